"""Every public function can be the first thing that a process asks cutex for."""

from __future__ import annotations

import subprocess
import sys

import pytest

EACH = """
import os, sys, torch
from cutlass import cute
import cutex
wrong = []
for home, name in sorted({h: n for n, h in cutex._HOMES.items()}.items()):
    if (child := os.fork()) == 0:
        try:
            getattr(cutex, name)
        except BaseException as error:
            print(f"cutex.{name}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        wrong.append(name)
sys.exit(len(wrong))
"""


@pytest.mark.slow
def test_any_name_may_be_the_first_to_be_imported() -> None:
    # NOTE: a module loads its package first, which may load what loads the module
    done = subprocess.run([sys.executable, "-c", EACH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_python_that_is_too_old_is_told_so_in_one_sentence() -> None:
    older = "import sys; sys.version_info = (3, 10, 9); {} import cutex"
    for code, exit_code in (("", 1), ("sys.argv = ['-m'];", 2)):
        done = subprocess.run(
            [sys.executable, "-c", older.format(code)], capture_output=True, text=True
        )
        assert done.returncode == exit_code
        assert "cutex needs Python 3.11 or newer, this is " in done.stderr
        assert exit_code == 1 or done.stderr.count("\n") == 1

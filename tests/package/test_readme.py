from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cutex import attention, gemm, report
from cutex.analysis import layout, roofline
from cutex.bench import check, cli, sweep
from cutex.cloud import rental
from cutex.problem.gemm_fp32 import Fp32GemmProblem
from cutex.report import sweeps
from cutex.results import history
from cutex.sim import __main__ as sim

SETUP = "python3 -m venv .venv && .venv/bin/pip install"


@pytest.fixture
def readme(root) -> str:
    return (root / "README.md").read_text()


def commands(readme: str) -> list[str]:
    """All lines of all bash blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_ci_runs_the_two_commands_of_the_readme(root, readme):
    run, test = (line for line in commands(readme) if line.startswith(SETUP))
    assert run.endswith("-m cutex.gemm --stage 3")
    assert test.endswith("-m pytest -q -n 2")
    ci = (root / ".ci" / "run").read_text().splitlines()
    assert run in ci
    assert test in ci


PARSERS = {
    "python -m cutex.gemm": gemm.parser,
    "python -m cutex.gemm --fp32": lambda: cli.parser(Fp32GemmProblem),
    "python -m cutex.attention": attention.parser,
    "python modal_app.py": rental.parser,
    "modal run modal_app.py": rental.parser,
    "python -m cutex.results": history.parser,
    "python -m cutex.roofline": roofline.parser,
    "python -m cutex.report": report.parser,
    "python -m cutex.layout": layout.parser,
    "python -m cutex.sim": sim.parser,
    "python -m cutex.check": check.parser,
    "python -m cutex.sweep": sweep.parser,
}


def parse(line: str) -> None:
    """Parse a command by the parser of the longest of its beginnings that has one."""
    start = max((start for start in PARSERS if line.startswith(start)), key=len)
    PARSERS[start]().parse_args(shlex.split(line.removeprefix(start)))


def test_every_other_command_is_one_that_its_parser_takes(readme):
    others = [line for line in commands(readme) if not line.startswith(SETUP)]
    assert len(others) >= 12
    for line in others:
        parse(line)


def on_this_machine(readme: str) -> list[str]:
    """The commands that need neither a GPU, nor an account, nor a user to end them."""
    needs = (SETUP, "modal run ", "--compare", "--watch")
    alone = [line for line in commands(readme) if not any(word in line for word in needs)]
    return [*alone, *(line for line in commands(readme) if line.endswith("--dry-run"))]


@pytest.mark.slow
def test_each_command_works_as_it_is_typed(root, readme, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", root, clone], check=True)
    lines = on_this_machine(readme)
    assert len(lines) >= 12
    bin = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line in lines:
        ran = subprocess.run(
            ["bash", "-c", line],
            cwd=clone,
            env={**os.environ, "PATH": bin, "PYTHONPATH": str(clone)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, f"{line}\n{ran.stdout}{ran.stderr}"


def test_a_newcomer_is_told_where_to_begin(readme):
    head = readme.partition("## ")[0]
    assert head.index("(docs/tutorial.md)") < head.index("- **")
    assert "`[peers]` is for" in readme
    assert "minutes" in readme.partition("-m pytest")[0]


def test_the_pictures_are_those_that_the_ledgers_render(root, readme):
    drawn = report.pictures(report.read_all(root / "results"))
    assert drawn
    for name, svg in drawn.items():
        assert f"](docs/{name})" in readme
        assert (root / "docs" / name).read_text() == svg


def test_the_tables_are_those_that_the_ledgers_render(root, readme):
    models = sweeps.read_sweeps(root / "results")
    rows = report.read_all(root / "results")
    assert report.rewrite(readme, rows, models) == readme
    assert report.results_page(rows, models) == (root / "docs" / report.TABLES).read_text()
    for name, svg in sweeps.pictures(models).items():
        assert (root / "docs" / name).read_text() == svg


def test_every_path_that_the_readme_names_is_there(root, readme):
    named = re.findall(r"`((?:kernels|cutex|schedulers|docs|results)/[\w./]*)`", readme)
    assert "docs/facts.md" in named
    for name in named:
        if name != "results/":  # made by the first run
            assert (root / name).exists(), name


def test_the_repository_names_no_absolute_path_of_a_machine(root):
    ran = subprocess.run(
        ["git", "grep", "-nE", "(^|[^.\\w/])/(work|home|root)/"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if ran.returncode == 128:
        pytest.skip("not a git clone")
    assert ran.stdout == ""

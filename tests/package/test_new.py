"""`python -m cutex.new`: each start runs, its test passes, and nothing is ever overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cutex import scaffold

QUICK = {  # of each start's own tests
    "kernel": "1000-fifo",
    "stage": "fifo-int",
    "operator": "sm_90a or bad",
}


def python(folder: Path, *argv: str) -> str:
    """What a Python in the folder prints, in an environment that finds cutex."""
    done = subprocess.run([sys.executable, *argv], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kind_has_a_start_with_a_test():
    assert {p.name for p in scaffold.TEMPLATES.iterdir() if p.is_dir()} - {"__pycache__"} == {
        *scaffold.KINDS,
        *QUICK,
    }
    for kind in scaffold.KINDS:
        assert "test_NAME.py" in [place for place, _ in scaffold._templates(kind)]


def test_what_is_written_passes_its_own_tests(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for kind in scaffold.KINDS:
        assert scaffold.main([kind, f"my_{kind}"]) == 0
        assert f"wrote test_my_{kind}.py" in capsys.readouterr().out
    chosen = " or ".join(f"my_{kind} and ({some})" for kind, some in QUICK.items())
    argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, ".")
    assert "4 passed" in python(tmp_path, *argv)


@pytest.mark.slow
def test_a_fault_in_it_is_found(tmp_path):
    scaffold.write("kernel", "my_kernel", tmp_path)
    file = tmp_path / "my_kernel.py"
    text = file.read_text()
    file.write_text(text.replace("if at < cute.size(mY):", "if at < cute.size(mY) + 1:"))
    assert file.read_text() != text
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "1000-fifo"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed" in done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("kernel", "3x", "cannot be the name of a module"),
        ("kernel", "class", "cannot be the name of a module"),
        ("stage", "queue", "queue is a module already"),
        ("operator", "cutex", "cutex is a module already"),
        ("thing", "x", "invalid choice: 'thing'"),
    ],
)
def test_a_bad_name_or_kind_gets_a_sentence(kind, name, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert scaffold.main([kind, name]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("test_mine.py").write_text("mine\n")
    assert scaffold.main(["kernel", "mine"]) == 2
    assert "test_mine.py is there already: nothing was written" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["test_mine.py"]

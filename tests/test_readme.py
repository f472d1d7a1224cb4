from __future__ import annotations

import re
import subprocess

import pytest

from cutex import cli, report

SETUP = "python3 -m venv .venv && .venv/bin/pip install"


@pytest.fixture
def readme(root) -> str:
    return (root / "README.md").read_text()


def commands(readme: str) -> list[str]:
    """Every line of every bash block."""
    blocks = re.findall(r"```bash\n(.*?)```", readme, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_ci_runs_the_two_commands_of_the_readme(root, readme):
    run, test = (line for line in commands(readme) if line.startswith(SETUP))
    assert run.endswith("-m cutex.gemm --stage 3")
    assert test.endswith("-m pytest -q")
    ci = (root / ".ci" / "run").read_text().splitlines()
    assert run in ci
    assert test in ci


def test_every_other_command_is_one_that_the_parser_takes(readme):
    ours = [line for line in commands(readme) if line.startswith("python -m cutex.gemm")]
    assert len(ours) >= 3
    for line in ours:
        cli.parser().parse_args(line.split()[3:])


def test_the_tables_are_those_that_the_ledgers_render(root, readme):
    assert report.rewrite(readme, report.read_all(root / "results")) == readme


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

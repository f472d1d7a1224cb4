"""Every command that README, docs/, docstrings and --help name is one that its program takes.

Parsed as the program does; what runs kernels or rents a GPU is planned as well, and stops there.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from cutex.cloud import rental  # isort: skip

from cutex.bench import cli
from cutex.command import commands
from cutex.problem.attention import AttentionProblem
from cutex.problem.gemm import GemmProblem

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"(?:python -m cutex|python modal_app\.py|modal run modal_app\.py)(?!\.X)[^`\[]*")
KINDS = {"cutex.gemm": GemmProblem, "cutex.attention": AttentionProblem}


def in_page(text):
    """The commands in the code blocks and in the sentences of a page."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from (line.removeprefix("$ ") for line in block.splitlines())
    for words in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield " ".join(words.split())


def in_docstring(file):
    source = file.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) if OURS.search(source) else None
    for line in (text or "").splitlines()[1:]:
        command = re.split(r" {2,}", line)[0]
        if not re.search(r"\.$|\||, \w+ \w+| takes ", command):  # a sentence
            yield command


@cache
def documented():
    found = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        found.update(dict.fromkeys(in_page(page.read_text(encoding="utf-8")), page.name))
    for file in (ROOT / "modal_app.py", *ROOT.glob("cutex/**/*.py"), *ROOT.glob("kernels/**/*.py")):
        found.update(dict.fromkeys(in_docstring(file), file.name))
    return [line for line in found if OURS.fullmatch(line)]


class Parsed(Exception):
    """The command line was taken."""


@pytest.fixture
def parse_only(monkeypatch):
    """Every program ends as soon as it has parsed its options."""
    parse = argparse.ArgumentParser.parse_args

    def then_end(self, args=None, namespace=None):
        raise Parsed(parse(self, args, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", then_end)


def main_of(module):
    found = importlib.import_module(module)
    if not hasattr(found, "main"):
        found = importlib.import_module(f"{module}.__main__")
    return found.main


def test_there_are_many():
    assert len(documented()) > 50


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_is_taken(line, monkeypatch, tmp_path, request):
    line = line.partition(" 2>&1")[0].partition(" | ")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    if "modal_app.py" in line:
        argv = shlex.split(line.partition("modal_app.py")[2])
        sizes = [option for kind in rental.kinds() for option in kind.size_options]
        made = rental.plan(rental.parser().parse_args(cli.join_sizes(argv, sizes)))
        assert made.requests
        return
    _, _, module, *argv = shlex.split(line)
    if module in KINDS and "list" not in argv:
        if "--compare" in argv:  # times, which needs a GPU
            request.getfixturevalue("fake_gpu")
        assert cli.plan(*cli.parsed(KINDS[module], argv)).stages
        return
    request.getfixturevalue("parse_only")
    main = main_of(module)
    if argv and module in ("cutex.sim", "cutex.check") and not any(".py" in x for x in argv):
        argv.append("mine.py")  # as in "python -m cutex.sim --time"
    if argv:  # a command alone is only named
        with pytest.raises((Parsed, SystemExit)) as end:
            main(argv)
        assert "--help" in argv or isinstance(end.value, Parsed)


@pytest.mark.parametrize("command", [words.split()[2] for words, _ in commands()])
def test_help_is_printed_and_names_only_commands_that_are_taken(
    command, capsys, parse_only, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        main_of(command)(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: python -m cutex")
    for line in re.findall(OURS, told.partition("\n")[2]):
        _, _, module, *argv = shlex.split(re.split(r" {2,}|\n", line)[0])
        with pytest.raises(Parsed):
            main_of(module)(argv)

"""The generated parts of docs/tutorial.md: its commands' output, its pictures, its table of steps.

A ```console block has commands behind "$ " with their output, a ```bash block commands alone.
`python tests/tutorial_page.py`, from the clone's root, runs them in a shell, and writes the output
into the page and the pictures beside it; tests/test_tutorial.py compares.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/tutorial.md")
PICTURES = "docs/tutorial/"
_BLOCK = re.compile(r"^```(console|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"python -m (?P<module>[\w.]+) (?P<rest>.*?)(?P<pipe> 2>&1 \| head -n \d+)?$")
_STEPS = re.compile(r"(<!-- steps: .*? -->\n).*?(<!-- end of steps -->)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line, and its output on the page; None if the page has none."""

    line: str
    output: str | None = None

    def __str__(self) -> str:
        return self.line

    @property
    def picture(self) -> str | None:
        """The file that it draws."""
        drawn = re.search(rf"{PICTURES}\S+\.svg", self.line)
        return drawn[0] if drawn else None


def commands(page: str) -> list[list[Command]]:
    """The commands of each block of the page."""
    found = []
    for kind, text in _BLOCK.findall(page):
        if kind == "bash":
            found.append([Command(line) for line in text.splitlines()])
        else:
            parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
            found.append([Command(*part.partition("\n")[::2]) for part in parts])
    return found


def in_process(line: str) -> str:
    """The output of a command to a terminal, without a new interpreter for each `python -m`."""
    asked = _PYTHON.fullmatch(line)
    if not asked:
        return in_shell(line)
    module = importlib.import_module(asked["module"])
    if not hasattr(module, "main"):
        module = importlib.import_module(f"{asked['module']}.__main__")
    linecache.clearcache()
    out = io.StringIO()
    err = io.StringIO() if asked["pipe"] else out
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        module.main(shlex.split(asked["rest"]))
    if not asked["pipe"]:
        return out.getvalue()
    # NOTE: Python buffers output to a pipe until it ends, but not stderr
    lines = (err.getvalue() + out.getvalue()).splitlines(keepends=True)
    return "".join(lines[: int(asked["pipe"].split()[-1])])


def in_shell(line: str) -> str:
    """The output of a command to a terminal."""
    at_once = "" if "|" in line else "1"  # NOTE: as a terminal has it, and a pipe has not
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PYTHONUNBUFFERED": at_once, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ran.stdout


def plain(output: str) -> str:
    """The output without the parts that differ from run to run: seconds, addresses, the clone's
    path."""
    output = output.replace(f"{ROOT}/", "")
    output = re.sub(r"\b\d+\.\d s\b", "0.1 s", output)
    return re.sub(r"\b0x[0-9a-f]{8,}\b", "0x7f0000000000", output)


def steps(readme: str) -> str:
    """The gain of each stage of Hopper's GEMM ladder, from the README's table."""
    ladder = readme.partition("### GEMM on Hopper")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (\d) \| ([^|]+) \| (\d+) \(", ladder, re.MULTILINE)
    lines = ["| stage | what it adds | TFLOPS | times the stage before |", "|---|---|---:|---:|"]
    before = None
    for number, what, tflops in rows:
        gain = f"{int(tflops) / before:.2f}" if before else ""
        lines.append(f"| {number} | {what} | {tflops} | {gain} |")
        before = int(tflops)
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the output of its commands, and the steps of the README."""

    def block(found: re.Match[str]) -> str:
        (inside,) = commands(found[0])
        parts = []
        for command in inside:
            if found[1] == "bash" and not command.picture:
                continue
            print(command, file=sys.stderr)
            parts.append(f"$ {command}\n{plain(in_shell(command.line))}")
        return f"```console\n{''.join(parts)}```" if found[1] == "console" else found[0]

    readme = Path("README.md").read_text()
    page = _STEPS.sub(lambda found: found[1] + steps(readme) + found[2], page)
    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

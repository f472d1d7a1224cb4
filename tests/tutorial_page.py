"""The generated parts of docs/tutorial.md: its commands' output, its pictures, its table of steps.

A ```console block has commands behind "$ " with their output, a ```bash block commands alone.
`python tests/tutorial_page.py`, from the clone's root, runs them in a shell, and writes the output
into the page and the pictures beside it; tests/package/test_tutorial.py compares.
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
from collections.abc import Callable
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


@dataclass(frozen=True)
class Prediction:
    """A sentence of the page with numbers of the simulator's clock, and the runs that print
    them."""

    sentence: str  # a pattern with a group for each number
    script: str
    edits: tuple[tuple[str, str], ...]  # one run for each, of the script so changed
    numbers: str  # a pattern of what a run prints, with the groups of its numbers

    def shown(self, page: str) -> re.Match[str]:
        found = re.search(self.sentence.replace(" ", r"\s+"), page)
        assert found, f"the page does not say: {self.sentence}"
        return found

    def told(self, run: Callable[[str], str] = in_process) -> list[str]:
        """The numbers, in the order of the sentence."""
        found: list[str] = []
        for old, new in self.edits:
            code = (ROOT / self.script).read_text()
            assert old in code
            Path("broken.py").write_text(code.replace(old, new))
            told = run("python -m cutex.sim --arch sm_90a --time broken.py")
            numbers = re.search(self.numbers, told, re.DOTALL)
            assert numbers, told
            found += numbers.groups()
        return found

    def written(self, page: str) -> str:
        """The page with the numbers that the runs print."""
        shown, numbers = self.shown(page), self.told()
        for group in reversed(range(1, len(numbers) + 1)):
            start, end = shown.span(group)
            page = page[:start] + numbers[group - 1] + page[end:]
        return page


PREDICTIONS = (
    Prediction(
        r"Of ([\d,]+) predicted cycles the warp works in (\d+) %, waits for TMA's load in (\d+) % "
        r"and for its store in (\d+) %",
        "examples/2_tma_copy.py", (("", ""),),
        r"([\d,]+) cycles .*? load +1 +(\d+)% +TMA (\d+) %, TMA store (\d+) %",
    ),
    Prediction(
        r"are predicted to take ([\d,]+) cycles instead of ([\d,]+)",
        "examples/3_reduction.py",
        (("SLOTS, ADDERS = 2", "SLOTS, ADDERS = 8"), ("SLOTS, ADDERS = 2", "SLOTS, ADDERS = 2")),
        r"([\d,]+) cycles",
    ),
)  # fmt: skip


def own_stage(page: str) -> str:
    """The page with what its last program, a stage of one's own, prints."""
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    Path("mine.py").write_text(program)
    printed = in_shell("python mine.py")
    return re.sub(r"(```text\n).*?(```)", lambda m: m[1] + printed + m[2], page, flags=re.DOTALL)


def written(page: str) -> str:
    """The page with the output of its commands, its predicted numbers, and the steps of the
    README."""

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
    for prediction in PREDICTIONS:
        page = prediction.written(page)
    return _BLOCK.sub(block, own_stage(page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

"""How findings read: the cause first, what follows from it folded under it, with source text."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutex.sim.errors import Finding

_WAITED = re.compile(r"on which this warp last waited with parity \d+ at (PTX line \d+)[^\n]*")
_SOURCE = re.compile(r"\(((?:[^()\s:]|\\ )+\.py):(\d+)(?::(\d+))?\)")
_PTX = re.compile(r"PTX line (\d+)")


@dataclass
class Report:
    """A finding, and those that share its cause."""

    root: Finding
    followers: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.root}{excerpts(str(self.root))}"
        if not self.followers:
            return text
        lines = [f"  {len(self.followers)} more follow from the same wait:"]
        lines += [f"    {f.rule} at {f.where}" for f in self.followers]
        return "\n".join([text, *lines])

    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            **_plain(self.root),
            "text": str(self),
            "followers": [_plain(f) for f in self.followers],
        }


def folded(findings: Iterable[Finding]) -> list[Report]:
    """One report for each cause, those that explain the most first.

    Findings have one cause if the warps in them passed the same wait last. A CTA that returns too
    early for an operation follows from the wait that another access was too early for.
    """
    groups: dict[object, Report] = {}
    first: object = None
    for number, finding in enumerate(findings):
        waited = _WAITED.search(finding.message)
        cause = waited.group(1) if waited else number
        if waited and first is None:
            first = cause
        if finding.rule == "exit" and first is not None:
            cause = first
        if cause in groups:
            groups[cause].followers.append(finding)
        else:
            groups[cause] = Report(finding)
    return sorted(groups.values(), key=lambda report: -len(report.followers))


def told(findings: Sequence[Finding]) -> str:
    """All of them as text."""
    return "\n".join(map(str, folded(findings)))


def excerpts(text: str) -> str:
    """The lines of source that ``text`` names, each once, with a caret under where it begins."""
    shown = []
    for path, line, column in dict.fromkeys(_SOURCE.findall(text)):
        source = linecache.getline(path, int(line)).rstrip("\n").expandtabs()
        if not source.strip():
            continue
        indent = len(source) - len(source.lstrip())
        at = max(int(column or 0) - 1, indent) if int(column or 0) <= len(source) else indent
        shown += [f"    {path}:{line}", f"      {source[indent:]}", f"      {' ' * (at - indent)}^"]
    return "".join(f"\n{line}" for line in shown)


def _plain(finding: Finding) -> dict[str, Any]:
    lines = [int(n) for n in _PTX.findall(finding.where)]
    sources = [
        {
            "file": os.path.abspath(path),
            "line": int(line),
            "column": int(column or 0),
            "text": linecache.getline(path, int(line)).strip(),
        }
        for path, line, column in dict.fromkeys(_SOURCE.findall(str(finding)))
    ]
    return {
        "rule": finding.rule,
        "message": finding.message,
        "advisory": finding.advisory,
        "where": finding.where,
        "ptx_line": lines[0] if lines else None,
        "sources": sources,
    }


def around(ptx: str, text: str, lines: int = 4) -> str:
    """The PTX around every line that ``text`` names."""
    code = ptx.split("\n")
    parts = []
    for number in dict.fromkeys(int(n) for n in _PTX.findall(text)):
        near = range(max(1, number - lines), min(len(code), number + lines) + 1)
        shown = [f"  {'>' if n == number else ' '}{n:6} {code[n - 1].strip()}" for n in near]
        parts += [f"  PTX around line {number}:", *shown]
    return "\n".join(parts)

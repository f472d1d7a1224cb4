"""The two sides of a finding: the instructions involved, their call stacks, and the names of the
memory that they access.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutex.debug_info import Buffer, Call, Stack, where

if TYPE_CHECKING:
    from cutex.sim.ptx.program import Instruction, Program

_PTX = re.compile(r"PTX line (\d+)")
_STANDS = re.compile(r"^ +at PTX line (\d+)", re.M)
_SHARED = re.compile(r"\b(shared memory|shared|mbarrier) 0x([0-9a-f]+)(?:\.\.0x([0-9a-f]+))?")
_MOST = 8  # sides of one report, at most


@dataclass(frozen=True)
class Side:
    """An instruction that a report names. ``stack``: innermost first, the kernel's own call last;
    empty where the PTX has no line information.
    """

    ptx_line: int
    text: str
    stack: Stack
    place: str  # of the source, in short; empty where there is none

    @classmethod
    def of(cls, ins: Instruction) -> Side:
        stack = ins.source.stack if ins.source else ()
        if ins.source and not stack:
            stack = (Call(*ins.source[:3], ""),)
        return cls(ins.line, ins.text, stack, ins.source.where() if ins.source else "")

    def lines(self) -> Iterator[str]:
        """Each call with its source and a caret where it begins."""
        for depth, call in enumerate(self.stack):
            function = f" in {call.function}" if call.function else ""
            yield f"    {'called at ' if depth else ''}{where(call)}{function}"
            yield from excerpt(call)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ptx_line": self.ptx_line,
            "ptx": self.text,
            "stack": [
                {
                    "file": os.path.abspath(call.file),
                    "line": call.line,
                    "column": call.column,
                    "function": call.function,
                    "text": linecache.getline(call.file, call.line).strip(),
                }
                for call in self.stack
            ],
        }


def excerpt(call: Call) -> Iterator[str]:
    """The source line of a call, and a caret under its column."""
    source = linecache.getline(call.file, call.line).rstrip("\n").expandtabs()
    if source.strip():
        indent = len(source) - len(source.lstrip())
        at = max(call.column - 1, indent) if call.column <= len(source) else indent
        yield f"      {source[indent:]}"
        yield f"      {' ' * (at - indent)}^"


def sides_of(text: str, program: Program) -> tuple[Side, ...]:
    """The instructions whose PTX lines ``text`` names, each once; first those at which warps wait,
    which have a line of the text to themselves.
    """
    named = [*_STANDS.findall(text), *_PTX.findall(text)]
    lines = list(dict.fromkeys(int(n) for n in named))[:_MOST]
    by_line = {i.line: i for i in program.code if i.line in lines}
    return tuple(Side.of(by_line[n]) for n in lines if n in by_line)


def _range(first: str, last: str) -> str:
    """'sA[0..63]' from the names of two elements."""
    buffer, _, index = first.partition("[")
    if index and last.startswith(f"{buffer}["):
        return f"{buffer}[{index.rstrip(']')}..{last.removeprefix(buffer)[1:]}"
    return f"{first}..{last}"


@dataclass(frozen=True)
class SmemNames:
    """The kernel's names for the parts of its shared memory."""

    buffers: list[Buffer]
    start: int  # address of the dynamic part

    @classmethod
    def of(cls, program: Program, start: int, dynamic: int) -> SmemNames:
        """The names of ``program``'s buffers; none if ``dynamic``, the bytes that the launch
        requested, is not the sum of the recorded allocations.
        """
        size = max((b.offset + b.size for b in program.buffers), default=0)
        return cls(program.buffers if size == dynamic else [], start)

    def with_names(self, text: str) -> str:
        """``text`` with the shared addresses in it named."""
        return _SHARED.sub(self._named, text) if self.buffers else text

    def _named(self, m: re.Match[str]) -> str:
        kind, low, high = m[1], int(m[2], 16), int(m[3] or m[2], 16)
        name, last = self.at(low), self.at(max(low, high - 1))
        if not name or not last:
            return m[0]
        if m[3] and name != last:
            name = _range(name, last)
        return f"{kind} {name} ({m[0].removeprefix(kind).strip()})"

    def at(self, address: int) -> str:
        """'ab.full[2]', the name of a shared address: elements count from the buffer's start, in
        memory order.
        """
        for name, offset, size, unit in self.buffers:
            within = address - self.start - offset
            if name and 0 <= within < size:
                if size <= max(unit, 1):
                    return name
                return f"{name}[{within // unit}]" if unit else f"{name} + {within}"
        return ""

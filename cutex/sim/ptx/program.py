"""A PTX module as the simulator runs it: its programs, their instructions and variables."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cutex.debug_info import Buffer, Stack, where
from cutex.sim.ptx.forms import opcode_parts
from cutex.sim.ptx.operands import Operands, Reg


class Source(NamedTuple):
    """A place in the DSL program, as .loc gives it; the column counts from 1, 0 if unknown.

    ``stack``: the place and its function, then their callers up to the kernel; empty if the trace
    was not recorded.
    """

    file: str
    line: int
    column: int
    stack: Stack = ()

    def where(self) -> str:
        """'tma.py:50:9, called at stage.py:74:9': the second part only if the kernel is in another
        file.

        That is the innermost call from another folder, such as a library's caller; where all are in
        one folder, the innermost in the kernel's own file.
        """
        here = where(self)
        if not self.stack or self.stack[-1].file == self.file:
            return here
        folder, kernel = os.path.dirname(self.file), self.stack[-1].file
        from_elsewhere = (c for c in self.stack if os.path.dirname(c.file) != folder)
        own = next(from_elsewhere, None) or next(c for c in self.stack if c.file == kernel)
        return f"{here}, called at {where(own)}"


@dataclass
class Instruction:
    op: str  # "add.s32"
    operands: Operands
    guard: Reg | None  # @%p
    negated: bool  # @!%p
    line: int  # in the PTX text, from 1
    text: str
    source: Source | None = None  # of the DSL program
    target: int = 0  # of a branch: index into Program.code
    parts: tuple[str, ...] = ()
    name: str = field(init=False)  # the first part of its opcode

    def __post_init__(self) -> None:
        self.parts = opcode_parts(self.op)
        self.name = self.parts[0]

    def where(self) -> str:
        """One line for reports: the PTX line and its text, and the Python line if known."""
        text = self.text if len(self.text) <= 110 else self.text[:107] + "..."
        source = f" ({self.source.where()})" if self.source else ""
        return f"PTX line {self.line}: {text}{source}"

    def place(self) -> str:
        """The place in the source, as `Source.where`; without source, the PTX line."""
        return self.source.where() if self.source else f"PTX line {self.line}"


@dataclass
class Param:
    name: str
    size: int
    align: int
    offset: int = 0  # in the parameter space


@dataclass
class Variable:
    name: str
    size: int  # bytes; 0 for the dynamic part (``extern ...[]``)
    align: int
    space: str  # "shared", "global", "const", "local"
    init: bytes | None = None


@dataclass
class Program:
    name: str
    target: str  # "sm_100a"
    code: list[Instruction]
    params: list[Param]
    param_bytes: int
    variables: dict[str, Variable]
    registers: dict[int, int]  # bank -> how many
    max_threads: int | None = None
    labels: dict[str, int] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)  # of dynamic shared memory, where named
    assembled: bool = False  # whether ptxas is known to have taken this text
    ctas_per_sm: int = 1  # at least, for which registers must do (.minnctapersm)
    derived: dict[object, Any] = field(default_factory=dict, repr=False)  # by `once`

    @property
    def title(self) -> str:
        """The name for people: that of the kernel's function where the DSL made the entry's name
        of its arguments' types.
        """
        if not self.name.startswith(_MANGLED):
            return self.name
        stacks = [i.source.stack for i in self.code if i.source is not None and i.source.stack]
        functions = Counter(stack[-1].function for stack in stacks if stack[-1].function)
        if functions:
            function = functions.most_common(1)[0][0]
            of = re.search(r"_([A-Za-z0-9]+)_object_at_", self.name)  # of a method
            return f"{of[1]}.{function.rpartition('.')[2]}" if of else function
        return re.split(_TYPES_FOLLOW, self.name.removeprefix(_MANGLED))[0]


_MANGLED = "kernel_cutlass_"  # begins what the DSL calls an entry: then the function, and types
_TYPES_FOLLOW = r"_(?:tensorptr|Tensor|tensor|CopyAtom|TiledMMA|TiledCopy|Tmem|None_|\d+_)"

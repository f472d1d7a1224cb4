"""The operands of an instruction: registers, numbers, addresses, vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsIndex, overload


@dataclass(frozen=True)
class Reg:
    """A virtual register: ``bank`` is its width in bits (1 for predicates), ``index`` its place in
    that bank; ``declared``: its declared type.
    """

    bank: int
    index: int
    name: str
    declared: str = "b32"

    def agrees(self, kind: str) -> bool:
        """Whether an operand of the instruction type ``kind`` may be this register (PTX ISA 9.4):
        untyped bits go with all, integers not with floats.
        """
        if self.declared[0] in "bp" or kind[0] in "pt" or (kind[0] == "b" and kind[1].isdigit()):
            return True
        if self.declared[0] in "us":
            return kind[0] in "us"
        return kind[0] == "f" and self.declared.endswith("x2") == kind.endswith("x2")


@dataclass(frozen=True)
class Imm:
    value: int | float
    bits: int = 0  # of a float written as its bits: 0f... 32, 0d... 64


@dataclass(frozen=True)
class Special:
    name: str  # "%tid.x"


@dataclass(frozen=True)
class Symbol:
    name: str  # a parameter, a shared or global variable
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base+offset]``; ``coords`` where the bracket holds ``[map, {c0, c1}]``."""

    base: Operand
    offset: int = 0
    coords: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    first: Operand  # ``%r1|%p1``
    second: Operand


@dataclass(frozen=True)
class Not:
    reg: Reg  # ``!%p1`` as a source operand


@dataclass(frozen=True)
class Minus:
    """A float operand of a contracted multiplication (`contraction`), negated."""

    of: Operand
    signs: int  # its sign bits


@dataclass(frozen=True)
class Sink:
    pass


Operand = Reg | Imm | Special | Symbol | Address | Vector | Pair | Not | Minus | Sink
RegisterId = tuple[int, int]  # of a register: bank, index


def registers_of(operand: object) -> Iterator[RegisterId]:
    """The registers in an operand."""
    if isinstance(operand, Reg):
        yield operand.bank, operand.index
    elif isinstance(operand, Not):
        yield operand.reg.bank, operand.reg.index
    elif isinstance(operand, Minus):
        yield from registers_of(operand.of)
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, Address):
        yield from registers_of(operand.base)
        for item in operand.coords or ():
            yield from registers_of(item)


class Operands(list[Operand]):
    """The operands of an instruction, which record those that a definition has looked at.

    An operand that was not looked at is not implemented: see `Decoder.account`.
    """

    def __init__(self, operands: Iterable[Operand] = ()) -> None:
        super().__init__(operands)
        self.asked: set[int] = set()

    @overload
    def __getitem__(self, k: SupportsIndex) -> Operand: ...
    @overload
    def __getitem__(self, k: slice) -> list[Operand]: ...
    def __getitem__(self, k: SupportsIndex | slice) -> Operand | list[Operand]:
        found = super().__getitem__(k)
        if isinstance(k, slice):
            self.asked.update(range(len(self))[k])
        else:
            self.asked.add(range(len(self))[k])
        return found

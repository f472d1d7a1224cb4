"""Multiplications and additions that ptxas fuses into one FMA.

`mul`, `add` and `sub` without a rounding modifier may be contracted, those with one never are (PTX
ISA 9.7.3.3 to 9.7.3.5). An FMA rounds once, so that `x*s - m*s` with x = m is the rounding error
of a product where separate instructions give 0. A program is rewritten here as ptxas has compiled
it: such an addition becomes the FMA of its operands and the factors of the product.

Where the cubin says what ptxas made of each line, that decides. Else its choice is taken to be
the one that it was seen to make: in program order, a product is fused into its uses if all are
additions of the same basic block that may be contracted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.operands import Minus, Operand, Operands, Reg, RegisterId, registers_of
from cutex.sim.ptx.sass_lines import ADD, FMA, Lines

if TYPE_CHECKING:
    from cutex.sim.ptx.program import Instruction

_LEAVES = ("bra", "ret", "exit", "trap")
_TYPES = ("f32", "f64", "f32x2", "f16", "f16x2", "bf16", "bf16x2")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


@dataclass(frozen=True)
class Product:
    """A product that an addition may take in: the instruction `mul`, and whether it is negated."""

    at: int
    negative: bool


def contract(code: list[Instruction], lines: Lines | None) -> None:
    """Replace the additions that are fused with a product. ``lines``: the operations that each
    line of the PTX was compiled to; None where that is not known.
    """
    if not any(_may(ins, "mul") for ins in code):
        return
    additions = [pc for pc, ins in enumerate(code) if _may(ins, "add", "sub")]
    if not additions:
        return
    flow = _Values(code)
    fused = _by_sass(flow, additions, lines) if lines else _by_habit(flow, additions)
    for pc, (k, product) in fused.items():
        code[pc] = _fma(code[pc], k, code[product.at], product.negative)


def _may(ins: Instruction, *names: str) -> bool:
    """Whether an instruction is one of `names` that may be contracted: it names no rounding, and
    its result is not clamped before it is used."""
    kind = ins.parts[-1]
    plain = {"ftz", kind} if ins.name == "mul" else {"ftz", "sat", kind}
    return ins.name in names and kind in _TYPES and plain.issuperset(ins.parts[1:])


class _Values:
    """The products that reach the operands of additions."""

    def __init__(self, code: list[Instruction]) -> None:
        self.code = code
        self.block = _blocks(code)
        self.written: dict[RegisterId, list[int]] = defaultdict(list)
        self.touched: dict[RegisterId, list[int]] = defaultdict(list)
        for pc, ins in enumerate(code):
            if ins.guard is not None:
                self.touched[1, ins.guard.index].append(pc)
            for k, operand in enumerate(ins.operands):
                for place in registers_of(operand):
                    self.touched[place].append(pc)
                    if k == 0 and ins.name != "st":
                        self.written[place].append(pc)

    def definition(self, operand: Operand, pc: int) -> int | None:
        """The instruction that gave `operand` of `pc` its value: in the same block, or the only
        one."""
        if not isinstance(operand, Reg):
            return None
        writers = self.written[operand.bank, operand.index]
        before = [w for w in writers if w < pc]
        if before and (len(writers) == 1 or self.block[before[-1]] == self.block[pc]):
            return before[-1] if self.code[before[-1]].guard is None else None
        return None

    def product(self, k: int, pc: int) -> Product | None:
        """The product that operand `k` of the addition at `pc` is, through moves and negations."""
        addition = self.code[pc]
        operand, negative, at = addition.operands[k], False, pc
        while (found := self.definition(operand, at)) is not None:
            ins = self.code[found]
            if ins.name in ("mov", "neg") and len(ins.operands) == 2:
                if ins.name == "neg" and ins.parts[-1] != addition.parts[-1]:
                    return None
                operand, at = ins.operands[1], found
                negative ^= ins.name == "neg"
                continue
            alike = "ftz" in ins.parts, ins.parts[-1]
            if not _may(ins, "mul") or alike != ("ftz" in addition.parts, addition.parts[-1]):
                return None
            return Product(found, negative) if self._lasts(found, pc) else None
        return None

    def _lasts(self, mul: int, pc: int) -> bool:
        """Whether the factors of the product at `mul` are unchanged at `pc`."""
        alike = self.block[mul] == self.block[pc]
        for place in (p for factor in self.code[mul].operands[1:] for p in registers_of(factor)):
            writers = self.written[place]
            if alike and any(mul <= w < pc for w in writers):
                return False
            if not alike and (len(writers) != 1 or writers[0] >= mul):
                return False
        return True

    def each(self, pc: int) -> Iterator[tuple[int, Product]]:
        """The operands of an addition that are products."""
        for k in (1, 2):
            if (found := self.product(k, pc)) is not None:
                yield k, found

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """By product, the instructions that touch it, without its own."""
        return {
            pc: [
                at
                for place in registers_of(ins.operands[0])
                for at in self.touched[place]
                if at != pc
            ]
            for pc, ins in enumerate(self.code)
            if _may(ins, "mul")
        }


def _by_sass(flow: _Values, additions: list[int], lines: Lines) -> dict[int, tuple[int, Product]]:
    """The additions whose line holds an FMA, with the product of which no multiplication is left.

    NOTE: ptxas also adds halves with an FMA by 1, so there a product that was kept is not fused.
    """
    fused = {}
    for pc in additions:
        ins = flow.code[pc]
        made = lines.get(ins.line, frozenset())
        if FMA not in made or (ADD in made and ins.parts[-1] in _HALVES):
            continue
        candidates = sorted(
            flow.each(pc), key=lambda c: (flow.code[c[1].at].line in lines, c[1].at)
        )
        if not candidates:
            continue
        k, product = candidates[0]
        kept = flow.code[product.at].line in lines
        if not (kept and ins.parts[-1] in _HALVES):
            fused[pc] = k, product
    return fused


def _by_habit(flow: _Values, additions: list[int]) -> dict[int, tuple[int, Product]]:
    """The additions that ptxas was seen to fuse."""
    wanted: dict[int, list[tuple[int, int, Product]]] = defaultdict(list)
    for pc in additions:
        for k, product in flow.each(pc):
            wanted[product.at].append((pc, k, product))
    fused: dict[int, tuple[int, Product]] = {}
    for mul in sorted(wanted):
        takers = {pc: (k, product) for pc, k, product in wanted[mul]}
        together = all(
            flow.block[pc] == flow.block[mul]
            and flow.code[pc].guard is None
            and flow.code[pc].operands[1] != flow.code[pc].operands[2]  # x + x is no FMA
            for pc in takers
        )
        if together and set(flow.uses[mul]) <= takers.keys() - fused.keys():
            fused |= takers
    return fused


def _fma(addition: Instruction, k: int, mul: Instruction, negative: bool) -> Instruction:
    """The FMA that computes what `addition` adds, with the product at its operand `k`."""
    kind = addition.parts[-1]
    result, *terms = list(addition.operands)
    x, y = list(mul.operands)[1:]
    other = terms[2 - k]
    if addition.name == "sub":
        negative ^= k == 2
        other = Minus(other, _signs(kind)) if k == 1 else other
    x = Minus(x, _signs(kind)) if negative else x
    modifiers = "".join(f".{m}" for m in ("ftz", "sat") if m in addition.parts)
    operands = Operands([result, x, y, other])
    return replace(addition, op=f"fma.rn{modifiers}.{kind}", operands=operands)


def _signs(kind: str) -> int:
    """The sign bits of a value: of each half of a pair."""
    bits = WIDTH[kind]
    return 1 << bits - 1 | (1 << bits // 2 - 1 if kind.endswith("x2") else 0)


def _blocks(code: list[Instruction]) -> list[int]:
    """Return, by instruction, the number of its basic block."""
    heads = {ins.target for ins in code if ins.name == "bra"}
    out, number = [], 0
    for pc, ins in enumerate(code):
        number += pc in heads
        out.append(number)
        number += ins.name in _LEAVES
    return out

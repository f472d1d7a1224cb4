"""The comparisons that decide what a kernel does with a flag that it has loaded.

A strong load whose result is only compared, with numbers or, in its own basic block, with
registers, decides by the outcome of these comparisons alone: with another value of the same outcome
the kernel would have gone on the same way.
"""

from __future__ import annotations

from functools import lru_cache
from types import UnionType
from typing import NamedTuple

from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import Imm, Reg, RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.strength import strength
from cutex.sim.ptx.unassigned import READS_ALL, blocks_of

_OF_INTEGERS = ("s32", "u32", "b32", "s64", "u64", "b64")


class FlagTest(NamedTuple):
    """A comparison of a flag with another value: ``compare`` is the name of setp; ``first``:
    whether the flag is its first operand."""

    compare: str
    kind: str
    other: Reg | Imm
    first: bool


@lru_cache(maxsize=1024)
def _adds_nothing(op: str) -> bool:
    parts = op.split(".")
    return parts[0] == "atom" and not {"add", "or", "xor"}.isdisjoint(parts)


def only_reads(ins: Instruction) -> bool:
    """Whether an atomic changes nothing: it adds 0, or is a compare and swap of equals."""
    numbers = [o.value for o in list(ins.operands)[2:] if isinstance(o, Imm)]
    if ins.name == "atom" and "cas" in ins.parts:
        return len(numbers) == 2 and numbers[0] == numbers[1]
    return _adds_nothing(ins.op) and numbers == [0]


@once
def flag_tests(program: Program) -> dict[int, list[FlagTest]]:
    """The comparisons of what each such load returns, by the id of the instruction."""
    heads, followers = blocks_of(program)
    ends = [*heads[1:], len(program.code)]
    out: dict[int, list[FlagTest]] = {}
    for n, (head, end) in enumerate(zip(heads, ends, strict=True)):
        for pc in range(head, end):
            ins = program.code[pc]
            if not (ins.name == "ld" and strength(ins.op).strong) and not only_reads(ins):
                continue
            register = next(iter(ins.operands))
            if isinstance(register, Reg):
                found = _tests(program.code[pc + 1 : end], register, Reg | Imm)
                if found is not None and found.live:
                    found = _behind(program, register, found.tests, followers[n])
                if found is not None and found.tests:
                    out[id(ins)] = found.tests
    return out


class _Found(NamedTuple):
    """The comparisons of a register in some code, and whether its value lives on behind it."""

    tests: list[FlagTest]
    live: bool


def _tests(code: list[Instruction], register: Reg, others: type | UnionType) -> _Found | None:
    """The comparisons of ``register`` with ``others``; None if anything else uses it."""
    key, written, tests = (register.bank, register.index), set[RegisterId](), list[FlagTest]()
    for ins in code:
        operands = list(ins.operands)
        if ins.name == "setp" and ins.parts[-1] in _OF_INTEGERS and register in operands[1:3]:
            first = operands[1] == register
            other = operands[2 if first else 1]
            if not isinstance(other, others) or {key, *written} & set(registers_of(other)):
                return None
            assert isinstance(other, Reg | Imm)
            tests.append(FlagTest(ins.parts[1], ins.parts[-1], other, first))
        elif any(key in registers_of(o) for o in operands[1:]):
            return None
        elif operands and key in registers_of(operands[0]):
            alone = ins.guard is None and ins.name not in READS_ALL and operands[0] == register
            return _Found(tests, False) if alone else None
        if operands:
            written.update(registers_of(operands[0]))
    return _Found(tests, True)


def _behind(
    program: Program, register: Reg, tests: list[FlagTest], after: list[int]
) -> _Found | None:
    """With ``tests``, the comparisons with numbers in these blocks and behind them."""
    heads, followers = blocks_of(program)
    ends = [*heads[1:], len(program.code)]
    seen, todo = set[int](), list(after)
    while todo:
        block = todo.pop()
        if block in seen:
            continue
        seen.add(block)
        found = _tests(program.code[heads[block] : ends[block]], register, Imm)
        if found is None:
            return None
        tests = tests + found.tests
        if found.live:
            todo += followers[block]
    return _Found(tests, False)

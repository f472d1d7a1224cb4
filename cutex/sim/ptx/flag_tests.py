"""The comparisons that decide what a kernel does with a flag that it has loaded.

A strong load whose result is only compared, with numbers or, in its own basic block, with
registers, decides by the outcome of these comparisons alone: with another value of the same outcome
the kernel would have gone on the same way. What is compared may be some bits of it, or come
of it by integer arithmetic in the same basic block.
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


_ARITHMETIC = ("and", "or", "xor", "add", "sub", "shl", "shr", "rem", "not")


class Step(NamedTuple):
    """An operation on a flag and another value: ``name`` is the opcode, or a comparison of setp;
    ``first``: whether the flag is its first operand."""

    name: str
    kind: str
    other: Reg | Imm | None
    first: bool


FlagTest = tuple[Step, ...]  # arithmetic, and last a comparison


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
                    behind = _behind(program, register, found.tests, followers[n])
                    found = behind and behind._replace(derived=found.derived)
                if found is not None and found.tests:
                    elsewhere = [*program.code[:head], *program.code[end:]]
                    if not (found.derived and found.derived & _sources(elsewhere)):
                        out[id(ins)] = found.tests
    return out


def _sources(code: list[Instruction]) -> set[RegisterId]:
    return {r for ins in code for o in list(ins.operands)[1:] for r in registers_of(o)}


class _Found(NamedTuple):
    """The comparisons of a register in some code, whether its value lives on behind it, and the
    registers with values that come of it."""

    tests: list[FlagTest]
    live: bool
    derived: frozenset[RegisterId] = frozenset()


def _tests(code: list[Instruction], register: Reg, others: type | UnionType) -> _Found | None:
    """The comparisons of ``register`` with ``others``; None if anything else uses it."""
    key, written, tests = (register.bank, register.index), set[RegisterId](), list[FlagTest]()
    steps: dict[RegisterId, tuple[Step, ...]] = {key: ()}  # of what has come of it
    for ins in code:
        operands = list(ins.operands)
        used = {r for o in operands[1:] for r in registers_of(o)} & {*steps}
        if used:
            sides = [o for o in operands[1:3] if isinstance(o, Reg)]
            mine = [o for o in sides if (o.bank, o.index) in used]
            if len(used) != 1 or len(mine) != 1 or ins.parts[-1] not in _OF_INTEGERS:
                return None
            first = operands[1] == mine[0]
            other = operands[2 if first else 1] if len(operands) > 2 else None
            if other is not None and (
                not isinstance(other, others) or {*steps, *written} & set(registers_of(other))
            ):
                return None
            assert other is None or isinstance(other, Reg | Imm)
            setp = ins.name == "setp"
            step = Step(ins.parts[1] if setp else ins.name, ins.parts[-1], other, first)
            made = (*steps[used.pop()], step)
            if setp:
                tests.append(made)
            elif (
                ins.name in _ARITHMETIC
                and len(ins.parts) == 2
                and len(operands) <= 3
                and ins.guard is None
                and isinstance(operands[0], Reg)
                and (operands[0].bank, operands[0].index) not in steps
            ):
                steps[operands[0].bank, operands[0].index] = made
            else:
                return None
        elif operands and (gone := set(registers_of(operands[0])) & {*steps}):
            alone = ins.guard is None and ins.name not in READS_ALL and operands[0] == register
            return (
                _Found(tests, False, frozenset(steps) - {key}) if alone and gone == {key} else None
            )
        if operands:
            written.update(registers_of(operands[0]))
    return _Found(tests, True, frozenset(steps) - {key})


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
        if found is None or found.derived:
            return None
        tests = tests + found.tests
        if found.live:
            todo += followers[block]
    return _Found(tests, False)

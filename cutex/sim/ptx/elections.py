"""The instructions that the leader of an elect.sync alone executes."""

from __future__ import annotations

from cutex.sim.ptx.flow import flow_of
from cutex.sim.ptx.once import once
from cutex.sim.ptx.operands import RegisterId, registers_of
from cutex.sim.ptx.program import Instruction, Program


@once
def leader_places(program: Program) -> frozenset[int]:
    """Their places: those with a predicate that is true for a leader only, and those behind a
    branch on one, up to where its two ways meet.
    """
    leads, others = _predicates(program.code)
    flow, places = flow_of(program), set[int]()
    for pc, ins in enumerate(program.code):
        if ins.guard is None:
            continue
        guard = ins.guard.bank, ins.guard.index
        if guard not in leads and guard not in others:
            continue
        taken = (guard in leads) != ins.negated
        if ins.name != "bra":
            places |= {pc} if taken else set()
            continue
        ends, todo = flow.beyond(pc), [ins.target if taken else pc + 1]
        while todo:
            at = todo.pop()
            if at < len(program.code) and at not in ends and at not in places:
                places.add(at)
                todo += flow.followers(at)
    return frozenset(places)


def _predicates(code: list[Instruction]) -> tuple[set[RegisterId], set[RegisterId]]:
    """The predicates that are true for leaders only, and those that are true for all others."""
    writers: dict[RegisterId, list[Instruction]] = {}
    for ins in code:
        for register in registers_of(next(iter(ins.operands), None)):
            if register[0] == 1:
                writers.setdefault(register, []).append(ins)
    once_written = {register: each[0] for register, each in writers.items() if len(each) == 1}
    leads, others, known = set[RegisterId](), set[RegisterId](), -1
    while known < len(leads) + len(others):
        known = len(leads) + len(others)
        for register, ins in once_written.items():
            sources = {r for o in list(ins.operands)[1:] for r in registers_of(o)}
            if ins.name == "elect" or (ins.name in ("and", "mov", "setp") and sources & leads):
                leads.add(register)
            elif ins.name == "not" and sources & leads:
                others.add(register)
            elif ins.name == "not" and sources & others:
                leads.add(register)
    return leads, others

"""What each PTX instruction costs, in the machine code's order.

ptxas moves instructions: exponentials between the multiplications that feed them. In a straight
stretch of PTX without an event every instruction is executed once, so the stretch's machine code is
charged in its own order, evenly over the stretch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cutex.sim.ptx.parse import Instruction
from cutex.sim.timing.machine_code import PIPES, Cost

FIELDS = ("cycles", "slots", *PIPES, "beside")
_BRANCHES = ("bra", "brx", "ret", "exit", "call", "trap")


def row(cost: Cost) -> list[float]:
    """The figures of `FIELDS`."""
    return [cost.cycles, cost.slots, *(cost.pipes[p] for p in PIPES), cost.beside]


def by_instruction(
    code: Sequence[Instruction], labels: set[int], events: Sequence[bool], costs: Mapping[int, Cost]
) -> np.ndarray:
    """(instructions, FIELDS): what each costs. ``labels`` are those that a branch may reach,
    ``events`` says which are events of their own.
    """
    found = np.zeros((len(code), len(FIELDS)))
    on_line = Counter(ins.line for ins in code)
    stretch: list[int] = []
    for pc, ins in enumerate(code):
        if pc in labels:
            _charge(found, stretch, code, costs)
            stretch = []
        # NOTE: inline assembly has several instructions on a line
        if events[pc] or ins.name in _BRANCHES or on_line[ins.line] > 1:
            _charge(found, stretch, code, costs)
            stretch = []
            if cost := costs.get(ins.line):
                found[pc] = np.array(row(cost)) / on_line[ins.line]
        else:
            stretch.append(pc)
    _charge(found, stretch, code, costs)
    return found


def _charge(
    found: np.ndarray,
    stretch: Sequence[int],
    code: Sequence[Instruction],
    costs: Mapping[int, Cost],
) -> None:
    mine = [costs[code[pc].line] for pc in stretch if code[pc].line in costs]
    parts = [(at, part) for cost in mine for at, part in zip(cost.sass, cost.parts, strict=True)]
    parts.sort(key=_place(mine))
    for i, (_, part) in enumerate(parts):
        found[stretch[i * len(stretch) // len(parts)]] += row(part)


def _place(mine: Sequence[Cost]) -> Callable[[tuple[tuple[int, int], Cost]], float]:
    """What to sort by: addresses, or, where there are copies, how far each is through its own."""
    if all(len({block for block, _ in cost.sass}) == 1 for cost in mine):
        return lambda item: item[0][1]
    ends: dict[int, list[int]] = {}
    for cost in mine:
        for block, at in cost.sass:
            ends.setdefault(block, []).append(at)
    spans = {block: (min(at), max(1, max(at) - min(at))) for block, at in ends.items()}
    return lambda item: (item[0][1] - spans[item[0][0]][0]) / spans[item[0][0]][1]

"""The cost of each PTX instruction, in the machine code's order.

ptxas moves instructions: exponentials between the multiplications that feed them, and past a wait
for a product that they do not need. So instructions that run equally often are charged in the order
of their machine code: between two events goes the SASS whose addresses are between theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from cutex.sim.ptx.program import Instruction
from cutex.sim.timing.machine_code import PIPES, Cost
from cutex.sim.timing.regions import regions

FIELDS = ("cycles", "slots", *PIPES, "beside")
_BRANCHES = ("bra", "brx", "ret", "exit", "call", "trap")
Anchor = tuple[int, int]  # an event: its address in the machine code, its index in the program


def row(cost: Cost) -> list[float]:
    """The values of a cost, in the order of `FIELDS`."""
    return [cost.cycles, cost.slots, *(cost.pipes[p] for p in PIPES), cost.beside]


def by_instruction(
    code: Sequence[Instruction], events: Sequence[bool], costs: Mapping[int, Cost]
) -> np.ndarray:
    """Return the cost of each instruction, (instructions, FIELDS); ``events`` marks those that are
    events.
    """
    found = np.zeros((len(code), len(FIELDS)))
    on_line = Counter(ins.line for ins in code)
    alike: dict[int, list[int]] = defaultdict(list)
    for pc, (ins, region) in enumerate(zip(code, regions(code), strict=True)):
        # NOTE: inline assembly has several instructions on a line
        if events[pc] or ins.name in _BRANCHES or on_line[ins.line] > 1:
            if cost := costs.get(ins.line):
                found[pc] = np.array(row(cost)) / on_line[ins.line]
        else:
            alike[region].append(pc)
    anchors = _anchors(code, events, costs)
    for mine in alike.values():
        _charge(found, mine, code, costs, [a for a in anchors if mine[0] < a[1] < mine[-1]])
    return found


def _anchors(
    code: Sequence[Instruction], events: Sequence[bool], costs: Mapping[int, Cost]
) -> list[Anchor]:
    """Every event that the machine code shows, by address.

    NOTE: the line of a wgmma is ambiguous, for it may be that of its accumulators; but ptxas keeps
    their order, so the n-th wgmma between two other events is the n-th HGMMA between theirs.
    """
    mma = {pc for pc, ins in enumerate(code) if ins.op.startswith("wgmma.mma")}
    found = sorted(
        (at, pc)
        for pc, ins in enumerate(code)
        if events[pc] and pc not in mma and ins.line in costs
        for at in costs[ins.line].asynchronous
    )
    products = sorted(at for cost in costs.values() for at in cost.products)
    more: list[Anchor] = []
    for (low, first), (high, last) in pairwise([(-1, -1), *found, (1 << 62, len(code))]):
        theirs = [pc for pc in sorted(mma) if first < pc < last]
        here = [at for at in products if low < at < high]
        if len(theirs) == len(here):
            more += zip(here, theirs, strict=True)
    return sorted([*found, *more])


def _charge(
    found: np.ndarray,
    mine: Sequence[int],
    code: Sequence[Instruction],
    costs: Mapping[int, Cost],
    anchors: Sequence[Anchor],
) -> None:
    """Add the costs of ``mine``, instructions that run equally often, with the ``anchors`` between
    them. What of them is in fewer loops than the rest, ptxas has moved before a loop or behind it.
    """
    places = [at for at, _ in anchors]
    bounds = sorted({-1, len(code), *(pc for _, pc in anchors)})
    parts: dict[int, list[tuple[float, Cost]]] = defaultdict(list)  # by the event before them
    known = [cost for pc in mine if (cost := costs.get(code[pc].line))]
    deepest = max((part.depth for cost in known for part in cost.parts), default=0)
    for pc in mine:
        if cost := costs.get(code[pc].line):
            for (_, at), part in zip(cost.sass, cost.parts, strict=True):
                if part.depth < deepest:
                    continue
                i = bisect_right(places, at)
                start, event = anchors[i - 1] if i else (0, -1)
                stop = places[i] if i < len(places) else at + 1
                parts[event].append(((at - start) / (stop - start), part))
    for event, here in parts.items():
        last = bounds[bounds.index(event) + 1]
        onto = [pc for pc in mine if event < pc < last]
        onto = onto or [min(mine, key=lambda pc: (abs(pc - last), pc))]
        here.sort(key=lambda item: item[0])
        for i, (_, part) in enumerate(here):
            found[onto[i * len(onto) // len(here)]] += row(part)

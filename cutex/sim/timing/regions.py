"""Sets of instructions that run equally often: those of basic blocks of which each follows the
other on every path, in the same loops. And the loops that each is in.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutex.sim.ptx.flow import ControlFlow
from cutex.sim.ptx.program import Instruction


def regions(code: Sequence[Instruction]) -> list[int]:
    """Return, by instruction, the number of the first one that runs equally often; an unreachable
    one's own number.
    """
    flow = ControlFlow(list(code))
    starts, lasts, edges = _blocks(flow, len(code))
    above = _dominators(edges)
    loops = _loops(edges, above)
    same = list(range(len(starts)))
    for b in range(len(starts)):
        for a in range(len(starts)):  # NOTE: the first of all that run equally often
            if (
                a != b
                and above[b] >> a & 1
                and loops[a] == loops[b]
                and starts[b] in flow.beyond(lasts[a])
                and same[a] == a
            ):
                same[b] = a
                break
    found = []
    for i, (start, last) in enumerate(zip(starts, lasts, strict=True)):
        found += [starts[same[i]]] * (last + 1 - start)
    return found


def loops(code: Sequence[Instruction]) -> list[int]:
    """Return, by instruction, a number that those in the same loops share."""
    starts, lasts, edges = _blocks(ControlFlow(list(code)), len(code))
    found: list[int] = []
    for start, last, inside in zip(starts, lasts, _loops(edges, _dominators(edges)), strict=True):
        found += [inside] * (last + 1 - start)
    return found


def _blocks(flow: ControlFlow, end: int) -> tuple[list[int], list[int], list[list[int]]]:
    """The first and the last instruction of each basic block, and the blocks that it goes on to."""
    after = [[x for x in flow.followers(pc) if x < end] for pc in range(end)]
    starts = sorted({0} | {x for pc in range(end) if after[pc] != [pc + 1] for x in after[pc]}
                    | {pc + 1 for pc in range(end - 1) if after[pc] != [pc + 1]})  # fmt: skip
    lasts = [*(x - 1 for x in starts[1:]), end - 1]
    block = {start: i for i, start in enumerate(starts)}
    return starts, lasts, [[block[x] for x in after[last]] for last in lasts]


def _dominators(edges: Sequence[Sequence[int]]) -> list[int]:
    """Return, by block, a mask of the blocks on every path to it; all blocks for an unreachable
    one.
    """
    before: list[list[int]] = [[] for _ in edges]
    for a, targets in enumerate(edges):
        for b in targets:
            before[b].append(a)
    everything = (1 << len(edges)) - 1
    found = [1] + [everything] * (len(edges) - 1)
    changed = True
    while changed:
        changed = False
        for b in range(1, len(edges)):
            common = everything
            for a in before[b]:
                common &= found[a]
            common |= 1 << b
            if common != found[b]:
                found[b], changed = common, True
    return found


def _loops(edges: Sequence[Sequence[int]], above: Sequence[int]) -> list[int]:
    """Return, by block, a mask of the heads of the loops that contain it."""
    before: list[list[int]] = [[] for _ in edges]
    for a, targets in enumerate(edges):
        for b in targets:
            before[b].append(a)
    found = [0] * len(edges)
    for a, targets in enumerate(edges):
        for head in targets:
            if not above[a] >> head & 1:
                continue
            inside, left = {head}, [a]
            while left:
                b = left.pop()
                if b not in inside:
                    inside.add(b)
                    left += before[b]
            for b in inside:
                found[b] |= 1 << head
    return found

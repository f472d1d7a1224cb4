"""Control flow of a program: the places where diverged lanes reconverge."""

from __future__ import annotations

from functools import cached_property

from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program

LEAVES = ("ret", "exit", "trap")


class ControlFlow:
    """The post-dominators of instructions: those that every path from one to the end passes."""

    def __init__(self, code: list[Instruction]) -> None:
        self.code = code
        self._chains: dict[int, frozenset[int]] = {}

    def beyond(self, pc: int) -> frozenset[int]:
        """All post-dominators of ``pc``, without itself: places where lanes that are ahead wait for
        those at ``pc``.
        """
        chain = self._chains.get(pc)
        if chain is None:
            end, at, places = len(self.code), pc, []
            while (at := self._next_common[at]) < end:
                places.append(at)
            chain = self._chains[pc] = frozenset(places)
        return chain

    def followers(self, pc: int) -> list[int]:
        ins, end = self.code[pc], len(self.code)
        if ins.name in LEAVES:
            return [end] if ins.guard is None else [end, pc + 1]
        if ins.name == "bra":
            return [ins.target] if ins.guard is None else [ins.target, pc + 1]
        return [pc + 1]

    @cached_property
    def _next_common(self) -> list[int]:
        """The immediate post-dominator of each instruction; the program's length stands for its
        end.

        Cooper, Harvey and Kennedy's algorithm on the reversed graph.
        """
        end = len(self.code)
        followers = [self.followers(pc) for pc in range(end)]
        order = self._from_the_end(followers)
        number = {pc: i for i, pc in enumerate(order)}
        nearest = [-1] * end + [end]
        changed = True
        while changed:
            changed = False
            for pc in order[1:]:
                common = -1
                for at in followers[pc]:
                    if nearest[at] < 0:
                        continue
                    if common < 0:
                        common = at
                    while common != at:
                        while number[at] > number[common]:
                            at = nearest[at]
                        while number[common] > number[at]:
                            common = nearest[common]
                if nearest[pc] != common:
                    nearest[pc], changed = common, True
        return nearest

    def _from_the_end(self, followers: list[list[int]]) -> list[int]:
        """Reverse postorder of the reversed graph, from the end."""
        end = len(self.code)
        before: list[list[int]] = [[] for _ in range(end + 1)]
        for pc, targets in enumerate(followers):
            for target in targets:
                before[target].append(pc)
        reached = set(_postorder(end, before, set()))
        for pc in range(end - 1, -1, -1):
            if pc not in reached:  # the last instruction of a loop without a way out is given one
                followers[pc].append(end)
                before[end].append(pc)
                reached |= set(_postorder(pc, before, reached))
        return _postorder(end, before, set())[::-1]


@once
def flow_of(program: Program) -> ControlFlow:
    return ControlFlow(program.code)


def _postorder(root: int, edges: list[list[int]], done: set[int]) -> list[int]:
    seen, out = done | {root}, []
    stack = [(root, iter(edges[root]))]
    while stack:
        at, rest = stack[-1]
        for next_one in rest:
            if next_one not in seen:
                seen.add(next_one)
                stack.append((next_one, iter(edges[next_one])))
                break
        else:
            out.append(at)
            stack.pop()
    return out

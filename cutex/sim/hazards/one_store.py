"""Threads that write different values to one place by one store.

If a store of a warp writes to one place for several of its threads, one of them is the last, and
which is not defined (CUDA C++ Programming Guide, SIMT Architecture). Warps that execute a store
side by side are not ordered either. Where all write the same value that is no matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.hazards.sparse_marks import LARGEST
from cutex.sim.machine.batch import Lanes
from cutex.sim.machine.events import Observer
from cutex.sim.machine.memory import Part
from cutex.sim.machine.operation import WORD
from cutex.sim.ptx.program import Instruction
from cutex.sim.ptx.strength import strength

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

SHARED = -1


class OneStore(Observer):
    """The stores of all warps."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.last: dict[int, np.ndarray] = {}  # by region, or SHARED: who has stored last, by word

    def global_stores(
        self, where: Lanes, values: np.ndarray, parts: Sequence[Part], ins: Instruction
    ) -> None:
        if ins.name not in ("st", "tensormap"):
            return  # NOTE: atomics come one after another
        for region, members, offsets in parts:
            mine, words = where.pick(members), len(region.data) // WORD + 1
            pair = self._clash(region.base, words, mine.warps, offsets, values[members])
            if pair is not None:
                place = region.element(int(offsets[pair[0]]))
                self._report(mine, pair, place, ins)

    def shared_stores(
        self, where: Lanes, places: np.ndarray, values: np.ndarray, ins: Instruction
    ) -> None:
        if ins.name not in ("st", "stmatrix", "cp"):
            return
        words = self.m.smem.size // WORD
        pair = self._clash(SHARED, words, where.warps, places, values)
        if pair is not None:
            place = f"shared memory 0x{int(places[pair[0]]) % self.m.smem_bytes:x}"
            self._report(where, pair, place, ins)

    def _clash(
        self, of: int, words: int, warps: np.ndarray, places: np.ndarray, values: np.ndarray
    ) -> tuple[int, int] | None:
        """Two threads that write different ``values`` (n, bytes) to one of ``places`` (n,), which
        are of a memory of so many words.
        """
        if len(places) < 2 or (places[1:] > places[:-1]).all():
            return None
        word = places // WORD
        if words > LARGEST // WORD:
            if len(np.unique(word)) == len(word):
                return None
        else:
            if of not in self.last:
                self.last[of] = np.zeros(words, np.int32)
            number = np.arange(len(places), dtype=np.int32)
            self.last[of][word] = number
            if (self.last[of][word] == number).all():
                return None  # NOTE: no two in one word, as in most stores
        order = np.lexsort((warps, places))
        first, second = order[:-1], order[1:]
        cluster = self.m.grid.cta_cluster[self.m.grid.warp_cta[warps]]
        # NOTE: clusters that store to one place do so one after the other, see global_races
        same = (places[first] == places[second]) & (cluster[first] == cluster[second])
        differs = same & (values[first] != values[second]).any(1)
        if not differs.any():
            return None
        k = int(differs.argmax())
        return int(first[k]), int(second[k])

    def _report(self, where: Lanes, pair: tuple[int, int], place: str, ins: Instruction) -> None:
        (one, other), name = pair, self.m.grid.name_warp
        warps = int(where.warps[one]), int(where.warps[other])
        who = f"{name(warps[0])} and {name(warps[1])}"
        remedy = "a barrier that both warps pass in between, as sync_threads()"
        letter = False
        if warps[0] == warps[1]:
            lanes = sorted(int(where.lanes[k]) for k in pair)
            who, remedy = f"lanes {lanes[0]} and {lanes[1]} of {name(warps[0])}", ""
        else:
            letter = strength(ins.op).strong  # such stores do not race (8.7.1)
        if not letter:
            self.m.findings.add(
                "race",
                f"{who} store different values to {place} in one instruction: which of them stays "
                "is not defined",
                ins,
                remedy=remedy,
            )

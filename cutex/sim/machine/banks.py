"""Bank conflicts of shared memory: 32 banks of 4 bytes, of which a wavefront accesses one word
each.

A warp's access of 4 bytes or fewer per lane is one wavefront if no bank has to deliver two
different words; of 8 bytes per lane two, of half the warp each; of 16 bytes and of the rows of
ldmatrix four (CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x and later).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.operation import WORD, Operation
from cutex.sim.ptx.program import Instruction

BANKS = 32


@dataclass
class Wavefronts:
    """The wavefronts of one instruction, over all its executions."""

    instruction: Instruction
    needed: int = 0  # without a conflict
    taken: int = 0


class BankConflicts(Observer):
    """The wavefronts of every access of lanes to shared memory, by cp.async too."""

    def __init__(self) -> None:
        self.by_line: dict[int, Wavefronts] = {}

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Count an access of lanes."""
        self._count(at, ins)

    def copying(self, at: SharedBytes, op: Operation, ins: Instruction) -> None:
        """Count what cp.async writes."""
        self._count(at, ins)

    @property
    def needed(self) -> int:
        """The wavefronts of all accesses without a conflict."""
        return sum(w.needed for w in self.by_line.values())

    @property
    def taken(self) -> int:
        return sum(w.taken for w in self.by_line.values())

    def _count(self, at: SharedBytes, ins: Instruction) -> None:
        warps, lanes, _, offset, width = at
        if not len(offset):
            return
        words = max(width // WORD, 1)
        at_once = BANKS // words  # lanes of a wavefront
        group = warps.astype(np.int64) * words + lanes // at_once
        word = (offset // WORD)[:, None] + np.arange(words)
        high = int(np.max(word)) + 1
        touched = np.unique((group[:, None] * high + word).reshape(-1))
        bank = touched // high * BANKS + touched % high % BANKS
        banks, words_of = np.unique(bank, return_counts=True)
        most: defaultdict[int, int] = defaultdict(int)
        for of, count in zip((banks // BANKS).tolist(), words_of.tolist(), strict=True):
            most[of] = max(most[of], count)
        seen = self.by_line.setdefault(ins.line, Wavefronts(ins))
        seen.needed += len(most)
        seen.taken += sum(most.values())

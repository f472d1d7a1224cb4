"""Tensor memory: 128 lanes x 512 columns of 32 bits per CTA, and its allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.machine.memory import POISON32
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core

LANES, COLUMNS = 128, 512
_NOBODY = np.zeros(COLUMNS, np.int32)  # of a CTA that has allocated nothing


class TensorMemory:
    """The tensor memory of all resident CTAs.

    Where several CTAs share an SM, a CTA gets what the others have left, so its columns begin
    behind those of a CTA that does not exist; a CTA that is alone gets the first.
    """

    def __init__(self, machine: Core, alone: bool) -> None:
        self.machine, self.alone = machine, alone
        self.most = 0  # columns that a CTA has held at once
        self.clear()

    def clear(self) -> None:
        self._cells: np.ndarray | None = None
        # cta -> (512,) PTX line of the tcgen05.alloc that took the column, 0 where it is free
        self.owner: dict[int, np.ndarray] = {}
        self.freed: dict[
            int, tuple[int, int, str]
        ] = {}  # by CTA: the last columns freed, and by whom
        self.freeing: dict[int, tuple[int, int, str]] = {}  # likewise, while it waits for the peer
        self.relinquished: set[int] = set()  # CTAs that allocate no more
        self.asked: dict[int, int] = {}  # cta of a pair -> columns that it waits for
        self.granted: dict[int, int] = {}  # cta of a pair -> first column granted, not yet returned
        # by joint action of a pair: CTAs that wait for their peer, and those whose peer has arrived
        self.came: dict[str, set[int]] = {"dealloc": set(), "relinquish": set()}
        self.met: dict[str, set[int]] = {"dealloc": set(), "relinquish": set()}

    @property
    def cells(self) -> np.ndarray:
        """All cells, (ctas, 128 lanes, 512 columns) uint32, poisoned when first used."""
        if self._cells is None:
            shape = (self.machine.grid.num_ctas, LANES, COLUMNS)
            self._cells = np.full(shape, POISON32, np.uint32)
        return self._cells

    def request(self, cta: int, pair: bool, count: int, ins: Instruction) -> int | None:
        """The first of ``count`` columns allocated to the CTA; None if it must wait, for free
        columns or, in a pair, for the other CTA's request.
        """
        if not pair:
            return self._allocate(cta, count, ins)
        if cta in self.granted:
            return self.granted.pop(cta)
        self.asked[cta] = count
        peer = cta ^ 1  # NOTE: resident clusters start at even CTAs where there are pairs
        if peer not in self.asked:
            return None
        if min(self._room(c, self.asked[c]) is not None for c in (cta, peer)):
            for c in (cta, peer):
                first = self._allocate(c, self.asked.pop(c), ins)
                assert first is not None
                self.granted[c] = first
            self.machine.wake(("tmem", peer))
            return self.granted.pop(cta)
        return None

    def together(self, what: str, cta: int, pair: bool) -> bool:
        """Whether the peer has met the CTA, which had to wait."""
        if pair and cta in self.met[what]:
            self.met[what].remove(cta)
            return True
        return False

    def meet(self, what: str, cta: int, pair: bool) -> bool:
        """Whether the CTA, which arrives, need not wait: it has no peer, or its peer waits
        already."""
        peer = cta ^ 1
        if not pair:
            return True
        if peer in self.came[what]:
            self.came[what].remove(peer)
            self.met[what].add(peer)
            return True
        self.came[what].add(cta)
        return False

    def why_not(self, cta: int, count: int) -> str:
        if cta in self.asked and cta ^ 1 not in self.asked:
            return (
                f"the other CTA of the pair, {self.machine.grid.name_cta(cta ^ 1)}, has not asked"
            )
        return f"{count} columns wanted, {self.num_free(cta)} free"

    def _room(self, cta: int, count: int) -> int | None:
        owner = self.owner.setdefault(cta, np.zeros(COLUMNS, np.int32))
        firsts = range(0, COLUMNS, count)
        for first in firsts if self.alone else reversed(firsts):
            if not owner[first : first + count].any():
                return first
        return None

    def _allocate(self, cta: int, count: int, ins: Instruction) -> int | None:
        first = self._room(cta, count)
        if first is not None:
            self.owner[cta][first : first + count] = ins.line
            if self._cells is not None:
                self._cells[cta, :, first : first + count] = POISON32
            self.most = max(self.most, COLUMNS - self.num_free(cta))
        return first

    def free(self, cta: int, first: int, count: int, by: str) -> None:
        """Free the columns; ``by``: the thread and the place, as text."""
        self.owner[cta][first : first + count] = 0
        self.freed[cta] = first, first + count, by
        self.freeing.pop(cta, None)

    def num_free(self, cta: int) -> int:
        return int((self.owner[cta] == 0).sum())

    def check(self, cta: int, first: int, count: int, who: str, ins: Instruction) -> None:
        """Raise BadAddress if one of the columns does not exist, is not allocated, or is being
        freed.
        """
        owner = self.owner.get(cta, _NOBODY)
        if 0 <= first <= COLUMNS - count and owner[first : first + count].all():
            self._check_freeing(cta, first, count, who, ins)
            return
        allocated = np.nonzero(owner)[0]
        have = "none is allocated"
        low, high, by = self.freed.get(cta, (0, 0, ""))
        gone = ""
        if first < high and low < first + count:
            gone = (
                f": {by} has freed {low}..{high - 1}, and no barrier behind this use comes before"
            )
        if first == int(POISON32) & 0xFFFF:
            have = "that is what memory holds before tcgen05.alloc has written an address there"
        elif len(allocated):
            have = f"columns {allocated[0]}..{allocated[-1]} are allocated"
            if not self.alone and 0 <= first <= len(allocated) - count:
                have += (
                    ", as on an SM that several CTAs share: only the address that tcgen05.alloc has"
                    " written to shared memory says where they begin"
                )
        raise BadAddress.at(
            ins, f"{who} uses tensor memory columns {first}..{first + count - 1}, but {have}{gone}"
        )

    def _check_freeing(self, cta: int, first: int, count: int, who: str, ins: Instruction) -> None:
        low, high, by = self.freeing.get(cta, (0, 0, ""))
        if first < high and low < first + count:
            raise BadAddress.at(
                ins,
                f"{who} uses tensor memory columns {first}..{first + count - 1}, but {by} frees "
                f"{low}..{high - 1}, and need not wait for the other CTA of the pair",
            )

    def leftovers(self) -> list[tuple[str, int]]:
        """Allocations that were never freed: a sentence, and the PTX line, of each."""
        return [
            (
                f"{self.machine.grid.name_cta(cta)} returns without tcgen05.dealloc of "
                f"{int((owner != 0).sum())} columns",
                int(owner[owner != 0][0]),
            )
            for cta, owner in self.owner.items()
            if owner.any()
        ]

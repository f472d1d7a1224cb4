"""Tensor memory: 128 lanes x 512 columns of 32 bits per CTA, and who allocated which columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.memory import POISON32
from cutex.sim.ptx import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine import Machine

LANES, COLUMNS = 128, 512


class TensorMemory:
    """The tensor memory of all resident CTAs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        self._cells: np.ndarray | None = None
        # cta -> (512,) PTX line of the tcgen05.alloc that took the column, 0 where it is free
        self.owner: dict[int, np.ndarray] = {}
        self.relinquished: set[int] = set()  # CTAs that allocate no more

    @property
    def cells(self) -> np.ndarray:
        """(ctas, 128 lanes, 512 columns) uint32, poisoned when first used."""
        if self._cells is None:
            shape = (self.machine.num_ctas, LANES, COLUMNS)
            self._cells = np.full(shape, POISON32, np.uint32)
        return self._cells

    def allocate(self, cta: int, count: int, ins: Instruction) -> int | None:
        """First of ``count`` columns that now belong to the CTA, None if there is no room."""
        owner = self.owner.setdefault(cta, np.zeros(COLUMNS, np.int32))
        for first in range(0, COLUMNS, count):
            if not owner[first : first + count].any():
                owner[first : first + count] = ins.line
                return first
        return None

    def free(self, cta: int, first: int, count: int) -> None:
        self.owner[cta][first : first + count] = 0

    def num_free(self, cta: int) -> int:
        return int((self.owner[cta] == 0).sum())

    def check(self, cta: int, first: int, count: int, who: str, ins: Instruction) -> None:
        """Raises BadAddress where one of the columns does not exist or was not allocated."""
        owner = self.owner.get(cta, np.zeros(COLUMNS, np.int32))
        if 0 <= first <= COLUMNS - count and owner[first : first + count].all():
            return
        allocated = np.nonzero(owner)[0]
        have = "none is allocated"
        if len(allocated):
            have = f"columns {allocated[0]}..{allocated[-1]} are allocated"
        raise BadAddress.at(
            ins, f"{who} uses tensor memory columns {first}..{first + count - 1}, but {have}"
        )

    def leftovers(self) -> list[tuple[str, int]]:
        """What was never given back: a sentence, and the PTX line of its allocation."""
        return [
            (
                f"{self.machine.name_cta(cta)} returns without tcgen05.dealloc of "
                f"{int((owner != 0).sum())} columns",
                int(owner[owner != 0][0]),
            )
            for cta, owner in self.owner.items()
            if owner.any()
        ]

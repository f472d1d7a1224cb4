"""Exactly one tile per SM: where M does not divide evenly, neighbouring tiles overlap.

128 tiles of 64 rows leave 4 of 132 SMs idle. Spread evenly, 132 tiles start 56 or 64 rows apart;
the rows that two of them share are computed and stored twice, with the same result. It pays where
memory binds and the tiles nearly fill the GPU: rows read twice come from L2.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from cutex.device.work_tile import WorkTile
from cutex.schedulers.one_round import OneStep
from cutex.schedulers.order import TileCounts

UNIT = 8  # rows: 16 contiguous bytes, which a TMA store writes whole


def first_row(cta: Int32 | int, rows: Int32 | int, num_ctas: int) -> Int32 | int:
    """The first row of a CTA's tile: where its share of the rows begins, in whole units."""
    return cta * ((rows + UNIT - 1) // UNIT) // num_ctas * UNIT


@dataclass(frozen=True)
class Spread:
    """A grid of one CTA per SM, with one tile each, which begins at `first_row`."""

    num_ctas: int

    def grid(self, counts: TileCounts) -> tuple[int, int, int]:
        return 1, 1, self.num_ctas

    def walk(self, counts: TileCounts) -> OneStep:
        """The walk of this CTA, whose rows are counted from its first one."""
        return OneStep(WorkTile(Int32(0), Int32(0)))

    def first_row(self, cta: Int32, rows: Int32) -> Int32:
        """The first row of the tile of CTA `cta` along z, of `rows` in all."""
        return first_row(cta, rows, self.num_ctas)

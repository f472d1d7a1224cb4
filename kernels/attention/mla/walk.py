"""The walk of an MLA kernel's roles over their parts of units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Boolean, Int32

from cutex.device.attention.block_info import larger
from cutex.device.attention.unit_rows import UnitRows
from cutex.kernels.attention.decode.shared import Walk
from cutex.kernels.attention.decode.splits import EntrySpan, Piece, Splits
from cutex.kernels.attention.mla.combine import rows_of
from cutex.kernels.attention.mla.signature import blocks_of_rows
from cutex.schedulers.order import select

UNEVEN = 5  # percent by which a share of whole units may exceed an equal one


@dataclass(frozen=True)
class MlaWalk(Walk):
    """A CTA's, or a pair's, walk over its parts of units."""

    asks_shortest: ClassVar[bool] = True

    def worker(self) -> tuple[Int32, Int32]:
        cta, ctas = Walk.worker(self)
        return cta // self.config.ctas_of_part, ctas // self.config.ctas_of_part

    def rows(self, piece: Piece) -> UnitRows:
        """The rows of a part's unit."""
        return rows_of(self.args, self.sizes, piece.entry, piece.head, self.config.tile_m)

    def kv_head(self, owner: Int32) -> Int32:
        """The head of keys that an owner of units reads."""
        return owner // blocks_of_rows(self.sizes, self.config.tile_m)

    def size_alone(self, *counts: Int32) -> None:
        """None: parts end where shares do."""
        return None

    def piece(self, splits: Splits, at: Int32, span: EntrySpan) -> Piece:
        return splits.piece(at, span)

    def uncut(
        self, quota: Int32, longest: Int32, shortest: Int32, many: Boolean
    ) -> tuple[Int32, Int32]:
        """A share, and the number of parts that units are cut into: a share of whole units, uncut,
        if it is only a little longer than an equal share. Several are whole if all are equally
        long."""
        count = select(longest == shortest, (quota + longest - 1) // larger(longest, 1), 1)
        whole = count * longest
        near = (whole >= quota) & (whole * 100 <= quota * (100 + UNEVEN))
        return select(near, whole, quota), self.args.num_splits

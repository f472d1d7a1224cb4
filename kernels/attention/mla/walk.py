"""The walk of an MLA kernel's roles over the parts of units that are theirs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from cutex.kernels.attention.decode.rows import Rows
from cutex.kernels.attention.decode.shared import WARP, Part, Walk
from cutex.kernels.attention.decode.splits import Piece, Splits, weight
from cutex.kernels.attention.mla.combine import rows_of
from cutex.kernels.attention.mla.signature import blocks_of_rows

UNEVEN = 5  # percent by which the longest unit may exceed a share and not be cut


@dataclass(frozen=True)
class MlaWalk(Walk):
    """A CTA's, or a pair's, way over its parts of units."""

    def worker(self) -> tuple[Int32, Int32]:
        cta, ctas = Walk.worker(self)
        return cta // self.config.ctas_of_part, ctas // self.config.ctas_of_part

    def rows(self, piece: Piece | Part) -> Rows:
        """The rows of a part's unit."""
        return rows_of(self.passed, self.sizes, piece.entry, piece.head, self.config.tile_m)

    def kv_head(self, owner: Int32) -> Int32:
        """The head of keys that an owner of units reads."""
        return owner // blocks_of_rows(self.sizes, self.config.tile_m)

    @cute.jit
    def shares(self, owners: Int32, teams: Int32) -> tuple[Int32, Int32]:
        """The length of the row of all units, and of each team's share: that of the longest unit,
        so that none is cut, if it is only a little longer than an equal share."""
        c, total, longest = self.config, Int32(0), Int32(0)
        for first in cutlass.range(0, self.sizes.entries, WARP, unroll=4):
            mine = weight(self.length(first + cute.arch.lane_idx()), c.start)
            total += mine
            longest = cutlass.max(longest, mine)
        total = cute.arch.warp_redux_sync(total, "add") * owners
        longest = cute.arch.warp_redux_sync(longest, "max")
        quota = Splits.quota_of(total, teams, c.least)
        near = (longest > quota) & (longest * 100 <= quota * (100 + UNEVEN))
        return total, longest if near else quota

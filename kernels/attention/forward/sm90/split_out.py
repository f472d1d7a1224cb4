"""PartMerge: what a warp does with its rows of a part of a tile that is split (split_row.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cutex.device.atoms.wgmma import ROWS
from cutex.device.attention.merged_rows import (
    ROWS_OF_THREAD,
    STATS,
    MergedRows,
    numbers_of_warp,
)
from cutex.device.attention.row_stats import KeptStats
from cutex.device.attention.row_store import RoundedRow
from cutex.device.attention.split_row import PartPlace
from cutex.device.attention.unit_rows import UnitRows, units_of
from cutex.device.pipeline import threads_where
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.shared import OwnRows
from cutex.kernels.attention.signature import KernelArgs

WHOLE_BARRIER = 11  # a named barrier of all warps that compute


@dataclass(frozen=True)
class PartMerge:
    """What CTAs leave of their parts of a tile, and how each merges some columns of it."""

    config: Sm90ForwardConfig
    mO: Any  # (batch, seqlen_q, heads, DV) or (total_q, heads, DV)
    args: KernelArgs

    def stats(self) -> cute.Tensor:
        """The stats (STATS, rows) of rows without keys."""
        stats = cute.make_rmem_tensor(cute.make_layout((STATS, ROWS_OF_THREAD)), Float32)
        stats.fill(0.0)
        return stats

    @cute.jit
    def note(
        self,
        stats: cute.Tensor,
        softmax: cutlass.Constexpr[Any],
        lse: cute.Tensor,
        low: cute.Tensor,
    ) -> None:
        """Set the stats to those of rows whose blocks `softmax` has seen; LSE is `lse` and
        `low`."""
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            for i, value in enumerate(KeptStats.of(softmax, lse, low, r)):
                stats[i, r] = value

    @cute.jit
    def leave(
        self, acc: cute.Tensor, stats: cute.Tensor, own: OwnRows, place: PartPlace, valid: Boolean
    ) -> Boolean:
        """Leave these rows to all CTAs of their tile, if those of all warps of this CTA are valid.
        Returns whether they are."""
        failed = threads_where(~valid, Int32(WHOLE_BARRIER), 32 * self.config.warps)
        if failed == 0:
            self.rows(own, place).leave(acc, stats)
        return failed == 0

    @cute.jit
    def merge(
        self,
        own: OwnRows,
        place: PartPlace,
        store_lse: cutlass.Constexpr[Callable[..., None] | None],
    ) -> None:
        """Merge a part of the columns of these rows; `store_lse` stores their LSE, of one part."""
        self.rows(own, place).merge(store_lse)

    def rows(self, own: OwnRows, place: PartPlace) -> MergedRows:
        c, args = self.config, self.args
        numbers = numbers_of_warp(c.head_dim_v)
        warp = cute.arch.warp_idx()
        first = Int64((place.slot * c.warps + warp) * numbers)
        sums = cute.make_tensor(
            args.parts.iterator + cute.assume(first, divby=4), args.parts.layout
        )
        count = args.counter.iterator + place.first * c.warps + warp
        of_tile = UnitRows(
            own.work.batch, own.m_block, own.work.head, own.seq_q, Int32(c.pack), ROWS
        )
        # NOTE: the rows of a tile beside those that exist are addresses that nothing is stored to
        mine = tuple(row - own.m_block * ROWS for row in own.rows)
        places = tuple(RoundedRow(of_tile.words(self.mO, r), units_of(self.mO)) for r in mine)
        exists = tuple(r < of_tile.count for r in mine)
        stride = Int32(c.warps * numbers)
        return MergedRows(
            sums,
            count,
            stride,
            place.number,
            place.parts,
            c.head_dim_v,
            places,
            exists,
            self.mO.element_type,
        )

"""What one CTA has of a tile's rows, over a part of their keys, for the CTA that completes it
(row_stats.py). The larger weight is taken out, so that none overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.scalar import exp2, reciprocal
from cutex.device.attention.row_stats import (
    FIELDS,
    KEPT_FIELDS,
    LN2_REST,
    KeptStats,
    RowStats,
    log2_of_ratio,
    sum_of_terms,
)
from cutex.device.attention.softmax import LN2
from cutex.device.kept_sums import VECTOR, KeptSums

ROWS_OF_THREAD = 2
STATS = KEPT_FIELDS * ROWS_OF_THREAD  # numbers that a thread keeps besides O
KEPT, FAILED = 1, 2  # what a part's flag says


@dataclass(frozen=True)
class KeptRows:
    """A part of the rows that a thread has, which others are added to or which is kept for them."""

    acc: cute.Tensor  # O of the part, divided by its sum
    kept: cute.Tensor  # (rows, KEPT_FIELDS): of each row the KeptStats of the part
    stats: cute.Tensor  # (rows, FIELDS): the RowStats of what has been added up

    @staticmethod
    def of(acc: cute.Tensor, softmax: Any, lse: cute.Tensor, low: cute.Tensor) -> KeptRows:
        """The rows of a tile whose blocks `softmax` has seen; LSE is `lse` and `low`."""
        kept, stats = (
            cute.make_rmem_tensor(cute.make_layout((ROWS_OF_THREAD, fields)), Float32)
            for fields in (KEPT_FIELDS, FIELDS)
        )
        for r in range(ROWS_OF_THREAD):
            found = KeptStats.of(softmax, lse, low, r)
            for i, value in enumerate(found):
                kept[r, i] = value
            for i, value in enumerate(found.known):
                stats[r, i] = value
        return KeptRows(acc, kept, stats)

    @property
    def tensors(self) -> tuple[cute.Tensor, cute.Tensor]:
        return self.kept, self.acc

    @cute.jit
    def keep(self, kept: KeptSums, valid: Boolean) -> None:
        """Leave this part to the warp that completes the tile, or say that it has `failed`."""
        if cute.arch.vote_all_sync(valid):
            kept.keep(self.tensors)
        else:
            kept.say(FAILED)

    @cute.jit
    def add(self, kept: KeptSums) -> Boolean:
        """Wait for another part, and add it. Returns whether it was valid."""
        kept.await_kept()
        said = cute.arch.make_warp_uniform(
            cute.arch.load(kept.kept, Int32, sem="acquire", scope="gpu")
        )
        if said == KEPT:
            self._add(kept)
        kept.say(0)
        return said == KEPT

    @cute.jit
    def _add(self, kept: KeptSums) -> None:
        layout = cute.make_layout((ROWS_OF_THREAD, KEPT_FIELDS))
        others = cute.make_rmem_tensor(layout, Float32)
        shares = cute.make_rmem_tensor(cute.make_layout((2, ROWS_OF_THREAD)), Float32)
        vector = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        for number, (mine, place) in enumerate(kept.vectors((others, self.acc))):
            if cutlass.const_expr(number < STATS // VECTOR):
                cute.autovec_copy(place, mine)
            else:
                if cutlass.const_expr(number == STATS // VECTOR):
                    self._weigh(others, shares)
                cute.autovec_copy(place, vector)
                for i in range(VECTOR):
                    mine[i] = mine[i] * shares[0, i // 2] + vector[i] * shares[1, i // 2]

    @cute.jit
    def _weigh(self, others: cute.Tensor, shares: cute.Tensor) -> None:
        """Find the shares of this part and of the other one in both, (2, rows), and add up what is
        known of their rows."""
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            known = RowStats(*(self.stats[r, i] for i in range(FIELDS)))
            other = KeptStats(*(others[r, i] for i in range(KEPT_FIELDS))).known
            above = other.above(known)
            exceeds = above > 0.0
            mine = known.n * exp2(-above) if exceeds else known.n
            theirs = other.n if exceeds else other.n * exp2(above)
            total = mine + theirs
            empty = total == 0.0
            over = Float32(0.0) if empty else reciprocal(total)
            shares[0, r], shares[1, r] = mine * over, theirs * over
            larger = RowStats(*(tuple(other) if exceeds else tuple(known)))
            rest = log2_of_ratio(total, larger.n)
            rest = rest * LN2 + rest * LN2_REST
            lse, low = sum_of_terms(larger.lse, larger.low + rest)
            self.stats[r, 0] = total
            self.stats[r, 1] = larger.e
            self.stats[r, 2] = larger.r
            self.stats[r, 3] = -Float32.inf if empty else lse
            self.stats[r, 4] = Float32(0.0) if empty else low

    @cute.jit
    def store_lse(self, lse: cute.Tensor) -> None:
        """Set `lse` (rows) to that of all parts so far."""
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            lse[r] = self.stats[r, 3]

"""What one CTA has of a tile's rows, over a part of their keys, for the CTA that completes it.

    O = sum of w O / sum of w,   w = n 2^(e + r)

over the parts, of which each has its own O, divided by its own sum n 2^e of exponentials, which are
lowered by r powers of two. The largest w is taken out, so that none overflows; what others are
worth is found from differences of r and of e, which are exact where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.atoms.scalar import exp2, log2, power_below, reciprocal
from cutex.device.attention.softmax import LN2
from cutex.device.kept_sums import VECTOR, KeptSums

ROWS_OF_THREAD = 2
STATS = 4 * ROWS_OF_THREAD  # numbers that a thread keeps besides O
KEPT, FAILED = 1, 2  # what a part's flag says


@dataclass(frozen=True)
class KeptRows:
    """A part of the rows that a thread has, which others are added to or which is kept for them."""

    acc: cute.Tensor  # O of the part, divided by its sum
    stats: Any  # (rows, 4): of each row n, e, r, and LSE of its keys

    @staticmethod
    def of(acc: cute.Tensor, softmax: Any, lse: cute.Tensor) -> KeptRows:
        """The rows of a tile whose blocks `softmax` has seen."""
        stats = cute.make_rmem_tensor(cute.make_layout((ROWS_OF_THREAD, 4)), Float32)
        for r in range(ROWS_OF_THREAD):
            total = softmax.over_row(softmax.sums[r], lambda x, y: x + y)
            power = power_below(total)  # NOTE: of no keys -127, so that n is 0
            values = total * exp2(-power), power, softmax.reference_log2(r), lse[r]
            for i, value in enumerate(values):
                stats[r, i] = value
        return KeptRows(acc, stats)

    @property
    def tensors(self) -> tuple[cute.Tensor, cute.Tensor]:
        return self.stats, self.acc

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
        layout = cute.make_layout((ROWS_OF_THREAD, 4))
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
            n, e, ref, lse = (self.stats[r, i] for i in range(4))
            n2, e2, ref2, lse2 = (others[r, i] for i in range(4))
            above = (ref2 - ref) + (e2 - e)  # powers of two
            exceeds = above > 0.0
            mine = n * exp2(-above) if exceeds else n
            other = n2 if exceeds else n2 * exp2(above)
            total = mine + other
            over = Float32(0.0) if total == 0.0 else reciprocal(total)
            shares[0, r], shares[1, r] = mine * over, other * over
            larger, of_larger = (n2, lse2) if exceeds else (n, lse)
            rest = log2(total * reciprocal(larger)) * LN2
            self.stats[r, 0] = total
            self.stats[r, 1] = e2 if exceeds else e
            self.stats[r, 2] = ref2 if exceeds else ref
            self.stats[r, 3] = -Float32.inf if total == 0.0 else of_larger + rest

    @cute.jit
    def store_lse(self, lse: cute.Tensor) -> None:
        """Set `lse` (rows) to that of all parts so far."""
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            lse[r] = self.stats[r, 3]

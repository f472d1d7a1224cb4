"""Softmax of dense rows, bulk-copied by persistent CTAs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Scalar
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing
from cutex.device.row.packed import PackedRows
from cutex.device.row.reduction import RowReduction
from cutex.device.row.tile import RowTile
from cutex.device.row.words import Words
from cutex.kernels.row.kernel import RowKernel, launch_of_groups, matrix, reductions
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.softmax import above, combined, exp

LEAST_SLOTS = 3


@dataclass(frozen=True)
class RowsBulkConfig:
    """How dense rows are processed: the tile (its vectors are not used), the 32-bit words per
    thread of a row or of its CTA's part, the slots for rows in flight, and the CTAs per SM."""

    tile: RowTile
    words: int
    slots: int
    resident: int


class SoftmaxBulk(RowKernel):
    """y = exp(x - max) / sum of exp(x - max). A row is read once from smem; its exponentials stay
    in registers until its threads have combined their sums. Thread 0 starts the copies."""

    title = "softmax_bulk"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    def __init__(self, config: RowsBulkConfig) -> None:
        super().__init__(config)
        if config.tile.aligned or config.tile.rows > 1:
            raise ValueError("rows by bulk copies may begin anywhere, and a CTA has one of them")
        if config.slots < LEAST_SLOTS:
            raise ValueError(f"slots={config.slots} must be at least {LEAST_SLOTS}")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        made = (matrix(name, dtype, self.tile) for name in ("x", "y"))
        return (*made, Scalar("groups", "int32"))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, groups: Int32, stream) -> None:
        self.kernel(mX, mY, groups).launch(
            **launch_of_groups(self.tile, self.config.resident, groups, stream)
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, groups: Int32) -> None:
        c, tile, dense = self.config, self.tile, self.dense
        (reduction,) = reductions(tile, 2, repeated=True, by_cta=True)
        ring = BulkRing.allocate(mX.element_type, dense.elements(mX.element_type.width), c.slots)
        publish_barriers((ring.full,))
        group = Int32(cute.arch.block_idx()[0]) // tile.ctas
        for ahead in cutlass.range_constexpr(c.slots - 1):
            dense.fetch(mX, group + ahead * groups, ring, ahead)
        words = dense.words(mX, group)
        turns = cute.ceil_div(Int32(cute.size(mX, mode=[0])) - group, groups)
        for turn in cutlass.range(turns, unroll=1):
            row = group + turn * groups
            ring.wait(turn)
            slot, begin = ring[turn], dense.begin(mX, row)
            self.row(dense, words, slot, begin, reduction, (turn, turns))
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            dense.run(mY, row, mX).store(slot)
            # the slot of the turn before, whose row is on its way out
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            ahead = turn + (c.slots - 1)
            dense.fetch(mX, group + ahead * groups, ring, ahead)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @property
    def dense(self) -> PackedRows:
        return PackedRows(self.tile, self.config.words)

    @cute.jit
    def row(
        self, dense: PackedRows, words: Words, slot: cute.Tensor, begin: Int32,
        reduction: RowReduction, turn: tuple[Int32, Int32],
    ) -> None:  # fmt: skip
        """Overwrite the row at offset `begin` of a slot with its softmax. turn: the current one, of
        how many."""
        own, e = exponentials(scores(dense, words, slot, begin))
        top, total = combined(reduction, (own, folded(e, plus)), *turn)
        factor = exp(own - above(top)) * cute.arch.rcp_approx(total)
        dense.keep(words, [v * factor for v in e], slot, begin, 0)


def scores(dense: PackedRows, words: Words, slot: cute.Tensor, begin: Int32) -> list[Float32]:
    """This thread's elements of the row at offset `begin` of a slot, in fp32; -inf outside the
    row."""
    found = []
    for word in range(words.count):
        pair = dense.pair(words, slot, begin, word)
        if words.is_edge(word):
            held = (words.holds(word, i) for i in range(words.per))
            pair = [
                cutlass.select_(there, x, -Float32.inf) for there, x in zip(held, pair, strict=True)
            ]
        found += pair
    return found


def exponentials(x: list[Float32]) -> tuple[Float32, list[Float32]]:
    """The maximum of x, and the exponentials of x relative to it."""
    own = functools.reduce(cute.arch.fmax, x)
    return own, [exp(v - above(own)) for v in x]

"""Rows of tensor memory: each thread of a warpgroup owns one, and moves parts of it.

A row of scores becomes probabilities part by part. Where its largest score is needed first, the row
is read twice: 128 scores in registers would leave none for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from cutex.device.atoms.tmem import LANES
from cutex.device.attention.row_softmax import RowSoftmax
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.softmax import row_max
from cutex.device.epilogue.sm100.tma_store import SubTiles, sub_tiles

PART = 32  # columns of one load or store


@cute.jit
def columns_of(tmem: cute.Pointer, column: Int32 | int, count: cutlass.Constexpr[int]) -> SubTiles:
    """This thread's row of `count` columns of tensor memory, in parts of PART columns."""
    thread, _, _ = cute.arch.thread_idx()
    layout = cute.make_layout((LANES, count), stride=(1 << 16, 1))
    return sub_tiles(cute.make_tensor(tmem + column, layout), None, thread % LANES, PART)


@cute.jit
def store_columns(tmem: cute.Pointer, column: Int32, values: cute.Tensor) -> None:
    """Start the store of a thread's `values`, 32 bits each, to its lane from `column` on."""
    thread, _, _ = cute.arch.thread_idx()
    count = cute.size(values)
    layout = cute.make_layout((LANES, count), stride=(1 << 16, 1))
    target = cute.make_tensor(tmem + column, layout)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(count)), Float32)
    store = tcgen05.make_tmem_copy(atom, target).get_slice(thread % LANES)
    coords = store.partition_S(cute.make_identity_tensor((LANES, count)))
    source = cute.make_tensor(values.iterator, cute.make_layout(coords.shape))
    cute.copy(store, source, store.partition_D(target))


@cute.jit
def scale_columns(
    tmem: cute.Pointer, column: Int32 | int, count: cutlass.Constexpr[int], factor: Float32
) -> None:
    """Multiply this thread's row of `count` columns by `factor`."""
    parts = columns_of(tmem, column, count)
    for part in cutlass.range_constexpr(parts.num_parts):
        values = parts.load(part)
        for i in cutlass.range_constexpr(PART):
            values[i] *= factor
        flat = cute.make_tensor(values.iterator, cute.make_layout(PART))
        store_columns(tmem, column + part * PART, flat)


@cute.jit
def rounded(scores: cute.Tensor, dtype: cutlass.Constexpr[type[cutlass.Numeric]]) -> cute.Tensor:
    """A part of a row, (PART), rounded to the 16-bit `dtype`."""
    flat = cute.make_layout(PART)
    found = cute.make_rmem_tensor(flat, dtype)
    found.store(cute.make_tensor(scores.iterator, flat).load().to(dtype))
    return found


@dataclass(frozen=True)
class ScoreRow:
    """One thread's row of a block of scores in tensor memory."""

    tmem: cute.Pointer
    tile_n: int
    softmax: RowSoftmax
    score_ops: ScoreOps

    @cute.jit
    def search(self, column: Int32, n_block: Int32, masked: Boolean | bool) -> Float32:
        """The largest score of the row. Scores that masking or other operations change are written
        back, for `exponentials` to read."""
        changed = masked
        if cutlass.const_expr(self.score_ops.elementwise):
            changed = True
        any_masked = masked is not False
        parts = columns_of(self.tmem, column, self.tile_n)
        highest = Float32(-Float32.inf)
        for part in cutlass.range(parts.num_parts, unroll_full=True):
            columns = cute.make_rmem_tensor(parts.tTR_cAcc.shape, Float32)
            parts.start_load_into(columns, part)
            parts.wait_loads()
            scores = cute.make_tensor(columns.iterator, cute.make_layout((1, PART)))
            if changed:
                # NOTE: of blocks without a mask it changes nothing
                self.score_ops.apply(scores, n_block, any_masked, part * PART)
                flat = cute.make_tensor(columns.iterator, cute.make_layout(PART))
                store_columns(self.tmem, column + part * PART, flat)
            highest = cute.arch.fmax(highest, row_max(scores, 0))
        if changed:
            cute.arch.fence_view_async_tmem_store()
        return highest

    @cute.jit
    def exponentials(
        self,
        column: Int32,
        n_block: Int32,
        searched: cutlass.Constexpr[bool],
        by_fma: cutlass.Constexpr[int],
        store: cutlass.Constexpr,
    ) -> None:
        """Turn the scores into exponentials, passed part by part, (1, PART) each, to `store(scores,
        part)`; the next part is loaded while one is computed. Scores that have been `searched` are
        final."""
        softmax = self.softmax.partly_by_fma(by_fma)
        parts = columns_of(self.tmem, column, self.tile_n)
        following = parts.start_load(0)
        for part in cutlass.range_constexpr(parts.num_parts):
            columns = following
            parts.wait_loads()
            if cutlass.const_expr(part < parts.num_parts - 1):
                following = parts.start_load(part + 1)
            scores = cute.make_tensor(columns.iterator, cute.make_layout((1, PART)))
            if cutlass.const_expr(not searched):
                self.score_ops.apply(scores, n_block, False, part * PART)
            softmax.add(scores)
            store(scores, part)

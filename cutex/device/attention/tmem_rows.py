"""Rows of tensor memory: each thread of a warpgroup owns one, and moves parts of it.

A row of scores becomes probabilities part by part. Where its largest score is needed first, the row
is read twice: 128 scores in registers would leave room for nothing else. Where the reference of
earlier blocks will probably do, the row is read once, and its first parts are held back as 16-bit
values until the last scores are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

from cutex.device.atoms.packed import mul2
from cutex.device.atoms.tmem import LANES
from cutex.device.attention.row_softmax import RowSoftmax, row_max
from cutex.device.attention.scores import ScoreOps
from cutex.device.epilogue.sm100.tma_store import SubTiles, sub_tiles

PART = 32  # columns of one load or store
Store = Callable[[cute.Tensor, int], None]  # of part `part` of a row of P, (PART) of 16 bits


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
    cX = cute.make_identity_tensor((LANES, count))
    coords = store.partition_S(cX)  # (R2T, R2T_M, R2T_N)
    source = cute.make_tensor(values.iterator, cute.make_layout(coords.shape))
    cute.copy(store, source, store.partition_D(target))


@cute.jit
def scale_columns(
    tmem: cute.Pointer, column: Int32 | int, count: cutlass.Constexpr[int], factor: Float32
) -> None:
    """Multiply this thread's row of `count` columns by `factor`."""
    parts = columns_of(tmem, column, count)
    following = parts.start_load(0)
    for part in cutlass.range_constexpr(parts.num_parts):
        values = following
        parts.wait_loads()
        if cutlass.const_expr(part < parts.num_parts - 1):
            following = parts.start_load(part + 1)
        for i in cutlass.range_constexpr(0, PART, 2):
            values[i], values[i + 1] = mul2((values[i], values[i + 1]), (factor, factor))
        store_columns(tmem, column + part * PART, flat(values))


@cute.jit
def scaled_part(
    parts: SubTiles, part: cutlass.Constexpr[int], factor: Float32, computed: Boolean
) -> cute.Tensor:
    """Part `part` of this thread's row of O, (PART), times `factor`; 0 if it was not computed."""
    values = cute.make_rmem_tensor(parts.tTR_cAcc.shape, Float32)
    values.fill(0.0)
    if computed:
        parts.start_load_into(values, part)
        parts.wait_loads()
    for k in cutlass.range_constexpr(PART):
        values[k] *= factor
    return flat(values)


def flat(columns: cute.Tensor) -> cute.Tensor:
    """A part of a row as (PART)."""
    return cute.make_tensor(columns.iterator, cute.make_layout(PART))


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

    def search(
        self, column: Int32, n_block: Int32, masked: Boolean | bool
    ) -> tuple[Float32, cute.Tensor]:
        """The largest score of the row, NaN if any is, and the first part in registers. Scores of
        other parts changed by masking or other operations are written back for `exponentials` to
        read."""
        parts = columns_of(self.tmem, column, self.tile_n)
        order = [*range(1, parts.num_parts), 0]
        highest = Float32(-Float32.inf)
        following = parts.start_load(order[0])
        for part, after in zip(order, (*order[1:], None), strict=True):
            columns = following
            parts.wait_loads()
            if after is not None:
                following = parts.start_load(after)
            self.make_final(columns, column, n_block, masked, part)
            highest = row_max(flat(columns), highest)
        if self.changes(masked) is not False:
            cute.arch.fence_view_async_tmem_store()
        return highest, columns

    def changes(self, masked: Boolean | bool) -> Boolean | bool:
        """Whether any operation changes scores after the tensor core."""
        return True if self.score_ops.elementwise else masked

    @cute.jit
    def make_final(
        self,
        columns: cute.Tensor,
        column: Int32,
        n_block: Int32,
        masked: Boolean | bool,
        part: cutlass.Constexpr[int],
    ) -> None:
        """Apply the operations to part `part` of a row; the first part is not written back."""
        any_masked = masked is not False
        if self.changes(masked):
            scores = cute.make_tensor(columns.iterator, cute.make_layout((1, PART)))
            # NOTE: of blocks without a mask it changes nothing
            self.score_ops.apply(scores, n_block, any_masked, part * PART)
            if cutlass.const_expr(part > 0):
                store_columns(self.tmem, column + part * PART, flat(columns))

    def exponentials(
        self,
        column: Int32,
        found: tuple[Float32, cute.Tensor],
        dtype: type[cutlass.Numeric],
        store: Store,
    ) -> None:
        """Replace the scores, final as `search` has `found` them, by probabilities, and store them
        part by part; each part is loaded while the one before is computed."""
        highest, following = found
        parts, total = columns_of(self.tmem, column, self.tile_n), Float32(0.0)
        for part in range(parts.num_parts):
            columns = following
            if part > 0:
                parts.wait_loads()
            if part < parts.num_parts - 1:
                following = parts.start_load(part + 1)
            total += self.softmax.exponentials(flat(columns), (0, PART), exact=True)
            store(rounded(columns, dtype), part)
        self.softmax.sums[0] += total
        self.softmax.count_rounding(highest, total, self.tile_n, dtype, True, exact=True)

    def tentative(
        self,
        column: Int32,
        n_block: Int32,
        num_held: int,
        dtype: type[cutlass.Numeric],
        store: Store,
    ) -> Boolean:
        """Turn unmasked scores into exponentials with the present reference and return True; or, if
        a row of this warp exceeds it by too much, change nothing and return False.

        The first `num_held` parts are stored together, once all scores are known.
        """
        softmax, parts = self.softmax, columns_of(self.tmem, column, self.tile_n)
        loaded, held = [parts.start_load(0)], []
        parts.wait_loads()
        total, highest = Float32(0.0), Float32(-Float32.inf)
        for part in range(num_held):
            scores = flat(loaded[part])
            is_last = part == num_held - 1
            following = range(part + 1, parts.num_parts if is_last else part + 2)
            loaded += [parts.start_load(i) for i in following]
            if part == 0:
                highest = self.highest_of(scores, n_block, 0, highest)
            total += softmax.exponentials(scores, (0, PART // 2), exact=False)
            # NOTE: half a part early, so that the vote is under exponentials, not after them
            parts.wait_loads()
            for i in following:
                highest = self.highest_of(flat(loaded[i]), n_block, i, highest)
            kept = softmax.holds(highest) if is_last else None
            total += softmax.exponentials(scores, (PART // 2, PART), exact=False)
            held.append(rounded(scores, dtype))
        others = [flat(x) for x in loaded[num_held:]]
        of_others = partial(softmax.exponentials, columns=(0, PART), exact=False)
        total = keep(kept, held, others, total, of_others, store)
        softmax.sums[0] += total
        softmax.count_rounding(highest, total, self.tile_n, dtype, kept, exact=False)
        return kept

    def highest_of(
        self, scores: cute.Tensor, n_block: Int32, part: int, highest: Float32
    ) -> Float32:
        """The largest of `highest` and of part `part` of a row, whose scores are made final."""
        row = cute.make_tensor(scores.iterator, cute.make_layout((1, PART)))
        self.score_ops.apply(row, n_block, False, part * PART)
        return row_max(scores, highest)


@cute.jit
def keep(
    kept: Boolean,
    held: list[cute.Tensor],
    others: list[cute.Tensor],
    total: Float32,
    exponentials: cutlass.Constexpr,
    store: cutlass.Constexpr[Store],
) -> Float32:
    """If `kept`, store a row, the `held` parts of P and the `others`, which are still scores, and
    return the sum of its exponentials (`total` is that of the held parts); otherwise return 0."""
    found = Float32(0.0)
    if kept:
        for part in cutlass.range_constexpr(len(held)):
            store(held[part], part)
        found = total
        for part in cutlass.range_constexpr(len(held), len(held) + len(others)):
            scores = others[part - len(held)]
            found += exponentials(scores)
            store(rounded(scores, held[0].element_type), part)
    return found

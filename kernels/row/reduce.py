"""Reductions of contiguous rows, each by one CTA or split among several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float16, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.last_arrival import is_last_arrival
from cutex.device.row.columns import Columns, thread_of
from cutex.device.row.reduction import RowReduction, Values, add, lanes, pairwise
from cutex.device.row.tile import WARP, RowTile
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.fold import DOWN, MOST, Fold, is_finite
from cutex.kernels.row.kernel import (
    RowKernel,
    elements,
    launch_of,
    matrix,
    meet,
    parts_of,
    reductions,
)
from cutex.kernels.row.published import leave, taken_for_good

FINISHERS = 8  # warps of a CTA, each of which combines the parts of one result
PARTS = "parts"  # what CTAs leave: a value each, combined in order
WORDS = "words"  # the same in words with a flag, which the CTA of the last part waits for
ATOMICS = "atomics"  # or added to the result, in any order


@dataclass(frozen=True)
class ReduceConfig:
    """What rows are reduced to, the number of CTAs that share a row, and the tile."""

    tile: RowTile
    fold: Fold
    out: str  # the dtype of results
    # "": a CTA has whole rows; PARTS, WORDS (of few rows alone) or ATOMICS: several CTAs share one
    shared: str = ""

    def why_not(self) -> str | None:
        if self.shared == WORDS and self.tile.rows > 1:
            return f"rows={self.tile.rows}: a CTA that publishes its part has one row"
        return None


class Reduce(RowKernel):
    """y = fold of each row of x; `splits` CTAs share a row."""

    title = "reduce"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        # of the CTAs that have left their parts
        counts = Operand(
            "counts", ("groups",), "int32", aligned=False, whole=False, bounds_by=self.bounds
        )
        counted = (counts,) if c.shared == PARTS else ()
        if c.shared == WORDS:
            words = Operand("words", ("words",), "int32", whole=False, bounds_by=self.word_bounds)
            counted = (words,)
        outs = results(c, lambda numbers: numbers["m"])
        return (matrix("x", dtype, c.tile), *outs, *counted, *SCALARS)

    def bounds(self, numbers: Mapping[str, int]) -> tuple[Bound, ...]:
        """The bound of the counters of a launch: one for each tile of rows."""
        return (Bound("groups", -(-numbers["outs"] // self.tile.rows)),)

    def word_bounds(self, numbers: Mapping[str, int]) -> tuple[Bound, ...]:
        """The bound of the words of a launch, two of 32 bits for each word of a part's value."""
        return (Bound("words", 2 * numbers["m"] * numbers["splits"] * self.config.fold.words),)

    @cute.jit
    def __call__(self, mX: cute.Tensor, *rest) -> None:
        *to, splits, scale, stream = rest
        how = launch_of(self.tile, mX, stream)
        how["grid"] = (how["grid"][0] * splits, 1, 1)
        self.by_rows(mX, tuple(to), splits, scale).launch(**how)

    @cute.kernel
    def by_rows(self, mX: cute.Tensor, to: tuple, splits: Int32, scale: Float32) -> None:
        c, tile = self.config, self.config.tile
        (reduction,) = reductions(tile, c.fold.count, later=True, by_cta=True)
        block, rows = cute.arch.block_idx()[0] // tile.ctas, cute.size(mX, mode=[0])
        this = block // splits * tile.rows + cute.arch.thread_idx()[0] // tile.threads
        gX = mX[cutlass.min(this, rows - 1), None]  # (N)
        columns, parts = Columns.of(tile, gX), parts_of(tile, gX)
        each = cute.ceil_div(parts, splits)
        first = block % splits * each
        last = cutlass.min(first + each, parts)
        wait_for_kernel_before()
        found = self.walked(gX, columns, first, last)
        meet(tile)
        found = self.combined(reduction, found)
        speaks, place = (this < rows) & columns.is_first_of_row(), (this, block % splits)
        again = reduction, gX, columns, (first, last)
        if cutlass.const_expr(c.fold.kind == "sum" and c.shared in (PARTS, WORDS)):
            low = found[0] * DOWN
            if cutlass.const_expr(overflows(mX)):  # noqa: SIM102 (the other is traced)
                if ~is_finite(found[0]):
                    low = self.lower(*again)
            found += (low,)
        if cutlass.const_expr(c.shared == WORDS):
            if cute.arch.warp_idx() == 0:
                self.meet_in_words(to, found, place, splits, scale)
        elif speaks:
            store_value(c, to, found, place, scale)
        # NOTE: behind the store, where nobody who does not need it loads its instructions
        if cutlass.const_expr(c.fold.kind == "sum" and not c.shared and overflows(mX)):
            self.store_again(again, found[0], speaks, (to, place, scale))
        if cutlass.const_expr(c.shared == PARTS):
            mine = block // splits
            self.finish_if_last(to, mine, splits, rows, scale)

    def combined(self, reduction: RowReduction, found: Values, turn: int = 0) -> Values:
        """The combination over all threads of a row."""
        fold, group = self.config.fold, min(self.tile.threads, WARP)

        def gather(found: list[Values], count: int) -> Values:
            # NOTE: lanes beyond `count` have the same values again
            whole = fold.kind == "argmax"
            return fold.lanes(functools.reduce(fold.combine, found), group if whole else count)

        return reduction.of_warps(fold.lanes(found, group), gather, turn)

    @cute.jit
    def store_again(self, again: tuple, total: Float32, speaks: Boolean, where: tuple) -> None:
        """Store a sum anew that is not finite, from that of elements scaled down."""
        to, place, scale = where
        is_again = ~is_finite(total)
        speaks = speaks & is_again
        if cutlass.const_expr(self.tile.threads < WARP):
            is_again = cute.arch.vote_any_sync(is_again)  # rows of a warp shuffle together
        if is_again:
            low = self.lower(*again)
            if speaks:
                store_value(self.config, to, (total, low), place, scale)

    @cute.jit
    def lower(
        self, reduction: RowReduction, gX: cute.Tensor, columns: Columns, span: tuple[Int32, Int32]
    ) -> Float32:
        """The sum of the elements, scaled down, of the parts of a `span` of the row gX (N), which
        all threads that share it read again."""
        tile, thread = self.tile, thread_of(self.tile)
        begin, end = (columns.moved(x).first - thread * tile.width for x in span)
        begin, end = cutlass.max(begin, 0) + thread, cutlass.min(end, columns.n)
        low = Float32(0)
        for column in cutlass.range(begin, end, tile.threads * tile.ctas, unroll=4):
            low += gX[column].to(Float32) * DOWN
        if cutlass.const_expr(tile.ctas > 1):
            low = reduction((low,), add, 1)[0]
        else:
            low = self.of_threads(reduction, low)
        return low

    @cute.jit
    def of_threads(self, reduction: RowReduction, low: Float32) -> Float32:
        """A second sum over the threads of this row alone: other rows of the CTA may have none."""
        tile = self.tile
        own = lanes((low,), add, min(tile.threads, WARP))
        if cutlass.const_expr(tile.warps > 1):
            row = cute.arch.thread_idx()[0] // tile.threads
            reduction.start(own, 1)
            cute.arch.barrier(barrier_id=1 + row, number_of_threads=tile.threads)
            own = reduction.finish(pairwise(add), 1, 2)
        return own[0]

    @cute.jit
    def walked(self, gX: cute.Tensor, columns: Columns, first: Int32, last: Int32) -> Values:
        """This thread's partial result over parts `first` to `last` of a row gX (N)."""
        fold = self.config.fold
        found = fold.start()
        rX = columns.moved(first).load(gX, fold.fill)  # (V, NumV)
        for part in cutlass.range(first, last, unroll=1):
            rHere = cute.make_rmem_tensor(rX.shape, rX.element_type)
            rHere.store(rX.load())
            rX.fill(fold.fill)
            columns.moved(part + 1).fetch(gX, rX)  # on its way while this one is counted
            found = fold.combine(found, self.of_part(gX, columns.moved(part), rHere))
        return found

    @cute.jit
    def of_part(self, gX: cute.Tensor, columns: Columns, rX: cute.Tensor) -> Values:
        """The value of a thread's elements (V, NumV) of one part of a row gX (N)."""
        fold = self.config.fold
        if cutlass.const_expr(fold.kind == "argmax"):
            return self.first_of_part(gX, columns, rX)
        x = elements(rX)
        return tree(fold, [fold.of(value, Int32(0)) for value in x])

    @cute.jit
    def first_of_part(self, gX: cute.Tensor, columns: Columns, rX: cute.Tensor) -> Values:
        """The same of an "argmax": the largest element, then its first place. Where the largest is
        -inf, which elements outside the row are, too, or NaN, elements are read one by one."""
        fold, tile = self.config.fold, self.tile
        x = [value if fold.sign == 1 else -value for value in elements(rX)]
        places = [i * columns.step + j for i in range(tile.vectors) for j in range(tile.width)]
        top = tree(replace(fold, kind="max"), [(value,) for value in x])[0]
        found = fold.start()
        if top > -Float32.inf:
            at = Int32(MOST)
            for value, place in zip(reversed(x), reversed(places), strict=True):
                at = cutlass.select_(value == top, Int32(place), at)
            found = fold.key_of(top, columns.first + at)
        else:
            for i in cutlass.range(tile.vectors, unroll=1):
                for j in cutlass.range(tile.width, unroll=1):
                    column = columns.first + i * columns.step + j
                    if columns.holds(column):
                        found = fold.combine(found, fold.of(gX[column].to(Float32), column))
        return found

    @cute.jit
    def finish_if_last(
        self, to: tuple, mine: Int32, splits: Int32, rows: Int32, scale: Float32
    ) -> None:
        """Finish the results of a tile's rows in the last of its CTAs to store partial results.
        This saves a second launch; one CTA suffices, since a row has about a hundred parts."""
        tile, (mOut, mParts, mCounts) = self.tile, to
        is_last = SmemAllocator().allocate_tensor(Int32, cute.make_layout(1), 4)
        cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            is_last[0] = Int32(is_last_arrival(mCounts.iterator + mine, splits))
        cute.arch.sync_threads()
        if is_last[0] != 0:
            first = mine * tile.rows
            results = first, cutlass.min(first + tile.rows, rows)
            finish_parts(self.config, mOut, mParts, results, tile.num_threads // WARP, scale)

    @cute.jit
    def meet_in_words(
        self, to: tuple, found: Values, place: tuple[Int32, Int32], splits: Int32, scale: Float32
    ) -> None:
        """Publish a part's value; the CTA of the last part waits for the others, and stores the
        combination of all in a fixed order. A warp calls it.

        NOTE: an atomic count behind a fence, and the parts' values behind it, are three trips to L2
        where this is one and a half (docs/facts/rows.md#rows-few-words)."""
        fold, (row, split), (mOut, mWords) = self.config.fold, place, to
        lane, count = cute.arch.lane_idx(), fold.words
        first = cute.recast_ptr(mWords.iterator, dtype=Int64) + row * splits * count
        if split < splits - 1:
            if lane == 0:
                for i in cutlass.range_constexpr(count):
                    leave(first + (split * count + i), found[i])
        else:
            value = fold.start() + (Float32(0),) * (count - fold.count)
            for part in cutlass.range(lane, splits - 1, WARP, unroll=1):
                value = fold.combine(value, taken_for_good(first + part * count, count))
            value = fold.combine(fold.lanes(value, WARP), found)
            if lane == 0:
                mOut[row] = fold.result(value, scale).to(mOut.element_type)

    @property
    def kernels(self) -> dict[str, Any]:
        return {"rows": type(self).by_rows}


SCALARS = Scalar("splits", "int32"), Scalar("scale")


def results(c: Any, count: Callable[[Mapping[str, int]], int]) -> tuple[Operand, ...]:
    """The operands for a reduction's outputs: `count` results, and the partial results they are
    combined from."""

    def made(numbers: Mapping[str, int]) -> tuple[Bound, ...]:
        """The bound of the number of results of a launch."""
        return (Bound("outs", count(numbers)),)

    out = Operand("out", ("outs",), c.out, aligned=False, whole=False, bounds_by=made)
    sizes = "words", "outs", "parts"

    def bounds(numbers: Mapping[str, int]) -> tuple[Bound, ...]:
        """The bounds of a launch's partial results, all of which are combined."""
        count, splits = c.fold.words, numbers["splits"]
        return Bound("words", count, count), Bound("parts", splits, splits)

    parts = Operand("parts", sizes, "fp32", aligned=False, whole=False, bounds_by=bounds)
    return (out, parts) if c.shared == PARTS else (out,)


def overflows(mX: cute.Tensor) -> bool:
    """Whether a sum of elements may be no number of fp32: of 2^31 of fp16 it is."""
    return mX.element_type is not Float16


def tree(fold: Fold, values: list[Values]) -> Values:
    """The pairwise combination of several values."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        left = values[-1:] if len(values) % 2 else []
        values = [fold.combine(x, y) for x, y in pairs] + left
    return values[0]


@cute.jit
def store_value(
    c: Any, to: tuple, found: Values, place: tuple[Int32, Int32], scale: Float32
) -> None:
    """Store one result, or this CTA's partial result, at `place` (result, split)."""
    out, split = place
    if cutlass.const_expr(c.shared == PARTS):
        for word in cutlass.range_constexpr(c.fold.words):
            to[1][word, out, split] = found[word]
    elif cutlass.const_expr(c.shared == ATOMICS):
        at = cute.domain_offset((out,), to[0]).iterator
        cute.arch.atomic_add(at, c.fold.result(found, scale), sem="relaxed", scope="gpu")
    else:
        to[0][out] = c.fold.result(found, scale).to(to[0].element_type)


@cute.jit
def finish_parts(
    c: Any,
    mOut: cute.Tensor,
    mParts: cute.Tensor,
    results: tuple[Int32, Int32],
    warps: cutlass.Constexpr[int],
    scale: Float32,
) -> None:
    """Combine the partial results of each result in a fixed order, from first to last, one result
    per warp at a time."""
    lane = cute.arch.lane_idx()
    for out in cutlass.range(results[0] + cute.arch.warp_idx(), results[1], warps, unroll=1):
        found = c.fold.start()
        found += (Float32(0),) * (c.fold.words - c.fold.count)
        for split in cutlass.range(lane, cute.size(mParts, mode=[2]), WARP, unroll=16):
            value = tuple(mParts[word, out, split] for word in range(c.fold.words))
            found = c.fold.combine(found, value)
        found = c.fold.lanes(found, WARP)
        if lane == 0:
            mOut[out] = c.fold.result(found, scale).to(mOut.element_type)

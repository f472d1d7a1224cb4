"""Reductions of contiguous rows, each by one CTA or split among several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.last_arrival import is_last_arrival
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import Values, lanes
from cutex.device.row.tile import WARP, RowTile
from cutex.kernels.row.fold import Fold
from cutex.kernels.row.kernel import RowKernel, launch_of, matrix, meet, parts_of, reductions

FINISHERS = 8  # warps of a CTA, each of which combines the parts of one result
PARTS = "parts"  # what CTAs leave: a value each, combined in order
ATOMICS = "atomics"  # or added to the result, in any order


@dataclass(frozen=True)
class ReduceConfig:
    """What rows are reduced to, the number of CTAs that share a row, and the tile."""

    tile: RowTile
    fold: Fold
    out: str  # the dtype of results
    shared: str = ""  # "": a CTA has whole rows; PARTS or ATOMICS: several CTAs share one


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
        outs = results(c, lambda numbers: numbers["m"])
        return (matrix("x", dtype, c.tile), *outs, *counted, *SCALARS)

    def bounds(self, numbers: Mapping[str, int]) -> tuple[Bound, ...]:
        """The bound of the counters of a launch: one for each tile of rows."""
        return (Bound("groups", -(-numbers["outs"] // self.tile.rows)),)

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
        found = self.walked(gX, columns, first, last)
        meet(tile)
        found = reduction(found, c.fold.combine)
        if (this < rows) & columns.is_first_of_row():
            store_value(c, to, found, (this, block % splits), scale)
        if cutlass.const_expr(c.shared == PARTS):
            mine = block // splits
            self.finish_if_last(to, mine, splits, rows, scale)

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
            found = fold.combine(found, self.of_part(columns.moved(part), rHere))
        return found

    @cute.jit
    def of_part(self, columns: Columns, rX: cute.Tensor) -> Values:
        """The value of a thread's elements (V, NumV) of one part."""
        fold, tile = self.config.fold, self.config.tile
        values = []
        for i in cutlass.range_constexpr(tile.vectors):
            for j in cutlass.range_constexpr(tile.width):
                column = columns.first + i * columns.step + j
                value = fold.of(rX[j, i].to(Float32), column)
                if cutlass.const_expr(fold.kind == "argmax"):
                    there = columns.holds(column)
                    value = tuple(
                        cutlass.select_(there, a, b)
                        for a, b in zip(value, fold.start(), strict=True)
                    )
                values.append(value)
        return tree(fold, values)

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
        count, splits = c.fold.count, numbers["splits"]
        return Bound("words", count, count), Bound("parts", splits, splits)

    parts = Operand("parts", sizes, "fp32", aligned=False, whole=False, bounds_by=bounds)
    return (out, parts) if c.shared == PARTS else (out,)


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
        for word in cutlass.range_constexpr(c.fold.count):
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
        for split in cutlass.range(lane, cute.size(mParts, mode=[2]), WARP, unroll=16):
            value = tuple(mParts[word, out, split] for word in range(c.fold.count))
            found = c.fold.combine(found, value)
        found = lanes(found, c.fold.combine, WARP)
        if lane == 0:
            mOut[out] = c.fold.result(found, scale).to(mOut.element_type)

"""Reductions over a dimension that is not contiguous: each thread walks down its columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.device.row.reduction import Values
from cutex.device.row.tile import VECTOR_BYTES, WARP
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.fold import DOWN, Fold, is_finite
from cutex.kernels.row.kernel import ARCHS
from cutex.kernels.row.reduce import (
    FINISHERS,
    PARTS,
    SCALARS,
    finish_parts,
    results,
    store_value,
)

THREADS = 256
AHEAD = 4  # rows whose loads a thread starts at once


@dataclass(frozen=True)
class ReduceColumnsConfig:
    """What columns are reduced to, the number of CTAs that share a column, and each thread's
    columns."""

    fold: Fold
    out: str  # the dtype of results
    shared: str = ""  # see ReduceConfig
    lanes: int = 32  # threads next to each other, each with a vector; the others have other rows
    width: int = 8  # elements of a vector

    @property
    def columns(self) -> int:
        """The columns of a CTA."""
        return self.lanes * self.width

    @property
    def rows(self) -> int:
        """The rows that a CTA loads at once."""
        return THREADS // self.lanes

    def why_not(self) -> str | None:
        if THREADS % self.lanes or self.lanes & (self.lanes - 1):
            return f"lanes={self.lanes} must be a power of two up to {THREADS}"
        return None


class ReduceColumns:
    """y (A, B) = fold of x (A, R, B) over R; `splits` CTAs share a column, each with a part of R.

    smem            bytes
    words           4 * words of a value * 256 * width
    """

    archs = ARCHS
    dtypes = ("bf16", "fp16", "fp32")
    name = "row_reduce_columns"

    def __init__(self, config: ReduceColumnsConfig) -> None:
        self.config = config
        if reason := config.why_not():
            raise ValueError(reason)

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        x = Operand("x", ("a", "r", "b"), dtype, aligned=False, whole=False)
        return (x, *results(self.config, lambda given: given["a"] * given["b"]), *SCALARS)

    @cute.jit
    def __call__(self, mX: cute.Tensor, *rest) -> None:
        *to, splits, scale, stream = rest
        across = cute.ceil_div(cute.size(mX, mode=[2]), self.config.columns)
        blocks = cute.size(mX, mode=[0]) * across * splits
        self.by_columns(mX, tuple(to), splits, scale).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), use_pdl=may_overlap(), stream=stream
        )
        if cutlass.const_expr(self.config.shared == PARTS):
            # NOTE: a group has up to 256 results of many parts each, too many for its last CTA
            self.finish(to[0], to[1], scale).launch(
                grid=(cute.ceil_div(cute.size(to[0]), FINISHERS), 1, 1),
                block=(FINISHERS * WARP, 1, 1),
                use_pdl=may_overlap(),
                stream=stream,
            )

    @cute.kernel
    def by_columns(self, mX: cute.Tensor, to: tuple, splits: Int32, scale: Float32) -> None:
        c = self.config
        words = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((c.columns, c.rows, c.fold.count)), 16
        )  # (COLUMN, ROW, WORD)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        _, rows, columns = mX.shape
        across = cute.ceil_div(columns, c.columns)
        split, block = block % splits, block // splits
        tile, outer = block % across, block // across
        each = cute.ceil_div(rows, splits)
        first = split * each
        last = cutlass.min(first + each, rows)
        lane, down = thread % c.lanes, thread // c.lanes
        wait_for_kernel_before()
        found = self.walked(
            mX[outer, None, None], tile * c.columns + lane * c.width, first + down, last
        )
        for j in cutlass.range_constexpr(c.width):
            for word in cutlass.range_constexpr(c.fold.count):
                words[lane * c.width + j, down, word] = found[j][word]
        cute.arch.sync_threads()
        for at in cutlass.range(thread, c.columns, THREADS, unroll=1):
            column = tile * c.columns + at
            if column < columns:
                value = tuple(words[at, 0, word] for word in range(c.fold.count))
                for other in cutlass.range(1, c.rows, unroll=4):
                    more = tuple(words[at, other, word] for word in range(c.fold.count))
                    value = c.fold.combine(value, more)
                if cutlass.const_expr(c.fold.kind == "sum"):
                    value = with_low(value, mX[outer, None, column], first, last)
                store_value(c, to, value, (outer * columns + column, split), scale)

    @cute.jit
    def walked(
        self, gX: cute.Tensor, column: Int32, first: Int32, last: Int32
    ) -> tuple[Values, ...]:
        """This thread's partial results for its columns of gX (R, B), over rows `first` to
        `last`."""
        c = self.config
        found = tuple(c.fold.start() for _ in range(c.width))
        for row in cutlass.range(first, last, c.rows * AHEAD, unroll=1):
            ahead = [self.loaded(gX, row + n * c.rows, column, last) for n in range(AHEAD)]
            for n in cutlass.range_constexpr(AHEAD):
                here = row + n * c.rows
                found = tuple(
                    c.fold.combine(found[j], self.value(ahead[n][j], here, last))
                    for j in range(c.width)
                )
        return found

    def value(self, x: Any, row: Int32, last: Int32) -> Values:
        """The value of an element; the identity for a row that does not exist."""
        fold = self.config.fold
        value = fold.of(x.to(Float32), row)
        if fold.kind != "argmax":
            return value
        pairs = zip(value, fold.start(), strict=True)
        return tuple(cutlass.select_(row < last, a, b) for a, b in pairs)

    @cute.jit
    def loaded(self, gX: cute.Tensor, row: Int32, column: Int32, last: Int32) -> cute.Tensor:
        """A vector (V) of a row, filled with the identity's element where it does not exist."""
        c = self.config
        rX = cute.make_rmem_tensor(c.width, gX.element_type)
        rX.fill(c.fold.fill)
        # NOTE: vectors are whole, since columns are a multiple of their width
        if (row < last) & (column < cute.size(gX, mode=[1])):
            at = (gX[row, None].iterator + column).toint()
            bytes_ = min(VECTOR_BYTES, c.width * gX.element_type.width // 8)
            p = cute.make_ptr(gX.element_type, at, cute.AddressSpace.gmem, assumed_align=bytes_)
            cute.autovec_copy(cute.make_tensor(p, cute.make_layout(c.width)), rX)
        return rX

    @cute.kernel
    def finish(self, mOut: cute.Tensor, mParts: cute.Tensor, scale: Float32) -> None:
        first = cute.arch.block_idx()[0] * FINISHERS
        wait_for_kernel_before()
        results = first, cutlass.min(first + FINISHERS, cute.size(mOut))
        finish_parts(self.config, mOut, mParts, results, FINISHERS, scale)

    @property
    def kernels(self) -> dict[str, Any]:
        columns = {"columns": type(self).by_columns}
        return {**columns, "finish": type(self).finish} if self.config.shared == PARTS else columns


@cute.jit
def with_low(found: Values, gX: cute.Tensor, first: Int32, last: Int32) -> Values:
    """A sum over rows `first` to `last` of a column gX (R) and, if it is not finite, that of
    elements scaled down: one thread reads them again."""
    total, low = found[0], found[0] * DOWN
    if ~is_finite(total):
        low = Float32(0)
        for row in cutlass.range(first, last, unroll=8):
            low += gX[row].to(Float32) * DOWN
    return total, low

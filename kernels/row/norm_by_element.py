"""Norms of unaligned rows, whose columns are dealt to the threads element by element.

Rows are copied to and from smem by whole gmem vectors. There thread t of T holds columns t, t + T,
t + 2T and so on, whose weights neighbouring lanes load from consecutive addresses wherever the row
starts; by gmem vectors, each weight vector would have to be extracted from two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.row import in_smem
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction, add, lanes, pairwise
from cutex.device.row.tile import VECTOR_BYTES, WARP
from cutex.kernels.row.kernel import ThisRow, reductions
from cutex.kernels.row.norm import Normed, merged
from cutex.kernels.row.norm_in_turns import InTurnsConfig, NormInTurns


@dataclass(frozen=True)
class ByElementConfig(InTurnsConfig):
    """A norm of rows of more than (elements - 1) * threads and at most elements * threads columns.

    elements: the columns per thread, the last of which may be past the row's end.
    """

    elements: int = 1


class NormByElement(NormInTurns):
    """The norm of unaligned rows, without a residual. All rows of a CTA are copied to smem
    (cp.async) before the first is processed; the norm overwrites the row there."""

    title = "norm_by_element"

    def __init__(self, config: ByElementConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if tile.threads < WARP or (tile.rows > 1 and tile.threads > WARP):
            raise ValueError("rows by the element have a warp, or the whole CTA")

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32
    ) -> None:
        c, tile = self.config, self.tile
        sums = reductions(tile, *c.reduced, repeated=True)[0]
        slot = tile.threads * tile.vectors * tile.width
        shape = cute.make_layout((slot, tile.rows, c.turns))
        words = SmemAllocator().allocate_tensor(mX.element_type, shape, VECTOR_BYTES)
        own = cute.arch.thread_idx()[0] // tile.threads
        for turn in cutlass.range_constexpr(c.turns):
            this = self.row(mX, turn)
            gX = this(mX)
            between = this.is_between(mX, tile.width)
            in_smem.fetch(Columns.of(tile, gX), gX, words[None, own, turn], between)
        held = {n: self.by_element(optional[n]) for n in c.vectors} if c.turns > 1 else {}
        cute.arch.cp_async_wait_group(0)
        self.meet()
        for turn in cutlass.range(c.turns, unroll=1):
            this = self.row(mX, turn)
            columns = Columns.of(tile, this(mX))
            sX = words[None, own, turn]  # (columns of a slot)
            shift = Int32(cute.arch.thread_idx()[0] % tile.threads * tile.width) - columns.first
            self.norm(this, columns, sX, shift, sums, turn, optional, held, eps)
            self.meet()
            if this.exists:
                in_smem.store(columns, sX, this(mY))

    def row(self, mX: cute.Tensor, turn: Int32 | int) -> ThisRow:
        c, tile = self.config, self.tile
        row = (cute.arch.block_idx()[0] * c.turns + turn) * tile.rows
        row += cute.arch.thread_idx()[0] // tile.threads
        return ThisRow(Int32(row), cute.size(mX, mode=[0]))

    @cute.jit
    def meet(self) -> None:
        """Synchronise the threads of the row."""
        if cutlass.const_expr(self.tile.threads == WARP):
            cute.arch.sync_warp()
        else:
            cute.arch.sync_threads()

    def column(self, e: int) -> Int32:
        return Int32(cute.arch.thread_idx()[0] % self.tile.threads + e * self.tile.threads)

    def has(self, e: int, n: Int32) -> Boolean:
        """Whether this thread's column e is inside the row."""
        return Boolean(True) if e < self.config.elements - 1 else self.column(e) < n

    @cute.jit
    def by_element(self, mW: cute.Tensor) -> Any:
        """The elements of mW (N) in this thread's columns, in fp32."""
        rW = cute.make_rmem_tensor(self.config.elements, mW.element_type)
        for e in cutlass.range_constexpr(self.config.elements):
            column = self.column(e)
            if self.has(e, cute.size(mW)):
                rW[e] = mW[column]
        return rW.load().to(Float32)

    @cute.jit
    def norm(
        self, this: ThisRow, columns: Columns, sX: cute.Tensor, shift: Int32, sums: RowReduction,
        turn: Int32, optional: dict[str, cute.Tensor], held: dict[str, Any], eps: Float32,
    ) -> None:  # fmt: skip
        """Overwrite the row, which starts at sX[shift], with its norm."""
        c, n = self.config, columns.n
        rX = cute.make_rmem_tensor(c.elements, sX.element_type)
        rX.fill(0)
        for e in cutlass.range_constexpr(c.elements):
            at = shift + self.column(e)
            if self.has(e, n):
                rX[e] = sX[at]
        x = rX.load().to(Float32)
        mean, squares = self.moments_of(x, n, sums, turn)
        rstd = cute.math.rsqrt(squares / Float32(n) + eps)
        y = (x - mean if c.centred else x) * rstd
        if cutlass.const_expr(c.weight):
            y = y * (held["weight"] if c.turns > 1 else self.by_element(optional["weight"]))
        if cutlass.const_expr(c.bias):
            y = y + (held["bias"] if c.turns > 1 else self.by_element(optional["bias"]))
        rX.store(y.to(sX.element_type))
        for e in cutlass.range_constexpr(c.elements):
            at = shift + self.column(e)
            if self.has(e, n):
                sX[at] = rX[e]
        if this.exists:
            self.store_rest(Normed(this, columns, None, None, mean, rstd), optional)

    def moments_of(self, x: Any, n: Int32, sums: RowReduction, turn: Int32) -> tuple[Any, Any]:
        """The mean of the row, of which this thread holds x (E), 0 past its end, and the sum of
        squared differences from it. The mean is 0 for an RMS norm.

        Each warp computes its mean first, then its squares; the warps synchronise once and exchange
        both."""
        c, last = self.config, self.config.elements - 1

        def of_warp(values: Any) -> Float32:
            own = values.reduce(cute.ReductionOp.ADD, Float32(0), 0)
            return lanes((own,), add, WARP)[0]

        if not c.centred:
            return Float32(0), sums.of_warps((of_warp(x * x),), pairwise(add), turn, c.turns)[0]
        # of this warp's last columns as many as the row has
        begun = n - (self.column(last) - cute.arch.lane_idx())
        count = Float32(last * WARP + cutlass.min(cutlass.max(begun, 0), WARP))
        mean = of_warp(x) / cute.arch.fmax(count, Float32(1))
        apart = cute.make_rmem_tensor(c.elements, Float32)
        apart.store(x - mean)
        apart[last] = cutlass.select_(self.has(last, n), apart[last], Float32(0))
        d = apart.load()
        found = count, mean, of_warp(d * d)
        _, mean, squares = sums.of_warps(found, pairwise(merged), turn, c.turns)
        return mean, squares

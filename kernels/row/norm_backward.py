"""The gradient of a norm: dx in one pass over the rows, and those of its weight and bias, summed
first by groups of threads and then by columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import add
from cutex.device.row.ring import RowRing
from cutex.device.row.tile import WARP, RowTile
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.kernel import (
    RowKernel,
    ThisRow,
    by_vectors,
    column_vector,
    matrix,
    reductions,
    row_vector,
)

FEW_THREADS = 128  # of a row, whose registers ptxas bounds well by itself
SUM_WARPS = 32  # warps that share 32 columns of the partial sums, by the CTAs of a row
# of each warp's rows so many are on their way at one time: those of four CTAs of 132 SMs
SUM_ROWS = 17


@dataclass(frozen=True)
class NormBackwardConfig:
    """What a norm's gradient computes, and its tile.

    The optional operands come in this order: weight, mean, dsummed (the gradient of x + residual),
    then dweight and its partial sums (P, N), dbias and its partial sums.
    """

    tile: RowTile
    centred: bool = False  # the norm subtracts the mean
    weight: str = ""  # its dtype; "": none
    bias: str = ""
    summed: bool = False
    stages: int = 0  # slots of smem for rows that are on their way
    alone: bool = False  # dx alone, a row for each group; rows may then begin anywhere, all alike

    @property
    def sums(self) -> tuple[str, ...]:
        """The gradients that are sums over all rows."""
        if self.alone:
            return ()
        return tuple(f"d{name}" for name in ("weight", "bias") if getattr(self, name))

    @property
    def optional(self) -> tuple[str, ...]:
        wanted = {"weight": self.weight, "mean": self.centred, "dsummed": self.summed}
        names = [name for name, is_wanted in wanted.items() if is_wanted]
        return (*names, *(name for x in self.sums for name in (x, f"{x}_parts")))


class NormBackward(RowKernel):
    """dx = (g - mean(g) - xhat * mean(g * xhat)) * rstd + dsummed, where g = dy * weight, and
    mean(g) is that of a layer norm alone; dweight = sum of dy * xhat, dbias = sum of dy.

    `groups` groups of threads, a multiple of the rows of a tile, take rows in turn; each keeps sums
    of its rows in registers.
    """

    title = "norm_backward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c, whole = self.config, by_vectors(self.tile, "fp32")
        kinds: dict[str, Argument] = {
            "weight": column_vector("weight", c.weight or dtype, self.tile),
            "mean": row_vector("mean"),
            "dsummed": matrix("dsummed", dtype, self.tile),
        }
        for name in c.sums:
            of = getattr(c, name.removeprefix("d"))
            kinds[name] = Operand(name, ("n",), of, aligned=False, whole=False)
            parts = f"{name}_parts"
            # NOTE: all are summed up, and a CTA, or cluster, writes one
            kinds[parts] = Operand(
                parts, ("p", "n"), "fp32", aligned=whole, whole=whole, bounds_by=self.bounds
            )
        made = [matrix(name, dtype, self.tile) for name in ("x", "dy", "dx")]
        optional = (kinds[name] for name in c.optional)
        return (*made, row_vector("rstd"), *optional, Scalar("groups", "int32"))

    def bounds(self, numbers: Mapping[str, int]) -> tuple[Bound, ...]:
        """The bounds of the partial sums in a launch, by its sizes and groups."""
        count = numbers["groups"] // self.tile.rows
        return (Bound("p", count, count),)

    @cute.jit
    def __call__(self, mX, mdY, mdX, mRstd, *rest) -> None:
        tile, (*given, groups, stream) = self.tile, rest
        optional = dict(zip(self.config.optional, given, strict=True))
        how: dict[str, Any] = {}
        if cutlass.const_expr(tile.threads > FEW_THREADS):
            # NOTE: else ptxas gives a thread that needs more than 255 registers 32
            # (docs/facts/rows.md#rows-gradient-registers)
            how["min_blocks_per_mp"] = 1
            how["preferred_smem_carveout"] = 100  # percent; else the DSL asks a GPU
        # NOTE: tracing a kernel puts its own values into a dict that it is given
        self.by_rows(mX, mdY, mdX, mRstd, groups, {**optional}).launch(
            grid=(groups // tile.rows * tile.ctas, 1, 1),
            block=(tile.num_threads, 1, 1),
            cluster=(tile.ctas, 1, 1) if tile.ctas > 1 else None,
            use_pdl=may_overlap(),
            stream=stream,
            **how,
        )
        self.launch_sums(optional, stream)

    @property
    def sum_warps(self) -> int:
        """The warps that share 32 columns of the partial sums, of which clusters leave few."""
        return max(1, SUM_WARPS // self.tile.ctas)

    def launch_sums(self, optional: dict[str, cute.Tensor], stream) -> None:
        """One launch for all sums of columns."""
        if names := self.config.sums:
            self.sums({**optional}).launch(
                grid=(cute.ceil_div(cute.size(optional[names[0]]), WARP), len(names), 1),
                block=(WARP * self.sum_warps, 1, 1),
                preferred_smem_carveout=100,  # as the rows' CTAs have it, which SMs need not change
                use_pdl=may_overlap(),
                stream=stream,
            )

    @cute.kernel
    def by_rows(self, mX, mdY, mdX, mRstd, groups: Int32, optional: dict[str, cute.Tensor]) -> None:
        c, tile = self.config, self.tile
        (reduction,) = reductions(tile, 1 + c.centred, repeated=True)
        ring = RowRing.allocate(SmemAllocator(), tile, mX.element_type, 2, c.stages)
        whole = self.allocate_sums()
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX) if c.alone else mX[0, None])
        sums = {name: columns.zeros() for name in c.sums}
        row, last = this.row, this.rows - 1
        wait_for_kernel_before()
        if cutlass.const_expr(c.weight):
            rW = columns.held(optional["weight"])  # (V, NumV)
        ring.start(columns, (mX, mdY), row, groups)
        # all groups of a CTA take the same number of turns, since they meet at its barriers
        turns = cute.ceil_div(this.rows - (row - row % tile.rows), groups)
        for turn in cutlass.range(turns, unroll=1):
            here = cutlass.min(row, last)
            rstd, mean = mRstd[here], Float32(0)
            if cutlass.const_expr(c.centred):
                mean = optional["mean"][here]
            if cutlass.const_expr(c.summed):
                rMore = columns.load(optional["dsummed"][here, None])
            ring.wait()
            x = ring.load(columns, mX[here, None], 0, turn).load().to(Float32)  # (V, NumV)
            dy = ring.load(columns, mdY[here, None], 1, turn).load().to(Float32)  # (V, NumV)
            ahead = ring.stages - 1
            ring.fetch(columns, (mX, mdY), row + ahead * groups, turn + ahead)
            xhat = (x - mean) * rstd
            g = dy * rW.load().to(Float32) if c.weight else dy
            along = (g * xhat).reduce(cute.ReductionOp.ADD, Float32(0), 0)
            values = (along, g.reduce(cute.ReductionOp.ADD, Float32(0), 0))[: 1 + c.centred]
            means = [total / columns.n for total in reduction(values, add, turn, turns)]
            dx = (g - sum(means[1:]) - xhat * means[0]) * rstd
            if cutlass.const_expr(c.summed):
                dx = dx + rMore.load().to(Float32)
            if row <= last:
                columns.store(columns.rounded(dx, mdX), mdX[row, None])
                for name, part in (("dweight", dy * xhat), ("dbias", dy)):
                    if cutlass.const_expr(name in c.sums):
                        sums[name].store(sums[name].load() + part)
            row += groups
        for name in c.sums:
            self.write_sums(columns, sums[name], whole, optional[f"{name}_parts"])

    def allocate_sums(self) -> cute.Tensor | None:
        """The smem (COLUMN, row) in which a CTA adds up its rows."""
        tile = self.tile
        if tile.rows == 1 or not self.config.sums:
            return None
        shape = tile.threads * tile.vectors * tile.width, tile.rows
        return SmemAllocator().allocate_tensor(Float32, cute.make_layout(shape), 16)

    @cute.jit
    def write_sums(
        self, columns: Columns, rSum: cute.Tensor, whole: Any, mParts: cute.Tensor
    ) -> None:
        """Write the sums of this CTA, or of its part of a cluster, to its row of mParts (P, N)."""
        tile = self.tile
        gPart = mParts[cute.arch.block_idx()[0] // tile.ctas, None]  # (N)
        if cutlass.const_expr(whole is None):
            columns.store(rSum, gPart)
        else:
            thread = cute.arch.thread_idx()[0]
            sOwn = whole[None, thread // tile.threads]  # (COLUMN)
            for i in cutlass.range_constexpr(tile.vectors):
                at = thread % tile.threads * tile.width + i * columns.step
                to = cute.domain_offset((at,), sOwn).iterator
                cute.autovec_copy(rSum[None, i], cute.make_tensor(to, tile.width))
            cute.arch.sync_threads()
            for column in cutlass.range(thread, columns.n, tile.num_threads, unroll=1):
                total = whole[column, 0]
                for row in cutlass.range_constexpr(1, tile.rows):
                    total += whole[column, row]
                gPart[column] = total
            cute.arch.sync_threads()  # before the next sums are written there

    @cute.kernel
    def sums(self, optional: dict[str, cute.Tensor]) -> None:
        """The column sums of partial sums (P, N): each warp takes 32 columns, and the warps of a
        CTA divide the rows."""
        layout = cute.make_layout((WARP, self.sum_warps))
        sums = SmemAllocator().allocate_tensor(Float32, layout, 16)
        wait_for_kernel_before()
        for i, name in enumerate(self.config.sums):
            if cute.arch.block_idx()[1] == i:
                self.add_up(optional[f"{name}_parts"], optional[name], sums)

    @cute.jit
    def add_up(self, mParts: cute.Tensor, mSum: cute.Tensor, sums: cute.Tensor) -> None:
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        column, rows = cute.arch.block_idx()[0] * WARP + lane, cute.size(mParts, mode=[0])
        total = Float32(0)
        if column < cute.size(mSum):
            for first in cutlass.range(warp, rows, self.sum_warps * SUM_ROWS, unroll=1):
                rPart = cute.make_rmem_tensor(SUM_ROWS, Float32)
                rPart.fill(0.0)
                for i in cutlass.range_constexpr(SUM_ROWS):
                    row = first + i * self.sum_warps
                    if row < rows:
                        rPart[i] = mParts[row, column]
                total += rPart.load().reduce(cute.ReductionOp.ADD, Float32(0), 0)
        sums[lane, warp] = total
        cute.arch.sync_threads()
        if (warp == 0) & (column < cute.size(mSum)):
            total = Float32(0)
            for other in cutlass.range_constexpr(self.sum_warps):
                total += sums[lane, other]
            mSum[column] = total.to(mSum.element_type)

    kernels = {"rows": by_rows, "sums": sums}  # noqa: RUF012

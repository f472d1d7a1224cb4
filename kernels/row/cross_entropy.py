"""Cross-entropy of rows of logits, each read once, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, cute

from cutex.compile import Argument, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import Values
from cutex.device.row.tile import RowTile
from cutex.kernels.row.kernel import (
    RowKernel,
    ThisRow,
    launch_of,
    matrix,
    reductions,
    row_vector,
)
from cutex.kernels.row.softmax import above, exp, merged

LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class CrossEntropyConfig:
    """A cross-entropy of rows, and the tile."""

    tile: RowTile
    smoothed: bool = False  # labels are smoothed: the sum of a row's logits counts, too


def operands_of(config: CrossEntropyConfig, dtype: str) -> tuple[Argument, ...]:
    return (
        matrix("x", dtype, config.tile), row_vector("target", "int32"), row_vector("lse"),
        row_vector("loss"), Scalar("smoothing"), Scalar("z_loss"), Scalar("ignored", "int32"),
    )  # fmt: skip


class CrossEntropy(RowKernel):
    """loss = lse - (1 - s) x[target] - s mean(x) + z lse^2; 0 where the target is ignored."""

    title = "cross_entropy"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return operands_of(self.config, dtype)

    @cute.jit
    def __call__(self, mX, mTarget, mLse, mLoss, s, z, ignored, stream) -> None:
        self.kernel(mX, mTarget, mLse, mLoss, s, z, ignored).launch(
            **launch_of(self.config.tile, mX, stream)
        )

    @cute.kernel
    def kernel(self, mX, mTarget, mLse, mLoss, s, z, ignored) -> None:
        c, tile = self.config, self.config.tile
        (reduction,) = reductions(tile, 2 + c.smoothed)
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        rX = columns.load(this(mX), -Float32.inf)  # (V, NumV)
        x = rX.load().to(Float32)
        own = x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        e = exp(x - above(own))
        present = columns.where_held(x) if c.smoothed else x
        sums = [part.reduce(cute.ReductionOp.ADD, Float32(0), 0) for part in (e, present)]
        found = reduction((own, *sums[: 1 + c.smoothed]), merged_with_sums)
        if this.exists & columns.is_first_of_row():
            target = mTarget[this.row]
            lse = above(found[0]) + cute.math.log2(found[1]) * LN_2
            loss = Float32(0)
            if target != ignored:
                # no class has such a number: nothing is read there
                loss = Float32(float("nan"))
                if columns.holds(target):
                    loss = lse - (1 - s) * mX[this.row, target].to(Float32) + z * lse * lse
                    if cutlass.const_expr(c.smoothed):
                        loss -= s * found[2] / columns.n
            mLse[this.row] = lse
            mLoss[this.row] = loss


class CrossEntropyBackward(RowKernel):
    """dx = dloss * ((1 + 2 z lse) exp(x - lse) - s / N - (1 - s where x is the target)), part by
    part of a row; dx may be x. 0 where the target is ignored."""

    title = "cross_entropy_backward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        x, target, lse, dloss, *scalars = operands_of(self.config, dtype)
        return x, replace(x, name="dx"), target, lse, replace(dloss, name="dloss"), *scalars

    @cute.jit
    def __call__(self, mX, mdX, mTarget, mLse, mdLoss, s, z, ignored, stream) -> None:
        tile = self.config.tile
        rows, columns = (cute.size(mX, mode=[i]) for i in range(2))
        self.kernel(mX, mdX, mTarget, mLse, mdLoss, s, z, ignored).launch(
            grid=(cute.ceil_div(columns + tile.slack, tile.columns + tile.slack), rows, 1),
            block=(tile.num_threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mdX, mTarget, mLse, mdLoss, s, z, ignored) -> None:
        tile = self.config.tile
        part, row, _ = cute.arch.block_idx()
        gX, gdX = mX[row, None], mdX[row, None]  # (N)
        columns = Columns.of(tile, gX).moved(part)
        x = columns.load(gX).load().to(Float32)  # (V, NumV)
        lse, target, n = mLse[row], mTarget[row], Float32(columns.n)
        scale = mdLoss[row] if target != ignored else Float32(0)
        if (target != ignored) & ~columns.holds(target):
            scale = Float32(float("nan"))
        p = exp(x - lse)
        rdX = cute.make_rmem_tensor((tile.width, tile.vectors), Float32)
        rdX.store((p * (1 + 2 * z * lse) - s / n) * scale)
        for i in cutlass.range_constexpr(tile.vectors):
            for j in cutlass.range_constexpr(tile.width):
                if columns.first + i * columns.step + j == target:
                    rdX[j, i] -= (1 - s) * scale
        columns.store(columns.rounded(rdX.load(), mdX), gdX)


def merged_with_sums(x: Values, y: Values) -> Values:
    return (*merged(x[:2], y[:2]), *(a + b for a, b in zip(x[2:], y[2:], strict=True)))

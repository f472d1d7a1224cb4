"""Cross-entropy whose gradient overwrites the logits: each is read and written once."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from cutex.compile import Argument
from cutex.device.row.columns import Columns
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.cross_entropy import (
    LN_2,
    SCALARS,
    apart,
    one,
    part_of_mean,
    subtract_at,
)
from cutex.kernels.row.kernel import (
    RowKernel,
    ThisRow,
    launch_of,
    matrix,
    reductions,
    row_vector,
)
from cutex.kernels.row.softmax import above, combined, exp


class CrossEntropyInPlace(RowKernel):
    """losses = lse - (1 - s) x[target] - s mean(x) + z lse^2, and x becomes the gradient of their
    sum divided by `count`. Both are 0 in rows whose target is ignored."""

    title = "cross_entropy_in_place"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        return (
            matrix("x", dtype, c.tile), row_vector("target", c.target), row_vector("losses"),
            *((one("count"),) if c.reduction == "mean" else ()), *SCALARS,
        )  # fmt: skip

    @cute.jit
    def __call__(self, mX: cute.Tensor, mTarget: cute.Tensor, mLosses: cute.Tensor, *rest) -> None:
        *count, s, z, ignored, stream = rest
        options = {"s": s, "z": z, "ignored": ignored}
        if cutlass.const_expr(self.config.reduction == "mean"):
            options["count"] = count[0]
        self.kernel(mX, mTarget, mLosses, options).launch(**launch_of(self.config.tile, mX, stream))

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mTarget: cute.Tensor, mLosses: cute.Tensor, options: dict
    ) -> None:
        c, tile = self.config, self.config.tile
        s, z = options["s"], options["z"]
        (reduction,) = reductions(tile, 3 + c.smoothed)
        this = ThisRow.of(tile, mX)
        # NOTE: past the last row nothing is read: the threads of that row overwrite it
        columns = Columns.of(tile, this(mX)).where(this.exists)
        wait_for_kernel_before()
        rX = columns.load(this(mX), -Float32.inf)  # (V, NumV)
        x = rX.load().to(Float32)  # (V, NumV)
        row = cutlass.min(this.row, this.rows - 1)
        target, scale = mTarget[row].to(cutlass.Int64), Float32(1)
        if cutlass.const_expr(c.reduction == "mean"):
            scale = scale / options["count"][0]
        own = x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        e = exp(x - above(own))
        sums = [e.reduce(cute.ReductionOp.ADD, Float32(0), 0)]
        # NOTE: from the thread that has it: another's load may be late, when it is overwritten
        sums.append(self.at(columns, rX, target))
        if cutlass.const_expr(c.smoothed):
            sums.append(part_of_mean(columns, x))
        top, total, label, *more = combined(reduction, (own, *sums))
        log_total = cute.math.log2(total) * LN_2
        lse = above(top) + log_total
        mean = more[0] if c.smoothed else None
        loss = apart(above(top), label, mean, s) + log_total + z * lse * lse
        if target == options["ignored"]:
            loss, scale = Float32(0), Float32(0)
        elif ~columns.holds(target):
            loss, scale = Float32(float("nan")), Float32(float("nan"))
        # 0 in a thread whose logits are all -inf, whatever the others' are
        p = e * (exp(own - above(top)) / total)
        rdX = cute.make_rmem_tensor((tile.width, tile.vectors), Float32)
        rdX.store((p * (1 + 2 * z * lse) - s / Float32(columns.n)) * scale)
        subtract_at(columns, rdX, target, (1 - s) * scale)
        if target == options["ignored"]:
            rdX.fill(0.0)  # also where a logit is inf or NaN
        if this.exists:
            columns.store(columns.rounded(rdX.load(), mX), this(mX))
            if columns.is_first_of_row():
                mLosses[this.row] = loss

    @cute.jit
    def at(self, columns: Columns, rX: cute.Tensor, target: cutlass.Int64) -> Float32:
        """The target's logit in the thread that holds it; 0 in all others."""
        found = Float32(0)
        for i in cutlass.range_constexpr(self.tile.vectors):
            for j in cutlass.range_constexpr(self.tile.width):
                here = columns.first + i * columns.step + j == target
                found = cutlass.select_(here, rX[j, i].to(Float32), found)
        return found

"""Layer and RMS norms of rows, each read once: y = (x - mean) * rstd * weight + bias, or without
the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, cute

from cutex.compile import Argument, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction, Values, add
from cutex.device.row.tile import RowTile
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.kernel import (
    RowKernel,
    ThisRow,
    column_vector,
    launch_of,
    matrix,
    meet,
    reductions,
    row_of,
    row_vector,
)
from cutex.kernels.row.unequal import UnequalMoments

RESIDENT = 1024  # threads of an SM, of 64 registers each
# vectors of a row whose threads meet once, by the elements of a vector
MEETS_ONCE = {8: 4096, 4: 32768}  # docs/facts/rows.md#rows-layer-norm-by-smem


def merged(a: Values, b: Values) -> Values:
    """The moments of the union of two sets of elements: the count, the mean, and the sum of squared
    differences from it.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances, 1979."""
    count = a[0] + b[0]
    deviation = b[1] - a[1]
    part = b[0] * cute.arch.rcp_approx(cute.arch.fmax(count, Float32(1)))
    part = cutlass.select_(a[0] == 0.0, Float32(1), part)  # then b's mean, to the bit
    return count, a[1] + deviation * part, a[2] + b[2] + deviation * deviation * a[0] * part


@dataclass(frozen=True)
class NormConfig:
    """What a norm computes, and its tile.

    The optional operands come in this order: residual, weight, bias, summed (x + residual), mean,
    rstd.
    """

    tile: RowTile
    centred: bool = False  # subtracts the mean (layer norm)
    residual: bool = False  # is added to x first; the sum is written, too
    weight: str = ""  # its dtype; "": none
    bias: str = ""
    out: str = ""  # y's dtype, if not x's
    saves: bool = False  # writes rstd, and the mean of a layer norm, for the gradient
    by_smem: bool = False  # a layer norm's rows that come by smem though they are not long
    few: bool = False  # a layer norm's few rows, where latencies count: see UnequalMoments

    @property
    def is_light(self) -> bool:
        """Whether a thread needs hardly more than 64 registers: an RMS norm in large clusters."""
        tile = self.tile
        more = self.centred or self.residual or self.bias or not tile.aligned
        return tile.ctas >= 4 and tile.vectors <= 4 and tile.num_threads == 128 and not more

    @property
    def is_plain(self) -> bool:
        """Whether only x is read of a row, and only y, of the same dtype, is written."""
        return not (self.residual or self.out)

    @property
    def meets_once(self) -> bool:
        """Whether the threads of a long layer norm row synchronise once, exchanging moments."""
        tile = self.tile
        vectors = tile.threads * tile.vectors * tile.ctas
        long = vectors >= MEETS_ONCE.get(tile.width, vectors + 1)
        return self.centred and tile.aligned and (long or self.by_smem)

    @property
    def may_be_few(self) -> bool:
        tile = self.tile  # of one vector a thread there is little to save
        return self.centred and tile.aligned and (tile.ctas > 1 or tile.vectors > 1)

    @property
    def reduced(self) -> tuple[int, ...]:
        """The number of values in each reduction: squares, for a layer norm elements too; or all
        moments in one."""
        if self.few:
            return (2,)
        return (3,) if self.meets_once else (1,) * (1 + self.centred)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The operands shared by all rows."""
        return tuple(name for name in ("weight", "bias") if getattr(self, name))

    @property
    def optional(self) -> tuple[str, ...]:
        wanted = {
            "residual": self.residual, "weight": self.weight, "bias": self.bias,
            "summed": self.residual, "mean": self.saves and self.centred, "rstd": self.saves,
        }  # fmt: skip
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


class Normed(NamedTuple):
    """A thread's share of a normalised row: the row, its columns, y (V, NumV), x + residual as it
    is written, the mean and 1 / sqrt(mean square + eps)."""

    this: ThisRow
    columns: Columns
    y: Any
    rSum: Any
    mean: Any
    rstd: Any


class Norm(RowKernel):
    """y = (x + residual - mean) * rstd * weight + bias; rstd = 1 / sqrt(mean square + eps)."""

    title = "norm"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c, tile = self.config, self.config.tile
        vectors = {"weight": c.weight, "bias": c.bias}
        made: list[Argument] = [matrix("x", dtype, tile), matrix("y", c.out or dtype, tile)]
        for name in c.optional:
            if name in vectors:
                made.append(column_vector(name, vectors[name], tile))
            elif name in ("mean", "rstd"):
                made.append(row_vector(name))
            else:
                made.append(matrix(name, dtype, tile))
        return (*made, Scalar("eps"))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        optional = dict(zip(self.config.optional, rest[:-2], strict=True))
        eps, stream = rest[-2:]
        how = launch_of(self.config.tile, mX, stream)
        if cutlass.const_expr(self.config.is_light):
            # NOTE: a few registers less let one CTA more run (docs/facts/rows.md#rows-norm-bound)
            how["min_blocks_per_mp"] = RESIDENT // self.config.tile.num_threads
            how["preferred_smem_carveout"] = 10  # percent; else the DSL asks a GPU
        self.kernel(mX, mY, optional, eps).launch(**how)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32
    ) -> None:
        c = self.config
        sums = reductions(c.tile, *c.reduced, later=True, by_cta=True)
        found = self.normed(sums, mX, optional, eps)
        this, columns = found.this, found.columns
        if this.exists:
            columns.store(columns.rounded(found.y, mY), this(mY))
            self.store_rest(found, optional)

    def normed(
        self, sums: list[RowReduction], mX: cute.Tensor, optional: dict[str, cute.Tensor], eps: Any
    ) -> Normed:
        """The norm of this thread's row; `sums` are reductions over the config's `reduced`
        values."""
        c, tile = self.config, self.config.tile
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        # NOTE: counts are combined while the kernel before this one ends
        known = UnequalMoments.of(sums[0], columns) if c.few else None
        wait_for_kernel_before()
        rX = row_of(mX, this, columns)  # (V, NumV)
        # their latency passes under that of x: after the reduction it would be a second one
        vectors = {name: columns.held(optional[name]) for name in c.vectors}  # (V, NumV) each
        meet(tile)
        x = rX.load().to(Float32)
        rSum = None
        if c.residual:
            # the norm is that of the sum as it is written, and its gradient, too
            x = x + row_of(optional["residual"], this, columns).load().to(Float32)
            rSum = columns.rounded(x, mX)  # (V, NumV)
            x = rSum.load().to(Float32)
        length = Float32(columns.n)
        if known is not None:
            mean, squares = known(x)
            deviation = x - mean
        else:
            deviation, mean, squares = self.moments(sums, x, columns)
        rstd = cute.math.rsqrt(squares / length + eps)
        y = deviation * rstd
        if c.weight:
            y = y * vectors["weight"].load().to(Float32)
        if c.bias:
            y = y + vectors["bias"].load().to(Float32)
        return Normed(this, columns, y, rSum, mean, rstd)

    def moments(self, sums: list[RowReduction], x: Any, columns: Columns) -> tuple[Any, Any, Any]:
        """x - mean (V, NumV), the mean, and the sum of squared differences from it, of the row of
        which this thread holds x (V, NumV), 0 outside it. The mean is 0 for an RMS norm."""

        def summed(which: int, values: Any) -> Float32:
            own = values.reduce(cute.ReductionOp.ADD, Float32(0), 0)
            return sums[which]((own,), add)[0]

        if self.config.meets_once:
            count = columns.count().to(Float32)
            own = x.reduce(cute.ReductionOp.ADD, Float32(0), 0) / cute.arch.fmax(count, Float32(1))
            _, mean, squares = sums[0]((count, own, columns.squares(x - own)), merged)
            return x - mean, mean, squares
        if not self.config.centred:
            return x, Float32(0), summed(0, x * x)
        mean = summed(1, x) / Float32(columns.n)
        deviation = columns.where_held(x - mean)
        return deviation, mean, summed(0, deviation * deviation)

    @cute.jit
    def store_rest(self, found: Normed, optional: dict[str, cute.Tensor]) -> None:
        """Store the row's other outputs, if the row exists."""
        c, this, columns = self.config, found.this, found.columns
        if cutlass.const_expr(c.residual):
            summed = optional["summed"]
            columns.store(found.rSum, this(summed))
        if columns.is_first_of_row():
            for name, value in (("mean", found.mean), ("rstd", found.rstd)):
                if cutlass.const_expr(name in c.optional):
                    optional[name][this.row] = value

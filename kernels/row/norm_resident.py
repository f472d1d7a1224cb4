"""Norms of aligned rows by persistent CTAs that keep the weights in registers.

One CTA per row would load all weights again for each row: with fp32 weights of a layer norm that is
more L2 traffic than x and y together. Each thread loads its part of the next row while it processes
the current one, so loads are always in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.words import halves
from cutex.kernels.row.kernel import ThisRow, launch_of_groups, reductions
from cutex.kernels.row.moments import Moments
from cutex.kernels.row.norm import Norm, NormConfig, Normed


@dataclass(frozen=True)
class ResidentConfig(NormConfig):
    """A norm by persistent CTAs. resident: CTAs per SM."""

    resident: int = 1

    @property
    def meets_once(self) -> bool:
        return self.centred


@dataclass(frozen=True)
class FullColumns(Columns):
    """Columns of aligned rows, where all vectors of a thread but its last are inside the row."""

    def has(self, vector: int) -> Boolean:
        last = vector == self.tile.vectors - 1
        return super().has(vector) if last else Boolean(True)

    def own(self) -> Float32:
        """The number of elements of a row that this thread holds."""
        tile = self.tile
        last = cutlass.select_(self.has(tile.vectors - 1), Float32(tile.width), Float32(0))
        return last + tile.width * (tile.vectors - 1)

    def where_held(self, x: list[Float32]) -> list[Float32]:
        """x, this thread's elements, with 0 outside the row."""
        count = self.tile.width * (self.tile.vectors - 1)
        has = self.has(self.tile.vectors - 1)
        return [*x[:count], *(cutlass.select_(has, v, Float32(0)) for v in x[count:])]


class NormResident(Norm):
    """The norm of aligned rows, without a residual; each CTA or cluster processes several."""

    title = "norm_resident"

    def __init__(self, config: ResidentConfig) -> None:
        super().__init__(config)
        if config.residual or config.out or not self.tile.aligned:
            raise ValueError("rows taken in turn are plain and aligned")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return (*super().operands(dtype), Scalar("groups", "int32"))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        optional = dict(zip(self.config.optional, rest[:-3], strict=True))
        eps, groups, stream = rest[-3:]
        how = launch_of_groups(self.tile, self.config.resident, groups, stream)
        how["preferred_smem_carveout"] = 10  # percent: x comes by L1
        self.kernel(mX, mY, optional, eps, groups).launch(**how)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32,
        groups: Int32,
    ) -> None:  # fmt: skip
        c, tile = self.config, self.tile
        sums = reductions(tile, *c.reduced, repeated=True, by_cta=not c.centred)[0]
        this = ThisRow.of(tile, mX)
        columns = FullColumns(**vars(Columns.of(tile, this(mX))))
        own = columns.own() if c.centred else None
        moments = Moments.of(c.centred, sums, own, columns.n)
        held = {name: columns.load(optional[name]) for name in c.vectors}  # (V, NumV) each
        rX = columns.load(this(mX))  # (V, NumV)
        step = groups * tile.rows
        group = Int32(cute.arch.block_idx()[0]) // tile.ctas
        turns = cute.ceil_div(cute.ceil_div(Int32(this.rows), tile.rows) - group, groups)
        for turn in cutlass.range(turns, unroll=1):
            row = replace(this, row=this.row + turn * step)
            x = elements(rX)
            if turn + 1 < turns:
                columns.fetch(replace(row, row=row.row + step)(mX), rX)
            mean, apart, found = self.of_its_warp(x, columns, moments)
            found = sums.of_warps(found, moments.gather, turn, turns)
            rstd = cute.math.rsqrt(found[-1] * moments.by_n + eps)
            # apart from the mean of the warp, which is near that of the row
            shift = (mean - found[-2]) * rstd if c.centred else Float32(0)
            y = [v * rstd + shift for v in apart] if c.centred else [v * rstd for v in apart]
            if cutlass.const_expr(c.weight):
                y = [v * w for v, w in zip(y, elements(held["weight"]), strict=True)]
            if cutlass.const_expr(c.bias):
                y = [v + b for v, b in zip(y, elements(held["bias"]), strict=True)]
            if row.exists:
                columns.store(self.as_vectors(y, mY), row(mY))
                mean = found[-2] if c.centred else Float32(0)
                self.store_rest(Normed(row, columns, None, None, mean, rstd), optional)

    def of_its_warp(self, x: list[Float32], columns: FullColumns, moments: Moments) -> tuple:
        """The mean of the row's elements in this warp, of which x are this thread's; x minus that
        mean; and the values that the row's warps exchange."""
        if not self.config.centred:
            return Float32(0), x, (moments.squares_of_warp(x),)
        mean = moments.mean_of_warp(x)
        apart = columns.where_held([v - mean for v in x])
        return mean, apart, (moments.of_warp, mean, moments.squares_of_warp(apart))

    def as_vectors(self, y: list[Float32], mY: cute.Tensor) -> cute.Tensor:
        """y in registers (V, NumV) of mY's type."""
        shape = self.tile.width, self.tile.vectors
        rY, rounded = (cute.make_rmem_tensor(shape, t) for t in (Float32, mY.element_type))
        for i, value in enumerate(y):
            rY[i] = value
        rounded.store(rY.load().to(mY.element_type))
        return rounded


def elements(rX: cute.Tensor) -> list[Float32]:
    """The elements of a register tensor as fp32 values.

    NOTE: 16-bit elements go by words: a loop that carries single elements unpacks words where they
    are loaded, and so waits for them there (docs/facts/rows.md#rows-norm-resident).
    """
    if rX.element_type.width == 32:
        return [rX[i] for i in range(cute.size(rX))]
    words = cute.recast_tensor(rX, Int32)
    return [x for i in range(cute.size(words)) for x in halves(words[i], rX.element_type)]

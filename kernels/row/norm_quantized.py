"""Norms quantized in registers: 4- or 8-bit elements and their scale factors in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument, Operand, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import Values
from cutex.device.row.tile import RowTile
from cutex.kernels.quantize.config import QuantizeConfig
from cutex.kernels.quantize.elements import Factor, bits_of, factor_of, float_of
from cutex.kernels.quantize.magnitudes import magnitude, over_lanes
from cutex.kernels.quantize.tile import Quantize
from cutex.kernels.row.kernel import RowKernel, launch_of, reductions
from cutex.kernels.row.norm import Norm, NormConfig
from cutex.problem.scaled.formats import FORMATS, SWIZZLE_ROWS, Format


@dataclass(frozen=True)
class NormQuantizedConfig:
    """A norm, and the format that its result is quantized to."""

    norm: NormConfig
    format: str  # a name in cutex.problem.scaled.formats.FORMATS
    native: bool = True  # whether the arch has the conversion to the element

    @property
    def tile(self) -> RowTile:
        return self.norm.tile

    @property
    def of(self) -> Format:
        return FORMATS[self.format]

    @property
    def lanes(self) -> int:
        """The number of neighbouring threads that share a scale factor; 0: all threads of the
        row."""
        return max(1, self.of.block[1] // self.tile.width) if self.of.block[1] else 0

    def why_not(self) -> str | None:
        if not self.tile.aligned:
            return "aligned: blocks take rows that begin with a whole vector"
        if self.lanes > min(32, self.tile.threads):
            return f"threads={self.tile.threads}: {self.lanes} of a warp share a factor"
        if self.norm.saves:
            return "saves: a quantized norm has no gradient"
        return None


def larger(x: Values, y: Values) -> Values:
    """The elementwise maximum; NaN if either is NaN."""
    return tuple(cute.arch.fmax(a, b, nan=True) for a, b in zip(x, y, strict=True))


class NormQuantized(RowKernel):
    """q = y / factors, and the factors, where y is the norm rounded as the norm kernel would write
    it."""

    title = "norm_quantized"

    def __init__(self, config: NormQuantizedConfig) -> None:
        super().__init__(config)
        if reason := config.why_not():
            raise ValueError(reason)
        self.norm = Norm(config.norm)
        of = config.of
        self.quantize = Quantize(
            QuantizeConfig(config.format, swizzled=of.swizzled, native=config.native)
        )

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        of = self.config.of
        mX, _, *optional, eps = self.norm.operands(dtype)
        data = Operand("data", ("m", "kp"), "uint8", aligned=False, whole=False)
        sizes = ("f",) if of.swizzled else ("m",) if not of.block[1] else ("fk", "fm")
        kind = "fp32" if of.scale == "fp32" else "uint8"
        factors = Operand("factors", sizes, kind, aligned=False, whole=False)
        own = Operand("tensor_scale", ("one",), "fp32", aligned=False, whole=False)
        assert isinstance(eps, Scalar)
        return (mX, data, factors, *([own] if of.tensor_scale else []), *optional, eps)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mData: cute.Tensor, mFactors: cute.Tensor, *rest) -> None:
        c = self.config
        *given, eps, stream = rest
        names = (*(("tensor_scale",) if c.of.tensor_scale else ()), *c.norm.optional)
        options = {**dict(zip(names, given, strict=True)), "eps": eps}
        how = launch_of(c.tile, mX, stream)
        if cutlass.const_expr(c.of.swizzled):  # rows that are padding have factors, too
            rows = cute.ceil_div(cute.size(mX, mode=[0]), SWIZZLE_ROWS) * SWIZZLE_ROWS
            how["grid"] = (cute.ceil_div(rows, c.tile.rows) * c.tile.ctas, 1, 1)
        self.kernel(mX, mData, mFactors, options).launch(**how)

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mData: cute.Tensor, mFactors: cute.Tensor, options: dict[str, Any]
    ) -> None:
        c = self.config
        sums = reductions(c.tile, *c.norm.reduced, *([1] * (c.lanes == 0)), later=True)
        found = self.norm.normed(sums, mX, options, options["eps"])
        this, columns = found.this, found.columns
        rY = columns.rounded(found.y, mX)  # (V, NumV)
        own = Float32(1)
        if cutlass.const_expr(c.of.tensor_scale):
            own = options["tensor_scale"][0]
        if cutlass.const_expr(c.lanes == 0):
            all_ = [rY[j, i] for i in range(c.tile.vectors) for j in range(c.tile.width)]
            (largest,) = sums[-1]((float_of(largest_of(all_)),), larger)
            factor = self.factor(bits_of(largest), own)
            if this.exists & columns.is_first_of_row():
                mFactors[this.row] = float_of(factor.code)
            for i in cutlass.range_constexpr(c.tile.vectors):
                if this.exists & columns.has(i):
                    self.store(columns, rY, i, factor, mData[this.row, None])
        else:
            for i in cutlass.range_constexpr(c.tile.vectors):
                values = [rY[j, i].to(Float32) for j in range(c.tile.width)]
                factor = self.factor(over_lanes(magnitude(values), c.lanes), own)
                if this.exists & columns.has(i):
                    self.store(columns, rY, i, factor, mData[this.row, None])
                self.store_factor(mFactors, this, columns, i, factor.code)
        if this.exists:
            self.norm.store_rest(found, options)

    def factor(self, largest: Int32, own: Float32) -> Factor:
        return factor_of(self.config.of, largest, "floor", self.config.native, own)

    @cute.jit
    def store(
        self, columns: Columns, rY: cute.Tensor, i: int, factor: Factor, gData: cute.Tensor
    ) -> None:
        """Store the elements of vector i to the row gData (BYTES)."""
        elements, width = self.quantize.elements, self.config.tile.width
        scaled = [rY[j, i].to(Float32) * factor.inverse for j in range(width)]
        step = 32 // elements.bits
        words = [elements.pack(scaled[j : j + step]) for j in range(0, width, step)]
        bits = width * elements.bits
        kind = Int32 if cutlass.const_expr(bits >= 32) else cutlass.Int16
        count = max(1, bits // 32)
        rQ = cute.make_rmem_tensor(count, kind)
        for n in cutlass.range_constexpr(count):
            rQ[n] = Int32(words[n]).to(kind)
        place = (columns.first + i * columns.step) * elements.bits // 8
        address = (gData.iterator + place).toint()
        to = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=bits // 8)
        cute.autovec_copy(rQ, cute.make_tensor(to, cute.make_layout(count)))

    @cute.jit
    def store_factor(
        self, mFactors: cute.Tensor, this: Any, columns: Columns, i: int, code: Int32
    ) -> None:
        """Store the scale factor of the block that vector i is in; in the swizzled layout, 0 in the
        padding."""
        c = self.config
        column = columns.first + i * columns.step
        held = this.exists & (column < columns.n)
        kept = cutlass.select_(held, code, Int32(0))
        rows = this.rows
        if cutlass.const_expr(not c.of.swizzled):  # (K, M) of contiguous rows
            mFactors = cute.make_tensor(
                mFactors.iterator, cute.select(mFactors.layout, mode=[1, 0])
            )
        self.quantize.store_factor(mFactors, this.row, column, kept, rows, columns.n, c.lanes)


def largest_of(values: list[Any]) -> Int32:
    """The bits of the largest magnitude of any number of values."""
    width = 1 << (len(values).bit_length() - 1)
    found = magnitude(values[:width])
    return cutlass.max(found, largest_of(values[width:])) if len(values) > width else found

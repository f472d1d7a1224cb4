"""The epilogue operation that quantizes a product for the next one."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint8, cute

from cutex.compile import Argument, Operand
from cutex.device.epilogue.epilogue_ops import Fragment
from cutex.kernels.quantize.elements import bits_of, factor_of, multiply
from cutex.problem.scaled.formats import FORMATS

MAGNITUDE = 0x7FFFFFFF  # of a float's bits
CHUNK = (32, 4)  # rows of a chunk as (row mod 32, row div 32), and 4 factors


@dataclass(frozen=True)
class QuantizeRows:
    """x / factor, with a power of two for each 32 columns, which is written to the swizzled factors
    (L, RestRows, RestColumns, 128 words) of the result; it is rounded when it is stored. The last
    operation, on rows whose columns are one thread's.

    Bit by bit `cutex.quantize` of x: what a last block lacks counts as zero. Factors beyond the
    result are left as they are.
    """

    format: str = "mxfp8"
    rounding: str = "floor"

    def arguments(self) -> tuple[Argument, ...]:
        sizes = ("l_factors", "chunks_rows", "chunks_columns", "words")
        return (Operand("out_factors", sizes, "int32"),)

    @property
    def block(self) -> int:
        return FORMATS[self.format].block[1]

    def apply(self, x: Fragment, mFactors: cute.Tensor) -> None:
        of = FORMATS[self.format]
        for first in range(0, len(x.columns), self.block):
            largest = Int32(0)
            for c in range(first, first + self.block):
                size = bits_of(x.values[0, c]) & MAGNITUDE
                inside = x.columns[c] < x.bounds[1]
                largest = cutlass.max(largest, cutlass.select_(inside, size, Int32(0)))
            factor = factor_of(of, largest, self.rounding, True, None)
            for c in range(first, first + self.block):
                x.values[0, c] = multiply(x.values[0, c], factor.inverse)
            self.store(x, mFactors, x.columns[first], factor.code)

    @cute.jit
    def store(self, x: Fragment, mFactors: cute.Tensor, column: Int32, code: Int32) -> None:
        """Store the factor of the block of x's row that begins with `column`."""
        row, block = x.rows[0], column // self.block
        if row < x.bounds[0] and column < x.bounds[1]:
            mBytes = cute.recast_tensor(mFactors, Uint8)  # (L, RestRows, RestColumns, 512)
            low, count = CHUNK
            rows = low * count
            byte = row % low * 16 + row % rows // low * count + block % count
            mBytes[x.batch, row // rows, block // count, byte] = code.to(Uint8)

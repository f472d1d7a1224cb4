"""Rows of out to which an epilogue stores, or adds, the rows of a product by an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp

from cutex.device.atoms.reduction import add_one, add_vector, add_words

NOWHERE = -1


@dataclass(frozen=True)
class ScatteredRows:
    """Row r of a product of `count` rows is row index[begin + r] of out, if out has one."""

    mOut: cute.Tensor  # (S, N)
    index: cute.Tensor  # (R)
    begin: Int32
    count: Int32
    add: bool  # to what out holds, instead of storing over it
    whole: bool  # rows of out begin and end at multiples of 16 bytes

    @property
    def width(self) -> int:
        """The elements of 16 bytes, which a thread writes at a time."""
        return 128 // self.mOut.element_type.width

    @cute.jit
    def target(self, row: Int32) -> Int32:
        """The row of out for `row` of the product; NOWHERE for one that there is none for."""
        found = self.index[self.begin + cutlass.min(row, self.count - 1)]
        known = row < self.count and found >= 0 and found < cute.size(self.mOut, mode=[0])
        return found if known else Int32(NOWHERE)

    @cute.jit
    def write(self, values: cute.Tensor, target: Int32, column: Int32) -> None:
        """Write `values`, (V) of `width` elements, to the columns of row `target` from `column`, a
        multiple of `width`, on; those that out has."""
        columns = cute.size(self.mOut, mode=[1])
        if target != NOWHERE and column < columns:
            if cutlass.const_expr(self.whole):
                by_width = cute.make_layout(self.width)
                gRow = cute.logical_divide(self.mOut[target, None], by_width)  # (V, NumV)
                self._write_vector(values, gRow[None, column // self.width])
            else:
                for e in cutlass.range_constexpr(self.width):
                    if column + e < columns:
                        self._write_element(values[e], target, column + e)

    def _write_vector(self, values: cute.Tensor, gOut: cute.Tensor) -> None:
        kind = values.element_type
        if not self.add:
            store = cute.make_copy_atom(CopyUniversalOp(), kind, num_bits_per_copy=128)
            cute.copy(store, values, gOut)
        elif kind is Float32:
            add_vector(gOut.iterator, tuple(values[e] for e in range(4)))
        else:
            words = cute.recast_tensor(values, Int32)
            add_words(gOut.iterator, tuple(words[e] for e in range(4)), kind)

    def _write_element(self, value: Any, target: Int32, column: Int32) -> None:
        if self.add:
            one = cute.domain_offset((target, column), self.mOut)
            add_one(one.iterator, value)
        else:
            self.mOut[target, column] = value

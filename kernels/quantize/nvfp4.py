"""NVFP4's factors of many blocks: the multiplier of the elements is looked up by the factor's
code."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from cutex.kernels.quantize.elements import (
    CODED,
    E4M3_LEAST,
    TAME,
    Elements,
    Factor,
    TensorScale,
    as_bits,
    at_least,
    bits_of,
    divide,
    float_of,
    multiply,
    of_e4m3,
    quotient,
)

CODES = 128  # of e4m3, without a sign
CODED_HALVES, ONE_HALVES = 0x38803880, 0x3F803F80  # CODED and 1, twice as bf16
FAR = 2.0**100  # a tensor's factor from which on a product with CODED may be denormal


class OwnScale(NamedTuple):
    """A tensor's own factor, and what follows from it."""

    scale: TensorScale
    far: Any  # whether elements, and not the inverses of factors, are taken times CODED
    inverses: cute.Tensor  # what elements are multiplied by, (CODES)

    @staticmethod
    def of(value: Float32, inverses: cute.Tensor) -> OwnScale:
        return OwnScale(TensorScale.of(value), bits_of(value) >= as_bits(FAR), inverses)

    @property
    def coded(self) -> Float32:
        """The multiplier of the elements."""
        return cutlass.select_(self.far, Float32(CODED), Float32(1.0))

    @property
    def coded_halves(self) -> Int32:
        """The same multiplier twice in bf16."""
        return cutlass.select_(self.far, Int32(CODED_HALVES), Int32(ONE_HALVES))

    @cute.jit
    def write_inverses(self, coded: cutlass.Constexpr[bool]) -> None:
        """Write `inverses`; if `coded`, times CODED, unless the elements are. A CTA's threads call
        it, and synchronise before reading."""
        code = cute.arch.thread_idx()[0]
        if code < CODES:
            inverse = divide(self.scale.inverse, of_e4m3(code))
            if cutlass.const_expr(coded):
                more = cutlass.select_(self.far, Float32(1.0), Float32(CODED))
                inverse = multiply(inverse, more)
            self.inverses[code] = inverse

    def factors(self, largest: list[Int32], native: bool) -> list[Factor]:
        """The factors of an even number of blocks whose largest magnitudes have the bits
        `largest`."""
        bits = cute.make_rmem_tensor(len(largest), Int32)
        for i, x in enumerate(largest):
            bits[i] = x
        relative, found = relative_to(bits, self.scale), []
        for i in range(0, len(largest), 2):
            both = [at_least(relative[i + n], E4M3_LEAST) for n in range(2)]
            word = Elements("e4m3", native).pair(*both)
            found += [Factor(code, self.inverses[code]) for code in (word & 0xFF, word >> 8)]
        return found


@cute.jit
def relative_to(largest: cute.Tensor, own: TensorScale) -> cute.Tensor:
    """Sixths of magnitudes, given by their bits, divided by the tensor's factor, each rounded."""
    count = cute.size(largest)
    relative = cute.make_rmem_tensor(count, Float32)
    tame = own.tame
    for i in cutlass.range_constexpr(count):
        inside = (largest[i] >= as_bits(1 / TAME)) & (largest[i] <= as_bits(TAME))
        tame = tame & ((largest[i] == 0) | inside)
    if tame:
        for i in cutlass.range_constexpr(count):
            sixth = quotient(float_of(largest[i]), Float32(6.0), Float32(1.0 / 6.0))
            relative[i] = quotient(sixth, own.value, own.inverse)
    else:
        for i in cutlass.range_constexpr(count):
            relative[i] = divide(divide(float_of(largest[i]), Float32(6.0)), own.value)
    return relative

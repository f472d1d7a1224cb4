"""What a reduction computes: a sum, a maximum or minimum, or its index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.device.row.reduction import Values, add, lanes
from cutex.device.row.tile import WARP
from cutex.kernels.quantize.elements import bits_of, float_of

LEAST, MOST = -(2**31), 2**31 - 1
KINDS = ("sum", "max", "argmax")
DOWN, UP = 2.0**-32, 2.0**32  # so many elements of any size have a sum once they are scaled down


@dataclass(frozen=True)
class Fold:
    """An associative and commutative combination of values in fp32.

    A value of "argmax" is two words: the element as an integer that sorts as it does, NaN above
    everything, and its index; among equal elements the first wins.

    A sum of some of the elements may overflow, or be inf - inf, where that of all does not. So a
    "sum" may have a second word: the sum of its elements scaled down, which counts where the first
    word is not finite. A CTA leaves both of its part.
    """

    kind: str
    sign: int = 1  # -1: of the elements' negatives, for the smallest one

    # NOTE: the two methods that let the DSL carry a Fold, all of which is known when tracing
    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Fold:
        return self

    @property
    def count(self) -> int:
        """The number of 32-bit words of a value."""
        return 2 if self.kind == "argmax" else 1

    @property
    def words(self) -> int:
        """The number of words of what a CTA leaves of its part."""
        return 2 if self.kind == "sum" else self.count

    @property
    def fill(self) -> Any:
        """The value loaded for elements outside the row."""
        return 0 if self.kind == "sum" else -self.sign * Float32.inf

    def start(self) -> Values:
        """The identity: the value of no elements."""
        if self.kind == "argmax":
            return float_of(Int32(LEAST)), float_of(Int32(MOST))
        return (Float32(0) if self.kind == "sum" else -Float32.inf,)

    def of(self, x: Float32, index: Int32) -> Values:
        """The value of a single element."""
        x = x if self.sign == 1 else -x
        if self.kind != "argmax":
            return (x,)
        return self.key_of(x, index)

    def key_of(self, x: Float32, index: Int32) -> Values:
        """The value of an "argmax" of an element, of which `sign` is taken already."""
        bits = bits_of(cutlass.select_(x == Float32(0), Float32(0), x))  # of both zeros the first
        key = cutlass.select_(bits < 0, bits ^ MOST, bits)
        return float_of(cutlass.select_(x != x, Int32(MOST), key)), float_of(index)

    def combine(self, x: Values, y: Values) -> Values:
        if self.kind == "sum":
            return add(x, y)
        if self.kind == "max":
            return (cute.arch.fmax(x[0], y[0], nan=True),)
        (a, i), (b, j) = ((bits_of(v[0]), bits_of(v[1])) for v in (x, y))
        first = (a > b) | ((a == b) & (i < j))
        return tuple(float_of(cutlass.select_(first, p, q)) for p, q in ((a, b), (i, j)))

    def lanes(self, values: Values, group: int) -> Values:
        """The combination over `group` neighbouring lanes."""
        if self.kind != "argmax" or group < WARP:
            return lanes(values, self.combine, group)
        key, index = map(bits_of, values)
        best = cute.arch.warp_redux_sync(key, "max")
        index = cutlass.select_(key == best, index, Int32(MOST))
        return float_of(best), float_of(cute.arch.warp_redux_sync(index, "min"))

    def result(self, values: Values, scale: Float32) -> Any:
        """The stored result: a sum times `scale`, the element, or its index."""
        if self.kind == "sum":
            total, *low = values
            if not low:
                return total * scale
            low = low[0] * (scale * UP)
            return Float32(cutlass.select_(is_finite(total), total * scale, low))
        if self.kind == "max":
            return values[0] if self.sign == 1 else -values[0]
        return cutlass.Int64(bits_of(values[1]))


def is_finite(x: Float32) -> Boolean:
    return x - x == Float32(0)

"""The largest magnitudes of blocks, by their bits as fp32: compared as integers, a NaN wins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.kernels.quantize.elements import MAGNITUDE, bits_of, larger_halves


def magnitude(values: list[Any]) -> Int32:
    """The bits, as fp32, of the largest magnitude; compared as integers, a NaN wins."""
    return largest_of([bits_of(v.to(Float32)) & MAGNITUDE for v in values], cutlass.max)


def vector_magnitude(rX: cute.Tensor, signed: bool) -> Int32:
    """The same for a vector in registers; 16-bit elements are compared in pairs."""
    if rX.element_type.width == 32:
        return magnitude([rX[i] for i in range(cute.size(rX))])
    words = cute.recast_tensor(rX, Int32)
    every = [words[i] for i in range(cute.size(words))]
    halves = larger_of_halves(every, rX.element_type, signed)
    return magnitude([halves[0], halves[1]])


def pair_magnitudes(rPairs: cute.Tensor, signed: bool) -> list[Int32]:
    """The bits, as fp32, of the largest magnitudes of two columns, (COLUMN, ROW)."""
    count = cute.size(rPairs, mode=[1])
    if rPairs.element_type.width == 32:
        return [magnitude([rPairs[n, j] for j in range(count)]) for n in range(2)]
    words = cute.recast_tensor(rPairs, Int32)
    halves = larger_of_halves([words[j] for j in range(count)], rPairs.element_type, signed)
    return [magnitude([halves[n]]) for n in range(2)]


def larger_of_halves(words: list[Int32], dtype: type[cutlass.Numeric], signed: bool) -> cute.Tensor:
    """The largest magnitude of the low and of the high halves of words, in both halves each;
    `signed`: whether the arch compares magnitudes."""
    kind = "bf16" if dtype is cutlass.BFloat16 else "f16"
    # NOTE: of two words: a tensor of one has stride 0, and so its halves
    pair = cute.make_rmem_tensor(2, Int32)
    larger = partial(larger_halves, kind=kind, signed=signed)
    largest = largest_of(words if signed else [word & 0x7FFF7FFF for word in words], larger)
    pair[0] = pair[1] = largest & 0x7FFF7FFF
    return cute.recast_tensor(pair, dtype)


def largest_of(found: list[Any], larger: Callable[[Any, Any], Any]) -> Any:
    """The largest of a power of two of values."""
    while len(found) > 1:
        found = [larger(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


@cute.jit
def over_lanes(x: Int32, lanes: cutlass.Constexpr[int]) -> Int32:
    """The largest over a power of two of neighbouring lanes."""
    step = 1
    while cutlass.const_expr(step < lanes):
        x = cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=step))
        step *= 2
    return x

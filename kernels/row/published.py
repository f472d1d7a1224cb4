"""Values that CTAs publish to each other in words of gmem: a value and its ready flag share one, so
that no fence is needed."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cutex.device.row.reduction import Values
from cutex.kernels.quantize.elements import bits_of, float_of

THERE = 1 << 32  # the flag of a word, above its value's 32 bits


@cute.jit
def leave(word: cute.Pointer, value: Float32) -> None:
    """Publish a value together with its ready flag."""
    found = Int64(bits_of(value)) & (THERE - 1) | THERE
    cute.arch.store(word, found, sem="relaxed", scope="gpu")


@cute.jit
def taken(word: cute.Pointer) -> Float32:
    """The value of a word, once it has been published."""
    found = cute.arch.load(word, Int64, sem="relaxed", scope="gpu")
    while found < THERE:
        found = cute.arch.load(word, Int64, sem="relaxed", scope="gpu")
    return float_of(Int32(found & (THERE - 1)))


@cute.jit
def taken_for_good(first: cute.Pointer, count: cutlass.Constexpr[int]) -> Values:
    """The values of `count` words from the first on, once all have been published. Leaves the words
    zeroed."""
    words = cute.make_rmem_tensor(count, Int64)
    all_there = Int32(0)
    while all_there == 0:
        all_there = Int32(1)
        for i in cutlass.range_constexpr(count):
            words[i] = cute.arch.load(first + i, Int64, sem="relaxed", scope="gpu")
        for i in cutlass.range_constexpr(count):
            if words[i] < THERE:
                all_there = Int32(0)
    for i in cutlass.range_constexpr(count):
        cute.arch.store(first + i, Int64(0), sem="relaxed", scope="gpu")
    return tuple(float_of(Int32(words[i] & (THERE - 1))) for i in range(count))

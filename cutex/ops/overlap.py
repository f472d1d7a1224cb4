"""Whether elements of strided tensors share memory, exactly.

Elements of one tensor share memory if their offsets, sums of index times stride, are equal; those
of two if their offsets differ by the distance of the tensors. Either is a sum of bounded integers
times strides that must have a given value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

from torch import Tensor
from torch.compiler import is_compiling

Term = tuple[int, int, int]  # a stride, and the least and the greatest integer to multiply it with
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of x are one in memory. Where a compiler leaves sizes open, only strides
    of 0 are known to be."""
    if not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
    # NOTE: a compiler that traces the call warns of a cache, which it leaves out itself
    of = _overlaps_itself.__wrapped__ if is_compiling() else _overlaps_itself
    return of(tuple(x.shape), tuple(x.stride()))


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether a byte belongs to an element of x and to one of y; False for a compiler that traces
    the call, since it knows no addresses."""
    if is_compiling():
        return False
    distance = y.data_ptr() - x.data_ptr()
    if not x.numel() or not y.numel() or not -span(y) < distance < span(x):
        return False
    return _share(_bytes(x), _bytes(y), distance)


def span(x: Tensor) -> int:
    """The bytes from the first element of x to the end of the last one."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize


def _bytes(x: Tensor) -> Layout:
    """The layout of the bytes of x."""
    return (*x.shape, x.itemsize), (*(s * x.itemsize for s in x.stride()), 1)


@lru_cache(maxsize=4096)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    dims = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1)
    if 0 in shape:
        return False
    for i, (stride, n) in enumerate(dims):  # of the indices that differ, this has the least stride
        rest = [(s, 1 - size, size - 1) for s, size in dims[i + 1 :]]
        if has_sum([(stride, 1, n - 1), *rest], 0):
            return True
    return False


@lru_cache(maxsize=4096)
def _share(x: Layout, y: Layout, distance: int) -> bool:
    terms = [(s, 0, n - 1) for n, s in zip(*x, strict=True)]
    return has_sum([*terms, *((s, 1 - n, 0) for n, s in zip(*y, strict=True))], distance)


def has_sum(terms: list[Term], total: int) -> bool:
    """Whether integers within their terms' bounds, times the strides, can add up to `total`."""
    merged: dict[int, tuple[int, int]] = {}
    for stride, low, high in terms:
        if low > high:
            return False
        before = merged.get(stride, (0, 0))
        merged[stride] = before[0] + low, before[1] + high
    merged.pop(0, None)
    return _has_sum(sorted(((s, *bounds) for s, bounds in merged.items()), reverse=True), total)


def _has_sum(terms: list[Term], total: int) -> bool:
    """`has_sum` for terms with different strides, the greatest first."""
    if not terms:
        return total == 0
    if total % gcd(*(s for s, _, _ in terms)):
        return False
    if len(terms) <= 2:
        return _two_have_sum(terms, total)
    stride = terms[0][0]
    return any(_has_sum(terms[1:], total - stride * x) for x in _multiples(terms, total))


def _multiples(terms: list[Term], total: int) -> Iterator[int]:
    """The multiples of the first stride that leave a remainder the other terms can reach."""
    (stride, low, high), *rest = terms
    least, most = (sum(s * bounds[i] for s, *bounds in rest) for i in (0, 1))
    yield from range(
        max(low, -((most - total) // stride)), min(high, (total - least) // stride) + 1
    )


def _two_have_sum(terms: list[Term], total: int) -> bool:
    """`has_sum` for one or two terms, whose strides' common divisor divides `total`."""
    (s, low, high), (t, least, most) = terms[0], terms[1] if len(terms) > 1 else (0, 0, 0)
    if t == 0:
        return low <= total // s <= high
    common = gcd(s, t)
    s, t, total = s // common, t // common, total // common
    x = total * pow(s, -1, t) % t if t > 1 else 0  # one solution; the others are t apart
    y = (total - s * x) // t
    # x + t * k within its bounds, y - s * k within its own
    begin = max(-((x - low) // t), -((most - y) // s))
    end = min((high - x) // t, (y - least) // s)
    return begin <= end

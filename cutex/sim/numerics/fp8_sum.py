"""The sum of fp8 products in a Hopper tensor core, which the PTX ISA leaves open.

For 32 of K at a time, one wgmma: align the products and the sum so far to the largest exponent
among them (of a product: the sum of its two elements' exponents), truncate each 13 bits below it,
towards zero, add, and truncate the sum 13 bits below its own exponent. Determined from one H200,
where it gives the bits of every element at K = 32, 64 and 256 of e4m3
(docs/facts/matmul.md#hopper-tensor-core-fp8); e5m2 is assumed to be the same.
"""

from __future__ import annotations

import numpy as np

KEPT = 13  # bits below the largest exponent
_NOTHING = -(1 << 12)  # stands for the exponent of zero


def add_products(old: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``old`` (M, N) + ``a`` (M, K) @ ``b`` (N, K).T, all float32. Values that are not finite add
    up as in float32.
    """
    with np.errstate(invalid="ignore"):
        plain = old + a @ b.T
    finite = np.isfinite(plain)
    if not finite.all():
        old = np.where(finite, old, np.float32(0))
        a, b = (np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b))
    largest = (_exponents(a)[:, None, :] + _exponents(b)[None, :, :]).max(-1)
    largest = np.maximum(largest, _exponents(old))
    largest = np.where(largest < _NOTHING // 2, 0, largest)  # all are zero
    unit = np.ldexp(np.float32(1), largest - KEPT)  # (M, N)
    per_unit = np.float32(1) / unit
    scaled = a[:, None, :] * b[None, :, :] * per_unit[..., None]  # (M, N, K), exact
    # NOTE: 33 integers of at most 15 bits: their sum is exact in float32
    total = np.trunc(scaled).sum(-1) + np.trunc(old * per_unit)
    excess = np.ldexp(np.float32(1), np.maximum(_exponents(total) - KEPT, 0))
    total = np.trunc(total / excess) * excess * unit
    return np.where(finite, total, plain)


def _exponents(x: np.ndarray) -> np.ndarray:
    """The exponents of the leading bits."""
    return np.where(x == 0, np.int32(_NOTHING), np.frexp(x)[1] - 1)

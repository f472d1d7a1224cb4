"""W4Weight: a packed weight of 4 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cutex.problem.w4 import packing
from cutex.problem.w4.layout import W4Format

LAYOUT = (
    "strips of 64 rows, in blocks of 128 of K: codes in the order of wgmma's registers, then "
    "scales, then zeros (cutex/problem/w4/layout.py)"
)


class W4Weight(NamedTuple):
    """A weight (N, K) of 4 bits, packed once by `cutex.pack_w4`, for `cutex.matmul(x, weight)`.

    packed: int32 (N / 64, K / 128, words), rounded up. factor: fp32, (N,) or (1,), which the
    epilogue multiplies with; None: 1. dtype: of the activations that it is packed for.
    """

    packed: Tensor
    factor: Tensor | None
    n: int
    k: int
    format: W4Format
    dtype: torch.dtype
    kind: str

    @property
    def layout(self) -> str:
        """How `packed` is laid out."""
        return LAYOUT

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales."""
        return self.packed.nbytes + (0 if self.factor is None else self.factor.nbytes)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values (N, K) that the product is of, rounded once to `dtype`, by default its own.
        Hopper's product with up to 16 rows does not round int4 in groups of 64 and more, with up to
        8 rows it may not in groups of 32 either."""
        return dequantized(self.packed, self.factor, self.n, self.k, self.format, self.dtype,
                           dtype or self.dtype)  # fmt: skip


def dequantized(
    packed: Tensor,
    factor: Tensor | None,
    n: int,
    k: int,
    of: W4Format,
    made_for: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """The values of a packed weight in `dtype`."""
    x = packing.values(packed, n, k, of, made_for)
    if factor is not None:
        x = x.double() * factor.double()[:, None] if dtype is torch.float64 else x * factor[:, None]
    return x.to(dtype)

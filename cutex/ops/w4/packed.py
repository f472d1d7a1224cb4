"""W4Weight: a packed weight of 4 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cutex.problem.w4 import packing
from cutex.problem.w4.layout import BLOCK_K, STRIP, W4Format, why_not_version

LAYOUT = (
    "strips of 64 rows, in blocks of 128 of K: codes in the order of wgmma's registers, then "
    "scales, then zeros (cutex/problem/w4/layout.py)"
)


class W4Weight(NamedTuple):
    """A weight (N, K) of 4 bits, packed once by `cutex.pack_w4`, for `cutex.matmul(x, weight)`.

    packed: int32 (N / 64, K / 128, words), rounded up. factor: fp32, (N,) or (1,), which the
    epilogue multiplies with; None: 1. dtype: of the activations that it is packed for.
    layout_version: of `packed` (problem/w4/layout.py); 0, as of those that were pickled before it
    was kept, is taken only where all layouts were alike. Whoever saves `packed` alone saves it too.
    """

    packed: Tensor
    factor: Tensor | None
    n: int
    k: int
    format: W4Format
    dtype: torch.dtype
    kind: str
    layout_version: int = 0

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
        given = self.packed, self.factor, self.n, self.k, self.format, self.dtype
        check_packed("the weight", *given, self.layout_version)
        return dequantized(*given, dtype or self.dtype)


def check_packed(
    name: str,
    packed: Tensor,
    factor: Tensor | None,
    n: int,
    k: int,
    of: W4Format,
    made_for: torch.dtype,
    layout_version: int,
) -> None:
    """Raise ValueError, with one sentence, for a packed weight that is laid out otherwise than it
    is read, or has other sizes than it says."""
    if reason := of.why_not():
        raise ValueError(f"{name} has no format of a packed weight: {reason}")
    if reason := why_not_version(layout_version, of, packing.NAMES[made_for]):
        raise ValueError(f"{name} cannot be read: {reason}")
    due = -(-n // STRIP), -(-k // BLOCK_K), of.words
    if packed.dtype is not torch.int32 or packed.shape != due or not packed.is_contiguous():
        raise ValueError(
            f"{name} of (N, K) = {(n, k)} must have packed words of int32 {due}, contiguous, got "
            f"{packed.dtype} {tuple(packed.shape)}"
        )
    if factor is None:
        return
    if factor.dtype is not torch.float32 or factor.shape not in ((1,), (n,)):
        raise ValueError(
            f"{name} must have a factor of float32 ({n},) or (1,), got {factor.dtype} "
            f"{tuple(factor.shape)}"
        )
    if factor.device != packed.device:
        raise ValueError(f"{name} has its factor on {factor.device}, its words on {packed.device}")


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

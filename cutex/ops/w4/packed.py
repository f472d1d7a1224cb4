"""W4Weight: a packed weight of 4 bits."""

from __future__ import annotations

from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutex.problem.w4 import packing
from cutex.problem.w4.layout import (
    BLOCK_K,
    LAYOUT_VERSION,
    STRIP,
    TOP_SCALE,
    W4Format,
    why_not_version,
)

LAYOUT = (
    "strips of 64 rows, in blocks of 128 of K: codes in the order of wgmma's registers, then "
    "scales, then zeros (cutex/problem/w4/layout.py)"
)


class W4Weight(NamedTuple):
    """A 4-bit weight (N, K), packed once by `cutex.pack_w4`, for `cutex.matmul(x, weight)`.

    packed: (N / 64, K / 128, words), rounded up, int32; uint32 for formats whose layout has changed
        (problem/w4/layout.py), so that words of the old layout are refused, whatever weight they
        are put in.
    factor: fp32, (N,) or (1,), applied by the epilogue; None: 1. Without one, integers' scales for
        bfloat16 are at most 256: Hopper's kernels make larger ones infinite.
    dtype: of the activations that it is packed for.
    layout_version: of `packed`. 0, as in weights pickled before it existed, is accepted only for
        formats whose layout has never changed. If `packed` is saved alone, save it, too.
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

    def __reduce__(self) -> tuple[Any, ...]:
        # NOTE: torch 2.11 pickles uint32, but does not read what it pickled
        words = str(self.packed.dtype).removeprefix("torch.")
        return _unpickled, (words, self.packed.view(torch.int32), *self[1:])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values (N, K) that the product is of, rounded once to `dtype`, by default its own.
        Hopper's product with up to 16 rows does not round int4 in groups of 64 and more, with up to
        8 rows it may not in groups of 32 either."""
        self.check("the weight")
        dtype, factor = dtype or self.dtype, self.factor
        x = packing.values(self.packed, self.n, self.k, self.format, self.dtype)
        if factor is not None and dtype is torch.float64:
            x = x.double() * factor.double()[:, None]
        elif factor is not None:
            x = x * factor[:, None]
        return x.to(dtype)

    def check_types(self, name: str) -> None:
        """Raise TypeError, in one sentence, for a field that is not of its type."""
        for field, kinds in FIELDS.items():
            value = getattr(self, field)
            if not isinstance(value, kinds):
                due = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name}.{field} must be of {due}, got {type(value).__name__}")

    def check(self, name: str) -> None:
        """Raise ValueError, in one sentence, if the weight's layout is not the one that is read, or
        its tensors have other sizes than it says."""
        self.check_types(name)
        of, packed, factor = self.format, self.packed, self.factor
        if reason := of.why_not():
            raise ValueError(f"{name} has no format of a packed weight: {reason}")
        if reason := why_not_version(self.layout_version, of, packing.NAMES[self.dtype]):
            raise ValueError(f"{name} cannot be read: {reason}")
        words = packing.words_of(of, self.dtype)
        due = -(-self.n // STRIP), -(-self.k // BLOCK_K), of.words
        if packed.dtype is not words or packed.shape != due or not packed.is_contiguous():
            kind = str(words).removeprefix("torch.")
            is_older = packed.dtype is torch.int32 and words is not torch.int32
            advice = ", as code before packed them: pack the weight again with cutex.pack_w4"
            raise ValueError(
                f"{name} of (N, K) = {(self.n, self.k)} must have packed words of {kind} {due}, "
                f"contiguous, got {packed.dtype} {tuple(packed.shape)}" + advice * is_older
            )
        if factor is None:
            self._check_scales(name)
            return
        if factor.dtype is not torch.float32 or factor.shape not in ((1,), (self.n,)):
            raise ValueError(
                f"{name} must have a factor of float32 ({self.n},) or (1,), got {factor.dtype} "
                f"{tuple(factor.shape)}"
            )
        if factor.device != packed.device:
            where = f"its factor on {factor.device}, its words on {packed.device}"
            raise ValueError(f"{name} has {where}")

    def _check_scales(self, name: str) -> None:
        """Raise ValueError for scales that older code packed, and that kernels make infinite."""
        of, packed = self.format, self.packed
        is_older = self.layout_version < LAYOUT_VERSION and packed.device.type != "meta"
        if not is_older or (of.kind, self.dtype) != ("int4", torch.bfloat16) or not of.group:
            return
        if packing.has_larger_scales(packed, of):
            raise ValueError(
                f"{name} has scales above {TOP_SCALE:.0f} and no factor, as code before packed "
                "them: pack the weight again with cutex.pack_w4"
            )


# the types of a weight's fields
FIELDS: dict[str, tuple[type, ...]] = {
    "packed": (Tensor,),
    "factor": (Tensor, NoneType),
    "n": (int,),
    "k": (int,),
    "format": (W4Format,),
    "dtype": (torch.dtype,),
    "layout_version": (int,),
}


def _unpickled(words: str, packed: Tensor, *rest: Any) -> W4Weight:
    """The weight with these fields, whose words are of type `words`."""
    return W4Weight(packed.view(getattr(torch, words)), *rest)


# plain values and tensors: `torch.load(weights_only=True)` may make it
torch.serialization.add_safe_globals([W4Weight, W4Format, _unpickled])

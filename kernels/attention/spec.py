"""What an attention kernel computes, apart from how: the same on every arch.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


@dataclass(frozen=True)
class AttentionSpec:
    """The function that a kernel is compiled to compute."""

    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = False
    window: tuple[bool, bool] = (False, False)  # whether lo and hi of the band are passed
    varlen_q: bool = False  # cu_seqlens_q is passed
    varlen_k: bool = False
    used_q: bool = False  # seqused_q is passed
    used_k: bool = False
    softcap: bool = False
    sink: bool = False
    alibi: bool = False  # slopes are passed
    lse: bool = True
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None

    @property
    def banded(self) -> bool:
        """Whether blocks of rows differ in the number of key blocks that they touch."""
        return self.causal or any(self.window)

    @property
    def modified(self) -> bool:
        """Whether a function of places, the user's or ALiBi's, decides about each score."""
        return self.score_mod is not None or self.mask_mod is not None or self.alibi

    @property
    def ragged_q(self) -> bool:
        return self.varlen_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        return self.varlen_k or self.used_k

    def why_not_computed(self) -> str | None:
        """The reason why no kernel computes it, as one sentence, or None."""
        if (self.head_dim, self.head_dim_v) not in HEAD_DIMS:
            known = ", ".join(f"{k}" if k == v else f"{k}/{v}" for k, v in HEAD_DIMS)
            return f"head dim {self.head_dim}/{self.head_dim_v}: there are kernels for {known}"
        if self.causal and self.window[1]:
            return "causal=True: it is the right side of the window"
        return None

    @classmethod
    def computing(cls, spec: AttentionSpec) -> Self:
        """A config that computes `spec`, with the tiles of its defaults."""
        return cls(**{field.name: getattr(spec, field.name) for field in fields(AttentionSpec)})


class Shape(NamedTuple):
    """The sizes that a choice of tiles depends on. No sequence has more than `longest_q` queries;
    what is said of keys, and the mean number of queries, only decides what is fast."""

    batch: int
    heads_q: int
    heads_kv: int
    longest_q: int
    longest_k: int
    mean_q: int

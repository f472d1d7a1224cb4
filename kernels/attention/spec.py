"""What an attention kernel computes, independent of how and of the arch.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from cutex.problem.attention import AttentionProblem

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


@dataclass(frozen=True)
class ScoreSpec:
    """The scores that a kernel of attention is compiled for: forward, backward or decode."""

    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = False
    window: tuple[bool, bool] = (False, False)  # whether lo and hi of the band are passed
    varlen_q: bool = False  # cu_seqlens_q is passed
    varlen_k: bool = False
    used_q: bool = False  # seqused_q is passed
    used_k: bool = False
    softcap: bool = False

    def of(self, problem: AttentionProblem) -> Self:
        """This config for the scores of a problem."""
        left, right = problem.bounds
        return replace(
            self,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            causal=problem.causal,
            window=(left is not None, right is not None and not problem.causal),
            varlen_q=problem.varlen,
            varlen_k=problem.varlen,
            softcap=problem.softcap != 0,
        )

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v

    @property
    def banded(self) -> bool:
        """Whether blocks of rows differ in the number of key blocks that they touch."""
        return self.causal or any(self.window)

    @property
    def ragged_q(self) -> bool:
        return self.varlen_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        return self.varlen_k or self.used_k

    def why_not_computed(self, problem: AttentionProblem | None = None) -> str | None:
        """The reason why no kernel computes it or, of `problem`, why this config does not, as one
        sentence, or None."""
        if self.head_dims not in HEAD_DIMS:
            known = ", ".join(f"{k}" if k == v else f"{k}/{v}" for k, v in HEAD_DIMS)
            return f"head dim {self.head_dim}/{self.head_dim_v}: there are kernels for {known}"
        if self.causal and self.window[1]:
            return "causal=True: it is the right side of the window"
        if problem is not None and self.head_dims != (problem.head_dim, problem.head_dim_v):
            return f"head_dim={self.head_dim}: the problem has {problem.head_dim}"
        return None


@dataclass(frozen=True)
class AttentionSpec(ScoreSpec):
    """The function that a forward kernel is compiled to compute."""

    sink: bool = False
    alibi: bool = False  # slopes are passed
    lse: bool = True
    page_size: int = 0  # keys of a page of K and V; 0: they are not in pages
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None

    @property
    def modified(self) -> bool:
        """Whether a function of places, the user's or ALiBi's, decides about each score."""
        return self.score_mod is not None or self.mask_mod is not None or self.alibi

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

"""One attention forward apart from its data: shapes, options, and the rows of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from cutex.problem.attention.families import DTYPES, INITS

VIEWS = ("contiguous", "interleaved", "padded", "heads first", "expanded", "shifted", "transposed")


class Inputs(NamedTuple):
    """The tensors of one problem.

    q (batch, seqlen_q, heads_q, head_dim) or, packed, (total_q, heads_q, head_dim); k and v
    likewise with heads_kv, v with head_dim_v; cu_seqlens (batch + 1,), seqused (batch,) int32;
    sink (heads_q,) float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    sink: Tensor | None = None


class Sequence(NamedTuple):
    """One entry of a batch: where its rows begin in a packed tensor, and how many count."""

    entry: int
    first_q: int
    queries: int
    first_k: int
    keys: int


@dataclass(frozen=True)
class AttentionShapes:
    """One attention forward, apart from its data.

    lengths_q, lengths_k: rows of each sequence, in tensors packed one after the other (varlen by
    cu_seqlens; seqlen_q or seqlen_k is then their maximum). used_q, used_k: how many rows of each
    sequence count (seqused). tail: rows after the last packed sequence. window (left, right): keys
    that a query sees on either side of its own, None for all; a negative side is a bound off the
    diagonal. scale: 1 / sqrt(head_dim) by default. init: the family of data, out of families.py.
    Memory that holds no data (around views, rows past `used`, the tail) is NaN. views: the memory
    layouts of q, k and v, out of VIEWS.

    Raises ValueError, in one sentence, for values that are no valid problem.
    """

    batch: int = 1
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads_q: int = 4
    heads_kv: int = 4
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: str = "bf16"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sink: bool = False
    scale: float | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    tail: int = 0
    views: tuple[str, str, str] = ("contiguous",) * 3
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "lengths_q", "lengths_k", "used_q", "used_k", "views"):
            if isinstance(given := getattr(self, name), list):  # as a ledger holds it
                object.__setattr__(self, name, tuple(given))
        for name in ("batch", "heads_q", "heads_kv", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q={self.heads_q}: must be a multiple of heads_kv={self.heads_kv}"
            )
        for name, known in (("dtype", DTYPES), ("init", INITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.softmax_scale <= 0 or self.softcap < 0:
            raise ValueError(
                f"scale={self.scale}, softcap={self.softcap}: the one must be positive, the other "
                "positive or 0 for none"
            )
        for view in self.views:
            if view not in VIEWS:
                raise ValueError(f"view {view!r} is not one of {', '.join(VIEWS)}")
        for side in "qk":
            self._check_lengths(side)

    def _check_lengths(self, side: str) -> None:
        lengths, used = getattr(self, f"lengths_{side}"), getattr(self, f"used_{side}")
        for name, given in ((f"lengths_{side}", lengths), (f"used_{side}", used)):
            if given is not None and (len(given) != self.batch or min(given) < 0):
                raise ValueError(f"{name}={given}: takes batch={self.batch} numbers from 0 up")
        if lengths is not None:
            object.__setattr__(self, f"seqlen_{side}", max(lengths))
        seqlen = getattr(self, f"seqlen_{side}")
        if seqlen < 0:
            raise ValueError(f"seqlen_{side}={seqlen}: must be at least 0")
        most = lengths or (seqlen,) * self.batch
        if used is not None and any(u > n for u, n in zip(used, most, strict=True)):
            raise ValueError(f"used_{side}={used}: more than the sequences have, {most}")

    # ---- what is computed

    @property
    def band(self) -> tuple[int | None, int | None]:
        """The bounds (lo, hi) on k - q - (seqlen_k - seqlen_q) of a visible key, None where
        open."""
        left, right = self.window
        return None if left is None else -left, 0 if self.causal else right

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def varlen(self) -> bool:
        """Whether the case needs FlashAttention's varlen function."""
        given = (self.lengths_q, self.lengths_k, self.used_q, self.used_k)
        return any(x is not None for x in given)

    @property
    def sequences(self) -> Iterator[Sequence]:
        lengths = [
            getattr(self, f"lengths_{x}") or (getattr(self, f"seqlen_{x}"),) * self.batch
            for x in "qk"
        ]
        firsts = [list(accumulate(n, initial=0)) for n in lengths]
        queries, keys = self.used_q or lengths[0], self.used_k or lengths[1]
        for i in range(self.batch):
            yield Sequence(i, firsts[0][i], queries[i], firsts[1][i], keys[i])

    @cached_property
    def visible_pairs(self) -> int:
        """The number of pairs of a query and a key that it sees, over the batch, of one head."""
        lo, hi = self.band
        pairs = 0
        for _, _, queries, _, keys in self.sequences:
            shift = keys - queries
            for q in range(queries):
                first = 0 if lo is None else max(0, q + shift + lo)
                last = keys - 1 if hi is None else min(keys - 1, q + shift + hi)
                pairs += max(0, last - first + 1)
        return pairs

    @property
    def flops(self) -> int:
        """The FLOPs of both products over the visible pairs.

        Of a causal square they are half of the full one's, as the field counts them, which leaves
        out half of the diagonal.
        """
        pairs = 2 * self.visible_pairs
        if self.causal and self.window[0] is None:
            squares = [x.queries for x in self.sequences if x.queries == x.keys]
            if len(squares) == self.batch:
                pairs = sum(n * n for n in squares)
        return pairs * self.heads_q * (self.head_dim + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """The least traffic with global memory, in bytes: Q, K and V read once, O and LSE written
        once."""
        queries = sum(x.queries for x in self.sequences)
        keys = sum(x.keys for x in self.sequences)
        row = self.head_dim + self.head_dim_v
        return (
            2 * row * (queries * self.heads_q + keys * self.heads_kv) + 4 * queries * self.heads_q
        )

    # ---- rows

    def rows(self, x: Tensor, s: Sequence, side: str) -> Tensor:
        """The rows of one sequence in x, which is laid out like q and o (side "q") or like k and v
        ("k")."""
        first, count = (s.first_q, s.queries) if side == "q" else (s.first_k, s.keys)
        packed = getattr(self, f"lengths_{side}") is not None
        return x[first : first + count] if packed else x[s.entry, :count]

    def lse_rows(self, lse: Tensor, s: Sequence) -> Tensor:
        """The rows of one sequence in LSE, as (heads_q, rows)."""
        return self.rows(lse.transpose(-1, -2), s, "q").T

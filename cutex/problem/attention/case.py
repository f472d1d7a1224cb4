"""One case of attention forward: shapes, data, reference and tolerance.

O = softmax(mask(softcap(scale * Q K^T))) V and LSE, the natural logarithm of the sum of the
exponentials, with the meaning of FlashAttention's functions: a band of visible keys aligned bottom
right; grouped heads; a sink, which is one more column of scores without a value; rows that see no
key have O = 0 and LSE = -inf (with a sink, LSE = sink).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cutex.dtypes import DTYPES as ELEMENTS
from cutex.problem.attention.check import check
from cutex.problem.attention.families import DTYPES, FAMILIES, INITS
from cutex.problem.protocol import Check

VIEWS = ("contiguous", "interleaved", "padded", "heads first", "expanded", "shifted", "transposed")
GUARD = 64  # elements of NaN on either side of a contiguous tensor


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
class AttentionCase:
    """One attention forward.

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

    # ---- data

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> Inputs:
        """The operands, sampled on `device` from the seed. `copy` numbers independent samples."""
        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)
        q = self._operand(0, "q", self.heads_q, self.head_dim, device, generator)
        k = self._operand(1, "k", self.heads_kv, self.head_dim, device, generator)
        v = self._operand(2, "k", self.heads_kv, self.head_dim_v, device, generator)

        def whole(numbers: tuple[int, ...] | None, cumulative: bool = False) -> Tensor | None:
            if numbers is None:
                return None
            numbers = tuple(accumulate(numbers, initial=0)) if cumulative else numbers
            return torch.tensor(numbers, dtype=torch.int32).to(device)

        sink = None
        if self.sink:
            sink = torch.randn(self.heads_q, generator=generator, device=device)
        return Inputs(
            q,
            k,
            v,
            cu_seqlens_q=whole(self.lengths_q, cumulative=True),
            cu_seqlens_k=whole(self.lengths_k, cumulative=True),
            seqused_q=whole(self.used_q),
            seqused_k=whole(self.used_k),
            sink=sink,
        )

    def _operand(
        self,
        which: int,
        side: str,
        heads: int,
        head_dim: int,
        device: str | torch.device,
        generator: torch.Generator,
    ) -> Tensor:
        lengths = getattr(self, f"lengths_{side}")
        batch, rows = self.batch, getattr(self, f"seqlen_{side}")
        if lengths is not None:
            batch, rows = 1, sum(lengths) + self.tail
        shape = batch, rows, heads, head_dim
        x, expanded = laid_out(self.views[which], shape, ELEMENTS[self.dtype].torch, device)
        x.normal_(generator=generator)
        change = FAMILIES[self.init]
        if change is not None and which < 2:
            change(self, x, side, generator)
        data = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
        for s in self.sequences:
            self.rows(data.expand(batch, -1) if lengths is None else data[0], s, side).fill_(True)
        x.masked_fill_(~data[:, :, None, None], torch.nan)
        x = x.expand(shape) if expanded else x
        return x if lengths is None else x[0]

    def outputs(self, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
        """The outputs, every element NaN until a kernel writes it: O like q with head_dim_v; LSE
        (batch, heads_q, seqlen_q) or (heads_q, total_q), float32."""
        rows = (self.batch, self.seqlen_q)
        lse: tuple[int, ...] = (self.batch, self.heads_q, self.seqlen_q)
        if self.lengths_q is not None:
            total = sum(self.lengths_q) + self.tail
            rows, lse = (total,), (self.heads_q, total)  # type: ignore[assignment]
        shape = (*rows, self.heads_q, self.head_dim_v)
        out = torch.full(shape, torch.nan, dtype=ELEMENTS[self.dtype].torch, device=device)
        return out, torch.full(lse, torch.nan, device=device)

    # ---- the result

    def rows(self, x: Tensor, s: Sequence, side: str) -> Tensor:
        """The rows of one sequence in x, which is laid out like q and o (side "q") or like k and v
        ("k")."""
        first, count = (s.first_q, s.queries) if side == "q" else (s.first_k, s.keys)
        packed = getattr(self, f"lengths_{side}") is not None
        return x[first : first + count] if packed else x[s.entry, :count]

    def lse_rows(self, lse: Tensor, s: Sequence) -> Tensor:
        """The rows of one sequence in LSE, as (heads_q, rows)."""
        return self.rows(lse.transpose(-1, -2), s, "q").T

    def check(
        self, inputs: Inputs, out: Tensor, lse: Tensor | None, poisoned: bool = True
    ) -> Check:
        """Compare O, and LSE where given, with float64; see check.py.

        poisoned: out and lse were NaN before, and must still be where no sequence has a row.
        """
        return check(self, inputs, out, lse, poisoned)


def laid_out(
    view: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str | torch.device
) -> tuple[Tensor, bool]:
    """Memory, all NaN, for a (batch, rows, heads, head_dim) tensor laid out as `view` says.

    Returns the part to fill, and whether it is to be expanded to `shape`. TMA can step through all
    views but "shifted", whose rows begin anywhere, and "transposed", whose rows are contiguous.
    """
    b, s, h, d = shape

    def memory(*sizes: int) -> Tensor:
        return torch.full(sizes, torch.nan, dtype=dtype, device=device)

    match view:
        case "interleaved":  # as one GEMM leaves q, k and v
            return memory(b, s, 3, h, d)[:, :, 1], False
        case "padded":
            return memory(b, s + 2, h, d + 16)[:, 1:-1, :, 8:-8], False
        case "heads first":  # as scaled_dot_product_attention has them
            return memory(b, h, s + 2, d)[:, :, 1:-1].transpose(1, 2), False
        case "expanded":  # one entry for the whole batch, or one head for all
            sizes = (1, s + 2, h, d) if b > 1 else (b, s + 2, 1, d)
            return memory(*sizes)[:, 1:-1], True
        case "shifted":
            return memory(b, s + 2, h, d + 3)[:, 1:-1, :, 3:], False
        case "transposed":
            return memory(b, h, d, s + 2)[..., 1:-1].permute(0, 3, 1, 2), False
    size = b * s * h * d
    return memory(size + 2 * GUARD)[GUARD : GUARD + size].view(shape), False

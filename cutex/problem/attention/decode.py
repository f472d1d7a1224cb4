"""Attention of few queries to caches as its ladder computes it: the sizes of an AttentionProblem,
whose keys are in a cache, contiguous or in pages, with a length for each sequence."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.peers import flash_attention, torch_attention
from cutex.problem.attention import AttentionProblem
from cutex.problem.protocol import Check, Launch, PeerKernel, Sizes

if TYPE_CHECKING:
    import torch

    from cutex.problem.attention.case import AttentionCase

MOST_PARTS = 528  # places for parts of units: two for each CTA of a grid (splits.py)
ROWS = 64, 128  # packed rows of a unit: the fewest and the most


def sizes_of(batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int) -> Sizes:
    return {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads,
        "heads_kv": heads_kv, "head_dim": 128, "head_dim_v": 128,
    }  # fmt: skip


def _cudnn(problem: DecodeProblem) -> tuple[Launch, str]:
    if problem.ragged or problem.page_size:
        raise ValueError("torch gives cuDNN no lengths and no pages")
    forward, version = torch_attention.cudnn(
        replace(problem, causal=problem.causal and problem.seqlen_q > 1)
    )

    def launch(q: Any, k: Any, v: Any, lengths: Any, out: Any, lse: Any) -> object:
        return forward(q, k, v, out, lse)

    return launch, version


def _fa4(problem: DecodeProblem) -> tuple[Launch, str]:
    attend, version = flash_attention.varlen()
    more = {"causal": problem.causal, "window_size": problem.bounds, "softcap": problem.softcap}

    def launch(q: Any, k: Any, v: Any, lengths: Any, *rest: Any) -> object:
        table = {"page_table": rest[0]} if problem.page_size else {}
        return attend(q, k, v, seqused_k=lengths, **table, **more)

    return launch, version


@dataclass(frozen=True)
class DecodeProblem(AttentionProblem):
    """O = softmax(Q K^T / sqrt(head_dim)) V, and LSE, of `seqlen_q` queries a sequence, the last of
    which is the last key.

    page_size: keys of a page, in which the cache is; 0 for a contiguous one. ragged: lengths are
    spread evenly by their logarithm from seqlen_k / 64 to seqlen_k; else all are seqlen_k.
    """

    op = "attention_decode"
    title = "attention to caches"
    about = "the ladder of attention to caches of keys and values"
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        # many sequences, for which packed heads suffice, and one, whose keys have to be cut
        "cuda": (sizes_of(16, 1, 8192, 32, 8), sizes_of(1, 1, 65536, 32, 8)),
        "sim": ({**sizes_of(2, 2, 300, 4, 2), "head_dim": 64, "head_dim_v": 64},),
        "sweep": (sizes_of(1, 1, 65536, 32, 8), sizes_of(64, 1, 4096, 64, 8)),
        "confirm": (sizes_of(16, 1, 8192, 32, 8), sizes_of(1, 1, 65536, 32, 8)),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "cudnn": PeerKernel("cuDNN (torch)", _cudnn),
        "fa4": PeerKernel("FlashAttention-4", _fa4, 40.0),
    }

    page_size: int = 0
    ragged: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.varlen:
            raise ValueError("varlen: the sequences of a cache have lengths; take ragged")
        if self.page_size < 0:
            raise ValueError(f"page_size={self.page_size}: at least 1, or 0 for no pages")

    # ---- lengths

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The keys of each sequence."""
        if not self.ragged:
            return (self.seqlen_k,) * self.batch
        r = random.Random(self.seed)
        found = [self.seqlen_k, *(self.seqlen_k * 64 ** -r.random() for _ in range(self.batch - 1))]
        return tuple(max(1, round(x)) for x in found)

    @cached_property
    def pairs(self) -> int:
        alone = replace(self, batch=1, ragged=False)
        if not self.ragged:
            return (
                super(DecodeProblem, alone).pairs * self.batch if self.batch > 1 else super().pairs
            )
        return sum(replace(alone, seqlen_k=n).pairs for n in self.lengths)

    @property
    def bytes(self) -> int:
        """The least traffic: Q, K and V read once, O and LSE written once."""
        rows = self.batch * self.seqlen_q * self.heads_q + sum(self.lengths) * self.heads_kv
        lse = 4 * self.batch * self.seqlen_q * self.heads_q
        return 2 * rows * (self.head_dim + self.head_dim_v) + lse

    def grid(self, tile: Sequence[int]) -> int:
        pack = self.heads_q // self.heads_kv
        return self.batch * self.heads_kv * -(-self.seqlen_q * pack // tile[0])

    def work(self, config: Any) -> tuple[float, float]:
        return config.work(self)

    def tile_steps(self, config: Any) -> tuple[int, ...]:
        return ()

    # ---- data and judgement

    @cached_property
    def case(self) -> AttentionCase:
        case = super().case
        return replace(case, used_k=self.lengths)

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """The inputs q, k_cache, v_cache, the lengths and, with pages, the page table."""
        import torch

        given = self.case.inputs(device, copy)
        q, k, v, lengths = given.q, given.k, given.v, given.seqused_k
        assert lengths is not None
        if not self.page_size:
            return q, k, v, lengths
        pages = -(-self.seqlen_k // self.page_size)
        generator = torch.Generator().manual_seed(self.seed + copy)
        table = torch.randperm(self.batch * pages, generator=generator).to(device, torch.int32)
        table = table.view(self.batch, pages)
        return q, *(self._in_pages(x, table) for x in (k, v)), lengths, table

    def _in_pages(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        import torch

        rows = table.shape[1] * self.page_size
        x = torch.nn.functional.pad(
            x, (0, 0, 0, 0, 0, rows - x.shape[1]), value=torch.nan
        ).unflatten(1, (-1, self.page_size))
        pages = torch.empty_like(x.flatten(0, 1))
        pages[table.flatten().long()] = x.flatten(0, 1)
        return pages

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare O and LSE with float64; see cutex/problem/attention/check.py."""
        from cutex.problem.attention.case import Inputs

        q, k, v, lengths, *table, out, lse = tensors
        if table:
            k, v = (x[table[0].long()].flatten(1, 2)[:, : self.seqlen_k] for x in (k, v))
        return self.case.check(Inputs(q, k, v, seqused_k=lengths), out, lse)

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        import torch

        left, right = self.bounds
        numbers = {
            "scale": self.case.softmax_scale,
            "softcap": self.softcap,
            "lo": None if left is None else -left,
            "hi": right,
            "num_splits": 0,
        }
        held: dict[torch.device, dict[str, torch.Tensor]] = {}

        def launch(*tensors: torch.Tensor) -> object:
            q, k, v, lengths, *table, out, lse = tensors
            if q.device not in held:
                units = self.batch * self.heads_q * -(-self.seqlen_q * self.heads_q // ROWS[0])
                sums = MOST_PARTS * ROWS[1] * (self.head_dim_v + 1)
                held[q.device] = {
                    "sums": torch.full((sums,), torch.nan, device=q.device),
                    "flags": torch.zeros(units, dtype=torch.int32, device=q.device),
                }
            given = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "seqused_k": lengths}
            given |= dict(zip(("page_table",), table, strict=False))
            values = {**given, **held[q.device], **numbers}
            return kernel(*(values[name] for name in arguments))

        return launch

    def reduced(self) -> DecodeProblem:
        less = min(self.seqlen_k, 300 + self.seqlen_k % 64)
        return replace(
            self,
            batch=min(self.batch, 2),
            seqlen_q=min(self.seqlen_q, 8),
            seqlen_k=less,
            heads_q=min(self.heads_q // self.heads_kv, 8),
            heads_kv=1,
        )

    # ---- names and options

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        pages = f" pages {sizes['page_size']}" if sizes.get("page_size") else ""
        return super().size_name(sizes) + pages + " ragged" * bool(sizes.get("ragged"))

    @property
    def series(self) -> dict[str, int]:
        if self.seqlen_q > 1 or self.window or self.softcap or self.ragged or self.page_size:
            return {}
        title = f"keys, {self.batch} sequences, {self.heads_q}/{self.heads_kv} heads"
        return {f"{title}, head dim {self.head_dim}": self.seqlen_k}

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        """Add --decode and its own options and, unless the parser has them, attention's."""
        alone = "--size" not in group._option_string_actions
        what = "the sizes are of queries and of a cache of keys"
        group.add_argument("--decode", action="store_true", default=alone or None, help=what)
        group.add_argument("--page-size", type=int, metavar="N", help="keys of a page; 0: no pages")
        group.add_argument(
            "--ragged", action="store_true", default=None, help="lengths from 1/64 of SEQLEN up"
        )
        if alone:
            super().add_options(group)

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        if not args.decode:
            return []
        more = {name: x for name in ("page_size", "ragged") if (x := getattr(args, name))}
        return [{**sizes, **more} for sizes in cls._sizes_given(args)]

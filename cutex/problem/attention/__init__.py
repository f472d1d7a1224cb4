"""Attention forward as the ladder computes it: sizes, band and peers; data, reference and tolerance
are those of an AttentionCase."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.peers import flash_attention, flash_attention_3, in_triton, torch_attention
from cutex.problem.attention.families import DTYPES, INITS
from cutex.problem.protocol import Check, Launch, PeerKernel, Problem, Sizes
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

    from cutex.problem.attention.case import AttentionCase

MOST_WARPS = 12 * 160  # more than any GPU has that compute rows
TOKENS, WIDTH = 16384, 2048  # batch * seqlen and heads * head_dim of a case that is timed


def sizes_of(seqlen: int, head_dim: int, causal: bool) -> Sizes:
    return {
        "batch": TOKENS // seqlen, "seqlen_q": seqlen, "seqlen_k": seqlen,
        "heads_q": WIDTH // head_dim, "heads_kv": WIDTH // head_dim,
        "head_dim": head_dim, "head_dim_v": head_dim, "causal": causal,
    }  # fmt: skip


def _both(head_dim: int, *seqlens: int) -> tuple[Sizes, ...]:
    return tuple(sizes_of(n, head_dim, causal) for causal in (False, True) for n in seqlens)


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """O = softmax(Q K^T / sqrt(head_dim)) V, and LSE, of sequences of equal length.

    window: "" or how many keys a query sees to its left and right, as "127,0"; "-" for all. varlen:
    sequences are packed one after the other, and separated by cu_seqlens. Raises ValueError for
    values that are not valid together.
    """

    op = "attention"
    title = "attention"
    about = "the attention forward ladder, O = softmax(Q K^T / sqrt(head dim)) V"
    dtypes = DTYPES
    inits = INITS
    size_options = ("--size", "--window")
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": (sizes_of(4096, 128, True),),
        "sim": ({**sizes_of(TOKENS, 128, True), "seqlen_q": 256, "seqlen_k": 256, "heads_q": 2,
                 "heads_kv": 1},),
        "sweep": (*_both(128, 1024, 2048, 4096, 8192, 16384), *_both(64, 4096, 16384)),
        "confirm": _both(128, 4096),
    }  # fmt: skip
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "cudnn": PeerKernel("cuDNN (torch)", torch_attention.cudnn),
        "fa3": PeerKernel("FlashAttention-3", flash_attention_3.forward),
        "fa4": PeerKernel("FlashAttention-4", flash_attention.forward, 40.0),
        "triton": PeerKernel("Triton", in_triton.peer("attention", "forward"), 30.0),
    }
    confirm_peers = ("cudnn", "fa4")
    variants: ClassVar[Mapping[str, str]] = {
        "--backward": "attention_backward", "--decode": "attention_decode",
    }  # fmt: skip
    data_steers = True  # how often a reference of the softmax moves
    wave_tile = (128,)

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: str = ""
    softcap: float = 0.0
    varlen: bool = False
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim",
                     "head_dim_v"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: every size must be at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q={self.heads_q}: must be a multiple of heads_kv={self.heads_kv}"
            )
        if not 0 <= self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: must be positive, or 0 for none")
        for name, known in (("dtype", DTYPES), ("init", INITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        self.bounds  # noqa: B018 (raises)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The window's (left, right), None where it is open."""
        if not self.window:
            return None, None
        try:
            left, right = (None if x == "-" else int(x) for x in self.window.split(","))
        except ValueError:
            left = right = -1
        if any(x is not None and x < 0 for x in (left, right)):
            raise ValueError(
                f"window {self.window!r}: takes LEFT,RIGHT, each a number from 0 up or - for all"
            )
        return left, right

    @cached_property
    def case(self) -> AttentionCase:
        """The AttentionCase of this problem, with data, a reference and a tolerance. Loads
        torch."""
        from cutex.problem.attention.case import AttentionCase

        lengths: dict[str, Any] = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k}
        if self.varlen:
            lengths = {f"lengths_{x}": (lengths[f"seqlen_{x}"],) * self.batch for x in "qk"}
        shared = ("batch", "heads_q", "heads_kv", "head_dim", "head_dim_v", "causal", "softcap",
                  "dtype", "init", "seed")  # fmt: skip
        given = {name: getattr(self, name) for name in shared}
        return AttentionCase(**given, **lengths, window=self.bounds)

    # ---- parts of the work

    @cached_property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it sees, over the batch, of one head.

        Of a causal square it is half of all pairs, as the field counts it, which leaves out half of
        the diagonal.
        """
        left, right = self.bounds
        right = 0 if self.causal else right
        n, m = self.seqlen_q, self.seqlen_k
        if self.causal and left is None and n == m:
            return self.batch * n * n // 2
        if left is None and right is None:
            return self.batch * n * m
        seen = 0
        for q in range(n):
            last = m - 1 if right is None else min(m - 1, q + m - n + right)
            first = 0 if left is None else max(0, q + m - n - left)
            seen += max(0, last - first + 1)
        return self.batch * seen

    @property
    def flops(self) -> int:
        return 2 * self.pairs * self.heads_q * (self.head_dim + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """The least traffic with global memory: Q, K and V read once, O and LSE written once."""
        rows = self.seqlen_q * self.heads_q + self.seqlen_k * self.heads_kv
        lse = 4 * self.seqlen_q * self.heads_q
        return self.batch * (2 * rows * (self.head_dim + self.head_dim_v) + lse)

    @property
    def needs(self) -> Work:
        """Beside the two products, an exponential of each score."""
        scores = self.flops / 2 / (self.head_dim + self.head_dim_v)
        return replace(super().needs, exponentials=scores)

    def grid(self, tile: Sequence[int]) -> int:
        return self.batch * self.heads_q * -(-self.seqlen_q // tile[0])

    def steps(self, tile: Sequence[int], step_flops: int) -> int:
        return -(-self.flops // (self.grid(tile) * step_flops))

    def tile(self, config: Any) -> tuple[int]:
        return (config.tile_m,)

    def work(self, config: Any) -> tuple[float, float]:
        flops = config.tile_flops(self)
        alike = min(flops) == max(flops)
        return sum(flops), flops[0] / getattr(config, "ctas", 1) * alike

    def tile_steps(self, config: Any) -> tuple[int, ...]:
        return tuple(config.key_blocks(self))

    def recorded(self, config: Any) -> Any:
        return config.uncut() if getattr(config, "is_cut", False) else config

    def with_steps(self, config: Any, steps: int, tiles: int = 1) -> AttentionProblem:
        rows = config.tile_m // getattr(config, "pack", 1)
        brief = replace(self, batch=1, seqlen_q=rows, seqlen_k=steps * config.tile_n)
        return replace(brief, batch=-(-tiles // len(brief.tile_steps(config))))

    # ---- data and judgement

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """The inputs q, k, v and, for packed sequences, cu_seqlens_q and cu_seqlens_k."""
        return tuple(x for x in self.case.inputs(device, copy) if x is not None)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
        """The outputs O and LSE."""
        return self.case.outputs(device)

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare O and LSE with float64; see cutex/problem/attention/check.py."""
        from cutex.problem.attention.case import Inputs

        *inputs, out, lse = tensors
        return self.case.check(Inputs(*inputs), out, lse)

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        import torch

        left, right = self.bounds
        numbers = {
            "scale": self.case.softmax_scale,
            "softcap": self.softcap,
            "lo": None if left is None else -left,
            "hi": right,
            "max_seqlen_q": self.seqlen_q,
        }
        counters: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        warps = MOST_WARPS if "parts" in arguments else 0
        kept = warps * 32 * (self.head_dim_v // 2 + 8)

        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> object:
            *lengths, out, lse = rest
            if q.device not in counters:
                words = torch.zeros(2 + warps, dtype=torch.int32, device=q.device)
                counters[q.device] = words, torch.empty(kept, device=q.device)
            words, parts = counters[q.device]
            given = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "counter": words, "parts": parts}
            ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=False))
            values = {**given, **ends, **numbers}
            return kernel(*(values[name] for name in arguments))

        return launch

    def exact(self) -> AttentionProblem:
        """This problem itself: exponentials are exact on no data."""
        return self

    def reduced(self) -> AttentionProblem:
        def less(size: int, most: int) -> int:
            return size if size <= most else most + size % most

        return replace(
            self,
            batch=min(self.batch, 2),
            seqlen_q=less(self.seqlen_q, 256),
            seqlen_k=less(self.seqlen_k, 256),
            heads_q=self.heads_q // self.heads_kv,
            heads_kv=1,
        )

    # ---- names and options

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        """The sizes as --size takes them, and the options that are set: "4,4096,16,128 causal"."""
        words = [str(sizes["batch"])]
        for one, other in (("seqlen_q", "seqlen_k"), ("heads_q", "heads_kv"),
                           ("head_dim", "head_dim_v")):  # fmt: skip
            alike = sizes[one] == sizes[other]
            words.append(f"{sizes[one]}" if alike else f"{sizes[one]}/{sizes[other]}")
        more = [name for name in ("causal", "varlen") if sizes.get(name)]
        more += [f"{name} {sizes[name]}" for name in ("window", "softcap") if sizes.get(name)]
        return " ".join([",".join(words), *more])

    @property
    def series(self) -> dict[str, int]:
        if self.seqlen_q != self.seqlen_k or self.window or self.softcap or self.varlen:
            return {}
        kind = "causal" if self.causal else "full"
        return {f"sequence length, {kind}, head dim {self.head_dim}": self.seqlen_q}

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        usual, simulated = (cls.size_name(cls.cases[x][0]) for x in ("cuda", "sim"))
        group.add_argument(
            "--size",
            action="append",
            metavar="BATCH,SEQLEN,HEADS,HEAD_DIM",
            help="may be given several times; SEQLEN as 1/4096 of queries and keys, HEADS as 32/4 "
            "of Q and KV, HEAD_DIM as 192/128 of QK and V where they differ; "
            f"default: {usual}, simulated {simulated}",
        )
        for name, what in (("causal", "of every --size"), ("varlen", "sequences are packed")):
            group.add_argument(f"--{name}", action="store_true", default=None, help=what)
        group.add_argument("--window", metavar="LEFT,RIGHT", help="keys that are seen; - for all")
        group.add_argument("--softcap", type=float, metavar="X")

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        if any(getattr(args, name.removeprefix("--"), None) for name in cls.variants):
            return []  # those of another operator
        return cls._sizes_given(args)

    @classmethod
    def _sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        names = ("causal", "varlen", "window", "softcap")
        more = {name: x for name in names if (x := getattr(args, name)) is not None}
        if more and not args.size:
            raise ValueError(f"--{next(iter(more))} is of what --size gives: give that too")
        return [{**_parsed(text), **more} for text in args.size or ()]


def _parsed(text: str) -> Sizes:
    try:
        batch, *pairs = text.split(",")
        seqlen, heads, head_dim = (tuple(map(int, x.split("/"))) for x in pairs)
        (seqlen_q, seqlen_k), (heads_q, heads_kv), (d, dv) = (
            x * 2 if len(x) == 1 else x for x in (seqlen, heads, head_dim)
        )
        return {
            "batch": int(batch), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_q,
            "heads_kv": heads_kv, "head_dim": d, "head_dim_v": dv,
        }  # fmt: skip
    except ValueError:
        raise ValueError(
            f"--size {text}: takes BATCH,SEQLEN,HEADS,HEAD_DIM, as 4,4096,16,128 or "
            "1,1/8192,32/4,192/128"
        ) from None

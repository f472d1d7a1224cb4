"""Attention backward as its ladder computes it: the sizes of an AttentionProblem, with dO, O and
LSE as further inputs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.peers import flash_attention, torch_attention
from cutex.problem.attention import AttentionProblem, sizes_of
from cutex.problem.protocol import Check, Launch, PeerKernel, Sizes
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

INPUTS = ("q", "k", "v", "o", "do", "lse")
OUTPUTS = ("dq", "dk", "dv")
SHARES = 132  # of the last tiles of keys, at most
TILE = 64  # rows of a tile of the sums of dQ on Hopper; on Blackwell up to twice as many


@dataclass(frozen=True)
class BackwardProblem(AttentionProblem):
    """dQ, dK and dV of O = softmax(Q K^T / sqrt(head_dim)) V, given dO, O and LSE."""

    op = "attention_backward"
    title = "attention backward"
    about = "the attention backward ladder, dQ, dK and dV given dO"
    data_steers = False
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        **AttentionProblem.cases,
        "sweep": (sizes_of(4096, 128, True), sizes_of(16384, 128, False)),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "cudnn": PeerKernel("cuDNN (torch)", torch_attention.cudnn_backward),
        "fa4": PeerKernel("FlashAttention-4", flash_attention.backward, 60.0),
        "flash": PeerKernel("torch (FlashAttention-2)", torch_attention.flash_backward),
    }

    @property
    def flops(self) -> int:
        """The FLOPs of five products, one of which is Q K^T again."""
        return 2 * self.pairs * self.heads_q * (3 * self.head_dim + 2 * self.head_dim_v)

    @property
    def bytes(self) -> int:
        """The least traffic: Q, K, V, O, dO and LSE read once, dQ, dK and dV written once."""
        d, dv = self.head_dim, self.head_dim_v
        of_q = self.seqlen_q * self.heads_q * (2 * (2 * d + 2 * dv) + 4)
        return self.batch * (of_q + self.seqlen_k * self.heads_kv * 4 * (d + dv))

    @property
    def needs(self) -> Work:
        """Beside the five products, an exponential of each score."""
        scores = self.flops / 2 / (3 * self.head_dim + 2 * self.head_dim_v)
        return replace(super().needs, exponentials=scores)

    def grid(self, tile: Sequence[int]) -> int:
        return self.batch * self.heads_kv * -(-self.seqlen_k // tile[0])

    def tile(self, config: Any) -> tuple[int]:
        return (config.tile_n,)

    def work(self, config: Any) -> tuple[float, float]:
        return float(self.flops), 0.0

    def tile_steps(self, config: Any) -> tuple[int, ...]:
        return ()

    # ---- data and judgement

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """The inputs q, k, v, o, do and lse and, for packed sequences, cu_seqlens_q and
        cu_seqlens_k."""
        import torch

        from cutex.problem.attention.reference import attend

        case = self.case
        given = case.inputs(device, copy)
        o, lse = case.outputs(device)
        do = torch.full_like(o, torch.nan)
        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy + 1)
        for s in case.sequences:
            q, k, v = (case.rows(x, s, side) for x, side in zip(given[:3], "qkk", strict=True))
            of_o, of_lse = attend(case, q, k, v, None, exact=False)
            case.rows(o, s, "q").copy_(of_o)
            case.lse_rows(lse, s).copy_(of_lse)
            case.rows(do, s, "q").normal_(generator=generator)
        lengths = [x for x in given[3:5] if x is not None]
        return (*given[:3], o, do, lse, *lengths)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
        """The outputs dQ, dK and dV."""
        import torch

        given = self.case.inputs(device)[:3]
        return tuple(torch.full(x.shape, torch.nan, dtype=x.dtype, device=device) for x in given)

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare dQ, dK and dV with float64; see cutex/problem/attention/gradients.py."""
        from cutex.problem.attention.gradients import check

        count = len(tensors) - len(OUTPUTS)
        return check(self.case, tensors[: len(INPUTS)], tensors[count:])

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:

        left, right = self.bounds
        numbers = {
            "scale": self.case.softmax_scale,
            "softcap": self.softcap,
            "lo": None if left is None else -left,
            "hi": right,
            "max_seqlen_q": self.seqlen_q,
            "max_seqlen_k": self.seqlen_k,
        }
        held: dict[torch.device, dict[str, torch.Tensor]] = {}

        def launch(*tensors: torch.Tensor) -> object:
            count = len(tensors) - len(OUTPUTS)
            given = dict(zip(INPUTS, tensors, strict=False))
            lengths = tensors[len(INPUTS) : count]
            given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=False))
            given |= dict(zip(OUTPUTS, tensors[count:], strict=True))
            device = tensors[0].device
            if device not in held:
                held[device] = self.passed_on(device)
            values = {**given, **held[device], **numbers}
            return kernel(*(values[name] for name in arguments))

        return launch

    def passed_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What the kernels pass on: LSE and delta of rows, for which Blackwell's take 16 bytes, and
        the sums of dQ, by tiles."""
        import torch

        rows, block, dims = self.seqlen_q, 2 * TILE, self.head_dim + self.head_dim_v
        tiles = self.batch * -(-rows // block)
        if self.varlen:
            tiles = self.batch * rows // block + self.batch
        tiles *= 2 * self.heads_q
        return {
            "stats": torch.full((tiles, 4 * TILE), torch.nan, device=device),
            "dq_sums": torch.full((tiles, TILE * self.head_dim), torch.nan, device=device),
            "counter": torch.zeros(2 + 8 * SHARES, dtype=torch.int32, device=device),
            "partials": torch.full((SHARES, 2 * TILE * dims), torch.nan, device=device),
            "zeroed": torch.zeros(self.batch * self.heads_kv, dtype=torch.int32, device=device),
            "ranks": torch.zeros((self.batch + 1, 3), dtype=torch.int32, device=device),
        }

    # ---- options

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        """Add --backward and, unless the parser has them, attention's own options."""
        alone = "--size" not in group._option_string_actions
        what = "the sizes are of attention's gradient"
        group.add_argument("--backward", action="store_true", default=alone or None, help=what)
        if alone:
            super().add_options(group)

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        return cls._sizes_given(args) if args.backward else []

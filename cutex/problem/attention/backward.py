"""Attention backward as its ladder computes it: the sizes of an AttentionProblem, with dO, O and
LSE as further inputs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.problem.attention import AttentionProblem, sizes_of
from cutex.problem.protocol import Check, Launch, PeerKernel, Sizes
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

INPUTS = ("q", "k", "v", "o", "do", "lse")
OUTPUTS = ("dq", "dk", "dv")
TILE = 64  # rows of a tile of the sums of dQ


def _by_autograd(forward: Callable[..., Any]) -> Launch:
    """The backward of `forward`, a differentiable function of q, k and v, whose graph is built at
    the first launch on these inputs."""
    import torch

    graphs: dict[int, Any] = {}

    def launch(q: Any, k: Any, v: Any, o: Any, do: Any, *rest: Any) -> tuple[Any, ...]:
        if q.data_ptr() not in graphs:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = forward(*leaves)
            graphs[q.data_ptr()] = leaves, out[0] if isinstance(out, tuple) else out
        leaves, out = graphs[q.data_ptr()]
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    return launch


def _in_torch(problem: AttentionProblem, name: str) -> Launch:
    """The backward of torch's scaled_dot_product_attention by one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if problem.varlen or problem.window or problem.softcap:
        raise ValueError("torch gives its backends no varlen, window or softcap")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise ValueError("torch aligns causal masks top left")
    grouped = problem.heads_q != problem.heads_kv

    def forward(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend[name]):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    return _by_autograd(forward)


def _cudnn(problem: AttentionProblem) -> tuple[Launch, str]:
    import torch

    version = f"cuDNN {torch.backends.cudnn.version()} in torch {torch.__version__}"
    return _in_torch(problem, "CUDNN_ATTENTION"), version


def _torch(problem: AttentionProblem) -> tuple[Launch, str]:
    import torch

    return _in_torch(problem, "FLASH_ATTENTION"), f"torch {torch.__version__}"


def _fa4(problem: AttentionProblem) -> tuple[Launch, str]:
    from flash_attn.cute import flash_attn_func

    if problem.varlen:
        raise ValueError("varlen: compared with dense sequences only")
    more = {"causal": problem.causal, "window_size": problem.bounds, "softcap": problem.softcap}
    launch = _by_autograd(lambda q, k, v: flash_attn_func(q, k, v, **more))
    return launch, f"flash-attn-4 {metadata.version('flash-attn-4')}"


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
        "cudnn": PeerKernel("cuDNN (torch)", _cudnn),
        "fa4": PeerKernel("FlashAttention-4", _fa4, 60.0),
        "flash": PeerKernel("torch (FlashAttention-2)", _torch),
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
        """What the kernels pass on: LSE and delta of rows, and the sums of dQ, by tiles."""
        import torch

        rows = self.seqlen_q
        tiles = self.batch * -(-rows // TILE)
        if self.varlen:
            tiles = self.batch * rows // TILE + self.batch
        tiles *= self.heads_q
        return {
            "stats": torch.full((tiles, 2 * TILE), torch.nan, device=device),
            "dq_sums": torch.full((tiles, TILE * self.head_dim), torch.nan, device=device),
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

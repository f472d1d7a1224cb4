"""torch's backends of attention: cuDNN, and FlashAttention-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutex.peers.attention_sizes import AttentionSizes, by_autograd


def cudnn(problem: AttentionSizes) -> tuple[Callable[..., Any], str]:
    """cuDNN through torch, whose operator takes (batch, heads, rows, D): views of q, k and v."""
    import torch

    if problem.varlen or problem.window or problem.softcap:
        raise ValueError("torch gives cuDNN no varlen, window or softcap")
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise ValueError("torch aligns cuDNN's causal mask top left")

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, problem.causal
        )
        return found[0].transpose(1, 2), found[1].view(lse.shape)

    return launch, _cudnn_version()


def cudnn_backward(problem: AttentionSizes) -> tuple[Callable[..., Any], str]:
    return _backward(problem, "CUDNN_ATTENTION"), _cudnn_version()


def flash_backward(problem: AttentionSizes) -> tuple[Callable[..., Any], str]:
    import torch

    return _backward(problem, "FLASH_ATTENTION"), f"torch {torch.__version__}"


def _cudnn_version() -> str:
    import torch

    return f"cuDNN {torch.backends.cudnn.version()} in torch {torch.__version__}"


def _backward(problem: AttentionSizes, name: str) -> Callable[..., Any]:
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
        with sdpa_kernel(getattr(SDPBackend, name)):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=grouped
            )
        return out.transpose(1, 2)

    return by_autograd(forward)

"""FlashAttention-3's forward, as vLLM builds it: the operator `torch.ops._vllm_fa3_C.fwd`.

It comes with vllm; without, CUTEX_FA3 names the shared library that registers it. This build takes
packed sequences only: dense ones are views of q, k, v and O, with cu_seqlens made once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from cutex.peers.attention_sizes import AttentionSizes

LIBRARY = "CUTEX_FA3"  # of the environment: the file of a library with the operator


def forward(problem: AttentionSizes) -> tuple[Callable[..., Any], str]:
    """O and LSE of q, k, v and, for packed sequences, their cu_seqlens."""
    operator, version = _operator()
    return launch_of(problem, operator), version


def launch_of(problem: AttentionSizes, operator: Callable[..., Any]) -> Callable[..., Any]:
    """A launch of `operator`, which takes the arguments of this build's fwd, by place."""
    import torch

    left, right = (-1 if x is None else x for x in problem.bounds)
    if problem.causal:
        right = 0
    ends: dict[Any, tuple[Any, Any]] = {}

    def cu_seqlens(q: Any) -> tuple[Any, Any]:
        if q.device not in ends:
            counts = range(q.shape[0] + 1)
            ends[q.device] = tuple(
                torch.tensor([i * rows for i in counts], dtype=torch.int32, device=q.device)
                for rows in (problem.seqlen_q, problem.seqlen_k)
            )
        return ends[q.device]

    def launch(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
        *lengths, out, lse = rest
        cu_q, cu_k = lengths or cu_seqlens(q)
        packed = [x.flatten(0, -3) for x in (q, k, v, out)]
        found = operator(
            *packed[:3],
            *(None, None, None, packed[3]),  # k_new, v_new, q_v, out
            *(cu_q, cu_k, None, None, None),  # cu_seqlens_k_new, seqused_q, seqused_k
            *(problem.seqlen_q, problem.seqlen_k),
            *(None, None, None, None, None, None),  # pages, batch index, left pads, rotary
            *(None, None, None),  # scales of q, k, v
            q.shape[-1] ** -0.5,
            problem.causal,
            *(left, right, problem.softcap),
            True,  # rotary is interleaved
            None,  # the scheduler's metadata
            0,  # splits of the keys: its own choice
            None,  # pack_gqa: its own choice
            0,  # SMs left free
            None,  # sinks
            *(1, 0, None),  # context parallelism: one rank
        )
        heads_first = (
            found[1]
            if lengths
            else found[1].unflatten(1, (lse.shape[0], lse.shape[2])).transpose(0, 1)
        )
        return found[0].view(out.shape), heads_first

    return launch


def _operator() -> tuple[Callable[..., Any], str]:
    """The operator, and what it is from."""
    import torch

    if given := os.environ.get(LIBRARY):
        if not Path(given).is_file():
            raise ImportError(f"{LIBRARY}={given}: there is no such file")
        torch.ops.load_library(given)
        return torch.ops._vllm_fa3_C.fwd, f"FlashAttention-3 in {Path(given).name}"
    try:
        import_module("vllm.vllm_flash_attn")
    except ImportError:
        raise ImportError(
            f"vllm is not installed, whose build of FlashAttention-3 this runs; {LIBRARY} may name "
            "its library"
        ) from None
    return torch.ops._vllm_fa3_C.fwd, f"FlashAttention-3 in vllm {metadata.version('vllm')}"

"""Attention's forward in Triton: O = softmax(Q K^T / sqrt(D)) V, a program a block of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from cutex.peers.attention_sizes import AttentionSizes

LOG2E = 1.4426950408889634
HEAD_DIMS = (16, 32, 64, 128, 256)

TILES = [
    triton.Config({"BM": m, "BN": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3),
    )
]  # fmt: skip


@triton.autotune(TILES, key=["seqlen_q", "seqlen_k", "D", "CAUSAL"])
@triton.jit
def attend(
    q, k, v, o, lse, seqlen_q, seqlen_k, heads_q, group, scale,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h,
    D: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The online softmax: blocks of BN keys in turn, sums rescaled as the maximum grows.

    Causal: query i sees keys up to i + seqlen_k - seqlen_q. `scale` includes log2(e).
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    batch, head = tl.program_id(1) // heads_q, tl.program_id(1) % heads_q
    rows, keys, d = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    of = batch.to(tl.int64)
    q_at = q + of * q_b + head * q_h + rows.to(tl.int64)[:, None] * q_s + d[None, :]
    k_at = k + of * k_b + head // group * k_h + keys.to(tl.int64)[:, None] * k_s + d[None, :]
    v_at = v + of * v_b + head // group * v_h + keys.to(tl.int64)[:, None] * v_s + d[None, :]
    x = tl.load(q_at, mask=(rows < seqlen_q)[:, None], other=0.0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, D), tl.float32)
    end, whole = seqlen_k, seqlen_k // BN * BN
    if CAUSAL:
        shift = seqlen_k - seqlen_q
        end = max(0, min(seqlen_k, (block + 1) * BM + shift))
        whole = max(0, min(seqlen_k, block * BM + shift + 1)) // BN * BN
    for _ in range(0, whole, BN):  # all queries see all of these keys
        scores = tl.dot(x, tl.load(k_at).T) * scale
        high = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - high[:, None])
        factor = tl.exp2(top - high)
        total = total * factor + tl.sum(weights, 1)
        y = tl.load(v_at)
        sums = tl.dot(weights.to(y.dtype), y, sums * factor[:, None])
        top = high
        k_at += BN * k_s
        v_at += BN * v_s
    for start in range(whole, end, BN):
        there = start + keys < seqlen_k
        y = tl.load(k_at, mask=there[:, None], other=0.0)
        scores = tl.dot(x, y.T) * scale
        sees = there[None, :]
        if CAUSAL:
            sees = sees & (start + keys[None, :] <= rows[:, None] + shift)
        scores = tl.where(sees, scores, float("-inf"))
        high = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(high == float("-inf"), 0.0, high)  # of a query that sees no key
        weights = tl.exp2(scores - safe[:, None])
        factor = tl.exp2(top - safe)
        total = total * factor + tl.sum(weights, 1)
        y = tl.load(v_at, mask=there[:, None], other=0.0)
        sums = tl.dot(weights.to(y.dtype), y, sums * factor[:, None])
        top = high
        k_at += BN * k_s
        v_at += BN * v_s
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = o + of * o_b + head * o_h + rows.to(tl.int64)[:, None] * o_s + d[None, :]
    tl.store(o_at, sums.to(o.dtype.element_ty), mask=(rows < seqlen_q)[:, None])
    found = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) / 1.4426950408889634)
    lse_at = lse + (of * heads_q + head) * seqlen_q + rows
    tl.store(lse_at, found, mask=rows < seqlen_q)


def forward(problem: AttentionSizes) -> Callable[..., Any]:
    """A launch of q, k, v, O and LSE of dense sequences."""
    if problem.varlen or problem.window or problem.softcap:
        raise ValueError("this Triton kernel has no varlen, window or softcap")

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
               lse: torch.Tensor) -> None:  # fmt: skip
        (batch, seqlen_q, heads, head_dim), seqlen_k = q.shape, k.shape[1]
        if v.shape[-1] != head_dim or head_dim not in HEAD_DIMS:
            known = ", ".join(map(str, HEAD_DIMS))
            raise ValueError(f"head_dim={head_dim}: this Triton kernel takes one of {known}")
        strides = [s for x in (q, k, v, o) for s in x.stride()[:3]]
        attend[lambda c: (triton.cdiv(seqlen_q, c["BM"]), batch * heads)](
            q, k, v, o, lse, seqlen_q, seqlen_k, heads, heads // k.shape[2],
            head_dim**-0.5 * LOG2E, *strides, D=head_dim, CAUSAL=problem.causal,
        )  # fmt: skip

    return launch

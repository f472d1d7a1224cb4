"""Gradients of attention by their formulas, in torch's own operations in float32.

They hold all scores of a head, so they serve tensors on the CPU only, where launches are simulated
for an arch whose kernels have no backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutex.ops.attention.call import AttentionCall
from cutex.ops.device import simulated_arch

Index = tuple[Any, ...]


def takes(device: torch.device) -> bool:
    """Whether gradients on the device are computed so."""
    return device.type == "cpu" and simulated_arch() is not None


def gradients(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those of rows of no sequence are 0."""
    found = [torch.zeros(x.shape, dtype=torch.float32) for x in (call.q, call.k, call.v)]
    delta = (grad_out.float() * out.float()).sum(-1).transpose(-1, -2)
    if grad_lse is not None:
        delta = delta - grad_lse
    for at_q, at_k in sequences(call):
        of_lse = (*at_q[:-1], slice(None), at_q[-1])
        one = (call.q[at_q], call.k[at_k], call.v[at_k], grad_out[at_q], lse[of_lse], delta[of_lse])
        for total, at, x in zip(found, (at_q, at_k, at_k), _of_sequence(call, *one), strict=True):
            total[at] = x
    dq, dk, dv = (x.to(call.q.dtype) for x in found)
    return dq, dk, dv


def sequences(call: AttentionCall) -> Iterator[tuple[Index, Index]]:
    """The index of each sequence's rows in q, and in k and v."""

    def index(side: str, x: Tensor, b: int) -> Index:
        cu, used = (getattr(call, f"{kind}_{side}") for kind in ("cu_seqlens", "seqused"))
        first = 0 if cu is None else int(cu[b])
        end = x.shape[-3] if cu is None else int(cu[b + 1])
        end = end if used is None else first + int(used[b])
        return (slice(first, end),) if cu is not None else (b, slice(first, end))

    for b in range(call.batch):
        yield index("q", call.q, b), index("k", call.k, b)


def _of_sequence(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, do = (x.float() for x in (q, k, v, do))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    slope = torch.ones(())
    if call.softcap:
        capped = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * capped, 1 - capped.square()
    left, right = call.window
    place = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    hidden = torch.zeros_like(place, dtype=torch.bool)
    if left is not None:
        hidden |= place < -left
    if right is not None:
        hidden |= place > right
    # NOTE: a row without keys has an LSE of -inf
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    p = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0)
    ds = p * (torch.einsum("qhd,khd->hqk", do, v) - delta[..., None]) * slope * call.scale
    dq = torch.einsum("hqk,khd->qhd", ds, k)
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, do)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq, dk, dv

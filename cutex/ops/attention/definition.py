"""Gradients of attention by their formulas, in torch operations in float32.

They serve what no kernel computes: ALiBi's bias, and CPU tensors simulated for an arch whose
kernels have no backward. Scores are computed for a limited number of heads and rows at a time, to
save memory. Sequence lengths are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from cutex.ops.attention.call import AttentionCall
from cutex.ops.device import simulated_arch

Index = tuple[Any, ...]
CHUNK = 2**26  # scores at a time: 256 MB of each of five tensors


def takes(call: AttentionCall) -> bool:
    """Whether a call's gradients are computed here."""
    if call.score_mod is not None or call.mask_mod is not None:
        return False
    on_cpu = call.q.device.type == "cpu" and simulated_arch() is not None
    return on_cpu or call.alibi_slopes is not None


def gradients(
    call: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those of rows of no sequence are 0."""
    kind: dict[str, Any] = {"dtype": torch.float32, "device": call.q.device}
    found = [torch.zeros(x.shape, **kind) for x in (call.q, call.k, call.v)]
    delta = (grad_out.float() * out.float()).sum(-1).transpose(-1, -2)
    if grad_lse is not None:
        delta = delta - grad_lse
    slopes: Tensor | Iterator[None] = repeat(None)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
    for (at_q, at_k), mine in zip(sequences(call), slopes, strict=False):
        of_lse = (*at_q[:-1], slice(None), at_q[-1])
        one = (call.q[at_q], call.k[at_k], call.v[at_k], grad_out[at_q], lse[of_lse], delta[of_lse])
        into = [x[at] for x, at in zip(found, (at_q, at_k, at_k), strict=True)]
        for heads, rows in chunks(call, *into[:2]):
            _add_chunk(call, heads, rows, one, mine, into)
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


def chunks(call: AttentionCall, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The heads of k and the rows of q whose scores are computed at a time."""
    heads, heads_kv = call.heads
    group, rows, keys = heads // heads_kv, len(q), len(k)
    step = min(max(CHUNK // max(group * keys, 1), 1), max(rows, 1))
    of_heads = max(CHUNK // max(group * keys * step, 1), 1)
    for head in range(0, heads_kv, of_heads):
        for row in range(0, rows, step):
            yield slice(head, head + of_heads), slice(row, min(row + step, rows))


def _add_chunk(
    call: AttentionCall,
    of: slice,
    rows: slice,
    one: tuple[Tensor, ...],
    slopes: Tensor | None,
    into: list[Tensor],
) -> None:
    """Add the contribution of some rows and heads of a sequence.

    one: its q, k, v, grad_out (rows, heads, D), LSE and delta (heads, rows). into: its gradients.
    """
    group = call.heads[0] // call.heads[1]
    heads = slice(of.start * group, of.stop * group)
    seqlen_q, seqlen_k = len(one[0]), len(one[1])
    q, do = (x[rows, heads].float() for x in (one[0], one[3]))
    k, v = (x[:, of].float().repeat_interleave(group, 1) for x in one[1:3])
    lse, delta = (x[heads, rows] for x in one[4:])
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    slope = None
    if call.softcap:
        capped = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * capped, 1 - capped.square()
    keys = torch.arange(seqlen_k, device=q.device)
    queries = torch.arange(rows.start, rows.stop, device=q.device)
    place = keys - queries[:, None] - (seqlen_k - seqlen_q)  # (rows, keys)
    if slopes is not None:
        scores = scores - slopes[heads, None, None] * place.abs()
    # NOTE: a row without keys has an LSE of -inf
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    p = torch.exp(scores - lse[..., None]).masked_fill(_hidden(call, place), 0.0)
    ds = p * (torch.einsum("qhd,khd->hqk", do, v) - delta[..., None]) * call.scale
    ds = ds if slope is None else ds * slope
    into[0][rows, heads] += torch.einsum("hqk,khd->qhd", ds, k)
    for found, x, y in ((into[1], ds, q), (into[2], p, do)):
        found[:, of] += torch.einsum("hqk,qhd->khd", x, y).unflatten(1, (-1, group)).sum(2)


def _hidden(call: AttentionCall, place: Tensor) -> Tensor:
    """Whether a key at `place`, counted from the one on the query's diagonal, is masked."""
    left, right = call.window
    hidden = torch.zeros_like(place, dtype=torch.bool)
    if left is not None:
        hidden |= place < -left
    if right is not None:
        hidden |= place > right
    return hidden

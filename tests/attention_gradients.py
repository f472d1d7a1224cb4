"""Gradients of attention in float64, by autograd, and their comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.problem.attention.case import AttentionCase, Inputs


def definition(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O and LSE of all sequences, as the case lays them out, by autograd's own operations; zeros in
    rows that belong to no sequence."""
    q, k, v, sink = inputs.q, inputs.k, inputs.v, inputs.sink
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    lse = torch.zeros(case.outputs()[1].shape, dtype=torch.float64)
    group = case.heads_q // case.heads_kv
    for s in case.sequences:
        a, b, c = (case.rows(x, s, side) for x, side in ((q, "q"), (k, "k"), (v, "k")))
        b, c = (x.repeat_interleave(group, 1) for x in (b, c))
        scores = torch.einsum("qhd,khd->hqk", a, b) * case.softmax_scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        offset = torch.arange(s.keys) - torch.arange(s.queries)[:, None] - (s.keys - s.queries)
        lo, hi = case.band
        hidden = torch.zeros_like(offset, dtype=torch.bool)
        hidden |= offset < lo if lo is not None else hidden
        hidden |= offset > hi if hi is not None else hidden
        scores = scores.masked_fill(hidden, -1e30)
        column = torch.full((*scores.shape[:2], 1), -1e29, dtype=torch.float64)
        if sink is not None:
            column = sink.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, column), -1)
        p = scores.softmax(-1)[..., : s.keys].masked_fill(hidden, 0.0)
        of_out, of_lse = torch.zeros_like(out), torch.zeros_like(lse)
        case.rows(of_out, s, "q").copy_(torch.einsum("hqk,khd->qhd", p, c))
        case.lse_rows(of_lse, s).copy_(scores.logsumexp(-1).clamp(min=-1e28))
        out, lse = out + of_out, lse + of_lse
    return out, lse


def wide(inputs: Inputs) -> Inputs:
    """Leaves in float64 with the same values; what belongs to no sequence is 0, not NaN."""
    leaves = [
        None if x is None else x.detach().double().nan_to_num().requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v, inputs.sink)
    ]
    return inputs._replace(q=leaves[0], k=leaves[1], v=leaves[2], sink=leaves[3])


def upstream(case: AttentionCase, seed: int, of_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Gaussian gradients of O and, if wanted, of LSE; NaN in rows of no sequence, where nobody may
    read them."""
    g = torch.Generator().manual_seed(seed)
    out, lse = case.outputs()
    for s in case.sequences:
        for x in (case.rows(out, s, "q"), case.lse_rows(lse, s)):
            x.copy_(torch.randn(x.shape, generator=g))
    return out, lse if of_lse else None


def far_off(got: Tensor, want: Tensor, unit: float) -> str | None:
    """A sentence if `got` is further from `want` than rounding P, dS and the result to steps of
    `unit` explains, in the norm of all, or in one element."""
    error = (got.double() - want).abs()
    if not error.isfinite().all():
        return f"{int((~error.isfinite()).sum())} elements are not finite"
    scale = want.square().mean().sqrt()
    norm, largest = error.square().mean().sqrt(), error.max()
    if norm > 1.5 * unit * scale:
        return f"off by {float(norm / scale):.3g} of the norm"
    if largest > 3 * unit * (want.abs().max() + scale):
        return f"an element is off by {float(largest):.3g} of {float(want.abs().max()):.3g}"
    return None

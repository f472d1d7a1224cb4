"""Gradients of attention in float64, by autograd, and their comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.shapes import Inputs, Sequence


def definition(case: AttentionCase, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """O and LSE of all sequences, as the case lays them out, by autograd's own operations; zeros in
    rows that belong to no sequence."""
    q, k, v = inputs.q, inputs.k, inputs.v
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    lse = torch.zeros(case.outputs()[1].shape, dtype=torch.float64)
    for s in case.sequences:
        a, b, c = (case.rows(x, s, side) for x, side in ((q, "q"), (k, "k"), (v, "k")))
        p, of_rows = probabilities(case, s, a, b, inputs.sink)
        of_out, of_lse = torch.zeros_like(out), torch.zeros_like(lse)
        c = c.repeat_interleave(case.heads_q // case.heads_kv, 1)
        case.rows(of_out, s, "q").copy_(torch.einsum("hqk,khd->qhd", p, c))
        case.lse_rows(of_lse, s).copy_(of_rows.clamp(min=-1e28))
        out, lse = out + of_out, lse + of_lse
    return out, lse


def probabilities(
    case: AttentionCase, s: Sequence, q: Tensor, k: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """P (heads, queries, keys) and LSE (heads, queries) of a sequence."""
    k = k.repeat_interleave(case.heads_q // case.heads_kv, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * case.softmax_scale
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
    return p, scores.logsumexp(-1)


def terms(case: AttentionCase, inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """The sums that dq, dk and dv would be if nothing in them cancelled: what a rounding error of
    dP, delta or P is a part of, however small the gradient itself. Of the sink's gradient, the root
    of the sum of the squares of the products dO * O that it is the sum of: O comes in 16 bits, and
    each product has a rounding error of its own."""
    found = {name: torch.zeros_like(getattr(inputs, name)) for name in "qkv"}
    of_sink = torch.zeros(case.heads_q, dtype=torch.float64)
    group = case.heads_q // case.heads_kv
    for s in case.sequences:
        q, do = (case.rows(x.detach(), s, "q") for x in (inputs.q, grad_out))
        k, v = (case.rows(x.detach(), s, "k") for x in (inputs.k, inputs.v))
        sink = None if inputs.sink is None else inputs.sink.detach()
        p, lse = probabilities(case, s, q, k, sink)
        if sink is not None:
            out = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))
            share = (sink.double()[:, None] - lse).exp()  # (heads, queries)
            of_sink += (share * (do * out).square().sum(-1).sqrt().T).square().sum(-1)
        q, k, v, do = q.abs(), *(x.abs().repeat_interleave(group, 1) for x in (k, v)), do.abs()
        dp = torch.einsum("qhd,khd->hqk", do, v)
        ds = case.softmax_scale * p * (dp + (p * dp).sum(-1, keepdim=True))
        case.rows(found["q"], s, "q").copy_(torch.einsum("hqk,khd->qhd", ds, k))
        for name, x, y in (("k", ds, q), ("v", p, do)):
            of_heads = torch.einsum("hqk,qhd->khd", x, y)
            case.rows(found[name], s, "k").copy_(of_heads.unflatten(1, (-1, group)).sum(2))
    return found | {"sink": of_sink.sqrt()}


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


def cancels(want: Tensor, terms: Tensor) -> bool:
    """Whether a gradient is far smaller than the terms that it is the sum of, as that of scores is
    0 where each query sees one key."""
    return bool(64 * want.square().mean() < terms.square().mean())


def far_off(got: Tensor, want: Tensor, unit: float, terms: Tensor | None = None) -> str | None:
    """A sentence if `got` is further from `want` than rounding P, dS and the result to steps of
    `unit` explains, in the norm of all, or in one element; `terms` are those of the function of
    that name, where the gradient may be far smaller than what it is the sum of."""
    if not want.numel():
        return None
    error = (got.double() - want).abs()
    if not error.isfinite().all():
        return f"{int((~error.isfinite()).sum())} elements are not finite"
    least = torch.zeros(()) if terms is None else terms.square().mean().sqrt()
    scale = want.square().mean().sqrt() + least
    norm, largest = error.square().mean().sqrt(), error.max()
    if norm > 1.5 * unit * scale:
        return f"off by {float(norm / scale):.3g} of the norm"
    if largest > 3 * unit * (want.abs().max() + scale):
        return f"an element is off by {float(largest):.3g} of {float(want.abs().max()):.3g}"
    return None

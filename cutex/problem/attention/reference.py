"""Attention by its definition, in torch: the reference that kernels are compared with.

`attend` computes it twice by the same code: in float64, which is the reference, and at the kernels'
own precision, whose error bounds that of a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cutex.problem.attention.shapes import AttentionShapes

CHUNK = 1 << 25  # scores at a time: 256 MB in float64


def attend(
    problem: AttentionShapes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """The O (rows, heads_q, head_dim_v) and LSE (heads_q, rows) of one sequence.

    q (rows, heads_q, head_dim), k (keys, heads_kv, head_dim), v (keys, heads_kv, head_dim_v).
    exact: all in float64. Otherwise at the kernels' precision: scores, exponentials and sums in
    float32, the probabilities rounded to the operands' dtype before they multiply v, O rounded to
    that dtype at the end. Both results are returned as float64.
    """
    wide = torch.float64 if exact else torch.float32
    rows, keys = q.shape[0], k.shape[0]
    out = torch.zeros(rows, problem.heads_q, problem.head_dim_v, dtype=torch.float64).to(q.device)
    lse = torch.full((problem.heads_q, rows), -torch.inf, dtype=torch.float64).to(q.device)
    if sink is not None:
        lse.copy_(sink[:, None].expand_as(lse))
    if keys == 0:
        return out, lse
    group = problem.heads_q // problem.heads_kv
    step = max(1, CHUNK // (group * keys))
    for head in range(problem.heads_kv):
        heads = slice(head * group, (head + 1) * group)
        kt, vt = k[:, head].to(wide).T, v[:, head].to(wide)  # (head_dim, keys), (keys, head_dim_v)
        for first in range(0, rows, step):
            chunk = slice(first, min(first + step, rows))
            mine = q[chunk, heads].to(wide).transpose(0, 1)  # (group, rows of the chunk, head_dim)
            scores = mine @ kt * problem.softmax_scale  # (group, rows of the chunk, keys)
            if problem.softcap:
                scores = (scores / problem.softcap).tanh() * problem.softcap
            hidden = ~visible(problem, chunk, rows, keys, q.device)
            scores.masked_fill_(hidden, -torch.inf)
            columns = scores
            if sink is not None:
                column = sink[heads].to(wide)[:, None, None].expand(*scores.shape[:2], 1)
                columns = torch.cat((scores, column), -1)
            largest = columns.amax(-1, keepdim=True)
            largest.masked_fill_(largest == -torch.inf, 0.0)  # rows that see nothing
            total = (columns - largest).exp().sum(-1, keepdim=True)
            p = (scores - largest).exp()
            product = (p if exact else p.to(q.dtype).to(wide)) @ vt
            o = torch.where(total > 0, product / total, 0.0)
            o = o if exact else o.to(q.dtype)
            out[chunk, heads] = o.transpose(0, 1).double()
            lse[heads, chunk] = (largest + total.log()).squeeze(-1).double()
    return out, lse


def visible(
    problem: AttentionShapes, chunk: slice, rows: int, keys: int, device: torch.device
) -> Tensor:
    """Whether each query of the chunk sees each key, (rows of the chunk, keys)."""
    queries = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    offset = torch.arange(keys, device=device) - queries - (keys - rows)
    lo, hi = problem.band
    seen = torch.ones_like(offset, dtype=torch.bool)
    if lo is not None:
        seen &= offset >= lo
    if hi is not None:
        seen &= offset <= hi
    return seen

"""Gradients of attention by their definition, in torch, and the comparison with a kernel's.

As in reference.py they are computed twice by the same code: in float64, which is the reference, and
at the kernels' own precision, whose error bounds that of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cutex.problem.attention.check import compare, truncation
from cutex.problem.attention.reference import CHUNK, attend, visible
from cutex.problem.protocol import Check

if TYPE_CHECKING:
    from cutex.problem.attention.case import AttentionCase

NAMES = ("dQ", "dK", "dV")


def gradients(
    problem: AttentionCase, inputs: Sequence[Tensor], *, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (rows, heads_q, head_dim), dK and dV of one sequence, in float64.

    inputs: q, k, v, o and do (rows, heads, dims), and lse (heads_q, rows). exact: all in float64, O
    and LSE computed anew. Otherwise at the kernels' precision: P and dS rounded to the operands'
    dtype before they are multiplied, the results at the end, everything else in float32.
    """
    q, k, v, o, do, lse = inputs
    wide = torch.float64 if exact else torch.float32
    if exact:
        o, lse = attend(problem, q, k, v, None, exact=True)
    lse = torch.where(lse == -torch.inf, torch.inf, lse).to(wide)  # of rows that see nothing
    delta = (do.to(wide) * o.to(wide)).sum(-1).T  # (heads_q, rows)
    rows, keys, group = q.shape[0], k.shape[0], problem.heads_q // problem.heads_kv
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    step = max(1, CHUNK // max(1, group * keys))
    scale = problem.softmax_scale

    def rounded(x: Tensor) -> Tensor:
        return x if exact else x.to(q.dtype).to(wide)

    for head in range(problem.heads_kv):
        heads = slice(head * group, (head + 1) * group)
        kh, vh = k[:, head].to(wide), v[:, head].to(wide)  # (keys, dims)
        for first in range(0, rows, step):
            chunk = slice(first, min(first + step, rows))
            qh, doh = (x[chunk, heads].to(wide).transpose(0, 1) for x in (q, do))
            scores = qh @ kh.T * scale  # (group, rows of the chunk, keys)
            slope = torch.ones((), dtype=wide)
            if problem.softcap:
                capped = (scores / problem.softcap).tanh()
                scores, slope = capped * problem.softcap, 1 - capped.square()
            p = (scores - lse[heads, chunk, None]).exp()
            p.masked_fill_(~visible(problem, chunk, rows, keys, q.device), 0.0)
            ds = rounded(p * (doh @ vh.T - delta[heads, chunk, None]) * slope)
            dq[chunk, heads] = (ds @ kh * scale).transpose(0, 1)
            dk[:, head] += (ds.transpose(1, 2) @ qh * scale).sum(0)
            dv[:, head] += (rounded(p).transpose(1, 2) @ doh).sum(0)
    found = (dq, dk, dv) if exact else (x.to(q.dtype) for x in (dq, dk, dv))
    dq, dk, dv = (x.double() for x in found)
    return dq, dk, dv


def check(problem: AttentionCase, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> Check:
    """Compare dQ, dK and dV sequence by sequence; rows that belong to none are not looked at."""
    worst, tolerance = 0.0, 0.0
    for s in problem.sequences:
        rows = [problem.rows(x, s, side) for x, side in zip(inputs[:5], "qkkqq", strict=True)]
        given = [*rows, problem.lse_rows(inputs[5], s)]
        exact, near = (gradients(problem, given, exact=e) for e in (True, False))
        lost = truncation(problem, rows[0], rows[1])
        for name, x, side, want, other in zip(NAMES, found, "qkk", exact, near, strict=True):
            largest = float(want.abs().max()) if want.numel() else 0.0
            one = compare(problem.rows(x, s, side), want, other, lost, largest)
            if not one.ok:
                message = one.message.replace("O[", f"{name}[").replace("O is", f"{name} is")
                where = f"sequence {s.entry} ({s.queries} queries, {s.keys} keys): "
                return Check(False, one.max_error, one.tolerance, where + message)
            worst, tolerance = max(worst, one.max_error), max(tolerance, one.tolerance)
    return Check(True, worst, tolerance, f"within {tolerance:.3g}")

"""Values that break shortcuts of attention's kernels, put into the inputs of a case, and the check
of what must still be right.

A row that sees a key whose score is NaN or +inf is NaN, as torch's is. A value of V that is not
finite makes its column so in the rows that see its key; rows that do not see it may have 0 * inf
there, as torch's have. All else must be as near to float64 as torch at the same precision is,
each column by its own largest value of V, so that a large one hides nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cutex.dtypes import DTYPES
from cutex.problem.attention.case import AttentionCase, Inputs
from cutex.problem.attention.check import truncation
from cutex.problem.attention.randomized import draw
from cutex.problem.attention.reference import attend, visible

Spoil = Callable[[AttentionCase, Inputs, random.Random], None]
EXACT = ("huge scores", "huge scores apart")  # whose scores are exact in float32
SCALE = 0.125


def spoiled_case(seed: int, largest: float, most_work: int, kernel: int) -> AttentionCase:
    """A randomized case with Gaussian data for `spoil` to change."""
    case = draw(seed, largest, most_work, kernel)
    views = tuple("padded" if x == "expanded" else x for x in case.views)
    scale = SCALE if name_of(seed) in EXACT else case.scale
    return replace(case, init="normal", views=views, scale=scale)


def name_of(seed: int) -> str:
    return list(SPOILS)[seed % len(SPOILS)]


def spoil(case: AttentionCase, inputs: Inputs) -> None:
    """Put the values of the case's seed into `inputs`."""
    SPOILS[name_of(case.seed)](case, inputs, random.Random(case.seed))


# ---- the values


def one_in(which: str, value: float) -> Spoil:
    """One element, of any row that counts."""

    def change(case: AttentionCase, inputs: Inputs, r: random.Random) -> None:
        side = "q" if which == "q" else "k"
        s = r.choice(list(case.sequences))
        rows = case.rows(getattr(inputs, which), s, side)
        if len(rows):
            rows[tuple(r.randrange(n) for n in rows.shape)] = clipped(case, value)

    return change


def clipped(case: AttentionCase, value: float) -> float:
    """`value`, or the largest of fp16 where it has none so large."""
    most = torch.finfo(DTYPES[case.dtype].torch).max
    return value if abs(value) in (torch.inf,) or value != value else max(-most, min(most, value))


def column_of_v(case: AttentionCase, inputs: Inputs, r: random.Random) -> None:
    inputs.v[..., r.randrange(case.head_dim_v)].mul_(clipped(case, 1e30) / 16)


def scores_by(largest: int) -> Spoil:
    """Whole numbers times powers of two, so that every sum of products is exact; `largest` of
    them, or all alike but for one column."""

    def change(case: AttentionCase, inputs: Inputs, r: random.Random) -> None:
        power = r.choice((4, 8, 12) if case.dtype == "bf16" else (2, 4, 6))
        for x in inputs[:2]:
            whole = x.float().mul(largest / 2).round().clamp(-largest, largest) * 2.0**power
            x.copy_(whole.where(x.isfinite(), torch.nan))

    return change


def denormals(case: AttentionCase, inputs: Inputs, r: random.Random) -> None:
    least = torch.finfo(DTYPES[case.dtype].torch).tiny
    for x in r.choice((inputs[:3], inputs[2:3], inputs[1:3], inputs[:2])):
        x.copy_(x.double() * least / 4)


def hot_key(case: AttentionCase, inputs: Inputs, r: random.Random) -> None:
    """One key anywhere has a score far above all others, for every query."""
    inputs.q[..., 0] = inputs.q[..., 0].where(inputs.q[..., 0].isnan(), 2.0)
    for s in case.sequences:
        keys = case.rows(inputs.k, s, "k")
        if len(keys):
            keys[r.randrange(len(keys)), :, 0] = r.choice((50, 300, 2000)) / case.softmax_scale / 16


def hidden_keys(case: AttentionCase, inputs: Inputs, r: random.Random) -> None:
    """Scores of -inf for whole stretches of keys, and far below 0 for the others."""
    inputs.q[..., 0] = inputs.q[..., 0].where(inputs.q[..., 0].isnan(), 1.0)
    for s in case.sequences:
        keys = case.rows(inputs.k, s, "k")
        keys[:, :, 0] = -r.choice((50.0, 150.0, 1000.0)) / case.softmax_scale / 8
        first, end = sorted(r.randint(0, len(keys)) for _ in range(2))
        keys[first:end, :, 0] = -torch.inf


SPOILS: dict[str, Spoil] = {
    "inf in v": one_in("v", torch.inf),
    "-inf in v": one_in("v", -torch.inf),
    "nan in v": one_in("v", torch.nan),
    "1e30 in v": one_in("v", 1e30),
    "1e30 in a column of v": column_of_v,
    "inf in k": one_in("k", torch.inf),
    "nan in k": one_in("k", torch.nan),
    "nan in q": one_in("q", torch.nan),
    "inf in q": one_in("q", -torch.inf),
    "1e30 in k": one_in("k", 1e30),
    "huge scores": scores_by(3),
    "huge scores apart": scores_by(1),
    "denormals": denormals,
    "hot key": hot_key,
    "hidden keys": hidden_keys,
}


# ---- what must be right


def fault(case: AttentionCase, inputs: Inputs, out: Tensor, lse: Tensor) -> str:
    """What is wrong with O and LSE of spoiled inputs; empty if nothing is."""
    for s in case.sequences:
        q = case.rows(inputs.q, s, "q")
        k, v = (case.rows(x, s, "k") for x in (inputs.k, inputs.v))
        found = fault_of_sequence(
            case, (q, k, v), inputs.sink, case.rows(out, s, "q"), case.lse_rows(lse, s)
        )
        if found:
            return f"{name_of(case.seed)}, sequence {s.entry}: {found}"
    return ""


def fault_of_sequence(
    case: AttentionCase,
    operands: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> str:
    q, k, v = operands
    if not out.numel():
        return ""
    finite_v = v.where(v.isfinite(), 0.0)
    want, want_lse = attend(case, q, k, finite_v, sink, exact=True)
    torchs, torchs_lse = attend(case, q, k, finite_v, sink, exact=False)
    seen = visible(case, slice(0, len(q)), len(q), len(k), q.device)  # (rows, keys)
    hopeless = without_softmax(case, q, k, seen)  # (rows, heads)
    want, torchs = (x.masked_fill(hopeless[..., None], torch.nan) for x in (want, torchs))
    want_lse, torchs_lse = (x.masked_fill(hopeless.T, torch.nan) for x in (want_lse, torchs_lse))
    right = want.isfinite() & torchs.isfinite()  # (rows, heads, D of v)
    # NOTE: a score of 1e30 is that of the only key that counts, or of none
    lost = truncation(case, *(x.where(x.abs() < 1e20, 0.0) for x in (q, k)))
    if name_of(case.seed) in EXACT:
        lost = 2.0**-11 * case.softcap
    bad_v = (~v.isfinite()).double()  # (keys, heads_kv, D of v)
    group = case.heads_q // case.heads_kv
    touched = torch.einsum("rk,khd->rhd", seen.double(), bad_v).repeat_interleave(group, 1) > 0
    near = bad_v.any(0).repeat_interleave(group, 0)[None].expand_as(touched)
    if (out[touched & right].isfinite()).any():
        return f"O[{first(touched & right & out.isfinite())}] is finite, its column of v is not"
    if (out[~right].isfinite()).any():
        return f"O[{first(~right & out.isfinite())}] is finite where float64 gives none"
    counts = right & ~touched & ~(near & ~out.isfinite())
    if bool((counts & ~out.isfinite()).any()):
        return f"O[{first(counts & ~out.isfinite())}] is {float(out[counts & ~out.isfinite()][0])}"
    error, theirs, size = (
        x.where(counts, 0.0).amax(0)  # (heads, D of v)
        for x in ((out.double() - want).abs(), (torchs - want).abs(), want.abs())
    )
    info = torch.finfo(out.dtype)
    largest = finite_v.abs().double().amax(0).repeat_interleave(group, 0) if len(v) else 0.0
    # NOTE: of one row a single column of torch's may be exact by luck
    worst_of_theirs = float(torch.where(theirs > 0, theirs / largest, 0.0).max())
    allowed = (2 * worst_of_theirs + lost) * largest + info.eps / 2 * size + least_of(out.dtype)
    if (error > allowed).any():
        at = first(error > allowed)
        return f"column O[:, {at}] is off by {worst(error, allowed)}"
    return fault_of_lse(lse, want_lse, torchs_lse, lost)


def without_softmax(case: AttentionCase, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """The rows and heads that see a score which is NaN or +inf, (rows, heads)."""
    k = k.double().repeat_interleave(case.heads_q // case.heads_kv, 1)
    scores = torch.einsum("rhd,khd->hrk", q.double(), k)
    if case.softcap:
        scores = (scores * (case.softmax_scale / case.softcap)).tanh()
    return ((scores.isnan() | (scores == torch.inf)) & seen).any(-1).T


def fault_of_lse(lse: Tensor, want: Tensor, theirs: Tensor, lost: float) -> str:
    right = want.isfinite() & theirs.isfinite()
    if lse[~right & ~(want == -torch.inf)].isfinite().any():
        return f"LSE[{first(~right & lse.isfinite())}] is finite where float64 gives none"
    if (lse[want == -torch.inf] != -torch.inf).any():
        return "LSE of rows that see nothing is not -inf"
    error, allowed = (lse.double() - want).abs(), 2 * (theirs - want).abs() + lost
    allowed = allowed + 2.0**-21 * want.abs().clamp(min=1.0)
    bad = right & ~(error <= allowed)
    return (
        f"LSE[{first(bad)}] is off by {worst(error.where(bad, 0.0), allowed)}" if bad.any() else ""
    )


def least_of(dtype: torch.dtype) -> float:
    """What may be lost near 0: of bf16 numbers below the least normal one, which float32's
    instructions flush; of fp16 a unit of its denormals."""
    return 2.0**-125 if dtype == torch.bfloat16 else 2.0**-24


def first(bad: Tensor) -> str:
    return ", ".join(str(int(i)) for i in bad.nonzero()[0])


def worst(error: Tensor, allowed: Tensor) -> str:
    at = (error - allowed).argmax()
    return f"{float(error.flatten()[at]):.3g}, more than {float(allowed.flatten()[at]):.3g}"

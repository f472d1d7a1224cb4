"""The check of a computed O and LSE against float64.

As in FlashAttention's own suite, a kernel's error may be twice that of the same computation by
torch at the kernel's precision (reference.attend). Here that bounds three errors of O: the largest,
as there; that of each row relative to the row, because rows of many keys are small, and a wrong key
in one is lost in the largest error; and that of all rows together, relative to the whole. To each
bound is added half a unit in the last place, and the loss of tensor cores in adding up a score,
which torch's float32 does not have (`truncation`). LSE never passes through the operands' dtype;
its bound is twice the error of float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cutex.problem.attention.reference import attend
from cutex.problem.protocol import Check

if TYPE_CHECKING:
    from cutex.problem.attention.shapes import AttentionShapes, Inputs


def check(
    problem: AttentionShapes, inputs: Inputs, out: Tensor, lse: Tensor | None, poisoned: bool
) -> Check:
    """Compare O and LSE sequence by sequence; with `poisoned`, rows that belong to none must still
    be NaN."""
    worst, tolerance = 0.0, 0.0
    for s in problem.sequences:
        q, mine = problem.rows(inputs.q, s, "q"), problem.rows(out, s, "q")
        k, v = problem.rows(inputs.k, s, "k"), problem.rows(inputs.v, s, "k")
        want, want_lse = attend(problem, q, k, v, inputs.sink, exact=True)
        torchs, torchs_lse = attend(problem, q, k, v, inputs.sink, exact=False)
        lost = truncation(problem, q, k)
        found = compare(mine, want, torchs, lost, float(v.abs().max()) if v.numel() else 0.0)
        if found.ok and lse is not None:
            found_lse = compare_lse(problem.lse_rows(lse, s), want_lse, torchs_lse, lost)
            found = found if found_lse.ok else found_lse
        if not found.ok:
            where = f"sequence {s.entry} ({s.queries} queries, {s.keys} keys): "
            return Check(False, found.max_error, found.tolerance, where + found.message)
        worst, tolerance = max(worst, found.max_error), max(tolerance, found.tolerance)
    if poisoned and (message := written_elsewhere(problem, out, lse)):
        return Check(False, torch.nan, 0.0, message)
    return Check(True, worst, tolerance, f"within {tolerance:.3g}")


def truncation(problem: AttentionShapes, q: Tensor, k: Tensor) -> float:
    """The largest loss of a score: a unit of float32, truncated, after every 16 products; with a
    soft cap also the error of the hardware's tanh, 2^-11 of it (PTX ISA, tanh.approx)."""
    if not q.numel() or not k.numel():
        return 0.0
    norm_q, norm_k = (float(x.double().square().sum(-1).max().sqrt()) for x in (q, k))
    largest = norm_q * norm_k * abs(problem.softmax_scale)
    lost = 2.0**-23 * (problem.head_dim / 16 + 1) * largest
    return lost + 2.0**-11 * min(problem.softcap, largest)


def compare(out: Tensor, want: Tensor, torchs: Tensor, lost: float, largest_v: float) -> Check:
    """Compare O (rows, heads, head_dim_v) with float64's `want`; an error `lost` of the scores
    moves a mean of v by up to that share of `largest_v`."""
    nan = ~out.isfinite()
    if nan.any():
        at = _first(nan)
        return Check(False, torch.nan, 0.0, f"O[{at}] is {float(out[nan][0])}: {_count(nan)}")
    if not out.numel():
        return Check(True, 0.0, 0.0, "empty")
    half_unit = torch.finfo(out.dtype).eps / 2
    error, torch_error = (out.double() - want).abs(), (torchs - want).abs()
    max_error = float(error.max())
    tolerance = 2 * float(torch_error.max()) + half_unit * float(want.abs().max())
    tolerance += lost * largest_v
    bad = error > tolerance
    if bad.any():
        what = f"is {float(out[bad][0]):g} where float64 gives {float(want[bad][0]):g}"
        message = f"O[{_first(bad)}] {what}, further off than {tolerance:.3g}: {_count(bad)}"
        return Check(False, max_error, tolerance, message)
    row, torch_row = (relative(x, want, (-1,)) for x in (error, torch_error))
    limit = 2 * float(torch_row.max()) + half_unit + lost
    bad = row > limit
    if bad.any():
        what = f"is off by {float(row[bad][0]):.3g} of its norm, more than {limit:.3g}"
        return Check(False, max_error, tolerance, f"row O[{_first(bad)}] {what}: {_count(bad)}")
    whole, torch_whole = (float(relative(x, want, (0, 1, 2))) for x in (error, torch_error))
    limit = 2 * torch_whole + half_unit / 4 + lost
    if whole > limit:
        return Check(False, max_error, tolerance, f"O is off by {whole:.3g} of its norm, "
                     f"more than {limit:.3g}")  # fmt: skip
    return Check(True, max_error, tolerance, "")


def relative(error: Tensor, want: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The norm of the error over that of `want`; 0 / 0 is 0."""
    error, want = (x.square().sum(dims).sqrt() for x in (error, want))
    return torch.where(error == 0, 0.0, error / want)


def compare_lse(lse: Tensor, want: Tensor, torchs: Tensor, lost: float) -> Check:
    """Compare LSE (heads, rows) with float64's `want`; it must be -inf exactly where that is."""
    finite = want.isfinite()
    bad = (lse.isfinite() != finite) | (~finite & (lse != want))
    tolerance, max_error = 0.0, 0.0
    if finite.any() and not bad.any():
        error = torch.where(finite, (lse.double() - want).abs(), 0.0)
        torch_error = (torchs - want)[finite].abs().max()
        unit = 2.0**-21 * max(1.0, float(want[finite].abs().max()))
        tolerance = 2 * float(torch_error) + unit + lost
        max_error, bad = float(error.max()), error > tolerance
    if bad.any():
        what = f"is {float(lse[bad][0]):.7g} where float64 gives {float(want[bad][0]):.7g}"
        message = f"LSE[{_first(bad)}] {what}, further off than {tolerance:.3g}: {_count(bad)}"
        return Check(False, max_error, tolerance, message)
    return Check(True, max_error, tolerance, "")


def written_elsewhere(problem: AttentionShapes, out: Tensor, lse: Tensor | None) -> str | None:
    """A sentence that names the first row written although it belongs to no sequence, or None."""
    free = torch.ones(out.shape[:-2], dtype=torch.bool, device=out.device)
    for s in problem.sequences:
        problem.rows(free, s, "q").fill_(False)
    for name, x in (("O", out), ("LSE", None if lse is None else lse.transpose(-1, -2))):
        if x is not None and not x[free].isnan().all():
            row = _first(free & ~x.isnan().flatten(free.dim()).all(-1))
            return f"{name} row [{row}] belongs to no sequence, and was written"
    return None


def _first(bad: Tensor) -> str:
    return ", ".join(str(int(i)) for i in bad.nonzero()[0])


def _count(bad: Tensor) -> str:
    return f"{int(bad.sum())} of {bad.numel()} are wrong"

"""`cutex.grouped_mm`, and the forms of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cutex.ops.differentiation import is_wanted
from cutex.ops.grouped.checks import (
    FORMS,
    check_edges,
    check_fused,
    check_groups,
    check_inner,
    check_rows,
    check_target,
    check_tensor,
)
from cutex.ops.grouped.gathered import gathered_rows
from cutex.ops.grouped.launch import repeated, ways
from cutex.ops.grouped.registered import (
    GATHERED,
    grouped_rows,
    grouped_sums,
    run_rows,
    run_sums,
)
from cutex.ops.number import check_flag
from cutex.ops.plain import is_plain, nobody_watches
from cutex.ops.plans import PlanCache

PLANS = PlanCache()


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    *,
    counts: Tensor | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    row_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_index: Tensor | None = None,
    add: bool = False,
    ragged: bool = False,
) -> Tensor:
    """Products of groups, like torch.nn.functional.grouped_mm. Group e consists of x's rows (or
    columns) from offs[e - 1] (0 for e = 0) to offs[e].

    x (T, K), w (E, K, N): activation(x[rows of e] @ w[e] + bias[e]), (T, N).
    x (M, T), w (T, N): x[:, rows of e] @ w[rows of e], (E, M, N), such as a weight's gradient;
        zeros for an empty group.
    x (E, M, K), w (K, T): x[e] @ w[:, columns of e], (M, T).
    x (E, M, K), w (E, K, N), with counts: the first counts[e] rows of x[e] @ w[e], (E, M, N).

    x, w: bfloat16 or float16, the same for both; sums are in fp32. Any strides. A tensor that TMA
        cannot read (its base or a stride is not a multiple of 16 bytes) is copied first, and so is
        one whose contiguous dimension is T, where groups start anywhere.
    offs, counts: (E,) int32 on the device of x. Only the device reads them: nothing waits for the
        host, and a CUDA graph may be replayed with other values. offs ascend to at most T; groups
        may be empty and of any length. Invalid values are replaced by the nearest valid ones: each
        is clamped to [0, T], and a group that would end before it starts is empty. A row in two
        groups gets the result of either.
    bias: (E, N), bfloat16 or float16. activation: as in `cutex.matmul`; gates leave N / 2 columns.
        Both only where w has three dimensions and x's rows are in groups.
    index, row_scale: (R,), with x (T, K), w (E, K, N) and offs. Row r is x[index[r]]; index is
        int32 in [0, T). On Hopper the kernel gathers rows as it loads them if K is a multiple of
        64; otherwise they are gathered first. offs then count the R rows of the result. Row r of
        the result is multiplied by row_scale[r], float32, before rounding, for instance by a
        router's weight.
    out, out_index: (S, N) and (R,), in the same form. Row r of the result is stored to
        out[out_index[r]], int32, or added to it with `add`; it is dropped if out has no such row.
        out has x's dtype or float32 (x's after a gate) and any strides, and is returned. Of several
        rows stored to one place any one remains. Rows are added atomically, each sum rounded to
        out's dtype, so with several rows for one row of out the result is not deterministic. Not
        differentiable.
    ragged: a hint that groups differ in length, as a router's do. x (T, K) is then multiplied by
        tiles that fit each group, where a Hopper kernel has faster ones; equal groups may be
        slower. Groups that T / E, no multiple of 64, shows to differ take them without the hint; of
        others, in large products, the device takes what their ends ask for. The sums are the same.

    Rows of no group (from offs[-1] or from counts[e] on) are neither read nor written: in the
    result they are uninitialised, as in torch; in a gradient they are zeros. Differentiable in x, w
    and bias, to any order; gradients of gathered rows are added up in fp32, in one order.

    Raises TypeError or ValueError, in one sentence that names the argument, for arguments that are
    not supported, and without a Hopper or Blackwell GPU.
    """
    options = activation, offs is None, bias is None, ragged
    stored = out is None and out_index is None and add is False  # to memory of its own
    plain = index is None and row_scale is None and stored
    if plain and not torch.compiler.is_dynamo_compiling():
        edges, rest = (counts if offs is None else offs), (() if bias is None else (bias,))
        known = PLANS.find(options, x, w, edges, *rest)
        if known is not None:
            return known.launch(x, w, edges, *rest)
    check_tensor("x", x)
    check_tensor("w", w, x)
    check_flag("ragged", ragged)
    if (offs is None) == (counts is None):
        raise ValueError("grouped_mm takes offs or counts, one of them")
    name, edges = ("offs", offs) if counts is None else ("counts", counts)
    check_edges(name, edges, x)
    form = (x.dim(), w.dim())
    if form != (2 if counts is None else 3, 3) and not (bias is activation is None):
        raise ValueError("bias and activation are taken where w is (E, K, N) and x has rows")
    if form == (2, 3) and counts is None:
        check_inner(x.shape[1], w.shape[1], "x (T, K) and w (E, K, N)")
        check_groups(w, edges, name)
        if not plain:
            check_fused(bias, activation, w)
            check_rows(x, index, row_scale)
            check_flag("add", add)
            if not stored:
                fused = bias, activation, row_scale
                return _scattered(x, w, edges, index, fused, (out, out_index, add))
            return _gathered(x, w, edges, index, bias, activation, row_scale, ragged)
        return _rows(x, w, edges, bias, activation, padded=False, ragged=ragged)
    if not plain:
        raise ValueError("index, row_scale and out take x (T, K), w (E, K, N) and offs")
    if form == (3, 3) and counts is not None:
        check_inner(x.shape[2], w.shape[1], "x (E, M, K) and w (E, K, N)")
        check_groups(w, edges, name)
        check_groups(x, edges, name)
        return _rows(x, w, edges, bias, activation, padded=True)
    if form == (2, 2) and counts is None:
        check_inner(x.shape[1], w.shape[0], "x (M, T) and w (T, N)")
        return _sums(x, w, edges, ragged)
    if form == (3, 2) and counts is None:
        check_inner(x.shape[2], w.shape[0], "x (E, M, K) and w (K, T)")
        check_groups(x, edges, name)
        return _rows(w.mT, x.mT, edges, None, None, padded=False).mT
    raise ValueError(f"grouped_mm takes {FORMS}, got {tuple(x.shape)} and {tuple(w.shape)}")


def _rows(
    x: Tensor, w: Tensor, edges: Tensor, bias: Tensor | None, activation: str | None,
    padded: bool, ragged: bool = False,
) -> Tensor:  # fmt: skip
    check_fused(bias, activation, w)
    given = [t for t in (x, w, bias) if t is not None]
    if activation is not None and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        from cutex.problem.matmul import ACTIVATIONS

        # NOTE: the activation's input is what its gradient needs
        return ACTIVATIONS[activation](grouped_rows(x, w, edges, bias, None, padded, ragged))

    def run(x: Tensor, w: Tensor, edges: Tensor, *bias: Tensor) -> Tensor:
        one = bias[0] if bias else None
        return run_rows(x, w, edges, one, activation, padded, False, ragged)

    def kinds(x: Tensor, w: Tensor, *bias: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
        of_call = (*(bias or (None,)), activation, padded)
        return [way[:2] for way in ways(x.flatten(0, -2), w, of_call, False, ragged)]

    given = [t for t in (x, w, edges, bias) if t is not None]
    remember((activation, padded, bias is None, ragged), given, run, kinds)
    return grouped_rows(x, w, edges, bias, activation, padded, ragged)


def _sums(x: Tensor, w: Tensor, edges: Tensor, ragged: bool) -> Tensor:
    def run(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
        return run_sums(x, w, edges, False)

    remember((None, False, True, ragged), [x, w, edges], run, lambda *_: [("sums", (False,))])
    return grouped_sums(x, w, edges)


def _gathered(
    x: Tensor, w: Tensor, edges: Tensor, index: Tensor | None, bias: Tensor | None,
    activation: str | None, row_scale: Tensor | None, ragged: bool,
) -> Tensor:  # fmt: skip
    given = [t for t in (x, w, bias, row_scale) if t is not None]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return GATHERED(x, w, edges, index, bias, activation, row_scale, ragged)
    rows = x if index is None else gathered_rows(x, index)
    y = _rows(rows, w, edges, bias, activation, padded=False, ragged=ragged)
    if row_scale is None:
        return y
    # NOTE: rows of no group hold anything, and the gradient of their row_scale adds up 0 times it
    of_none = torch.arange(y.shape[0], device=y.device) >= edges.amax()
    return (y.masked_fill(of_none[:, None], 0) * row_scale[:, None]).to(y.dtype)


def _scattered(
    x: Tensor,
    w: Tensor,
    edges: Tensor,
    index: Tensor | None,
    fused: tuple[Tensor | None, str | None, Tensor | None],
    where: tuple[Tensor | None, Tensor | None, bool],
) -> Tensor:
    """The rows of x[index] by their groups' matrices, to rows of out; fused: bias, activation and
    row_scale, where: out, out_index and add."""
    bias, activation, row_scale = fused
    out, out_index, add = where
    rows = x if index is None else x.index_select(0, index)
    given = [t for t in (x, w, edges, index, bias, row_scale, out_index) if t is not None]
    gated = (activation or "").startswith("gated_")
    check_target(rows, w, given, out, out_index, gated)
    assert out is not None and out_index is not None  # check_target has refused None
    if is_wanted([*given, out]):
        raise ValueError("out cannot be given where a gradient is wanted")
    torch.ops.cutex.grouped_scattered(
        out, out_index, rows, w, edges, bias, activation, row_scale, bool(add)
    )
    return out


def remember(
    options: tuple[Hashable, ...],
    given: list[Tensor],
    run: Callable[..., Tensor],
    kinds: Callable[..., list[tuple[Any, tuple[Any, ...]]]],
) -> None:
    """Keep a plan for calls with such `options` and tensors `given`, x, w, edges and perhaps a
    bias, if torch has nothing more to do than to `run` them; kinds: what they launch, as of
    launch.repeated, a function of the same tensors."""
    if torch.compiler.is_dynamo_compiling() or not nobody_watches():
        return
    if not all(map(is_plain, given)) or any(t.requires_grad for t in given):
        return

    known: list[Callable[..., Tensor]] = []

    def launch(x: Tensor, w: Tensor, edges: Tensor, *bias: Tensor) -> Tensor:
        if known:
            return known[0](x, w, edges, *bias)
        out = run(x, w, edges, *bias)
        if found := repeated(kinds(x, w, *bias), [x, w, out, edges, *bias], 2):
            known.append(found)
        return out

    PLANS.remember(PLANS.key_of(options, *given), given, launch)

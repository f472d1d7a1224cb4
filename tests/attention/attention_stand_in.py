"""A stand-in for the attention kernel: its arguments by its own names, its result by definition.

It replaces compiling and launching only, so that a test of what torch sees takes milliseconds.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutex.kernels.attention.forward.sm90.forward import Forward
from cutex.ops.attention import own_backward, plan, planned
from cutex.ops.attention.call import DTYPES
from cutex.problem.attention.case import AttentionCase, Inputs
from cutex.problem.attention.reference import attend


class StandIn:
    """The requested launches, each its config and its arguments by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[Any, dict[str, Any]]] = []
        monkeypatch.setattr(
            plan,
            "kernel_for",
            lambda config, dtype, arch: SimpleNamespace(
                config=config, operands=Forward(config).operands(dtype)
            ),
        )
        monkeypatch.setattr(plan, "launcher", self.launcher)
        monkeypatch.setattr(plan, "check_device", lambda device: None)
        monkeypatch.setattr(planned, "check_device", lambda device: None)
        planned.forget()

    def launcher(self, compiled: Any, _: Any) -> Any:
        def launch(*arguments: Any) -> None:
            named = dict(zip((x.name for x in compiled.operands), arguments, strict=True))
            self.launches.append((compiled.config, named))
            by_definition(compiled.config, named)

        return launch


def by_definition(config: Any, given: dict[str, Any]) -> None:
    """Write O and LSE of one launch."""
    q, k, v, out = (given[name] for name in "qkvo")
    for x in (q, k, v, out):
        if x.dtype != q.dtype or x.data_ptr() % 16:  # as the launcher does
            raise TypeError("not what the kernel takes")
        assert x.stride(-1) == 1
        assert all(s % 8 == 0 for s in x.stride()[:-1])
    problem = problem_of(config, given)
    inputs = Inputs(q, k, v, sink=given.get("sink"))
    for s in problem.sequences:
        rows = [problem.rows(x, s, side) for x, side in ((q, "q"), (k, "k"), (v, "k"))]
        o, lse = attend(problem, *rows, inputs.sink, exact=q.dtype == torch.float64)
        if config.varlen_q:
            o, lse = o[: given["max_seqlen_q"]], lse[:, : given["max_seqlen_q"]]
            s = s._replace(queries=min(s.queries, given["max_seqlen_q"]))
        problem.rows(out, s, "q").copy_(o)
        if config.lse:
            problem.lse_rows(given["lse"], s).copy_(lse)


def problem_of(config: Any, given: dict[str, Any]) -> AttentionCase:
    """The problem that a launch states."""
    q, k = given["q"], given["k"]
    lengths = {}
    for side, x in (("q", q), ("k", k)):
        if (cu := given.get(f"cu_seqlens_{side}")) is not None:
            lengths[f"lengths_{side}"] = tuple(cu.diff().tolist())
        else:
            lengths[f"seqlen_{side}"] = x.shape[-3]
        if (used := given.get(f"seqused_{side}")) is not None:
            lengths[f"used_{side}"] = tuple(used.tolist())
    batch = len(next((x for x in lengths.values() if isinstance(x, tuple)), q[..., 0, 0, 0]))
    lo, hi = given.get("lo"), given.get("hi")
    return AttentionCase(
        batch=batch,
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=given["v"].shape[-1],
        dtype=DTYPES[q.dtype],
        causal=config.causal,
        window=(None if lo is None else -lo, hi),
        softcap=given.get("softcap", 0.0),
        sink="sink" in given,
        scale=given["scale"],
        **lengths,
    )


@contextlib.contextmanager
def flash_on_cpu():
    """torch's flash backward for CPU tensors, by definition and autograd in float64."""

    def backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout == 0 and rng.dtype == torch.uint64
        assert not (lse == -torch.inf).any(), "torch's kernel would give NaN"
        for x in (grad, q, k, v, out):  # what torch's kernel refuses, or reads wrongly
            strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
            assert x.stride(-1) == 1 and all(s % 8 == 0 for s in (x.storage_offset(), *strides))
        assert all(x is None or (x.is_contiguous() and len(x) > 1) for x in (cu_q, cu_k))
        assert min(max_q, max_k) > 0 and max(window_size_left, window_size_right) < 2**31
        left, right = (
            None if x in (None, -1) else x for x in (window_size_left, window_size_right)
        )
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        count = len(cu_q) - 1 if cu_q is not None else len(q)
        for i in range(count):
            at_q, at_k = (
                i if cu is None else slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_q, cu_k)
            )
            dq, dk, dv = _gradients(
                *(x[at].double() for x, at in ((grad, at_q), (q, at_q), (k, at_k), (v, at_k))),
                out[at_q].double(), lse[i] if cu_q is None else lse[:, at_q],
                scale, left, 0 if causal else right,
            )  # fmt: skip
            for x, at, g in ((grads[0], at_q, dq), (grads[1], at_k, dk), (grads[2], at_k, dv)):
                x[at] = g.to(x.dtype)
        return tuple(grads)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def own_backward_on_cpu(monkeypatch: pytest.MonkeyPatch):
    """Our backward's kernels of dense calls that see all keys, by definition in float64."""

    def launcher(*_: Any) -> Any:
        def launch(q, k, v, out, grad, lse, dq, dk, dv, *_: Any) -> None:
            for i in range(len(q)):
                given = (x[i].double() for x in (grad, q, k, v, out, lse))
                found = _gradients(*given, None, None, None)
                for x, g in zip((dq, dk, dv), found, strict=True):
                    x[i] = g.to(x.dtype)

        return launch

    with monkeypatch.context() as patch:
        patch.setattr(own_backward, "kernel_for", lambda *of: None)
        patch.setattr(own_backward, "launcher", launcher)
        patch.setattr(own_backward, "_plans", {})
        yield


def _gradients(grad, q, k, v, out, lse, scale, left, right):
    """dq, dk, dv of one sequence from its O and LSE, by the formulas of FlashAttention's
    backward."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    offset = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if left is not None:
        hidden |= offset < -left
    if right is not None:
        hidden |= offset > right
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    p = torch.exp(scores.masked_fill(hidden, -torch.inf) - lse.double()[..., None])
    delta = (grad * out).sum(-1).T[..., None]
    ds = p * (torch.einsum("qhd,khd->hqk", grad, v) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k)
    dk = torch.einsum("hqk,qhd->khd", ds, q)
    dv = torch.einsum("hqk,qhd->khd", p, grad)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))

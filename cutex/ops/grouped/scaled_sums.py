"""The sums of `cutex.scaled_grouped_mm`: fp8 operands multiplied along the rows of each group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped import launch
from cutex.ops.grouped.checks import check_edges, check_inner
from cutex.ops.grouped.scaled_checks import OUT_DTYPES, check_factors
from cutex.ops.row.operators import define

WHOLE = ("TensorWise", "RowWise")


def scaled_sums(
    a: Tensor,
    b: Tensor,
    scales: tuple[Any, Any],
    kinds: tuple[str, str],
    offs: Tensor,
    output_dtype: torch.dtype,
) -> Tensor:
    """(a[:, rows of e] @ b[rows of e]) * scale_a[e] * scale_b[e], with a (M, T) and b (T, N): (E,
    M, N), zeros for an empty group."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype is not torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn, got {x.dtype}")
    if a.device != b.device:
        raise ValueError(f"b is on {b.device}, not on {a.device} as a")
    check_edges("offs", offs, a)
    check_inner(a.shape[1], b.shape[0], "a (M, T) and b (T, N)")
    if output_dtype not in OUT_DTYPES:
        raise TypeError(f"output_dtype {output_dtype} is not bfloat16, float16 or float32")
    factors = [
        _by_group(f"scale_{side}", scale, kind, size, offs.shape[0], a)
        for side, scale, kind, size in zip(
            "ab", scales, kinds, (a.shape[0], b.shape[1]), strict=True
        )
    ]
    given = (x.detach() for x in (a, b, *factors, offs))
    return SCALED_SUMS(*given, output_dtype)


def _by_group(name: str, scale: Any, kind: str, size: int, groups: int, a: Tensor) -> Tensor:
    """The factors (E, size), or (E, 1) where a group has one."""
    if kind not in WHOLE:
        raise ValueError(f"scale_recipe_{name[-1]} {kind}: sums take TensorWise or RowWise")
    if kind == "TensorWise":
        check_factors(name, scale, ((), (1,), (groups,)), a)
        return scale.reshape(-1, 1).expand(groups, 1)
    check_factors(name, scale, ((groups * size,), (groups, size)), a)
    return scale.reshape(groups, size)


def _run(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, output_dtype: torch.dtype
) -> Tensor:
    """NOTE: both have T contiguous, along which a group begins at any byte, where neither TMA nor
    an fp8 MMA does: so elements are widened to bfloat16, which is exact, and turned in one pass
    each, and added up in fp32 by the kernel of 16 bits."""
    out = _fake(a, b, scale_a, scale_b, offs, torch.float32)
    if not out.numel():
        launch.arch_for(a, NAME)
        return _fake(a, b, scale_a, scale_b, offs, output_dtype)
    x, w = (t.to(torch.bfloat16, memory_format=torch.contiguous_format) for t in (a.mT, b))
    launch.sums(x.mT, w, offs, out, False)
    ends = offs.clamp(0, a.shape[1]).cummax(0).values
    empty = (ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None]
    of_a, of_b = (s.masked_fill(empty, 0.0) for s in (scale_a, scale_b))  # which may be NaN
    out.mul_(of_a[:, :, None]).mul_(of_b[:, None, :])
    if output_dtype is torch.float32:
        return out
    return _fake(a, b, scale_a, scale_b, offs, output_dtype).copy_(out)


def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, output_dtype: torch.dtype
) -> Tensor:
    shape = offs.shape[0], a.shape[0], b.shape[1]
    return launch.empty(shape, a.new_empty(0, dtype=output_dtype))


NAME = "cutex.scaled_grouped_mm"
SCALED_SUMS = define(
    "scaled_grouped_sums",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, ScalarType output_dtype) "
    "-> Tensor",
    _run,
    _fake,
)

"""Grouped products whose scale factors tensor cores read: MXFP8, MXFP4, NVFP4, fp8 by fp4.

The part of `cutex.scaled_grouped_mm` that runs on Blackwell. There the factors of a are in chunks
of 128 rows of one group: each group begins with a chunk of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.arch import arch as arch_named
from cutex.ops.block_scaled import (
    ARCH,
    FACTORS,
    INST_K,
    BlockScaledOperand,
    _bytes,
    _element,
    _is_mixed,
    _name,
    _placed,
    _sizes,
    _swizzled,
    _without_padding,
)
from cutex.ops.grouped import launch
from cutex.ops.grouped.checks import check_edges
from cutex.ops.grouped.scaled_checks import check_epilogue
from cutex.ops.matmul.arrange import repacked
from cutex.ops.row.operators import define
from cutex.problem.scaled import layouts

NAME = "cutex.scaled_grouped_mm"


def block_scaled_grouped(
    both: tuple[BlockScaledOperand, BlockScaledOperand],
    vector: int,
    edges: Any,
    name: str,
    bias: Tensor | None,
    activation: str | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """activation((a * factors)[rows of e] @ (b * factors)[e]^T + bias[e]), a (T, K) or with counts
    (E, M, K), b (E, N, K); `name`: of the edges, offs or counts."""
    from cutex.kernels.gemm.scaled.sm100.config import PADDED_K, kind_of

    a, b = both
    names = _element(a), _element(b)
    kind_of(names[0], names[1], vector)  # ValueError
    padded = name == "counts"
    check_edges(name, edges, a.x)
    if a.x.dim() != (3 if padded else 2) or b.x.dim() != 3:
        rows = "(E, M, K)" if padded else "(T, K)"
        raise ValueError(f"with {name}, a must be {rows} and b (E, K, N)")
    (*rows_of, k), (groups, n, k_of_b) = _sizes(a), _sizes(b)
    if k != k_of_b:
        raise ValueError(f"b has K={k_of_b}, but a has K={k}")
    for operand, number in ((b, groups), *([(a, rows_of[0])] if padded else [])):
        if number != edges.shape[0]:
            raise ValueError(
                f"{operand.name} has {number} matrices, but {name} has {edges.shape[0]} groups"
            )
    unit = PADDED_K if _is_mixed(names) else vector
    if not k or k % unit:
        raise ValueError(f"K={k}: with factors of 1x{vector} it must be a multiple of {unit}")
    if names == ("e2m1", "e2m1") and k % INST_K:
        raise ValueError(f"K={k}: of fp4 in groups it must be a multiple of {INST_K}")
    stand_in = torch.empty((), dtype=torch.uint8, device=a.x.device).expand(groups, k, n)
    check_epilogue(bias, activation, stand_in, output_dtype)
    factors_a = _factors_of_rows(a, tuple(rows_of), k // vector, vector, edges, padded)
    factors_b = _swizzled(b, n, k // vector, vector)
    given = (
        *(_bytes(x.x.detach()) for x in both),
        factors_a,
        factors_b,
        _own(both, vector, groups),
    )
    return BLOCK_SCALED_GROUPED(
        *given, edges.detach(), vector, bias, activation, output_dtype, padded
    )


def _factors_of_rows(
    a: BlockScaledOperand,
    rows: tuple[int, ...],
    columns: int,
    vector: int,
    edges: Tensor,
    padded: bool,
) -> Tensor:
    """The factors of a as bytes (chunks of rows, RestK, 32, 4, 4)."""
    scale, due = a.factors, (*rows, columns)
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale_a must be a torch.Tensor, got {type(scale).__name__}")
    if scale.dtype != FACTORS[vector]:
        raise TypeError(f"scale_a of 1x{vector} must be {FACTORS[vector]}, got {scale.dtype}")
    if scale.device != a.x.device:
        raise ValueError(f"scale_a is on {scale.device}, not on {a.x.device}")
    plain = scale.detach().view(torch.uint8)
    if tuple(scale.shape) == due and a.swizzle in (None, "NO_SWIZZLE"):
        return layouts.swizzle(_in_chunks(plain.reshape(-1, columns), edges, rows, padded))
    along = -(-columns // layouts.SWIZZLE_FACTORS)
    chunk = layouts.SWIZZLE_ROWS * layouts.SWIZZLE_FACTORS * along
    if a.swizzle != "SWIZZLE_32_4_4" or scale.numel() % chunk or not scale.is_contiguous():
        raise ValueError(
            f"scale_a must be {due} with NO_SWIZZLE, or with SWIZZLE_32_4_4 contiguous chunks of "
            f"128 rows, {chunk} factors each, of which each group begins a new one; got "
            f"{tuple(scale.shape)}"
        )
    return plain.view(-1, along, 32, 4, 4)


def _in_chunks(scale: Tensor, edges: Tensor, rows: tuple[int, ...], padded: bool) -> Tensor:
    """The factors (rows, K) of all groups, each group's padded with zeros to whole chunks of 128
    rows. Nothing waits for the host: space is allocated for the most chunks possible."""
    total, groups, chunk = scale.shape[0], edges.shape[0], layouts.SWIZZLE_ROWS
    edges = edges.long()
    if padded:
        begins = torch.arange(groups, device=edges.device) * rows[1]
        ends = begins + edges.clamp(0, rows[1])
    else:  # as schedulers/ragged.py has them
        ends = edges.clamp(0, total)
        begins = torch.nn.functional.pad(ends[:-1], (1, 0))
        ends = torch.maximum(ends, begins)
    chunks = (ends - begins + chunk - 1) // chunk
    upto = chunks.cumsum(0)
    place = torch.arange((total // chunk + groups) * chunk, device=edges.device)
    group = torch.searchsorted(upto * chunk, place, right=True).clamp(max=groups - 1)
    row = begins[group] + place - (upto - chunks)[group] * chunk
    found = scale[row.clamp(0, max(total - 1, 0))]
    return torch.where((row < ends[group])[:, None], found, 0)


def _own(
    both: tuple[BlockScaledOperand, BlockScaledOperand], vector: int, groups: int
) -> Tensor | None:
    """The product of the tensors' own factors, (E,), or None without."""
    found = None
    for of, sizes in zip(both, ((1,), (1, groups)), strict=True):
        own = of.own
        if own is None:
            continue
        if vector != 16:
            raise ValueError(
                f"the tensor scale of {of.name} is given, but factors of 1x{vector} have none"
            )
        if not isinstance(own, Tensor) or own.dtype != torch.float32 or own.numel() not in sizes:
            got = f"{own.dtype} of {own.numel()}" if isinstance(own, Tensor) else type(own).__name__
            due = "one float32 number" if of.name == "a" else "float32, one or one for each group"
            raise TypeError(f"the tensor scale of {of.name} must be {due}, got {got}")
        if own.device != of.x.device:
            raise ValueError(f"the tensor scale of {of.name} is on {own.device}, not {of.x.device}")
        own = own.detach().reshape(-1)
        found = own if found is None else found * own
    return None if found is None else found.expand(groups)


# ---- the operator


def _run(
    a: Tensor, b: Tensor, factors_a: Tensor, factors_b: Tensor, own: Tensor | None, edges: Tensor,
    vector: int, bias: Tensor | None, activation: str | None, output_dtype: torch.dtype,
    padded: bool,
) -> Tensor:  # fmt: skip
    out = _fake(
        a, b, factors_a, factors_b, own, edges, vector, bias, activation, output_dtype, padded
    )
    arch = launch.arch_for(a, NAME)
    if arch != ARCH:
        raise ValueError(
            f"a is on {arch_named(arch).title}: factors of 1x{vector} take Blackwell's tensor "
            'cores; Hopper has kernels for cutex.quantize(x, "fp8_1x128")'
        )
    if out.numel() == 0:
        return out
    k = a.shape[-1] * (2 if a.dtype is torch.uint8 else 1)
    names = _name(a), _name(b)
    words = [layouts.words(_without_padding(f, k, vector, names)) for f in (factors_a, factors_b)]
    flat = launch.with_padding(out.flatten(0, -2))
    given = [a.flatten(0, -2), b, flat, *words, edges]
    if own is not None:
        given.append(own[:, None].expand(own.shape[0], b.shape[1]))
    given += [] if bias is None else [bias]
    launch.again("blocks", (vector, activation, padded, own is None, bias is None), given, _call)
    return out


def _call(options: Any, passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call."""
    from cutex.device.epilogue.epilogue_ops import Scale
    from cutex.kernels.gemm.grouped import choose
    from cutex.kernels.gemm.grouped.config import ScaledRowsConfig
    from cutex.kernels.gemm.layouts import OperandLayout
    from cutex.kernels.gemm.scaled.sm100.signature import SWIZZLED, ScaledConfig

    (vector, activation, padded, no_own, no_bias), (a, b, out, *words, edges) = options, passed[:6]
    own, bias = ([] if no_own else [passed[6]]), (None if no_bias else passed[-1])
    names = _name(a), _name(b)
    mixed = _is_mixed(names)
    a, k_contiguous = _placed(a, mixed and names[0] == "e2m1")
    a = a if k_contiguous else repacked(a, -1)
    b, b_by_k = _placed(b, mixed and names[1] == "e2m1")
    ops, others = launch.fused(bias, activation=activation)
    ops = (*(Scale("own", "column") for _ in own), *ops)
    most = choose.most_groups(edges.shape[0])
    tiles = choose.scaled_tiles(b.shape[1], (*names, vector), bool(ops), most)
    product = ScaledConfig(
        a=OperandLayout(names[0], scales=SWIZZLED),
        b=OperandLayout(names[1], "column" if b_by_k else "row", batched=True, scales=SWIZZLED),
        out=OperandLayout(launch.name_of(out)),
        ops=ops,
        tiles=tiles,
    )
    config = ScaledRowsConfig(product, most, padded)
    return config, ARCH, [a, b.mT, out, *words, launch.ends(edges), *own, *others]


def _fake(
    a: Tensor, b: Tensor, factors_a: Tensor, factors_b: Tensor, own: Tensor | None, edges: Tensor,
    vector: int, bias: Tensor | None, activation: str | None, output_dtype: torch.dtype,
    padded: bool,
) -> Tensor:  # fmt: skip
    n = b.shape[1] // 2 if (activation or "").startswith("gated_") else b.shape[1]
    return launch.empty((*a.shape[:-1], n), a.new_empty(0, dtype=output_dtype))


BLOCK_SCALED_GROUPED = define(
    "block_scaled_grouped_mm",
    "(Tensor a, Tensor b, Tensor factors_a, Tensor factors_b, Tensor? own, Tensor edges, "
    "int vector, Tensor? bias, str? activation, ScalarType output_dtype, bool padded) -> Tensor",
    _run,
    _fake,
)

"""The checks of `cutex.grouped_mm`, each with one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutex.ops.matmul.checks import ACTIVATIONS
from cutex.ops.overlap import overlaps_itself
from cutex.ops.plain import check_strided
from cutex.ops.written import are_apart, check_writable

DTYPES = (torch.bfloat16, torch.float16)
MOST_GROUPS = 1024
FORMS = (
    "x (T, K) and w (E, K, N), x (M, T) and w (T, N), x (E, M, T) and w (.., T) or, with counts, "
    "x (E, M, K) and w (E, K, N)"
)


def check_tensor(name: str, x: Any, like: Tensor | None = None) -> None:
    """Raise unless x is a strided tensor of a dtype that the kernels take, like `like`, which is
    called x."""
    check_strided(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16 or float16, got {x.dtype}")
    if like is not None and x.dtype != like.dtype:
        raise TypeError(f"{name} is {x.dtype}, but x is {like.dtype}: they must be alike")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, not on {like.device} as x")


def check_edges(name: str, edges: Any, x: Tensor) -> None:
    """Raise unless `edges` is a vector of int32 on the device of x."""
    check_strided(name, edges)
    if edges.dtype is not torch.int32:
        raise TypeError(f"{name} must be int32, got {edges.dtype}")
    if edges.device != x.device:
        raise ValueError(f"{name} is on {edges.device}, not on {x.device} as x")
    if edges.dim() != 1:
        raise ValueError(f"{name} must be (E,), got {tuple(edges.shape)}")
    if not 1 <= edges.shape[0] <= MOST_GROUPS:
        raise ValueError(f"{name} has {edges.shape[0]} groups, there may be 1 to {MOST_GROUPS}")


def check_groups(w: Tensor, edges: Tensor, name: str, of: str = "w") -> None:
    """Raise unless w (E, K, N), which the caller calls `of`, has a matrix for each group."""
    if w.shape[0] != edges.shape[0]:
        raise ValueError(
            f"{of} has {w.shape[0]} matrices, but {name} has {edges.shape[0]} groups: one each"
        )


def check_inner(x: int, w: int, shapes: str) -> None:
    """Raise unless the sizes that are added up over agree."""
    if x != w:
        raise ValueError(f"x and w must agree where they are multiplied, {shapes}: got {x} and {w}")


def check_rows(x: Tensor, index: Any, row_scale: Any) -> None:
    """Raise unless index is (R,) int32 and row_scale (R,) float32, on the device of x (T, K)."""
    count = x.shape[0]
    for name, given, dtype in (
        ("index", index, torch.int32),
        ("row_scale", row_scale, torch.float32),
    ):
        if given is None:
            continue
        check_strided(name, given)
        if given.dtype is not dtype:
            raise TypeError(f"{name} must be {str(dtype)[6:]}, got {given.dtype}")
        if given.device != x.device:
            raise ValueError(f"{name} is on {given.device}, not on {x.device} as x")
        if given.dim() != 1 or (name == "row_scale" and given.shape[0] != count):
            due = "(R,)" if name == "index" else f"({count},), one for each row"
            raise ValueError(f"{name} must be {due}, got {tuple(given.shape)}")
        count = given.shape[0]
    if index is not None and index.shape[0] and not x.shape[0]:
        raise ValueError(f"index has {index.shape[0]} rows, but x has none")


def check_target(
    x: Tensor, w: Tensor, read: Sequence[Tensor], out: Any, out_index: Any, gated: bool
) -> None:
    """Raise unless out (S, N) and out_index (R,) can take the rows of a product of x (R, K), none
    of which is in memory that is `read` meanwhile."""
    if out is None or out_index is None:
        raise ValueError("out and out_index are given together: rows of a product, and where to")
    for name, t in (("out", out), ("out_index", out_index)):
        check_strided(name, t)
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, not on {x.device} as x")
    if out_index.dtype is not torch.int32:
        raise TypeError(f"out_index must be int32, got {out_index.dtype}")
    rows, columns = x.shape[0], w.shape[2] // 2 if gated else w.shape[2]
    if out_index.shape != (rows,):
        shape = tuple(out_index.shape)
        raise ValueError(f"out_index must be ({rows},), one for each row, got {shape}")
    kinds = (x.dtype,) if gated else (x.dtype, torch.float32)
    if out.dtype not in kinds:
        known = " or ".join(str(kind)[6:] for kind in kinds)
        raise TypeError(f"out must be {known} with this x and activation, got {out.dtype}")
    if out.dim() != 2 or out.shape[1] != columns:
        raise ValueError(f"out must be (S, {columns}), got {tuple(out.shape)}")
    if overlaps_itself(out):
        raise ValueError("out has rows or columns that share memory")
    check_writable("out", out)
    check_apart(out, read)


def check_apart(out: Tensor, read: Sequence[Tensor | None]) -> None:
    """Raise ValueError, in one sentence, if out shares memory with what is read beside it. Where a
    compiler traces a call, it is the operator that asks."""
    given = [t for t in read if t is not None]
    if not torch.compiler.is_compiling() and not are_apart([out], given):
        raise ValueError("out shares memory with an argument that is read while out is written")


def check_fused(bias: Any, activation: Any, w: Tensor) -> None:
    """Raise unless bias is (E, N) and activation a name."""
    if bias is not None:
        check_tensor("bias", bias)
        if bias.device != w.device:
            raise ValueError(f"bias is on {bias.device}, not on {w.device} as x")
        if bias.shape != (w.shape[0], w.shape[2]):
            want = (w.shape[0], w.shape[2])
            raise ValueError(f"bias must have shape {want}, (E, N), got {tuple(bias.shape)}")
    if activation is None:
        return
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}")
    if activation.startswith("gated_") and w.shape[2] % 2:
        raise ValueError(f"activation {activation!r} takes pairs of columns, w has {w.shape[2]}")

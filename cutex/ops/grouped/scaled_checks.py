"""The checks of `cutex.scaled_grouped_mm`, each with one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutex.ops.grouped.checks import check_edges, check_groups
from cutex.ops.matmul.checks import ACTIVATIONS
from cutex.ops.plain import check_strided

BLOCK = 128
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_operands(a: Any, b: Any, edges: Tensor, name: str) -> None:
    """Raise unless a (T, K), or with counts (E, M, K), and b (E, K, N) are fp8 and agree."""
    for of, x in (("a", a), ("b", b)):
        check_strided(of, x)
        if x.dtype is not torch.float8_e4m3fn:
            raise TypeError(f"{of} must be float8_e4m3fn, got {x.dtype}")
        if x.device != a.device:
            raise ValueError(f"{of} is on {x.device}, not on {a.device} as a")
    rows = "(E, M, K)" if name == "counts" else "(T, K)"
    if a.dim() != (3 if name == "counts" else 2) or b.dim() != 3:
        shapes = tuple(a.shape), tuple(b.shape)
        raise ValueError(f"with {name}, a must be {rows} and b (E, K, N), got {shapes}")
    check_edges(name, edges, a)
    check_groups(b, edges, name, "b")
    if name == "counts":
        check_groups(a, edges, name, "a")
    if a.shape[-1] != b.shape[1]:
        raise ValueError(f"b has K={b.shape[1]} (its second size), but a has K={a.shape[-1]}")


def check_factors(name: str, scale: Any, due: tuple[tuple[int, ...], ...], a: Tensor) -> None:
    """Raise unless `scale` is float32 of one of the shapes `due`, on the device of a."""
    check_strided(name, scale)
    if scale.dtype is not torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    if scale.device != a.device:
        raise ValueError(f"{name} is on {scale.device}, not on {a.device} as a")
    if tuple(scale.shape) not in due:
        shapes = " or ".join(str(x) for x in dict.fromkeys(due))
        raise ValueError(f"{name} must be {shapes}, got {tuple(scale.shape)}")


def check_epilogue(bias: Any, activation: Any, b: Tensor, output_dtype: Any) -> None:
    """Raise unless bias is (E, N), activation a name, and output_dtype one that is stored."""
    if output_dtype not in OUT_DTYPES:
        raise TypeError(f"output_dtype {output_dtype} is not bfloat16, float16 or float32")
    if bias is not None:
        want = b.shape[0], b.shape[2]
        check_strided("bias", bias)
        if bias.dtype not in OUT_DTYPES:
            raise TypeError(f"bias must be bfloat16, float16 or float32, got {bias.dtype}")
        if bias.device != b.device:
            raise ValueError(f"bias is on {bias.device}, not on {b.device} as a")
        if tuple(bias.shape) != want:
            raise ValueError(f"bias must have shape {want}, (E, N), got {tuple(bias.shape)}")
    if activation is None:
        return
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}, got {activation!r}")
    if activation.startswith("gated_") and b.shape[2] % 2:
        raise ValueError(f"activation {activation!r} takes pairs of columns, b has {b.shape[2]}")

"""cuBLAS through torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def gemm() -> tuple[Callable[..., Any], str]:
    """c = a @ b.T, and torch's version."""
    import torch

    return lambda a, b, c: torch.mm(a, b.T, out=c), f"torch {torch.__version__}"


def gemm_fp32() -> tuple[Callable[..., Any], str]:
    """c = a @ b.T in full fp32, whatever precision torch is set to."""
    import torch

    def launch(a: Any, b: Any, c: Any) -> None:
        setting, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
        setting.fp32_precision = "ieee"
        try:
            torch.mm(a, b.T, out=c)
        finally:
            setting.fp32_precision = before

    return launch, f"torch {torch.__version__}"


def layer(dtype: str) -> Callable[..., Any]:
    """out = a @ b; of fp8 with scales of one."""
    import torch

    if dtype != "e4m3":
        return lambda a, b, out: torch.mm(a, b, out=out)
    one = torch.ones((), device="cuda")
    return lambda a, b, out: torch._scaled_mm(
        a, b, one, one, out_dtype=out.dtype, use_fast_accum=True, out=out
    )

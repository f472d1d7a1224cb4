"""Scaled GEMM by DeepGEMM, and by cuBLASLt through torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def deep_gemm(problem: Any) -> tuple[Callable[..., Any], str]:
    """DeepGEMM's 1x128 by 128x128, by itself or as vLLM brings it."""
    if problem.dtype != "fp8_block":
        raise ValueError(f"DeepGEMM is compared on fp8_block, not on {problem.dtype}")
    try:
        dg: Any = import_module("deep_gemm")
    except ImportError:
        dg = import_module("vllm.third_party.deep_gemm")

    def launch(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor,
               c: torch.Tensor) -> None:  # fmt: skip
        dg.fp8_gemm_nt((a, sa), (b, sb), c)

    return launch, f"DeepGEMM {getattr(dg, '__version__', 'of vLLM')}"


def cublaslt(problem: Any) -> tuple[Callable[..., Any], str]:
    """torch.nn.functional.scaled_mm, that is cuBLASLt."""
    import torch
    from torch.nn import functional

    kinds = functional.ScalingType
    kind = {
        (1, 16): kinds.BlockWise1x16,
        (1, 32): kinds.BlockWise1x32,
        (1, 128): kinds.BlockWise1x128,
        (128, 128): kinds.BlockWise128x128,
    }
    if any(f.block not in kind for f in problem.recipe):
        raise ValueError(f"torch is compared on factors of blocks, not on {problem.dtype}")
    if problem.dtype == "fp8_block" and problem.k % 512:
        raise ValueError(f"K={problem.k}: torch takes 128x128 factors for a multiple of 512")
    recipes: list[Any] = [[kind[f.block]] for f in problem.recipe]
    swizzles: list[Any] = [[functional.SwizzleType.SWIZZLE_32_4_4] for _ in recipes]
    if not problem.recipe.a.swizzled:
        swizzles = [[functional.SwizzleType.NO_SWIZZLE] for _ in recipes]
    for i, format in enumerate(problem.recipe):
        if format.tensor_scale:
            recipes[i].append(kinds.TensorWise)
            swizzles[i].append(functional.SwizzleType.NO_SWIZZLE)

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
        *scales, _ = rest
        if problem.dtype == "fp8_block":
            scales[1] = scales[1].mT
        out = functional.scaled_mm(
            a, b.mT, scales[::2], recipes[0], scales[1::2], recipes[1], *swizzles
        )
        return (out,)

    return launch, f"torch {torch.__version__}"

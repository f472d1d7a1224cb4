"""What others have for scaled GEMM, under the interface of PeerKernel."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cutex.problem.protocol import Launch, PeerKernel

if TYPE_CHECKING:
    import torch


def _deep_gemm(problem: Any) -> tuple[Launch, str]:
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


def _torch(problem: Any) -> tuple[Launch, str]:
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
    given: list[Any] = [kind[f.block] for f in problem.recipe]
    swizzle = None
    if problem.recipe.a.swizzled:
        swizzle = functional.SwizzleType.SWIZZLE_32_4_4

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
        scales = list(rest[:2])
        out = functional.scaled_mm(
            a, b.mT, scales[0], given[0], scales[1], given[1], swizzle, swizzle
        )
        return (out,)

    return launch, f"torch {torch.__version__}"


PEERS = {
    "gemm_fp8": {"deepgemm": PeerKernel("DeepGEMM", _deep_gemm, 20.0),
                 "torch": PeerKernel("torch (cuBLASLt)", _torch)},
    "gemm_scaled": {"torch": PeerKernel("torch (cuBLASLt)", _torch)},
}  # fmt: skip

"""Grouped GEMM by torch, by DeepGEMM and by quack."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGNED = 128  # rows that DeepGEMM's groups are padded to a multiple of


def torch_grouped() -> tuple[Callable[..., Any], str]:
    """torch.nn.functional.grouped_mm."""
    import torch

    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def launch(
        x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor]:
        return (function(x, w.mT, offs=ends),)

    return launch, f"torch {torch.__version__}"


def deep_gemm(problem: Any) -> tuple[Callable[..., Any], str]:
    """DeepGEMM's contiguous layout, by itself or as vLLM brings it."""
    import torch

    if any(rows % ALIGNED for rows in problem.rows):
        raise ValueError(f"DeepGEMM takes groups of a multiple of {ALIGNED} rows")
    try:
        dg: Any = import_module("deep_gemm")
    except ImportError:
        dg = import_module("vllm.third_party.deep_gemm")
    of_rows: dict[torch.device, torch.Tensor] = {}

    def launch(x: torch.Tensor, w: torch.Tensor, _: torch.Tensor, out: torch.Tensor) -> None:
        if x.device not in of_rows:
            numbers = torch.arange(problem.groups, dtype=torch.int32)
            groups = torch.repeat_interleave(numbers, torch.tensor(problem.rows))
            of_rows[x.device] = groups.to(x.device)
        dg.m_grouped_bf16_gemm_nt_contiguous(x, w, out, of_rows[x.device])

    return launch, f"DeepGEMM {getattr(dg, '__version__', 'of vLLM')}"


def quack() -> tuple[Callable[..., Any], str]:
    """quack's GEMM of sequences of any length, with its default config."""
    from importlib import metadata

    import torch
    from quack.gemm_interface import gemm

    begins: dict[torch.device, torch.Tensor] = {}

    def launch(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
        if x.device not in begins:
            begins[x.device] = torch.nn.functional.pad(ends, (1, 0))
        gemm(x, w.mT, out=out, cu_seqlens_m=begins[x.device], tuned=False)

    return launch, f"quack-kernels {metadata.version('quack-kernels')}"

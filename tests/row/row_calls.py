"""Rows of random numbers, launches on either device, and how near results are to be."""

from __future__ import annotations

import torch

from cutex.compile import Compiled
from cutex.ops.device import launcher
from cutex.sim import simulate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# half an ulp of the result, with what float32 sums of a row lose
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
ORDERS = [("random", 1), ("random", 2), ("starved", 0), ("peer-late", 0)]


def rows(device, shape, dtype=torch.float32, seed=0, scale=1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=g)).to(dtype).to(device)


def launched(kernel: Compiled, device: str, *arguments) -> None:
    """Run a kernel on the device; in the simulator, without a finding."""
    if device == "cuda":
        launcher(kernel, arguments)(*arguments)
    else:
        assert not simulate(kernel, *arguments).findings


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, terms: float = 1.0) -> None:
    """Check that found is wanted, rounded; `terms` is the size of what was added up for it."""
    bound = ROUNDING[dtype] * (wanted.abs() + terms * 2**-3) + 1e-30
    error = (found.double().cpu() - wanted.cpu()).abs()
    assert bool((error <= bound.cpu()).all()), float((error / bound.cpu()).max())

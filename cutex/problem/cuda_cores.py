"""Problems that CUDA cores compute, in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.dtypes import DTYPES
from cutex.problem.protocol import Problem
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch


class CudaCoreProblem(Problem):
    """Inputs of one dtype, whose FLOPs are all in fp32 and no MMA's."""

    @property
    def needs(self) -> Work:
        return Work(fp32=self.flops, bytes={"hbm": self.bytes})

    def sampled(
        self,
        shape: tuple[int, ...],
        device: str | torch.device,
        copy: int = 0,
        deviation: float = 1.0,
        hot: float = 0.0,
    ) -> torch.Tensor:
        """A tensor by `init`: int: integers in [-2, 2]; normal: mean 0 and this deviation; uniform:
        [-1, 1); hot: normal, and one element of each row is `hot`; else zeros."""
        import torch

        g = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)
        x = torch.zeros(shape, dtype=DTYPES[self.dtype].torch, device=device)
        match self.init:
            case "int":
                x.random_(-2, 3, generator=g)
            case "normal" | "hot":
                x.normal_(0, deviation, generator=g)
            case "uniform":
                x.uniform_(-1, 1, generator=g)
        if self.init == "hot":
            at = torch.randint(shape[-1], (*shape[:-1], 1), generator=g, device=device)
            x.scatter_(-1, at, hot)
        return x

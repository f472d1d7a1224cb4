"""The RMS norm of rows as its ladder computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.dtypes import DTYPES
from cutex.peers import in_triton, quack
from cutex.problem.protocol import Launch, PeerKernel
from cutex.problem.rows import DEVIATION, RowProblem

if TYPE_CHECKING:
    import torch

EPS = 1e-6
HOT = 1000.0  # an element that is most of its row's mean square


@dataclass(frozen=True)
class NormProblem(RowProblem):
    """y = x / sqrt(mean of x^2 + 1e-6) * weight, of each row of x (M, N), with weight (N) of the
    same dtype. Raises ValueError for values that are not valid."""

    op, title, about = "norm", "RMS norm", "the RMS norm ladder, of each row of a matrix"
    size_options = ("--tokens",)
    inits: ClassVar[tuple[str, ...]] = ("int", "normal", "uniform", "zeros", "hot")
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "torch": PeerKernel("torch.rms_norm", lambda _: _torch()),
        "quack": PeerKernel("quack", lambda _: _quack(), 10.0),
        "triton": PeerKernel("Triton", in_triton.peer("rows", "rms_norm"), 5.0),
    }

    @property
    def bytes(self) -> int:
        return super().bytes + DTYPES[self.dtype].bytes(self.columns)

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """x (M, N) and weight (N), by `init` as `sampled` says."""
        x = self.sampled((self.rows, self.columns), device, copy, DEVIATION, HOT)
        return x, self.sampled((self.columns,), device, copy + 1000, DEVIATION, HOT)

    def wanted(self, x: torch.Tensor, *shared: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The norm; 2^-19 of the value for sums, the root and two products in fp32."""
        rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return x * rstd * shared[0].double(), 2**-19

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        def launch(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> object:
            given = {"x": x, "weight": weight, "y": y, "eps": EPS}
            return kernel(*(given[name] for name in arguments))

        return launch


def _torch() -> tuple[Launch, str]:
    import torch

    def launch(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.rms_norm(x, (x.shape[1],), weight, EPS),)

    return launch, torch.__version__


def _quack() -> tuple[Launch, str]:
    rmsnorm, version = quack.rmsnorm()

    def launch(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (rmsnorm(x, weight, eps=EPS)[0],)

    return launch, version

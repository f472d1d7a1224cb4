"""The softmax of rows as its ladder computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.peers import in_triton, quack
from cutex.problem.protocol import Launch, PeerKernel
from cutex.problem.rows import DEVIATION, RowProblem
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

HOT = 60.0  # the score of a row that is far above the others


@dataclass(frozen=True)
class SoftmaxProblem(RowProblem):
    """y = exp(x - max) / sum of exp(x - max), of each row of x (M, N). Raises ValueError for values
    that are not valid."""

    op, title, about = "softmax", "softmax", "the softmax ladder, of each row of a matrix"
    size_options = ("--mn",)
    inits: ClassVar[tuple[str, ...]] = ("int", "normal", "uniform", "zeros", "hot")
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "torch": PeerKernel("torch.softmax", lambda _: _torch()),
        "quack": PeerKernel("quack", lambda _: _quack(), 10.0),
        "triton": PeerKernel("Triton", in_triton.peer("rows", "softmax"), 5.0),
    }

    @property
    def needs(self) -> Work:
        return replace(super().needs, exponentials=self.rows * self.columns)

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor]:
        """x (M, N), by `init` as `sampled` says."""
        return (self.sampled((self.rows, self.columns), device, copy, DEVIATION, HOT),)

    def wanted(self, x: torch.Tensor, *shared: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """torch's softmax; 2^-19 of the value, and what an exponent far from 0 loses in fp32."""
        # fp32 holds the exponent of an exponential with so many bits less
        below = (x.amax(-1, keepdim=True) - x).clamp(0, 1000)
        return x.softmax(-1), 2**-19 + below * 2**-22


def _torch() -> tuple[Launch, str]:
    import torch

    def launch(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.softmax(x, -1, out=y)

    return launch, torch.__version__


def _quack() -> tuple[Launch, str]:
    softmax, version = quack.softmax()

    def launch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (softmax(x),)

    return launch, version

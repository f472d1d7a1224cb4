"""The sum of many numbers as the reduction ladder computes it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.dtypes import DTYPES
from cutex.problem.cuda_cores import CudaCoreProblem
from cutex.problem.protocol import Check, Launch, PeerKernel, Sizes

if TYPE_CHECKING:
    import torch

MOST = 1 << 30  # three launches of 1024 threads
EXACT = 1 << 24  # integers up to here are exact in fp32


@dataclass(frozen=True)
class ReduceProblem(CudaCoreProblem):
    """total = the sum of x (N), in fp32. Raises ValueError for values that are not valid."""

    op, title, about = "reduce", "reduction", "the reduction ladder, the sum of N numbers"
    dtypes, inits = ("fp32", "bf16", "fp16"), ("int", "normal", "uniform", "zeros")
    size_options = ("--n",)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": ({"n": 1 << 28},),
        "sim": ({"n": 70_001},),
        "sweep": tuple({"n": 1 << bits} for bits in range(16, 31, 2)),
        "confirm": ({"n": 1 << 28},),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "torch": PeerKernel("torch.sum", lambda _: _torch_sum()),
    }
    wave_tile = (1,)

    n: int
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MOST:
            raise ValueError(f"N={self.n}: must be from 1 to {MOST}")
        self.check_names()

    @property
    def flops(self) -> int:
        return self.n

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].bytes(self.n) + 4

    def grid(self, tile: Sequence[int]) -> int:
        return -(-self.n // tile[0])

    def tile(self, config: Any) -> tuple[int, ...]:
        return (self.n,)

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor]:
        """x, by `init` as `sampled` says."""
        return (self.sampled((self.n,), device, copy),)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        import torch

        return (torch.full((1,), torch.nan, device=device),)

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare the total with that in float64. Integers: equal; others: within 32 roundings of
        a sum as large as those of random signs are."""
        x, total = tensors
        wide = x.double()
        wanted, found = float(wide.sum()), float(total)
        exact = self.init in ("int", "zeros") and 2 * self.n < EXACT
        tolerance = 0.0 if exact else 32 * 2.0**-24 * float(wide.square().sum().sqrt())
        error = abs(found - wanted)
        ok = error <= tolerance  # not of NaN
        if ok:
            return Check(True, error, tolerance, "exact" if exact else "within tolerance")
        what = f"the total is {found:g}, {wanted:g} was due"
        return Check(False, error, tolerance, what)

    def reduced(self) -> ReduceProblem:
        return replace(self, n=min(self.n, 65_536 + self.n % 8192), init="int")

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        import torch

        held: dict[torch.device, dict[str, torch.Tensor]] = {}

        def launch(x: torch.Tensor, total: torch.Tensor) -> object:
            if x.device not in held:
                held[x.device] = {
                    "first": torch.full((MOST >> 10,), torch.nan, device=x.device),
                    "second": torch.full((1024,), torch.nan, device=x.device),
                    "counter": torch.zeros(4, dtype=torch.int32, device=x.device),
                }
            given = {"x": x, "total": total, **held[x.device]}
            return kernel(*(given[name] for name in arguments))

        return launch

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        return str(sizes["n"])

    @property
    def series(self) -> dict[str, int]:
        return {"numbers": self.n}

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        group.add_argument("--n", metavar="N,N", help="how many numbers; default: by device")

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        if args.n is None:
            return []
        found: list[Sizes] = []
        for word in args.n.split(","):
            if not word.isdecimal():
                raise ValueError(f"--n {args.n!r}: {word!r} is not a whole number")
            found.append({"n": int(word)})
        return found


def _torch_sum() -> tuple[Launch, str]:
    import torch

    def launch(x: torch.Tensor, total: torch.Tensor) -> None:
        torch.sum(x, 0, keepdim=True, dtype=torch.float32, out=total)

    return launch, torch.__version__

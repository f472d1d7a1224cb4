"""The softmax of rows as its ladder computes it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cutex.dtypes import DTYPES
from cutex.peers import in_triton
from cutex.problem.protocol import Check, Launch, PeerKernel, Problem, Sizes
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch

ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}  # half an ulp of a result
SMALLEST = {"bf16": 2**-126, "fp16": 2**-24, "fp32": 2**-126}


def _sizes(*shapes: tuple[int, int]) -> tuple[Sizes, ...]:
    return tuple({"rows": rows, "columns": columns} for rows, columns in shapes)


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """y = exp(x - max) / sum of exp(x - max), of each row of x (M, N). Raises ValueError for values
    that are not valid."""

    op, title, about = "softmax", "softmax", "the softmax ladder, of each row of a matrix"
    dtypes = ("bf16", "fp16", "fp32")
    inits: ClassVar[tuple[str, ...]] = ("int", "normal", "uniform", "zeros", "hot")
    size_options = ("--mn",)
    cases: ClassVar[Mapping[str, Sequence[Sizes]]] = {
        "cuda": _sizes((4096, 32768)),
        "sim": _sizes((5, 3000)),
        "sweep": _sizes(*(((1 << 27) // n, n) for n in (256, 1024, 4096, 16384, 65536))),
        "confirm": _sizes((4096, 32768)),
    }
    peers: ClassVar[Mapping[str, PeerKernel]] = {
        "torch": PeerKernel("torch.softmax", lambda _: _torch()),
        "quack": PeerKernel("quack", lambda _: _quack(), 10.0),
        "triton": PeerKernel("Triton", in_triton.peer("rows", "softmax"), 5.0),
    }
    wave_tile = (1,)

    rows: int
    columns: int
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: every size must be at least 1")
        if self.dtype not in self.dtypes:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(self.dtypes)}")
        if self.init not in self.inits:
            raise ValueError(f"init {self.init!r} is not one of {', '.join(self.inits)}")

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.columns

    @property
    def bytes(self) -> int:
        return 2 * DTYPES[self.dtype].bytes(self.rows * self.columns)

    @property
    def needs(self) -> Work:
        return Work(
            fp32=self.flops, exponentials=self.rows * self.columns, bytes={"hbm": self.bytes}
        )

    def grid(self, tile: Sequence[int]) -> int:
        return -(-self.rows // tile[0])

    def tile(self, config: Any) -> tuple[int, ...]:
        return (config.tile.rows,)

    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor]:
        """x: int: integers in [-2, 2]; normal: mean 0, deviation 2; uniform: [-1, 1); hot: normal,
        and one score of each row is 60."""
        import torch

        g = torch.Generator(device).manual_seed(self.seed + 1_000_003 * copy)
        shape = self.rows, self.columns
        x = torch.zeros(shape, dtype=DTYPES[self.dtype].torch, device=device)
        match self.init:
            case "int":
                x.random_(-2, 3, generator=g)
            case "normal" | "hot":
                x.normal_(0, 2, generator=g)
            case "uniform":
                x.uniform_(-1, 1, generator=g)
        if self.init == "hot":
            at = torch.randint(self.columns, (self.rows, 1), generator=g, device=device)
            x.scatter_(1, at, 60.0)
        return (x,)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        import torch

        shape = self.rows, self.columns
        return (torch.full(shape, torch.nan, dtype=DTYPES[self.dtype].torch, device=device),)

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare y with torch's softmax in float64: within half an ulp, 2^-19 of the value, and
        what an exponent far from 0 loses in fp32."""
        x, y = tensors
        half_ulp, smallest = ROUNDING[self.dtype], SMALLEST[self.dtype]
        worst, tolerance = 0.0, 1.0
        step = max(1, (1 << 26) // self.columns)
        for first in range(0, self.rows, step):
            wide = x[first : first + step].double()
            wanted = wide.softmax(-1)
            # fp32 holds the exponent of an exponential with so many bits less
            below = (wide.amax(-1, keepdim=True) - wide).clamp(0, 1000)
            rounding = half_ulp + 2**-19 + below * 2**-22
            found = y[first : first + step].double()
            error = (found - wanted).abs() / (rounding * wanted + smallest)
            bad = ~(error <= 1)  # NaN, too
            if bad.any():
                i, j = (int(v) for v in bad.nonzero()[0])
                is_, due = float(found[i, j]), float(wanted[i, j])
                what = f"y[{first + i}, {j}] is {is_:g}, {due:g} was due"
                return Check(False, float(error.max()), tolerance, what)
            worst = max(worst, float(error.max()))
        return Check(True, worst, tolerance, "within half an ulp")

    def reduced(self) -> SoftmaxProblem:
        columns = self.columns if self.columns <= 4096 else 4096 + self.columns % 4096
        return replace(self, rows=min(self.rows, 5), columns=columns)

    @classmethod
    def size_name(cls, sizes: Sizes) -> str:
        return f"{sizes['rows']}x{sizes['columns']}"

    @property
    def series(self) -> dict[str, int]:
        return (
            {"columns, 2^27 elements": self.columns} if self.rows * self.columns == 1 << 27 else {}
        )

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        group.add_argument(
            "--mn", action="append", metavar="M,N", help="M rows of N; may be given again"
        )

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        found: list[Sizes] = []
        for given in args.mn or []:
            words = given.split(",")
            if len(words) != 2 or not all(w.isdecimal() for w in words):
                raise ValueError(f"--mn {given!r}: two whole numbers are due, as 4096,32768")
            found.append({"rows": int(words[0]), "columns": int(words[1])})
        return found


def _torch() -> tuple[Launch, str]:
    import torch

    def launch(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.softmax(x, -1, out=y)

    return launch, torch.__version__


def _quack() -> tuple[Launch, str]:
    from importlib import metadata

    from quack.softmax import softmax_fwd

    def launch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return (softmax_fwd(x),)

    return launch, metadata.version("quack-kernels")

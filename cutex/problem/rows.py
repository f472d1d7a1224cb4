"""Problems of rows: y, of the shape of x (M, N), where each row is computed for itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from cutex.dtypes import DTYPES
from cutex.problem.cuda_cores import CudaCoreProblem
from cutex.problem.protocol import Check, Sizes

if TYPE_CHECKING:
    import torch

ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}  # half an ulp of a result
SMALLEST = {"bf16": 2**-126, "fp16": 2**-24, "fp32": 2**-126}
DEVIATION = 2.0  # of normal data
AT_ONCE = 1 << 26  # elements that are compared in float64 at one time


def sizes_of(*shapes: tuple[int, int]) -> tuple[Sizes, ...]:
    """The sizes of problems of so many rows and columns."""
    return tuple({"rows": rows, "columns": columns} for rows, columns in shapes)


CASES = {
    "cuda": sizes_of((4096, 32768)),
    "sim": sizes_of((5, 3000)),
    "sweep": sizes_of(*(((1 << 27) // n, n) for n in (256, 1024, 4096, 16384, 65536))),
    "confirm": sizes_of((4096, 32768)),
}


@dataclass(frozen=True)
class RowProblem(CudaCoreProblem):
    """Rows of one length, in one dtype. Raises ValueError for values that are not valid.

    A subclass names its one option of sizes, since `modal_app.py` has those of all operators.
    """

    dtypes = ("bf16", "fp16", "fp32")
    cases = CASES
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
        self.check_names()

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.columns

    @property
    def bytes(self) -> int:
        return 2 * DTYPES[self.dtype].bytes(self.rows * self.columns)

    def grid(self, tile: Sequence[int]) -> int:
        return -(-self.rows // tile[0])

    def tile(self, config: Any) -> tuple[int, ...]:
        return (config.tile.rows,)

    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor]:
        import torch

        shape = self.rows, self.columns
        return (torch.full(shape, torch.nan, dtype=DTYPES[self.dtype].torch, device=device),)

    def wanted(self, x: torch.Tensor, *shared: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The results of some rows x in float64, by what all rows share, and the relative error
        that fp32 may have before it rounds to the output."""
        raise NotImplementedError

    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare y with `wanted`: within half an ulp, and what it says of fp32."""
        x, *shared, y = tensors
        half_ulp, smallest = ROUNDING[self.dtype], SMALLEST[self.dtype]
        worst, tolerance = 0.0, 1.0
        step = max(1, AT_ONCE // self.columns)
        for first in range(0, self.rows, step):
            wanted, of_fp32 = self.wanted(x[first : first + step].double(), *shared)
            found = y[first : first + step].double()
            error = (found - wanted).abs() / ((half_ulp + of_fp32) * wanted.abs() + smallest)
            bad = ~(error <= 1)  # NaN, too
            if bad.any():
                i, j = (int(v) for v in bad.nonzero()[0])
                is_, due = float(found[i, j]), float(wanted[i, j])
                what = f"y[{first + i}, {j}] is {is_:g}, {due:g} was due"
                return Check(False, float(error.max()), tolerance, what)
            worst = max(worst, float(error.max()))
        return Check(True, worst, tolerance, "within half an ulp")

    def reduced(self) -> Self:
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
        (option,) = cls.size_options
        what = f"M rows of N, of the {cls.title}; may be given again"
        group.add_argument(option, action="append", metavar="M,N", help=what)

    @classmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        found: list[Sizes] = []
        (option,) = cls.size_options
        for given in getattr(args, option.removeprefix("--")) or []:
            words = given.split(",")
            if len(words) != 2 or not all(w.isdecimal() for w in words):
                raise ValueError(f"{option} {given!r}: two whole numbers are due, as 4096,32768")
            found.append({"rows": int(words[0]), "columns": int(words[1])})
        return found

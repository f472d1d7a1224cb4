"""Configs of the row ladders: CTAs that pass over a row several times, and those that hold it. Does
not import the DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from cutex.device.row.tile import RowTile
from cutex.dtypes import DTYPES
from cutex.kernels.row import choose

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.rows import RowProblem

VECTOR = 16  # bytes
LINE = 128  # bytes of memory


@dataclass(frozen=True)
class PassesConfig:
    """A CTA that passes over its row several times."""

    threads: int = 256
    vectors: int = 0  # loads of `width` elements of a thread at one time; 0: it loads one element
    width: int = 1
    aligned: bool = True  # every row begins at a multiple of a vector

    def why_not(self, problem: RowProblem | None, arch: Arch) -> str | None:
        return self.tile.why_not()

    @property
    def tile(self) -> RowTile:
        return RowTile(1, self.threads, 1, max(1, self.vectors), self.width, self.aligned)

    def fitted(self, problem: RowProblem, arch: Arch) -> Self:
        if not self.vectors:
            return self
        width, aligned = loads(problem)
        return replace(self, width=width, aligned=aligned)


@dataclass(frozen=True)
class WholeConfig:
    """A tile that holds its rows in registers: the fields of a RowTile."""

    rows: int = 1
    threads: int = 128
    ctas: int = 1
    vectors: int = 1
    width: int = 8
    aligned: bool = True
    inner: bool = False
    clusters: bool = True  # whether a row may be shared by several CTAs
    shared: ClassVar[bool] = False  # whether all rows share a vector, which is loaded, too

    def why_not(self, problem: RowProblem | None, arch: Arch) -> str | None:
        if reason := self.tile.why_not(arch.capability >= (9, 0)):
            return reason
        if problem is not None and problem.columns > self.tile.columns:
            return f"columns={problem.columns}: the registers of the CTAs hold {self.tile.columns}"
        if problem is not None and problem.columns < self.tile.least_columns:
            least = self.tile.least_columns
            return f"columns={problem.columns}: with inner=True a row has at least {least}"
        return None

    @property
    def tile(self) -> RowTile:
        return RowTile(
            self.rows, self.threads, self.ctas, self.vectors, self.width, self.aligned, self.inner
        )

    def chosen(
        self, problem: RowProblem, bits: int, arch: str, width: int, shifted: bool
    ) -> RowTile:
        """The tile that the production function chooses."""
        m, n = problem.rows, problem.columns
        if not self.shared:
            return choose.softmax(m, n, bits, arch, width, shifted)
        lines = n * bits % (8 * LINE) == 0
        return choose.rms_norm(m, n, bits, arch, width, shifted, lines)

    def fitted(self, problem: RowProblem, arch: Arch) -> Self:
        bits, (width, aligned) = DTYPES[problem.dtype].bits, loads(problem)
        # sm_80 stands for one CTA a row
        name = arch.name if self.clusters else "sm_80"
        try:
            t = self.chosen(problem, bits, name, width, not aligned)
        except choose.TooLong as long:
            raise ValueError(str(long)) from None
        return replace(
            self, rows=t.rows, threads=t.threads, ctas=t.ctas, vectors=t.vectors, width=width,
            aligned=aligned, inner=t.inner,
        )  # fmt: skip


def loads(problem: RowProblem) -> tuple[int, bool]:
    """The elements of a vector, and whether every row starts on a vector boundary."""
    width = DTYPES[problem.dtype].elements(VECTOR)
    return width, problem.columns % width == 0

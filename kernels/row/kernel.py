"""What all row kernels share: archs, dtypes, operands, and the row of each thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Operand
from cutex.device.pipeline import publish_barriers
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import RowReduction
from cutex.device.row.relayed import RelayedReduction
from cutex.device.row.tile import VECTOR_BYTES, RowTile
from cutex.device.stream_order import may_overlap
from cutex.dtypes import DTYPES

LOG2_E = 1.4426950408889634


MOST_WITH_WHOLE_ENDS = 4  # vectors of a thread, where the ends of rows are loaded whole
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


class RowKernel:
    """A kernel over rows: its name, a config with a tile, and the archs and dtypes it supports."""

    archs: tuple[str, ...] = ARCHS
    dtypes = ("bf16", "fp16", "fp32")
    title: ClassVar[str]  # in its name

    def __init__(self, config: Any) -> None:
        self.config = config
        if reason := self.tile.why_not():
            raise ValueError(reason)

    @property
    def tile(self) -> RowTile:
        return self.config if isinstance(self.config, RowTile) else self.config.tile

    @property
    def name(self) -> str:
        return f"row_{self.title}"


@dataclass(frozen=True)
class ThisRow:
    """The row of a thread. A thread past the last row reads the last one and stores nothing."""

    row: Int32
    rows: Int32

    @staticmethod
    def of(tile: RowTile, mX: cute.Tensor) -> ThisRow:
        row = cute.arch.block_idx()[0] // tile.ctas * tile.rows
        return ThisRow(row + cute.arch.thread_idx()[0] // tile.threads, cute.size(mX, mode=[0]))

    @property
    def exists(self) -> cutlass.Boolean:
        return self.row < self.rows

    def is_between(self, mX: cute.Tensor, width: int) -> cutlass.Boolean:
        """Whether the `width` elements before and after this row of mX (M, N) belong to
        neighbouring rows of mX, and may be read. Gaps between the rows of a view may not."""
        step, n = mX.stride[0], cute.size(mX, mode=[1])
        dense = (step == n) & (n >= width)
        return dense & (self.row > 0) & (self.row < self.rows - 1)

    def __call__(self, mX: cute.Tensor) -> cute.Tensor:
        """This row of mX (M, N)."""
        return mX[cutlass.min(self.row, self.rows - 1), None]  # (N)


def row_of(mX: cute.Tensor, this: ThisRow, columns: Columns, fill: float = 0) -> cute.Tensor:
    """A read-only row of mX (M, N) in registers (V, NumV); `fill` outside it."""
    tile = columns.tile
    # NOTE: with more vectors a thread, its registers cost more than the ends do
    few = tile.vectors <= MOST_WITH_WHOLE_ENDS  # docs/facts/rows.md#rows-ends-loaded-whole
    return columns.load(this(mX), fill, this.is_between(mX, tile.width) if few else None)


def elements(rX: cute.Tensor) -> list[Float32]:
    """The elements of rX (V, NumV), in fp32."""
    width, vectors = rX.shape
    return [rX[j, i].to(Float32) for i in range(vectors) for j in range(width)]


def matrix(name: str, dtype: str, tile: RowTile) -> Operand:
    """An operand of rows (M, N)."""
    whole = by_vectors(tile, dtype)
    return Operand(name, ("m", "n"), dtype, aligned=whole, whole=whole)


def column_vector(name: str, dtype: str, tile: RowTile) -> Operand:
    """An operand with one element for each column (N)."""
    whole = by_vectors(tile, dtype)
    return Operand(name, ("n",), dtype, aligned=whole, whole=whole)


def by_vectors(tile: RowTile, dtype: str) -> bool:
    """Whether the tile loads every element of this dtype by its widest vectors."""
    return tile.aligned and DTYPES[dtype].bytes(tile.width) >= VECTOR_BYTES


def row_vector(name: str, dtype: str = "fp32") -> Operand:
    """An operand with one element for each row (M)."""
    return Operand(name, ("m",), dtype, aligned=False, whole=False)


def launch_of(tile: RowTile, mX: cute.Tensor, stream: Any) -> dict[str, Any]:
    """Launch arguments: the grid's clusters take the rows of mX in order, once they have called
    `wait_for_kernel_before`."""
    blocks = cute.ceil_div(cute.size(mX, mode=[0]), tile.rows) * tile.ctas
    return {
        "grid": (blocks, 1, 1),
        "block": (tile.num_threads, 1, 1),
        "cluster": (tile.ctas, 1, 1) if tile.ctas > 1 else None,
        "use_pdl": may_overlap(),
        "stream": stream,
    }


def parts_of(tile: RowTile, gX: cute.Tensor) -> Int32:
    """A row gX (N) divided into parts of a tile's length."""
    return cute.ceil_div(cute.size(gX) + tile.lead, tile.columns + tile.lead)


def reductions(
    tile: RowTile, *counts: int, repeated: bool = False, later: bool = False, by_cta: bool = False
) -> list[RowReduction]:
    """A reduction for each number of values given, ready to be called by all threads; with `later`
    once these have called `meet`. by_cta: see RowReduction.allocate."""
    smem = SmemAllocator()
    made = [RowReduction.allocate(smem, tile, count, repeated, by_cta) for count in counts]
    if tile.ctas > 1:
        publish_barriers(tuple(b for r in made for b in r.barriers), cluster=True, later=later)
    return made


def meet(tile: RowTile) -> None:
    """Wait until all CTAs of the cluster can be sent what their `reductions` take."""
    if tile.ctas > 1:
        cute.arch.cluster_wait()


def repeated(tile: RowTile, count: int) -> RowReduction:
    """A reduction of this many values that may be called more than twice."""
    return reductions(tile, count, repeated=True)[0]


def relayed(tile: RowTile, count: int) -> RelayedReduction:
    """A reduction of this many values over successive rows, each shared by all CTAs of a
    cluster."""
    made = RelayedReduction.allocate(SmemAllocator(), tile, count)
    publish_barriers(made.barriers, cluster=True)
    return made


def launch_of_groups(tile: RowTile, resident: int, groups: Int32, stream: Any) -> dict[str, Any]:
    """Launch arguments of persistent CTAs or clusters: `resident` CTAs on each SM."""
    return {
        "grid": (groups * tile.ctas, 1, 1),
        "block": (tile.num_threads, 1, 1),
        "cluster": (tile.ctas, 1, 1) if tile.ctas > 1 else None,
        "min_blocks_per_mp": resident,
        "preferred_smem_carveout": 100,  # percent; else the DSL asks a GPU
        "stream": stream,
    }

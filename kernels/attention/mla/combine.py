"""What MLA's kernels on all archs share: how they are compiled, and Combine, the merge of parts,
with MLA's units and LSE."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import cutlass
from cutlass import Float32, Int32, cute

from cutex.compile import Argument
from cutex.device.attention.unit_rows import UnitRows
from cutex.kernels.attention.decode.out import WARP, Combine, Out, Partials, Parts
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.config import MlaConfig
from cutex.kernels.attention.mla.signature import arguments, blocks_of_rows

Config = TypeVar("Config", bound=MlaConfig)
# of a CTA that merges parts itself
BARRIER = 3  # a named barrier of the warps that write
WARPS = 8
TOGETHER = 2  # rows of a warp


def rows_of(args: KernelArgs, sizes: Sizes, batch: Int32, owner: Int32, tile_m: int) -> UnitRows:
    """The rows of a unit."""
    m_blocks = blocks_of_rows(sizes, tile_m)
    head = owner // m_blocks
    seq_q = sizes.queries(args, batch)
    return UnitRows(batch, owner - head * m_blocks, head, seq_q, sizes.pack, tile_m)


class MlaOut(Out):
    """The destination of results; the LSE of rows without keys is +inf, as in FlashMLA."""

    @classmethod
    def of(cls, config: Any, mO: cute.Tensor, args: KernelArgs, sizes: Sizes, last: Any) -> MlaOut:
        """The Out of a kernel; `last`, in smem, where a unit's last CTA merges its parts."""
        c = config
        parts = Parts(args, sizes.units, c.tile_m, c.head_dim_v)
        if c.combined:
            return cls(c, mO, parts.partials, args, None, parts)
        partials = Partials(args.sums, args.flags, c.tile_m, c.head_dim_v)
        return cls(c, mO, partials, args, last)

    @staticmethod
    def sync() -> None:
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPS * WARP)

    @cute.jit
    def store_lse(self, lse: Float32, rows: UnitRows, row: Int32) -> None:
        Out.store_lse(self, Float32.inf if lse == -Float32.inf else lse, rows, row)

    @cute.jit
    def count_part(self, rows: UnitRows, piece: Piece, unit: Int32) -> None:
        last = self.last
        self.sync()
        if cute.arch.thread_idx()[0] % (WARPS * WARP) == 0:
            last[0] = Int32(self.partials.arrive(unit, piece.parts))
        self.sync()
        if last[0] != 0:
            self.merge(rows, piece)

    @cute.jit
    def merge(self, rows: UnitRows, piece: Piece) -> None:
        """Merge all parts of a unit and store O and LSE, some rows per warp at a time."""
        warp = cute.arch.warp_idx() % WARPS
        for row in cutlass.range(warp, rows.count, WARPS * TOGETHER, unroll=1):
            self.merge_rows(rows, piece, tuple(row + i * WARPS for i in range(TOGETHER)))


class MlaCombine(Combine):
    """The merge of the parts of MLA's units, whose owners are blocks of rows."""

    out: ClassVar[type[Out]] = MlaOut

    def rows(self, args: KernelArgs, sizes: Sizes, unit: Int32) -> UnitRows:
        batch = unit // sizes.heads
        return rows_of(args, sizes, batch, unit - batch * sizes.heads, self.config.tile_m)


class MlaKernel(Generic[Config]):
    """What compiles and launches an MLA kernel of any arch needs to know."""

    name: str
    kernel: Any

    def __init__(self, config: Config) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype)

    @property
    def kernels(self) -> dict[str, Any]:
        combine = {"combine": MlaCombine.kernel} if self.config.combined else {}
        return {"mla": type(self).kernel, **combine}

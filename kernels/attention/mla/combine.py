"""What MLA's kernels on all archs share: how they are compiled, and Combine, the merge of parts,
with MLA's units and LSE."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from cutex.compile import Argument
from cutex.device import meeting
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
SEVERAL = 4  # rows of half of the warps, which share columns


def rows_of(args: KernelArgs, sizes: Sizes, batch: Int32, owner: Int32, tile_m: int) -> UnitRows:
    """The rows of a unit."""
    m_blocks = blocks_of_rows(sizes, tile_m)
    head = owner // m_blocks
    seq_q = sizes.queries(args, batch)
    return UnitRows(batch, owner - head * m_blocks, head, seq_q, sizes.pack, tile_m)


def words_of(config: MlaConfig, args: KernelArgs, unit: Int32) -> cute.Pointer:
    """The words by which CTAs with parts of a unit meet."""
    return args.flags.iterator + unit * config.flags_of_unit


class MlaOut(Out):
    """The destination of results; the LSE of rows without keys is +inf, as in FlashMLA."""

    @classmethod
    def of(cls, config: Any, mO: cute.Tensor, args: KernelArgs, sizes: Sizes, last: Any) -> MlaOut:
        """The Out of a kernel; `last` is in smem: where CTAs that meet merge a unit's parts, this
        one's number among them (negative: it does not merge), and how many they are."""
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

    @property
    def is_first_thread(self) -> Boolean:
        """Whether this is one thread, always the same, of those that write."""
        return cute.arch.thread_idx()[0] % (WARPS * WARP) == 0

    def words(self, unit: Int32) -> cute.Pointer:
        """The words by which CTAs with parts of a unit meet."""
        return words_of(self.config, self.args, unit)

    @cute.jit
    def counts(self, piece: Piece, unit: Int32) -> Int32:
        """The counts of the parts of a unit so far, for the thread that meets others."""
        counts = Int32(0)
        if self.is_first_thread & (piece.parts > 1):
            counts = meeting.counts(self.words(unit))
        return counts

    @cute.jit
    def meet(self, rows: UnitRows, piece: Piece, unit: Int32, counts: Int32) -> None:
        """Count a part that this thread has helped to write. If all had begun by the `counts`
        before, wait for the others, and merge some rows; but behind a unit's last part this CTA may
        have another unit's first."""
        met = self.last
        self.sync()
        if self.is_first_thread:
            # NOTE: with num_splits another part of the unit may be this CTA's
            stays = (piece.part < piece.parts - 1) & (self.args.num_splits == 0)
            stays = stays & meeting.have_begun(counts, piece.parts)
            number, count = meeting.meet(self.words(unit), piece.parts, stays)
            met[0], met[1] = number, count
        self.sync()
        number, count = met[0], met[1]
        if number >= 0:
            # NOTE: by another warp than the first, which always has a row to merge
            if cute.arch.thread_idx()[0] % (WARPS * WARP) == WARPS * WARP - 1:
                meeting.leave(self.words(unit), count)
            self.merge_some(rows, piece, number, count)

    @cute.jit
    def merge_some(self, rows: UnitRows, piece: Piece, number: Int32, count: Int32) -> None:
        """Merge every `count`-th row from `number` on over all parts, and store O and LSE: half of
        the warps share a row's columns, and merge some rows at a time, where there are many."""
        warp, warps = cute.arch.warp_idx() % WARPS, WARPS // 2
        first, half = warp % warps * WARP, warp // warps
        if rows.count <= 2 * count:
            row = number + half * count
            if row < rows.count:
                self.merge_rows(rows, piece, (row,), first, warps)
        else:
            step = SEVERAL * count
            for at in cutlass.range(number + half * step, rows.count, 2 * step, unroll=1):
                mine = tuple(at + i * count for i in range(SEVERAL))
                self.merge_rows(rows, piece, mine, first, warps)


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

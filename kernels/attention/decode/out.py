"""Out: the destination of a unit's results, whole or in parts; Partials: the parts of a unit's O
and LSE in memory; Combine: the kernel that merges them where a unit's last CTA does not.

A part is O (bM, DV) in fp32, of which only existing rows are written, followed by LSE (bM).

A unit may be in a hundred parts of 64 rows each, which one CTA would take longer to read than all
CTAs take to compute. So one warp per row merges them, in a launch of its own, whose CTAs start
while the main kernel's end. The CTA with a unit's part 0 records where the others are: four words
in front of all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.scalar import exp2, log2
from cutex.device.attention.row_store import VECTOR, PartialRow, RoundedRow
from cutex.device.attention.seqlen_info import store_lse
from cutex.device.attention.softmax import LN2, LOG2_E
from cutex.device.attention.unit_rows import UnitRows, units_of
from cutex.device.last_arrival import is_last_arrival
from cutex.kernels.attention.decode.config import WORDS
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.splits import Piece

BARRIER = 1  # a named barrier of the warps that write
THREADS = 128  # that write
TOGETHER = 4  # rows that a warp merges at a time, where there are many
# of Combine
WARPS = 4  # of a CTA
MIN_CTAS = 4  # of an SM
FEW = 1024  # rows
MOST_ROWS = 4  # of a warp
ROW_WORDS = 32  # of its rows, in a lane, at most


@dataclass(frozen=True)
class Out:
    """The output of a CTA's units: O and LSE, or partial ones for units that are split."""

    config: Any  # says `head_dim_v`, `sink` and `lse`
    mO: cute.Tensor
    partials: Partials
    args: KernelArgs
    last: Any  # (1) Int32 in smem: whether this CTA wrote a unit's last part; None: nobody asks
    parts: Any = None  # the Parts that a kernel combines (Combine); None: the last CTA merges

    @staticmethod
    def sync() -> None:
        """A barrier of the threads that write."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)

    def row(self, rows: UnitRows, row: Int32) -> RoundedRow:
        """A row of O, for storing."""
        return RoundedRow(rows.words(self.mO, row), units_of(self.mO))

    @cute.jit
    def finish_row(self, lse: Float32, rows: UnitRows, row: Int32) -> tuple[Float32, Float32]:
        """The LSE of a row with its sink, and the factor that its O must still be multiplied by."""
        factor = Float32(1.0)
        if cutlass.const_expr(self.config.sink):
            lse, factor = with_sink(lse, self.args.sink[rows.head_of(row)])
        return lse, factor

    @cute.jit
    def store_lse(self, lse: Float32, rows: UnitRows, row: Int32) -> None:
        c, mLSE = self.config, self.args.lse
        if cutlass.const_expr(c.lse):
            query, head = rows.query(row), rows.head_of(row)
            store_lse(mLSE, lse, rows.batch, head, rows.seq_q, query)

    @cute.jit
    def announce(self, piece: Piece, unit: Int32) -> None:
        """Record where a unit's parts are, or that there is just one; for the CTA with part 0."""
        if cutlass.const_expr(self.parts is not None):
            thread, _, _ = cute.arch.thread_idx()
            if (thread == 0) & (piece.part == 0):
                self.parts.announce(unit, piece)

    @cute.jit
    def end_part(self, rows: UnitRows, piece: Piece, unit: Int32) -> None:
        """Count a part that this thread has helped to write and, if it is the last, merge all parts
        of the unit; or leave that to the kernel that combines parts."""
        if cutlass.const_expr(self.parts is None):
            self.count_part(rows, piece, unit)

    @cute.jit
    def count_part(self, rows: UnitRows, piece: Piece, unit: Int32) -> None:
        last = self.last
        self.sync()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            last[0] = Int32(self.partials.arrive(unit, piece.parts))
        self.sync()
        if last[0] != 0:
            self.merge(rows, piece)

    @cute.jit
    def merge(self, rows: UnitRows, piece: Piece) -> None:
        """Merge all parts of a unit and store O and LSE, one row per warp; or several rows at a
        time, where there are more rows than warps and each row would wait for memory, but no more
        than exist: the fewer rows, the more parts are on their way."""
        warp, warps = cute.arch.warp_idx(), THREADS // WARP
        if rows.count > 2 * warps:
            for row in cutlass.range(warp, rows.count, warps * TOGETHER, unroll=1):
                self.merge_rows(rows, piece, tuple(row + i * warps for i in range(TOGETHER)))
        elif rows.count > warps:
            self.merge_rows(rows, piece, (warp, warp + warps))
        elif warp < rows.count:
            self.merge_rows(rows, piece, (warp,))

    @cute.jit
    def merge_rows(
        self,
        rows: UnitRows,
        piece: Piece,
        numbers: tuple[Int32, ...],
        first: Int32 | int = 0,
        warps: cutlass.Constexpr[int] = 1,
    ) -> None:
        """Merge the rows `numbers` (those that exist, at least the first) over all parts of a unit,
        and store O and LSE. A whole warp calls it; or `warps` do, each for an equal number of
        columns from vector `first` on."""
        count = -(-self.config.head_dim_v // (VECTOR * WARP * warps))
        o = cute.make_rmem_tensor(cute.make_layout((VECTOR, count, len(numbers))), Float32)
        existing = tuple(cutlass.min(row, rows.count - 1) for row in numbers)
        lses = self.partials.merge(piece, existing, o, first)
        for r in cutlass.range_constexpr(len(numbers)):
            exists = numbers[r] < rows.count
            self.store_row(rows, existing[r], exists, o[None, None, r], lses[r], first)

    @cute.jit
    def store_row(
        self,
        rows: UnitRows,
        row: Int32,
        exists: Boolean,
        o: cute.Tensor,
        lse: Float32,
        first: Int32 | int,
    ) -> None:
        """Store a merged row, if it exists; a lane holds `o` (VECTOR, columns) from vector `first`
        on."""
        lane = cute.arch.lane_idx()
        vectors = cute.size(self.mO, mode=[cute.rank(self.mO) - 1]) // VECTOR
        narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), self.mO.element_type)
        of_row, factor = self.finish_row(lse, rows, row)
        gO = rows.words(self.mO, row)
        for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
            vector = first + lane + i * WARP
            narrow.store((o[None, i].load() * factor).to(narrow.element_type))
            if (vector < vectors) & exists:
                for j in cutlass.range_constexpr(2):
                    gO[2 * vector + j] = cute.recast_tensor(narrow, Int32)[j]
        if (first + lane == 0) & exists:
            self.store_lse(of_row, rows, row)


# ---- parts in memory


WARP = 32
IN_FLIGHT = 64  # words that a lane loads together, at most, and of how many parts
MOST_TOGETHER = 8


@dataclass(frozen=True)
class Partials:
    """The workspace of partial results: fp32 O and LSE of each part, and a flag for each unit."""

    sums: cute.Tensor  # (words) fp32
    flags: cute.Tensor  # (units) Int32
    rows: int  # bM
    columns: int  # DV

    def part(self, slot: Int32) -> cute.Pointer:
        """Where the part in `slot` starts."""
        return self.sums.iterator + Int64(slot) * (self.rows * (self.columns + 1))

    def o_row(self, slot: Int32, row: Int32) -> cute.Tensor:
        """A row of O, as (VECTOR, columns / VECTOR)."""
        first = (self.part(slot) + row * self.columns).align(4 * VECTOR)
        return cute.make_tensor(first, cute.make_layout((VECTOR, self.columns // VECTOR)))

    def row(self, slot: Int32, row: Int32) -> PartialRow:
        """A row of O, for storing."""
        return PartialRow(self.o_row(slot, row))

    def lse(self, slot: Int32) -> cute.Tensor:
        """The LSE of all rows, (bM)."""
        first = self.part(slot) + self.rows * self.columns
        return cute.make_tensor(first, cute.make_layout(self.rows))

    @cute.jit
    def arrive(self, unit: Int32, parts: Int32) -> Boolean:
        """Count a part of `unit` as written; returns whether it was the last. One thread calls it,
        after a barrier of all threads that wrote."""
        return is_last_arrival(self.flags.iterator + unit, parts)

    @cute.jit
    def merge(
        self, piece: Piece, rows: tuple[Int32, ...], o: cute.Tensor, first: Int32 | int = 0
    ) -> tuple[Float32, ...]:
        """Sum `rows` over all parts, each weighted by its share of the exponentials, into `o`
        (VECTOR, columns of this lane, rows); returns their LSE. A whole warp calls it; lane i has
        the vectors first + i, first + i + 32 and so on."""
        totals, highest = self.sums_of(piece, rows, o, first, 0, 1)
        return tuple(
            self.normalised(o[None, None, r], totals[r], highest[r]) for r in range(len(rows))
        )

    @cute.jit
    def sums_of(
        self,
        piece: Piece,
        rows: tuple[Int32, ...],
        o: cute.Tensor,
        first: Int32 | int,
        begin: Int32 | int,
        step: cutlass.Constexpr[int],
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Sum `rows` over the parts begin, begin + step, ... into `o`, as `merge` does. Returns for
        each row the sum of the weights, and the largest LSE of all parts, which has weight 1."""
        lane = cute.arch.lane_idx()
        highest = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
        total = cute.make_rmem_tensor(cute.make_layout(len(rows)), Float32)
        highest.fill(-Float32.inf)
        total.fill(0.0)
        o.fill(0.0)
        together = min(max(IN_FLIGHT // cute.size(o), 1), MOST_TOGETHER)
        parts = tuple(begin + i * step for i in range(together))
        # NOTE: on their way while the largest LSE is looked for
        held = self.loaded(piece, parts, rows, o, first)
        for part in cutlass.range(lane, piece.parts, WARP, unroll=1):
            for r in cutlass.range_constexpr(len(rows)):
                lse = self.lse(piece.slot_of(part))[rows[r]]
                highest[r] = cute.arch.fmax(highest[r], lse)
        for r in cutlass.range_constexpr(len(rows)):
            over_warp = cute.arch.warp_reduction_max(highest[r])
            highest[r] = Float32(0.0) if over_warp == -Float32.inf else over_warp
        self.add(piece, parts, held, (o, total), highest)
        stride = step * together
        for part in cutlass.range(begin + stride, piece.parts, stride, unroll=1):
            parts = tuple(part + i * step for i in range(together))
            self.add(piece, parts, self.loaded(piece, parts, rows, o, first), (o, total), highest)
        return total, highest

    @cute.jit
    def loaded(
        self,
        piece: Piece,
        parts: tuple[Int32, ...],
        rows: tuple[Int32, ...],
        o: cute.Tensor,
        first: Int32 | int,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """This lane's columns of O, and LSE, for `rows` of `parts`; where a part does not exist,
        the last one's.

        All loads are issued before anything is added; an unrolled loop would wait for each.
        """
        lane, vectors = cute.arch.lane_idx(), self.columns // VECTOR
        size = (VECTOR, cute.size(o, mode=[1]), len(rows), len(parts))
        values = cute.make_rmem_tensor(cute.make_layout(size), Float32)
        lses = cute.make_rmem_tensor(cute.make_layout((len(rows), len(parts))), Float32)
        for p in cutlass.range_constexpr(len(parts)):
            slot = piece.slot_of(cutlass.min(parts[p], piece.parts - 1))
            for r in cutlass.range_constexpr(len(rows)):
                lses[r, p] = self.lse(slot)[rows[r]]
                gO = self.o_row(slot, rows[r])
                for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    vector = cutlass.min(first + lane + i * WARP, vectors - 1)
                    values[None, i, r, p].store(gO[None, vector].load())
        return values, lses

    @cute.jit
    def add(
        self,
        piece: Piece,
        parts: tuple[Int32, ...],
        held: tuple[cute.Tensor, cute.Tensor],
        sums: tuple[cute.Tensor, cute.Tensor],
        highest: cute.Tensor,
    ) -> None:
        """Add those of `parts` that exist, as `held`, to the sums of O and of the weights."""
        (values, lses), (o, total) = held, sums
        for p in cutlass.range_constexpr(len(parts)):
            for r in cutlass.range_constexpr(cute.size(total)):
                weight = exp2((lses[r, p] - highest[r]) * LOG2_E)
                weight = weight if parts[p] < piece.parts else Float32(0.0)
                total[r] += weight
                for i in cutlass.range_constexpr(cute.size(o, mode=[1])):
                    more = values[None, i, r, p].load() * weight
                    o[None, i, r].store(o[None, i, r].load() + more)

    @cute.jit
    def normalised(self, o: cute.Tensor, total: Float32, highest: Float32) -> Float32:
        """Divide a row's sum by the sum of its weights; returns its LSE."""
        factor = Float32(0.0) if total == 0.0 else 1.0 / total
        o.store(o.load() * factor)
        return self._log_sum(total, highest)

    @staticmethod
    @cute.jit
    def _log_sum(total: Float32, shift: Float32) -> Float32:
        return -Float32.inf if total == 0.0 else shift + log2(total) * LN2


@cute.jit
def with_sink(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """The LSE of a row with one more key, of score `sink` and without a value, and the factor for
    its O."""
    highest = cute.arch.fmax(lse, sink)
    shift = Float32(0.0) if highest == -Float32.inf else highest
    mine, other = exp2((lse - shift) * LOG2_E), exp2((sink - shift) * LOG2_E)
    total = mine + other
    empty = total == 0.0
    factor = Float32(0.0) if empty else mine / total
    return -Float32.inf if empty else shift + log2(total) * LN2, factor


# ---- a launch that merges


@dataclass(frozen=True)
class Parts:
    """The parts of all units in memory, after the words that locate them."""

    args: KernelArgs
    units: Int32
    rows: int  # of a unit
    columns: int  # DV

    @property
    def partials(self) -> Partials:
        behind = self.args.sums.iterator + self.units * WORDS
        sums = cute.make_tensor(behind.align(16), self.args.sums.layout)
        return Partials(sums, None, self.rows, self.columns)

    def words(self, unit: Int32) -> cute.Tensor:
        """The words of a unit."""
        words = cute.recast_ptr(self.args.sums.iterator, dtype=Int32) + unit * WORDS
        return cute.make_tensor(words.align(16), cute.make_layout(WORDS))

    @cute.jit
    def announce(self, unit: Int32, piece: Piece) -> None:
        """Record where the parts of a unit are; called by the thread with part 0."""
        words = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        for i, x in enumerate((piece.parts, piece.slot_0, piece.slot, piece.step)):
            words[i] = Int32(x)
        self.words(unit).store(words.load())

    @cute.jit
    def whole(self, unit: Int32) -> Piece:
        """The record of a unit with a single part: 0."""
        words = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        words.store(self.words(unit).load())
        zero = Int32(0)
        return Piece(
            zero, zero, zero, zero, zero, words[0], slot=words[2], step=words[3], slot_0=words[1],
            after=zero,
        )  # fmt: skip


class Combine:
    """One warp per row of each unit; one CTA per row, where there are too few rows to fill the GPU;
    or one warp for several rows, where units fill the GPU, so that few are cut and most of the time
    goes to starting and ending.

    An operator with other units or results derives its own: `rows` and `out`.
    """

    out: ClassVar[type[Out]] = Out

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def by_columns(self) -> bool:
        """Whether warps that share a row divide its columns, not its parts."""
        return bool(self.config.head_dim_v >= WARPS * WARP * VECTOR)

    @property
    def rows_of_warp(self) -> int:
        """The rows that a warp merges together where units fill the GPU."""
        words = -(-self.config.head_dim_v // (VECTOR * WARP)) * VECTOR
        return min(MOST_ROWS, max(ROW_WORDS // words, 1))

    def rows(self, args: KernelArgs, sizes: Sizes, unit: Int32) -> UnitRows:
        """The rows of a unit."""
        sizes = sizes.known(self.config)
        entry = unit // sizes.heads
        batch = entry // sizes.m_blocks
        m_block, head = sizes.owner(entry - batch * sizes.m_blocks, unit - entry * sizes.heads)
        seq_q = sizes.queries(args, batch)
        return UnitRows(batch, m_block, head, seq_q, sizes.pack, self.config.tile_m)

    @cute.jit
    def launch(self, mO: cute.Tensor, args: KernelArgs, sizes: Sizes, stream: Any) -> None:
        rows = cutlass.min(sizes.rows_q * sizes.pack, self.config.tile_m)
        few = sizes.units * rows <= FEW
        if cutlass.const_expr(not self.by_columns):  # NOTE: the order of sums depends on it
            few = few | (args.num_splits > 0)
        across = Int32(WARPS) if few else Int32(1)  # warps of a row
        fill = (sizes.units * 2 >= self.config.num_sms) & (across == 1)
        together = Int32(self.rows_of_warp) if fill else Int32(1)
        self.kernel(mO, args, sizes, across, together).launch(
            grid=(sizes.units, cute.ceil_div(rows * across, WARPS * together), 1),
            block=(WARP * WARPS, 1, 1),
            # NOTE: else ptxas has each load wait where it is added (docs/facts/dsl.md#sunk-loads)
            min_blocks_per_mp=MIN_CTAS,
            preferred_smem_carveout=100,  # percent, as of the main kernel; else the DSL asks a GPU
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, args: KernelArgs, sizes: Sizes, across: Int32, together: Int32
    ) -> None:
        """Merge rows, `across` warps to a row, or `together` rows to a warp."""
        unit, group, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        row = group if across == WARPS else group * WARPS * together + warp
        rows = self.rows(args, sizes, unit)
        parts = Parts(args, sizes.units, self.config.tile_m, self.config.head_dim_v)
        out = self.out(self.config, mO, parts.partials, args, None)
        cute.arch.griddepcontrol_wait()
        if row < rows.count:
            piece = parts.whole(unit)
            if piece.parts > 1:
                if across != WARPS:
                    if together == 1:
                        out.merge_rows(rows, piece, (row,))
                    else:
                        mine = tuple(row + i * WARPS for i in range(self.rows_of_warp))
                        out.merge_rows(rows, piece, mine)
                elif cutlass.const_expr(self.by_columns):
                    out.merge_rows(rows, piece, (row,), warp * WARP, WARPS)
                else:
                    self.merge_by_parts(out, rows, piece, row)

    @cute.jit
    def merge_by_parts(
        self, out: cutlass.Constexpr[Out], rows: UnitRows, piece: Piece, row: Int32
    ) -> None:
        """Merge a row: each warp sums every fourth part, then their sums are added in smem."""
        smem, warp, lane = SmemAllocator(), cute.arch.warp_idx(), cute.arch.lane_idx()
        count = -(-self.config.head_dim_v // (VECTOR * WARP))
        layout = cute.make_ordered_layout((VECTOR, WARP, count, WARPS), order=(0, 1, 2, 3))
        sO = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        of_warps = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
        o = cute.make_rmem_tensor(cute.make_layout((VECTOR, count, 1)), Float32)
        totals, highest = out.partials.sums_of(piece, (row,), o, 0, warp, WARPS)
        for i in cutlass.range_constexpr(count):
            sO[None, lane, i, warp].store(o[None, i, 0].load())
        if lane == 0:
            of_warps[warp] = totals[0]
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range_constexpr(1, WARPS):
                totals[0] += of_warps[other]
                for i in cutlass.range_constexpr(count):
                    added = sO[None, lane, i, other].load()
                    o[None, i, 0].store(o[None, i, 0].load() + added)
            lse = out.partials.normalised(o[None, None, 0], totals[0], highest[0])
            out.store_row(rows, row, Boolean(True), o[None, None, 0], lse, 0)


def out_of(config: Any, mO: cute.Tensor, args: KernelArgs, sizes: Sizes, last: cute.Tensor) -> Out:
    """Where a decode kernel writes its results."""
    c = config
    if not c.combined:
        partials = Partials(args.sums, args.flags, c.tile_m, c.head_dim_v)
        return Out(c, mO, partials, args, last)
    parts = Parts(args, sizes.units, c.tile_m, c.head_dim_v)
    return Out(c, mO, parts.partials, args, None, parts)

"""The parts of the backward that all archs share: its three launches, and the kernels Preprocess
and Convert, which run before and after Main with one CTA for each tile of a head's queries.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from cutex.compile import Argument
from cutex.device.atoms.quad import transpose_in_quad
from cutex.device.attention.block_info import BlockInfo, smaller
from cutex.device.attention.gaps import Gaps
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.softmax import LOG2_E
from cutex.device.stream_order import (
    await_kernel_before,
    let_next_kernel_start,
    may_overlap,
)
from cutex.kernels.attention.backward.signature import (
    KernelArgs,
    RowTiles,
    Tensors,
    arguments,
    keys,
    queries,
)
from cutex.kernels.attention.backward.spec import BackwardSpec

THREADS = 128
LANES = 8  # threads of preprocess that read one row together
VECTOR = 8  # elements of 16 bits in one load
SIDE_BY_SIDE = THREADS // LANES  # rows that are read at one time
WIDE = 8  # columns of a unit of dQ
MOST = 32  # units that a thread of convert has in registers at one time
# bytes of smem that a CTA of convert has for nothing else than that three of them fill an SM: they
# begin while main ends, and would crowd on the SMs that it leaves first
SPARE_SMEM = 72 * 1024
HUGE_LSE, HUGE_LSE_ERROR = 2.0**24, 2.0**-20  # in powers of two, and more than its relative error

Config = TypeVar("Config", bound=BackwardSpec)


class QueryTile(NamedTuple):
    """The queries of one head of one sequence that a CTA processes."""

    number: Int32  # among all tiles of the workspace
    head: Int32
    batch: Int32
    seqlen: SeqlenInfo
    m_block: Int32


class Preprocess:
    """The kernel that computes the per-row values the backward needs.

    delta = rowsum(dO * O) - dLSE, with which the softmax's gradient is dS = P * (dP - delta), and
    LSE in powers of two. A gradient of LSE needs nothing else, since dLSE/dS = P. Rows without keys
    and the padding of tiles get LSE = inf, so that their P is 0. The kernel also zeroes the fp32
    sums of dQ: all of them, or those that main does not.
    """

    def __init__(self, config: BackwardSpec) -> None:
        self.config = config
        ragged = config.ragged_q or config.ragged_k
        self.gaps = Gaps(config.num_ctas if ragged else 0, THREADS)

    @cute.jit
    def launch(self, tensors: Tensors, args: KernelArgs, stream) -> None:
        batch, longest, tiles = row_sizes(self.config, tensors.q, args)
        num_m_blocks = cute.ceil_div(longest, self.config.tile_m)
        ctas = num_m_blocks * tiles.heads * batch + self.gaps.ctas
        if cutlass.const_expr(self.config.ranked):
            ctas += batch
        self.kernel(tensors, args, tiles, Int32(num_m_blocks), batch).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=may_overlap(), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tensors: Tensors,
        args: KernelArgs,
        tiles: RowTiles,
        num_m_blocks: Int32,
        num_sequences: Int32,
    ) -> None:
        c = self.config
        # NOTE: in this order, main may read what was there before this kernel without a wait
        await_kernel_before()
        let_next_kernel_start()
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(c.late_zeros):
            self.clear_flag(args)
        # NOTE: what is no block of rows has CTAs of its own, which delay none
        if cutlass.const_expr(c.ranked):
            index -= num_sequences
            if (index < 0) & (thread < 32):
                self.rank(args, index + num_sequences)
        if cutlass.const_expr(self.gaps.ctas > 0):
            if (index >= 0) & (index < self.gaps.ctas):
                self.clear_gaps(tensors, args, num_sequences, index * THREADS + thread)
            index -= self.gaps.ctas
        if index >= 0:
            self.rows(tensors, args, tiles, row_block(index, num_m_blocks, tiles.heads))

    @cute.jit
    def rows(
        self,
        tensors: Tensors,
        args: KernelArgs,
        tiles: RowTiles,
        place: tuple[Int32, Int32, Int32],
    ) -> None:
        """Process a block of queries of a head of a batch entry, if the sequence has it."""
        c, (m_block, head, batch) = self.config, place
        seqlen = queries(args, cute.size(tensors.o, mode=[0 if c.varlen_q else 1])).of(batch)
        if m_block * c.tile_m < seqlen.length:
            number = tiles.tile(c, head, batch, seqlen) + m_block
            self.tile(tensors, args, QueryTile(number, head, batch, seqlen, m_block))

    @cute.jit
    def tile(self, tensors: Tensors, args: KernelArgs, tile: QueryTile) -> None:
        """Process the queries of a tile."""
        c = self.config
        by_main = c.late_zeros or c.first_stores  # but for tiles that it has nothing to add to
        self.clear_turns(args, tile.number)
        for part in cutlass.range_constexpr(self.parts):
            rows = self.read_rows(part, tensors, args, tile)
            sums = tensors.dq_sums[tile.number, None]
            # NOTE: behind the loads, which do not wait for these stores then
            if cutlass.const_expr(not by_main):
                self.clear(sums, part)
            self.keep_rows(part, rows, tensors, args, tile)
            if cutlass.const_expr(c.first_stores or (c.late_zeros and c.ranked)):  # noqa: SIM102
                if self.sees_no_key(tensors, args, tile):
                    self.clear(sums, part)

    def sees_no_key(self, tensors: Tensors, args: KernelArgs, tile: QueryTile) -> Boolean:
        """Whether no key block adds to the sums of a tile."""
        c = self.config
        rows_k = cute.size(tensors.k, mode=[0 if c.varlen_k else 1])
        info = BlockInfo(c.tile_m, c.tile_n, args.band(c.causal))
        length_k = keys(args, Int32(rows_k)).of(tile.batch).length
        blocks = info.n_blocks(tile.m_block, tile.seqlen.length, length_k)
        return blocks.first >= blocks.end

    @cute.jit
    def clear_gaps(
        self, tensors: Tensors, args: KernelArgs, num_sequences: Int32, worker: Int32
    ) -> None:
        """Zero the gradients of rows of no sequence, which nothing else writes."""
        c = self.config
        if cutlass.const_expr(c.ragged_q):
            rows = Int32(cute.size(tensors.dq, mode=[0 if c.varlen_q else 1]))
            self.gaps.clear(queries(args, rows), (tensors.dq,), num_sequences, worker)
        if cutlass.const_expr(c.ragged_k):
            rows = Int32(cute.size(tensors.dk, mode=[0 if c.varlen_k else 1]))
            self.gaps.clear(keys(args, rows), (tensors.dk, tensors.dv), num_sequences, worker)

    @cute.jit
    def rank(self, args: KernelArgs, batch: Int32) -> None:
        """The rank of a sequence by its number of queries, and the number of key blocks of
        higher-ranked ones. One warp calls it."""
        lane, rank, before = cute.arch.lane_idx(), Int32(0), Int32(0)
        count = cute.size(args.ranks, mode=[0]) - 1
        mine = queries(args, Int32(0)).of(batch).length
        for j in cutlass.range(lane, count, 32, unroll=1):
            other = queries(args, Int32(0)).of(j).length
            if (other > mine) | ((other == mine) & (j < batch)):
                rank += 1
                before += self.key_blocks(args, j)
        for offset in (1, 2, 4, 8, 16):
            rank += cute.arch.shuffle_sync_bfly(rank, offset=offset)
            before += cute.arch.shuffle_sync_bfly(before, offset=offset)
        if lane == 0:
            args.ranks[rank, 0], args.ranks[rank, 1] = batch, before
            args.ranks[batch, 2] = rank
            if rank == count - 1:
                args.ranks[count, 1] = before + self.key_blocks(args, batch)

    def key_blocks(self, args: KernelArgs, batch: Int32) -> Int32:
        """The key blocks of a sequence; those of a cluster count as one."""
        length, c = keys(args, Int32(0)).of(batch).length, self.config
        return cute.ceil_div(length, c.tile_n * c.key_ctas)

    @cute.jit
    def clear_flag(self, args: KernelArgs) -> None:
        """Set the flag of the unit with this CTA's number to 0."""
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        if (thread == 0) & (number < cute.size(args.zeroed)):  # there are as many CTAs as units
            args.zeroed[number] = Int32(0)

    @cute.jit
    def clear_turns(self, args: KernelArgs, tile: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.config.deterministic):  # noqa: SIM102 - known when tracing
            if thread < self.config.turns:
                args.turns[tile, thread] = Int32(0)

    @property
    def vectors(self) -> int:
        """The vectors of a row of O per thread."""
        return -(-self.config.head_dim_v // (VECTOR * LANES))

    @property
    def at_once(self) -> int:
        """The number of rows per thread whose loads are in flight at once."""
        return min(4 if self.vectors > 1 else 8, self.config.tile_m // SIDE_BY_SIDE)

    @property
    def parts(self) -> int:
        """The parts of a tile whose rows are loaded at once."""
        return self.config.tile_m // (SIDE_BY_SIDE * self.at_once)

    def place(self, part: int, i: int) -> Int32:
        """The row of the tile that is row i of this thread's part."""
        thread, _, _ = cute.arch.thread_idx()
        return (part * self.at_once + i) * SIDE_BY_SIDE + thread // LANES

    @cute.jit
    def read_rows(
        self, part: cutlass.Constexpr[int], tensors: Tensors, args: KernelArgs, tile: QueryTile
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Start this thread's loads for the rows of a part: O and dO (VECTOR, NumV, row), LSE and
        its gradient (2, row); for rows past the end, those of the last one."""
        c, (_, head, batch, seqlen, m_block) = self.config, tile
        mO, mdO = (rows_of(x, c.varlen_q, head, batch) for x in (tensors.o, tensors.do))
        layout = cute.make_layout((VECTOR, self.vectors, self.at_once))
        rO, rdO = (cute.make_rmem_tensor(layout, mO.element_type) for _ in range(2))
        of_lse = cute.make_rmem_tensor(cute.make_layout((2, self.at_once)), Float32)
        for i in cutlass.range_constexpr(self.at_once):
            # NOTE: no load is in a branch, whose end would wait for it
            row = smaller(m_block * c.tile_m + self.place(part, i), seqlen.length - 1)
            self.read(mO, seqlen, row, rO[None, None, i])
            self.read(mdO, seqlen, row, rdO[None, None, i])
            at = (head, seqlen.offset + row) if c.varlen_q else (batch, head, row)
            of_lse[0, i] = tensors.lse[at]
            of_lse[1, i] = args.dlse[at] if c.dlse else Float32(0.0)
        return rO, rdO, of_lse

    @cute.jit
    def keep_rows(
        self,
        part: cutlass.Constexpr[int],
        rows: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        tensors: Tensors,
        args: KernelArgs,
        tile: QueryTile,
    ) -> None:
        """Write LSE and delta for the rows of a part."""
        thread, _, _ = cute.arch.thread_idx()
        rO, rdO, of_lse = rows
        columns = cute.size(tensors.o, mode=[cute.rank(tensors.o) - 1])
        for i in cutlass.range_constexpr(self.at_once):
            place, delta = self.place(part, i), Float32(0.0)
            for v in cutlass.range_constexpr(self.vectors):
                products = Float32(0.0)
                for j in cutlass.range_constexpr(VECTOR):
                    products += rO[j, v, i].to(Float32) * rdO[j, v, i].to(Float32)
                there = (v * LANES + thread % LANES) * VECTOR < columns
                delta += cutlass.select_(there, products, Float32(0.0))
            for offset in (1, 2, 4):
                delta += cute.arch.shuffle_sync_bfly(delta, offset=offset)
            there = tile.m_block * self.config.tile_m + place < tile.seqlen.length
            lse = cutlass.select_(there, of_lse[0, i], -Float32.inf)
            delta = cutlass.select_(there, delta, Float32(0.0))
            lse, dlse = in_powers(lse, of_lse[1, i])
            if thread % LANES == 0:
                self.keep(tensors.stats[tile.number, None], place, lse, delta - dlse, args)
                if cutlass.const_expr(self.config.sink):
                    self.hand_out(delta - dlse, place, args, tile)

    @cute.jit
    def hand_out(self, delta: Float32, place: Int32, args: KernelArgs, tile: QueryTile) -> None:
        """Return the delta of a row, if the sequence has it."""
        row, at = tile.m_block * self.config.tile_m + place, tile.seqlen.offset
        if row < tile.seqlen.length:
            if cutlass.const_expr(self.config.varlen_q):
                args.delta[tile.head, at + row] = delta
            else:
                args.delta[tile.batch, tile.head, row] = delta

    @cute.jit
    def keep(
        self, stats: cute.Tensor, place: Int32, lse: Float32, delta: Float32, args: KernelArgs
    ) -> None:
        """Write the values of one row for the main kernel."""
        stats[place] = lse
        stats[self.config.tile_m + place] = delta

    @cute.jit
    def clear(self, sums: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Zero a part of a tile's sums."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        zeros = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        zeros.fill(0.0)
        count = self.config.tile_m * self.config.head_dim // 4 // THREADS // self.parts
        for i in cutlass.range_constexpr(part * count, (part + 1) * count):
            cute.autovec_copy(zeros, vectors[None, i * THREADS + thread])

    @cute.jit
    def read(self, mX, seqlen: SeqlenInfo, row: Int32, rX: cute.Tensor) -> None:
        """Read this thread's part (VECTOR, NumV) of a row of O or dO; past the end, the last."""
        thread, _, _ = cute.arch.thread_idx()
        at = seqlen.offset + row if self.config.varlen_q else row
        gX = cute.logical_divide(mX[at, None], cute.make_layout(VECTOR))  # (VECTOR, NumV)
        for i in cutlass.range_constexpr(cute.size(rX, mode=[1])):
            v = smaller(i * LANES + thread % LANES, cute.size(gX, mode=[1]) - 1)
            cute.autovec_copy(gX[None, v], rX[None, i])


@cute.jit
def in_powers(lse: Float32, dlse: Float32) -> tuple[Float32, Float32]:
    """LSE in powers of two, and its gradient; inf and 0 for a row without keys."""
    # NOTE: past 2^24 float32 steps by more than 1, and a probability, 2^(score - LSE), could be
    # any power of two; with LSE's largest errors added it is at most 1, and nothing overflows
    lse_log2 = lse * LOG2_E
    past = cute.arch.fmax(cute.arch.fmax(lse_log2, -lse_log2) - HUGE_LSE, Float32(0.0))
    lse_log2 += past * HUGE_LSE_ERROR
    if lse == -Float32.inf:
        lse_log2, dlse = Float32.inf, Float32(0.0)
    return lse_log2, dlse


def by_tiles(mX: cute.Tensor, width: int) -> cute.Tensor:
    """The contiguous mX (rows, numbers) as (tiles, `width`), of 2^31 numbers or more."""
    rows, numbers = mX.shape
    tiles = Int32(Int64(rows) * numbers // width)
    # NOTE: of 64 bits, else the place of a tile overflows
    stride = cute.assume(Int64(width), divby=width)
    return cute.make_tensor(mX.iterator, cute.make_layout((tiles, width), stride=(stride, 1)))


def row_sizes(config: BackwardSpec, mX: cute.Tensor, args: KernelArgs):
    """The number of sequences, the most rows of any of them, and the number of tiles of mX, which
    is laid out like q."""
    c = config
    at = 0 if c.varlen_q else 1
    rows, heads = cute.size(mX, mode=[at]), Int32(cute.size(mX, mode=[at + 1]))
    batch = cute.size(mX, mode=[0])
    if c.varlen_q:
        batch = cute.size(args.cu_seqlens_q, mode=[0]) - 1
    longest = args.max_seqlen_q if c.varlen_q else rows
    tiles = RowTiles.of(c, heads, Int32(rows), Int32(batch))
    return Int32(batch), longest, tiles


def row_block(index: Int32, num_m_blocks: Int32, heads: Int32) -> tuple[Int32, Int32, Int32]:
    """The block of queries, the head and the batch entry of a CTA."""
    unit = index // num_m_blocks
    return index - unit * num_m_blocks, unit % heads, unit // heads


def rows_of(mX: cute.Tensor, packed: bool, head: Int32, batch: Int32) -> cute.Tensor:
    """The rows (seqlen, D) of one head: of one batch entry or, for packed sequences, of all of
    them."""
    return mX[None, head, None] if packed else mX[batch, None, head, None]


class Convert:
    """The kernel that scales the fp32 sums of dQ and rounds them to 16 bits.

    A tile of the sums is stored in the register order of the warpgroup that added them: warp by
    warp 16 rows, in which each unit of 8 columns is 4 numbers from each of 32 threads. A thread
    here reads the same order. The four threads of a row then exchange the columns of every four
    units, so that each writes 8 columns of one unit.
    """

    def __init__(self, config: BackwardSpec) -> None:
        self.config = config

    @cute.jit
    def launch(self, tensors: Tensors, args: KernelArgs, stream) -> None:
        batch, longest, tiles = row_sizes(self.config, tensors.dq, args)
        num_m_blocks = cute.ceil_div(longest, self.config.tile_m)
        self.kernel(tensors.dq_sums, tensors.dq, args, tiles, Int32(num_m_blocks)).launch(
            grid=(num_m_blocks * tiles.heads * batch, 1, 1),
            block=(THREADS, 1, 1),
            smem=SPARE_SMEM if self.config.overlaps else 0,
            use_pdl=self.config.overlaps,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSums, mdQ, args: KernelArgs, tiles: RowTiles, num_m_blocks: Int32) -> None:
        c = self.config
        if cutlass.const_expr(c.overlaps):
            await_kernel_before()
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        # NOTE: of the sums, those of the last heads are still in L2
        m_block, head, batch = row_block(ctas - 1 - index, num_m_blocks, tiles.heads)
        seqlen = queries(args, cute.size(mdQ, mode=[0 if c.varlen_q else 1])).of(batch)
        if m_block * c.tile_m < seqlen.length:
            sums = mSums[tiles.tile(c, head, batch, seqlen) + m_block, None]  # (bM * D)
            gdQ = rows_of(mdQ, c.varlen_q, head, batch)  # (seqlen, D)
            self.tile(thread, sums, gdQ, seqlen, m_block, args.scale)

    @cute.jit
    def tile(
        self,
        thread: Int32,
        sums: cute.Tensor,
        gdQ: cute.Tensor,
        seqlen: SeqlenInfo,
        m_block: Int32,
        scale: Float32,
    ) -> None:
        """Convert a tile of the sums: each warp converts the 16 rows added by one warp, or two such
        sets."""
        for i in cutlass.range_constexpr(self.config.tile_m // (16 * THREADS // 32)):
            self.rows_of_warp(thread // 32 + 4 * i, thread % 32, sums, gdQ, seqlen, m_block, scale)

    @cute.jit
    def rows_of_warp(
        self,
        warp: Int32,
        lane: Int32,
        sums: cute.Tensor,
        gdQ: cute.Tensor,
        seqlen: SeqlenInfo,
        m_block: Int32,
        scale: Float32,
    ) -> None:
        """Convert 16 rows of a tile, with the loads of all of them, or of half, in flight at
        once."""
        c = self.config
        units = c.head_dim // WIDE
        at_once = units if units <= MOST else units // 2
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        row = m_block * c.tile_m + warp * 16 + lane // 4
        for part in cutlass.range_constexpr(units // at_once):
            numbers = cute.make_rmem_tensor(cute.make_layout((4, at_once)), Float32)
            for j in cutlass.range_constexpr(at_once):
                at = (warp * units + part * at_once + j) * 32 + lane
                cute.autovec_copy(vectors[None, at], numbers[None, j])
            for four in cutlass.range_constexpr(at_once // 4):
                unit = part * at_once + 4 * four + lane % 4
                for r in cutlass.range_constexpr(2):
                    rounded = cute.make_rmem_tensor(WIDE, gdQ.element_type)
                    for i in cutlass.range_constexpr(WIDE):
                        number = numbers[2 * r + i % 2, 4 * four + i // 2]
                        rounded[i] = (number * scale).to(gdQ.element_type)
                    transpose_in_quad(cute.recast_tensor(rounded, Int32))
                    self.store(rounded, gdQ, seqlen, row + 8 * r, unit)

    @cute.jit
    def store(
        self, rounded: cute.Tensor, gdQ: cute.Tensor, seqlen: SeqlenInfo, row: Int32, unit: Int32
    ) -> None:
        """Write 8 columns of a row, if the row is in the sequence and the columns are in dQ."""
        at = seqlen.offset + row if self.config.varlen_q else row
        if (row < seqlen.length) & (unit * WIDE < cute.size(gdQ, mode=[1])):
            to = cute.logical_divide(gdQ[at, None], cute.make_layout(WIDE))  # (WIDE, NumUnits)
            cute.autovec_copy(rounded, to[None, unit])


class BackwardKernel(Generic[Config]):
    """What compiles and launches a backward kernel of any arch needs to know: preprocess, main and
    convert; each arch has its own main."""

    arch: str
    name: str
    preprocess: ClassVar[type[Preprocess]] = Preprocess
    main: ClassVar[Any]
    convert: ClassVar[type[Convert]] = Convert

    def __init__(self, config: Config) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    @property
    def kernels(self) -> dict[str, Any]:
        roles = {"preprocess": self.preprocess, "main": self.main, "convert": self.convert}
        return {role: of.kernel for role, of in roles.items()}

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype)

    def workspace(self, tensors: Tensors) -> Tensors:
        """`tensors` with stats and dq_sums in the layout of this arch's kernels."""
        return tensors

    @cute.jit
    def __call__(self, mQ, *rest) -> None:
        c, count = self.config, len(Tensors._fields)
        tensors, stream = self.workspace(Tensors(mQ, *rest[: count - 1])), rest[-1]
        args = KernelArgs.of(c, rest[count - 1 : -1])
        self.preprocess(c).launch(tensors, args, stream)
        self.main(c).launch(tensors, args, stream)
        self.convert(c).launch(tensors, args, stream)

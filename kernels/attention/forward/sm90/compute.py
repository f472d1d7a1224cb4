"""Compute: the role of the warpgroups of the Hopper forward, 64 rows of every tile each; and
OutStore, their store of O and of its LSE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.scalar import product_plus
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.attention.block_loop import BlockLoop, KeyRings, Products, State
from cutex.device.attention.issue_order import IssueOrder
from cutex.device.attention.kept_rows import KeptRows
from cutex.device.attention.mask import Mask
from cutex.device.attention.query import Query
from cutex.device.attention.row_store import row_stores
from cutex.device.attention.rows import Rows
from cutex.device.attention.scores import ScoreOps
from cutex.device.attention.seqlen_info import store_lse
from cutex.device.attention.split_row import PartPlace, within
from cutex.device.attention.tame_softmax import LEAST_SEEN
from cutex.device.attention.watched_softmax import WatchedSoftmax
from cutex.device.kept_sums import KeptSums
from cutex.device.pipeline import OrderedBarrier, PipelineState
from cutex.kernels.attention.forward.config import COUNTER
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.parts import MOST
from cutex.kernels.attention.forward.sm90.shared import OwnRows, Shared
from cutex.kernels.attention.work_ring import END, MERGE, RETRY

MAX_BLOCKS = 2**30
ORDER_BARRIER = 4  # the first of one named barrier for each warpgroup: its turn to issue


@dataclass(frozen=True)
class Compute:
    """The role of a warpgroup: O and LSE of its 64 rows of every tile, and their store."""

    config: Sm90ForwardConfig
    shared: Shared
    out: OutStore
    merge: Any = None  # the PartMerge of tiles that are split

    @cute.jit
    def run(self) -> None:
        c, shared, ring = self.config, self.shared, self.shared.work
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        query, half_qk, pv = self.query(), self.half_qk(), self.pv()
        factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        lse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        low = cute.make_rmem_tensor(cute.make_layout(2), Float32) if c.is_cut else None
        issue_order, pending, turns = None, None, c.turns(self.dtype is BFloat16)
        if cutlass.const_expr(c.scales_later and self.dtype is cutlass.Float16):
            pending = cute.make_rmem_tensor(cute.make_layout(1), Int32)
            pending[0] = Int32(0)
        if cutlass.const_expr(c.warpgroups > 1):
            issue_order = IssueOrder(OrderedBarrier(ORDER_BARRIER), wg, c.warpgroups)
            issue_order.start()
        rings = KeyRings(shared.k, shared.v)
        q_take, state = ring.q.consumer(), rings.consumer()
        ring.q.wait_full(q_take)
        mode = ring.mode(q_take.slot)
        while mode != END:
            work = ring.work(q_take.slot)
            seq_q, seqlen_k = ring.lengths(q_take.slot)
            part = ring.part(q_take.slot) if c.is_cut else None
            tile = shared.info.n_blocks(work.m, seq_q.length, seqlen_k)
            m_block = shared.m_block(work, wg)  # of this warpgroup's rows
            blocks = self.own_info.n_blocks(m_block, seq_q.length, seqlen_k)
            stats = None
            if cutlass.const_expr(c.split):
                tile, blocks, stats = within(tile, part), within(blocks, part), self.merge.stats()
            q_slot = wg if c.q_waits else q_take.slot * c.warpgroups + wg
            own = OwnRows(work, m_block, self.thread_rows(m_block), seq_q, seqlen_k, blocks)
            score_ops = self.score_ops(own)
            kind = WatchedSoftmax.rounding_to(self.dtype)
            number = blocks.end - blocks.first
            # NOTE: from a constant, it would be computed again in each block, after QK
            scale_log2 = cute.arch.shuffle_sync(score_ops.scale_log2(), 0)
            unit = score_ops.unit(), score_ops.usual_unit(c.head_dim)
            truncated = score_ops.truncated(c.head_dim, self.dtype is cutlass.Float16)
            begins = 0 if self.dtype is Float16 else c.begins
            options = c.speculates, number, not c.guards_all, *unit, truncated, begins
            threshold, headroom = self.limits(mode, kind.most_headroom)
            softmax = kind.of(scale_log2, threshold, *options, headroom)
            tSrQ = query.of_slot(q_slot)
            halves = None if half_qk is None else half_qk.of(tSrQ)
            loop = BlockLoop(
                Products(query.qk.of(tSrQ), pv, halves),
                *(rings, score_ops, softmax, factors, issue_order, c.speculates),
                *(cutlass.min(ROWS, seq_q.length * c.pack - m_block * ROWS), c.asks_later, pending),
                turns=turns,
            )
            forwards = ring.forwards(q_take.slot) if c.alternates else None
            around = tile.around(blocks, forwards)  # what only other warpgroups' rows see
            turn = tile.turn() - around[0] if turns else None
            valid = Boolean(True)
            if blocks.end > blocks.first and m_block * ROWS < seq_q.length * c.pack:
                state = loop.pass_over(around[0], state, True)
                state = self.attend(loop, own, q_take, state, mode, forwards, turn)
                loop.issue_last(state)
                in_range = softmax.finish(self.sinks(own), factors, lse, low)
                state = loop.await_last(state)
                state = loop.pass_over(around[1], state, True)
                if cutlass.const_expr(c.speculates):
                    valid = in_range
                loop.scale_output()
                if cutlass.const_expr(c.spread):
                    valid = self.join(pv.acc, softmax, part, valid, (lse, low))
                elif cutlass.const_expr(c.split):
                    self.merge.note(stats, softmax, lse, low)
            else:
                state = self.pass_tile(loop, tile.end - tile.first, q_take, state)
                pv.acc.fill(0.0)
                self.without_keys(self.sinks(own), lse)
            if cutlass.const_expr(c.split):
                # NOTE: what the loop over keys does not need is read again, not kept in registers
                mode, work = ring.mode(q_take.slot), ring.work(q_take.slot)
                seq_q, seqlen_k = ring.lengths(q_take.slot)
                m_block = shared.m_block(work, wg)
                own = OwnRows(work, m_block, self.thread_rows(m_block), seq_q, seqlen_k, blocks)
            rounded = self.out.rounded(pv.acc)
            if cutlass.const_expr(c.speculates):
                valid = (valid & is_finite(rounded)) | (mode == RETRY)
            o_slot = wg if c.own_o else q_slot
            if cutlass.const_expr(c.split):
                if mode == MERGE:
                    self.merge_parts(own, q_take)
                elif PartPlace.told(ring.place(q_take.slot)).parts == 1:
                    self.store(rounded, lse, own, o_slot, q_take, valid, None)
                else:
                    self.leave(pv.acc, stats, own, q_take, valid)
            else:
                stores = None
                if cutlass.const_expr(c.spread):
                    assert part is not None
                    stores = part >= 0
                    valid = valid | ~stores
                self.store(rounded, lse, own, o_slot, q_take, valid, stores)
            q_take.advance()
            ring.q.wait_full(q_take)
            mode = ring.mode(q_take.slot)
        self.out.wait()

    # ---- products

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        return self.shared.sQ.element_type

    @property
    def own_info(self):
        """The BlockInfo of a warpgroup's own rows."""
        return self.shared.info._replace(tile_m=ROWS)

    def query(self) -> Query:
        return Query.of(self.shared.sQ, self.shared.sK, self.config.q_in_registers)

    def half_qk(self) -> WgmmaProduct | None:
        """QK of the first half of a block's keys, where a row may end in it."""
        c, sK = self.config, self.shared.sK
        if not c.takes_halves:
            return None
        half = c.tile_n // 2, c.head_dim, c.num_stages
        halves = cute.local_tile(sK, half, (0, 0, 0))  # (bN / 2, D, SLOT)
        return Query.of(self.shared.sQ, halves, c.q_in_registers).qk

    def pv(self) -> WgmmaProduct:
        """P V into O, P in registers."""
        c, sV = self.config, self.shared.sV
        transposed = contiguous_rows_layout(self.dtype, c.head_dim_v, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(sV.iterator, transposed.outer)  # (DV, bN, SLOT)
        mma = Wgmma(c.head_dim_v, self.dtype, b_major=OperandMajorMode.MN)
        tOrV = mma.b_slots(sVt)  # (MMA, MMA_N, MMA_K, SLOT)
        acc_o = mma.accumulator()
        return WgmmaProduct(mma, mma.a_registers(c.tile_n), tOrV, acc_o)

    # ---- a tile

    @cute.jit
    def attend(
        self,
        loop: cutlass.Constexpr[BlockLoop],
        own: OwnRows,
        q_take: PipelineState,
        state: State,
        mode: Int32,
        forwards: Int32 | None,
        turn: Int32 | None,
    ) -> State:
        """Compute O, unscaled and without the last PV, over the blocks that these rows see."""
        c, half = self.config, None
        if cutlass.const_expr(c.takes_halves):
            seqlens = own.seq_q.length, own.seqlen_k
            half = self.own_info.ends_in_first_half(own.m_block, *seqlens)
        searched = Int32(MAX_BLOCKS) if mode == RETRY else self.searched(own)
        state = loop.run(own.blocks, half, state, searched, forwards, turn)
        self.release_q(q_take)
        return state

    @cute.jit
    def release_q(self, q_take: PipelineState) -> None:
        """Release Q after a tile's last QK, where its slot is free then."""
        q_read = self.shared.q_read
        if cutlass.const_expr(self.config.releases_early):
            self.shared.work.release(q_take, Boolean(True))
        elif cutlass.const_expr(q_read is not None):
            with cute.arch.elect_one():
                q_read.arrive()

    @cute.jit
    def searched(self, own: OwnRows) -> Int32:
        """In how many blocks without a mask a larger score has to be looked for: in one if a row
        may see no key before it, or if the block at the end has too few to tell what scores are
        like."""
        c, band = self.config, self.shared.info.band
        searched = Int32(1)
        if cutlass.const_expr(band.hi is None and band.lo is None):
            rest, tells = own.seqlen_k % c.tile_n, 4 * LEAST_SEEN
            if cutlass.const_expr(self.dtype is cutlass.Float16):
                tells *= 2  # NOTE: that scores fall along the keys is not seen in fewer
            searched = Int32(1) if (rest > 0) & (rest < tells) else Int32(0)
        elif cutlass.const_expr(band.lo is None and not c.alternates):
            end = own.m_block * ROWS // c.pack + own.seqlen_k - own.seq_q.length + band.hi + 1
            searched = Int32(1) if end % c.tile_n == 0 else Int32(0)  # of the first row's keys
        return searched

    @cute.jit
    def pass_tile(
        self,
        loop: cutlass.Constexpr[BlockLoop],
        count: Int32,
        q_take: PipelineState,
        state: State,
    ) -> State:
        """Release the `count` blocks of a tile of which these rows see none."""
        state = loop.pass_over(cutlass.max(count - 1, 0), state, True)
        state = loop.pass_over(cutlass.min(count, 1), state, False)
        self.release_q(q_take)
        return state

    @cute.jit
    def store(
        self,
        rounded: cute.Tensor,
        lse: cute.Tensor,
        own: OwnRows,
        o_slot: Int32,
        q_take: PipelineState,
        valid: Boolean,
        stores: Boolean | None,
    ) -> None:
        """Store O, through `o_slot`, and LSE, unless it is a part that others complete, and release
        Q's slot when nothing reads it."""
        c, ring = self.config, self.shared.work
        if cutlass.const_expr(stores is None) or stores:
            self.out.store(rounded, own, o_slot)
        if cutlass.const_expr(not c.releases_early):
            if cutlass.const_expr(not c.own_o):
                self.out.wait()
            # NOTE: behind the store, which is not to wait for what `valid` takes
            ring.release(q_take, valid)
        if cutlass.const_expr(c.lse):
            if cutlass.const_expr(stores is None):  # noqa: SIM114 - known when tracing
                self.out.store_lse(lse, own)
            elif stores:
                self.out.store_lse(lse, own)

    @cute.jit
    def leave(
        self,
        acc_o: cute.Tensor,
        stats: cute.Tensor,
        own: OwnRows,
        q_take: PipelineState,
        valid: Boolean,
    ) -> None:
        """Leave these rows of a part of a tile, and release Q's slot."""
        ring = self.shared.work
        place = PartPlace.told(ring.place(q_take.slot))
        ring.release(q_take, self.merge.leave(acc_o, stats, own, place, valid))

    @cute.jit
    def merge_parts(self, own: OwnRows, q_take: PipelineState) -> None:
        """Merge some columns of the parts of these rows, and release the slot that says so."""
        ring = self.shared.work
        place, store_lse = PartPlace.told(ring.place(q_take.slot)), self.lse_store(own)
        self.merge.merge(own, place, store_lse)
        ring.release(q_take, Boolean(True))

    def lse_store(self, own: OwnRows) -> Callable[[cute.Tensor], None] | None:
        """A function that stores the LSE of these rows, if it is wanted."""
        return (lambda lse: self.out.store_lse(lse, own)) if self.config.lse else None

    @cute.jit
    def join(
        self,
        acc_o: cute.Tensor,
        softmax: cutlass.Constexpr[WatchedSoftmax],
        part: Int32,
        valid: Boolean,
        lse: tuple[cute.Tensor, cute.Tensor],
    ) -> Boolean:
        """Keep these rows for another CTA, or add what others have of them, where `part` says so.
        Returns whether all that was added is valid."""
        if part != 0:
            rows = KeptRows.of(acc_o, softmax, *lse)
            valid = valid & is_finite(self.out.rounded(acc_o))
            if part < 0:
                rows.keep(self.kept(-1 - part), valid)
            else:
                share = part // MOST
                for i in cutlass.range(part % MOST, unroll=1):
                    valid = rows.add(self.kept(share - 1 - i)) & valid
                rows.store_lse(lse[0])
        return valid

    def kept(self, share: Int32) -> KeptSums:
        """What this warp of the CTA that has share `share` keeps of its rows."""
        c, args = self.config, self.shared.args
        cta = share * c.ctas + (0 if c.ctas == 1 else cute.arch.block_idx_in_cluster())
        warp = cta * c.warps + cute.arch.warp_idx()
        return KeptSums.of(args.parts, args.counter.iterator + COUNTER, warp, c.part_numbers)

    # ---- rows

    @property
    def threshold(self) -> float:
        """The threshold in powers of two; smaller for fp16, whose range ends at 2^16, which
        `Softmax.add` should not reach either."""
        threshold = self.config.rescale_threshold
        return min(threshold, 4.0) if self.dtype is cutlass.Float16 else threshold

    @cute.jit
    def limits(
        self, mode: Int32, most_headroom: cutlass.Constexpr[float]
    ) -> tuple[Float32 | float, Float32 | float]:
        """The threshold, and the powers of two by which references exceed the largest score: of
        tiles that are computed again none, and so many that O, unscaled, is as small as V."""
        threshold, headroom = self.threshold, 0.0
        if cutlass.const_expr(self.config.speculates):
            threshold = Float32(0.0) if mode == RETRY else Float32(self.threshold)
            if cutlass.const_expr(most_headroom > 0.0):
                headroom = Float32(most_headroom) if mode == RETRY else Float32(0.0)
        return threshold, headroom

    def thread_rows(self, m_block: Int32) -> tuple[Int32, Int32]:
        """The two packed rows of a sequence's head that this thread holds."""
        thread, _, _ = cute.arch.thread_idx()
        row = m_block * ROWS + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
        return row, row + 8

    def score_ops(self, own: OwnRows) -> ScoreOps:
        c, args = self.config, self.shared.args
        thread, _, _ = cute.arch.thread_idx()
        queries = tuple(row // c.pack for row in own.rows)
        heads = tuple(own.work.head * c.pack + row % c.pack for row in own.rows)
        band = self.shared.info.band
        mask = Mask(band, c.tile_n, own.seq_q.length, own.seqlen_k, queries, thread % 4)
        functions = c.score_mod, c.mask_mod
        ops = ScoreOps(mask, args.scale, args.softcap, *functions, own.work.batch, heads)
        return ops.with_slopes(args.slopes)

    def sinks(self, own: OwnRows) -> tuple[Float32, ...]:
        pack, sink = self.config.pack, self.shared.args.sink
        if sink is None:
            return ()
        return tuple(sink[own.work.head * pack + row % pack] for row in own.rows)

    @cute.jit
    def without_keys(self, sinks, lse: cute.Tensor) -> None:
        for r in cutlass.range_constexpr(2):
            lse[r] = sinks[r] if len(sinks) > 0 else -Float32.inf


# ---- the store of O


@cute.jit
def is_finite(rounded: cute.Tensor) -> Boolean:
    """Whether O, rounded, is finite in this thread's columns of its two rows.

    Of fp16 one column of each tells: what overflows is P, and with it all columns of its row. Of
    bf16 products of pairs are added up, which overflow beyond 1e19, too.
    """
    words = cute.recast_tensor(rounded, Int32)  # two columns of one row, of the other, ..
    is_fp16 = rounded.element_type is Float16
    total = [Int32(0)] * 2
    if cutlass.const_expr(is_fp16):
        total = [product_plus(words[r], Int32(0), total[r], True) for r in range(2)]
    else:
        for i in cutlass.range_constexpr(0, cute.size(words), 2):
            total[i // 2 % 2] = product_plus(words[i], words[i + 1], total[i // 2 % 2])
        total = [product_plus(x, Int32(0), Int32(0)) for x in total]
    return (total[0] | total[1]) & 0x7FFF7FFF == 0


STORE_BARRIER = 1  # the first of one named barrier for each warpgroup


@dataclass(frozen=True)
class OutStore:
    """A warpgroup's store of O, rounded and by TMA, and of its LSE."""

    config: Sm90ForwardConfig
    o: Rows  # of O, with its TMA operand
    sO: cute.Tensor  # (64, DV / o_parts, SLOT)
    mLSE: Any  # (batch, heads, seqlen_q) or (heads, total_q); None if it is not wanted

    def rounded(self, acc_o: cute.Tensor) -> cute.Tensor:
        """O of 16 bits, in registers (8, units of 8 columns)."""
        layout = cute.make_layout((8, cute.size(acc_o) // 8))
        wide = cute.make_tensor(acc_o.iterator, layout)
        narrow = cute.make_rmem_tensor(layout, self.sO.element_type)
        for unit in range(cute.size(layout, mode=[1])):
            narrow[None, unit].store(wide[None, unit].load().to(self.sO.element_type))
        return narrow

    @cute.jit
    def store(self, rounded: cute.Tensor, own: OwnRows, slot: Int32) -> None:
        """Write O, one part of its columns at a time, to `slot`, and start the stores, which leave
        out rows past the end.

        NOTE: the two stores of a tile that is computed again have one address; the second waits
        until the first has been written, not only read.
        """
        c, sO = self.config, self.sO
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        stores = cute.arch.warp_idx() % 4 == 0
        columns = c.head_dim_v // c.o_parts
        to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sO.element_type)
        r2s = cute.make_tiled_copy_C(to_smem, Wgmma(columns, sO.element_type).tiled())
        thr_r2s = r2s.get_slice(thread % WARPGROUP)
        tRS_sO = thr_r2s.partition_D(sO[None, None, slot])  # (R2S, R2S_M, R2S_N)
        of_part = cute.make_rmem_tensor(tRS_sO.shape, sO.element_type).layout
        size = cute.size(rounded) // c.o_parts
        for part in cutlass.range_constexpr(c.o_parts):
            if stores:
                cute.arch.cp_async_bulk_wait_group(0, read=part > 0 or not c.speculates)
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
            tRS_rO = cute.make_tensor(rounded.iterator + part * size, of_part)  # as tRS_sO
            cute.copy(r2s, tRS_rO, tRS_sO)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
            if stores:
                of = own.work.head, own.work.batch, own.seq_q
                row_stores(self.o, sO, of, part).store(slot, own.m_block)

    @cute.jit
    def wait(self) -> None:
        """Wait until TMA has read the smem that this warpgroup stores from."""
        if cute.arch.warp_idx() % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_lse(self, lse: cute.Tensor, own: OwnRows) -> None:
        """Store the LSE of a row by one of the four threads that hold it."""
        pack, mLSE = self.config.pack, self.mLSE
        thread, _, _ = cute.arch.thread_idx()
        for r in cutlass.range_constexpr(2):
            query, head = own.rows[r] // pack, own.work.head * pack + own.rows[r] % pack
            if thread % 4 == 0 and query < own.seq_q.length:
                store_lse(mLSE, lse[r], own.work.batch, head, own.seq_q, query)

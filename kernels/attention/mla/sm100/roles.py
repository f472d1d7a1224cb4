"""The warps of the Blackwell MLA kernel that load and that start MMAs.

Load: those that load Q and, box by box, keys as K and as V, each its slots of a block: one alone
would issue boxes more slowly than the MMAs read them. K and V share a ring of slots, in the order
in which the MMAs read them: K of a block comes before V of the block before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from cutex.device.atoms.tma import tile_loads
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.pipeline import PipelineState, is_leader
from cutex.device.row_source import UNROLLED, Box, BoxLoads, RowSource, cache_box_rows
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.config import CHUNK, CHUNKS, HEAD_DIM_V
from cutex.kernels.attention.mla.sm100.config import BOX, CTAS, DIMS, KEYS, KEYS_OF_CTA, ROWS
from cutex.kernels.attention.mla.sm100.shared import LOAD_WARPS, Shared

HALVES = 2  # boxes of a slot: of K 32 keys each, of V a chunk of columns each
PRODUCTS = HEAD_DIM_V // DIMS  # of P and V
OF_V = DIMS // CTAS // CHUNK  # chunks of a slot of V
GROUPS = KEYS // BOX  # of the keys of a block
BLOCKS = 32 // GROUPS  # that the lanes of a warp look up


class KeyBoxes(NamedTuple):
    """Where the keys of a block are: the box of each 32, or its smaller boxes, one in each lane."""

    first: Box
    second: Box
    third: Box
    fourth: Box


def no_box() -> Box:
    return Box(Int32(0), Int32(0))


def no_boxes() -> KeyBoxes:
    return KeyBoxes(*(no_box() for _ in range(GROUPS)))


@dataclass(frozen=True)
class Load:
    """The role of a load warp: its slots of every block of keys, and of Q."""

    q: cpasync.TmaInfo
    kv: cpasync.TmaInfo
    pitch: Int32  # rows from one page, or one sequence, to the next
    number: Int32  # of this warp, which loads every `LOAD_WARPS`th slot of a block
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this pair's parts, the last block of each first."""
        s = self.shared
        s.each_part(lambda x, then: self.part(x, *then), (s.kv.producer(), s.q.producer()))
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def part(
        self, piece: Piece, fill: PipelineState, q_fill: PipelineState
    ) -> tuple[PipelineState, PipelineState]:
        """Load the keys of a part."""
        s, blocks = self.shared, self.shared.of_piece(piece)
        if blocks.end > blocks.first:
            self.queries(piece, q_fill)
            q_fill.advance()
            batch, _ = s.entry(piece.entry)
            source = s.source(batch, s.sizes.keys(s.args, batch), self.pitch)
            loads = BoxLoads(self.kv, source, s.s32, s.kv_head(piece.head))
            found, here = no_box(), no_boxes()
            for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                n_block = blocks.end - 1 - i
                if i % BLOCKS == 0:
                    found = self.lookup(source, n_block)
                following = self.boxes(source, n_block, found, i % BLOCKS)
                fill = self.keys(loads, following, fill)
                if i > 0:
                    fill = self.values(loads, here, fill)
                here = following
            fill = self.values(loads, here, fill)
        return fill, q_fill

    @cute.jit
    def queries(self, piece: Piece, fill: PipelineState) -> None:
        """Load this CTA's rows of Q, zeros where there are none."""
        s = self.shared
        rows = s.own_rows(piece)
        operand = cpasync.TmaInfo(
            self.q.atom, self.q.tma_tensor[None, None, rows.batch], self.q.smem_layout
        )
        if self.number == 0:
            full, loads = s.q.acquire(fill), tile_loads(operand, s.sQ, rows.m_block)
            for chunk in cutlass.range_constexpr(CHUNKS):
                loads.load(chunk, chunk, full)

    @cute.jit
    def lookup(self, source: cutlass.Constexpr[RowSource], n_block: Int32) -> Box:
        """Where the keys of block `n_block` and of those before it are, a box in each lane: so a
        page table is waited for once for all of these."""
        lane = cute.arch.lane_idx()
        block = cutlass.max(n_block - lane // GROUPS, 0)
        return source.box(block * KEYS + lane % GROUPS * BOX, BOX)

    @cute.jit
    def boxes(
        self, source: cutlass.Constexpr[RowSource], n_block: Int32, found: Box, number: Int32
    ) -> KeyBoxes:
        """Where the keys of a block are: it is the block of this number that `found` has; or, in
        boxes of fewer rows, it is looked up."""
        rows = cache_box_rows(self.shared.config.page_size, BOX)
        if cutlass.const_expr(rows == BOX):
            lanes = [number * GROUPS + g for g in range(GROUPS)]
            return KeyBoxes(*(Box(*(cute.arch.shuffle_sync(x, i) for x in found)) for i in lanes))
        at = n_block * KEYS + cute.arch.lane_idx() % (BOX // rows) * rows
        return KeyBoxes(*(source.box(at + g * BOX, rows) for g in range(GROUPS)))

    @cute.jit
    def keys(
        self, loads: cutlass.Constexpr[BoxLoads], boxes: KeyBoxes, fill: PipelineState
    ) -> PipelineState:
        """Load this warp's chunks of this CTA's keys of a block as K."""
        leads = is_leader()
        mine = tuple(
            Box(*(x if leads else y for x, y in zip(boxes[g], boxes[g + HALVES], strict=True)))
            for g in range(HALVES)
        )
        for chunk in cutlass.range_constexpr(CHUNKS):
            if self.number == chunk % LOAD_WARPS:
                full = self.shared.kv.acquire(fill)
                for half in cutlass.range_constexpr(HALVES):
                    self.box(loads, mine[half], chunk, HALVES * fill.slot + half, full)
            fill.advance()
        return fill

    @cute.jit
    def values(
        self, loads: cutlass.Constexpr[BoxLoads], boxes: KeyBoxes, fill: PipelineState
    ) -> PipelineState:
        """Load this warp's part of this CTA's columns of a block as V, for each of its products, in
        their order."""
        first = cute.arch.block_idx_in_cluster() * OF_V
        for number in cutlass.range_constexpr(PRODUCTS * GROUPS):
            if self.number == (CHUNKS + number) % LOAD_WARPS:
                full = self.shared.kv.acquire(fill)
                column = number // GROUPS * (DIMS // CHUNK) + first
                for half in cutlass.range_constexpr(HALVES):
                    to = HALVES * fill.slot + half
                    self.box(loads, boxes[number % GROUPS], column + half, to, full)
            fill.advance()
        return fill

    @cute.jit
    def box(
        self,
        loads: cutlass.Constexpr[BoxLoads],
        found: Box,
        chunk: Int32 | int,
        half_slot: Int32,
        full: cute.Pointer,
    ) -> None:
        """Start the load of 32 keys' chunk of columns into half of a slot."""
        count, one = BOX // loads.box[0], cute.make_layout(1)
        sX = cute.flat_divide(loads.sX, loads.box)  # (boxRows, boxD, BOX, 1, SLOT)
        for i in cutlass.range(count, unroll_full=count <= UNROLLED):
            gX = loads.columns_of(Box(*(cute.arch.shuffle_sync(x, i) for x in found)))
            tXsX, tXgX = cpasync.tma_partition(
                self.kv.atom, 0, one,
                cute.group_modes(sX[None, None, i, 0, half_slot], 0, 2),
                cute.group_modes(gX[None, None, chunk], 0, 2),
            )  # (TMA), (TMA)  # fmt: skip
            cute.copy(self.kv.atom, tXgX, tXsX, tma_bar_ptr=full)


# ---- MMAs
#
# The warp of the leader of a pair that starts S = Q K^T and O += P V for both CTAs. QK of a block
# is started before PV of the block before, so that the tensor cores compute it during that block's
# softmax.


O_HALVES = 2  # of O's columns
STEPS = BOX // 16  # of K of a slot of V


@dataclass(frozen=True)
class Mma:
    """The MMA role of a pair: S = Q K^T and O += P V of every block."""

    shared: Shared
    tmem: cute.Pointer

    @cute.jit
    def run(self) -> None:
        """Start the products of this pair's parts."""
        s, c, dtype = self.shared, self.shared.config, self.shared.sK.element_type
        qk_mma = Umma(ROWS, c.tile_n, dtype, pair=True)
        tSrQ = qk_mma.a_slots(s.sQ)  # (MMA, MMA_M, MMA_K, CHUNK)
        qk = UmmaProduct(qk_mma, tSrQ, qk_mma.b_slots(s.sK), qk_mma.accumulator(self.tmem))
        pv_mma = Umma(ROWS, DIMS, dtype, b_major=OperandMajorMode.MN, pair=True)
        tOrP = pv_mma.a_slots(s.sP)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        acc_o = pv_mma.accumulator(self.tmem + c.o_column)
        pv = UmmaProduct(pv_mma, tOrP, pv_mma.b_slots(s.sVt), acc_o)
        states = s.kv.consumer(), Int32(0), s.barriers.buffers(), s.q.consumer()
        s.each_part(lambda x, then: self.part(x, (qk, pv), *then), states)

    @cute.jit
    def part(
        self,
        piece: Piece,
        products: cutlass.Constexpr[tuple[UmmaProduct, UmmaProduct]],
        kv: PipelineState,
        p_phase: Int32,
        buffer: PipelineState,
        q: PipelineState,
    ) -> tuple[PipelineState, Int32, PipelineState, PipelineState]:
        """Start the products of a part's blocks."""
        s, (qk, pv), blocks = self.shared, products, self.shared.of_piece(piece)
        count = blocks.end - blocks.first
        if count > 0:
            s.q.wait_full(q)
            for i in cutlass.range(count + 1, unroll=1):
                if i < count:
                    kv = self.scores(qk, kv, buffer)
                    buffer.advance()
                if i == count - 1:
                    commit(s.q.empty[0], pair=True)
                if i > 0:
                    s.barriers.p_full.wait(p_phase)
                    p_phase ^= 1
                    kv = self.outputs(pv, kv, i > 1)
            q.advance()
        return kv, p_phase, buffer, q

    @cute.jit
    def scores(
        self, qk: cutlass.Constexpr[UmmaProduct], kv: PipelineState, buffer: PipelineState
    ) -> PipelineState:
        """Start QK of a block into a buffer of S, chunk by chunk."""
        s = self.shared
        into = qk.at(buffer.slot * KEYS_OF_CTA)
        for chunk in cutlass.range_constexpr(CHUNKS):
            s.kv.wait_full(kv)
            fence_after_sync()
            into.of(qk.a[None, None, None, chunk]).issue(kv.slot, accumulate=chunk > 0)
            commit(s.kv.empty[kv.slot], pair=True)
            kv.advance()
        commit(s.barriers.s_full[buffer.slot], pair=True)
        return kv

    @cute.jit
    def outputs(
        self, pv: cutlass.Constexpr[UmmaProduct], kv: PipelineState, accumulate: Boolean
    ) -> PipelineState:
        """Start PV of a block, half by half of O's columns, 32 keys at a time."""
        s = self.shared
        fence_after_sync()
        # (MMA, MMA_M, (STEPS, GROUP))
        parts = cute.logical_divide(pv.a, (None, None, STEPS))
        for half in cutlass.range_constexpr(O_HALVES):
            into = pv.at(half * (DIMS // 2))
            for group in cutlass.range_constexpr(s.config.tile_n // BOX):
                s.kv.wait_full(kv)
                product = into.of(parts[None, None, (None, group)])
                product.issue(kv.slot, accumulate if group == 0 else True)
                commit(s.kv.empty[kv.slot], pair=True)
                kv.advance()
        commit(s.barriers.o_full[0], pair=True)
        return kv

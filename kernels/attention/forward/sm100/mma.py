"""The MMA role: one warp starts both products of all Q tiles of its CTA, or of its pair."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.tiles import Shared, Span
from cutex.kernels.attention.work_ring import END


@dataclass(frozen=True)
class Products:
    """The two products: S = Q K^T, with Q in shared memory, and O += P V, with P in tensor
    memory."""

    config: Sm100ForwardConfig
    qk: UmmaProduct  # of all Q tiles; S at column 0
    pv: UmmaProduct  # O at column 0

    @staticmethod
    @cute.jit
    def of(shared: Shared) -> Products:
        c, dtype = shared.config, shared.sQ.element_type
        qk_mma = Umma(c.mma_rows, c.tile_n, dtype, pair=c.pair)
        pv_mma = Umma(c.mma_rows, c.head_dim_v, dtype, b_major=OperandMajorMode.MN, pair=c.pair)
        columns = c.head_dim_v // c.ctas
        transposed = contiguous_rows_layout(dtype, columns, c.tile_n, c.num_stages)
        sVt = cute.make_tensor(shared.sV.iterator, transposed.outer)  # (DV / ctas, bN, SLOT)
        acc_s, tSrK = qk_mma.accumulator(shared.tmem), qk_mma.b_slots(shared.sK)
        acc_o, tOrV = pv_mma.accumulator(shared.tmem), pv_mma.b_slots(sVt)
        tSrQ = qk_mma.a_slots(shared.sQ)  # (MMA, MMA_M, MMA_K, TILE)
        qk = UmmaProduct(qk_mma, tSrQ, tSrK, acc_s)
        return Products(c, qk, UmmaProduct(pv_mma, None, tOrV, acc_o))

    @cute.jit
    def scores(self, tile: cutlass.Constexpr[int], buffer: Int32, slot: Int32) -> None:
        """Start S[buffer] = Q[tile] K[slot]^T."""
        tSrQ = self.qk.a[None, None, None, tile]  # (MMA, MMA_M, MMA_K)
        self.qk.of(tSrQ).at(buffer * self.config.tile_n).issue(slot, accumulate=Boolean(False))

    @cute.jit
    def outputs(
        self,
        tile: cutlass.Constexpr[int],
        buffer: Int32,
        slot: Int32,
        accumulate: Boolean,
        keys: cutlass.Constexpr[tuple[int, int]],
    ) -> None:
        """Start O[tile] += P[buffer] V[slot] over the keys [first, end) of the block."""
        c, pv = self.config, self.pv
        p, k = buffer * c.tile_n, pv.mma.k
        tOrP = pv.mma.a_tmem(pv.acc.iterator, p, c.tile_n)  # (MMA, MMA_M, MMA_K)
        column = Int32(c.o_column + tile * c.head_dim_v)
        pv.of(tOrP).at(column).issue(slot, accumulate, range(keys[0] // k, keys[1] // k))


@dataclass(frozen=True)
class Mma:
    """The MMA role.

    In a step each Q tile in turn gets PV of the block before and QK of this one, so that the tensor
    cores compute one tile's products during the other's exponentials. A single Q tile has two
    buffers of scores, and gets QK first.

    NOTE: QK overwrites P, over S, without waiting: MMAs of one CTA are executed in the order in
    which they are started, and PV, which reads P, comes first.
    """

    shared: Shared
    products: Products

    @staticmethod
    @cute.jit
    def of(shared: Shared) -> Mma:
        return Mma(shared, Products.of(shared))

    @property
    def config(self) -> Sm100ForwardConfig:
        return self.shared.config

    @cute.jit
    def run(self) -> None:
        shared, tiles = self.shared, self.shared.work
        take, k, v = tiles.q.consumer(), shared.barriers.k.consumer(), shared.barriers.v.consumer()
        turn = PipelineState(1, Int32(0), Int32(0))  # of barriers with one phase per tile
        parities = Int32(0)  # of the barriers of P, one bit per buffer
        tiles.q.wait_full(take)
        mode = tiles.mode(take.slot)
        while mode != END:
            seq_q, seqlen_k = tiles.lengths(take.slot)
            _, total, spans = shared.spans(tiles.work(take.slot), seq_q.length, seqlen_k)
            tiles.q.release(take)
            for i in cutlass.range(total + 1, unroll=1):
                for t in cutlass.range_constexpr(self.config.q_tiles):
                    if cutlass.const_expr(self.config.q_tiles == 1):
                        k = self.start_scores(t, spans[t], i, total, k, turn.phase)
                    v, parities = self.start_outputs(t, spans[t], i, v, parities, turn.phase)
                    if cutlass.const_expr(self.config.q_tiles > 1):
                        k = self.start_scores(t, spans[t], i, total, k, turn.phase)
            for t in cutlass.range_constexpr(self.config.q_tiles):
                if spans[t].count == 0:
                    self.skip(t, turn.phase)
            turn.advance()
            take.advance()
            tiles.q.wait_full(take)
            mode = tiles.mode(take.slot)

    @cute.jit
    def start_scores(
        self,
        t: cutlass.Constexpr[int],
        span: Span,
        i: Int32,
        total: Int32,
        k: PipelineState,
        phase: Int32,
    ) -> PipelineState:
        """Start QK of Q tile t and step i's block, if the tile touches it; the last Q tile releases
        the slot. Return the state after."""
        b, pair = self.shared.barriers, self.config.pair
        if cutlass.const_expr(t == 0):  # noqa: SIM102 - known when tracing, the next is not
            if i < total:
                b.k.wait_full(k)
        own = i - span.start
        if own >= 0 and own < span.count:
            if own == 0:
                b.q.full.wait(phase, t)
            buffer = self.buffer(t, own)
            self.products.scores(t, buffer, k.slot)
            commit(b.s_full[buffer], pair)
            if own == span.count - 1:
                commit(b.q.empty[t], pair)
        if cutlass.const_expr(t == self.config.q_tiles - 1):  # noqa: SIM102
            if i < total:
                commit(b.k.empty[k.slot], pair)
                k.advance()
        return k

    @cute.jit
    def start_outputs(
        self,
        t: cutlass.Constexpr[int],
        span: Span,
        i: Int32,
        v: PipelineState,
        parities: Int32,
        phase: Int32,
    ) -> tuple[PipelineState, Int32]:
        """Start PV of Q tile t and the block before step i's, if the tile touches it; the last Q
        tile releases the slot. Return the state after, and the parities."""
        c, b = self.config, self.shared.barriers
        if cutlass.const_expr(t == 0):  # noqa: SIM102
            if i > 0:
                b.v.wait_full(v)
        own = i - 1 - span.start
        if own >= 0 and own < span.count:
            if own == 0:
                b.o_empty.wait(phase ^ 1, t)
            buffer = self.buffer(t, own)
            parity = (parities >> buffer) & 1
            b.p_first.wait(parity, buffer)
            fence_after_sync()
            self.products.outputs(t, buffer, v.slot, own > 0, (0, c.p_first))
            if cutlass.const_expr(c.p_first < c.tile_n):
                b.p_rest.wait(parity, buffer)
                fence_after_sync()
                self.products.outputs(t, buffer, v.slot, True, (c.p_first, c.tile_n))
            parities ^= 1 << buffer
            if cutlass.const_expr(c.q_tiles == 1):
                commit(b.pv_done[0], c.pair)
            if own == span.count - 1:
                commit(b.o_full[t], c.pair)
        if cutlass.const_expr(t == c.q_tiles - 1):  # noqa: SIM102
            if i > 0:
                commit(b.v.empty[v.slot], c.pair)
                v.advance()
        return v, parities

    @cute.jit
    def skip(self, t: cutlass.Constexpr[int], phase: Int32) -> None:
        """Signal the barriers of a Q tile that touches no block, for which the other roles wait all
        the same."""
        b, pair = self.shared.barriers, self.config.pair
        b.q.full.wait(phase, t)
        commit(b.q.empty[t], pair)
        b.o_empty.wait(phase ^ 1, t)
        commit(b.o_full[t], pair)

    def buffer(self, t: int, own: Int32) -> Int32:
        """The buffer of a Q tile's scores of its `own`-th block."""
        return Int32(t) if self.config.q_tiles > 1 else own & 1


@cute.jit
def follow(shared: Shared) -> None:
    """Run the MMA role of a pair's second CTA: it only reads and releases the announced tiles."""
    tiles = shared.work
    take = tiles.q.consumer()
    tiles.q.wait_full(take)
    mode = tiles.mode(take.slot)
    while mode != END:
        tiles.q.release(take)
        take.advance()
        tiles.q.wait_full(take)
        mode = tiles.mode(take.slot)

"""KeyGradients: the role of a warpgroup that owns 64 keys, of which it sums dK and dV.

Scores are transposed, their rows are keys:

    S^T = K Q^T, dP^T = V dO^T, P^T = 2^(S^T - LSE), dS^T = P^T * (dP^T - delta)
    dV += P^T dO, dK += dS^T Q

so that P^T and dS^T are operands A in the registers that they were computed in. dS^T also goes to
smem, for dQ. LSE and delta belong to columns: a thread reads those of its columns from smem.

With `overlap`, dV and dK of a block are computed behind S^T of the next, under its exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.scalar import exp2, pinned, tanh
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, Wgmma, WgmmaProduct, round_to
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import KeyMask
from cutex.device.attention.rows import Rows
from cutex.device.attention.softmax import LOG2_E, rows_of
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.shared import Shared

STORE_BARRIER = 1  # the first of one named barrier for each warpgroup


@dataclass(frozen=True)
class Products:
    """The four products of a warpgroup; operands A and accumulators that change are given later."""

    s: WgmmaProduct
    dp: WgmmaProduct
    dv: WgmmaProduct
    dk: WgmmaProduct

    @staticmethod
    def of(config: BackwardConfig, shared: Shared, wg: Int32) -> Products:
        c, dtype, major = config, shared.sQ.element_type, OperandMajorMode.MN
        scores, of_dk = Wgmma(c.tile_m, dtype), Wgmma(c.head_dim, dtype, b_major=major)
        of_dv = Wgmma(c.head_dim_v, dtype, b_major=major)
        transposed = contiguous_rows_layout(dtype, c.head_dim, c.tile_m, c.num_stages)
        sQt = cute.make_tensor(shared.sQ.iterator, transposed.outer)  # (D, bM, SLOT)
        transposed = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_m, c.num_stages)
        sdOt = cute.make_tensor(shared.sdO.iterator, transposed.outer)  # (DV, bM, SLOT)
        tSrK = scores.a_slots(shared.sK)[None, None, None, wg]  # (MMA, MMA_M, MMA_K)
        tPrV = scores.a_slots(shared.sV)[None, None, None, wg]  # (MMA, MMA_M, MMA_K)
        return Products(
            WgmmaProduct(scores, tSrK, scores.b_slots(shared.sQ), None),
            WgmmaProduct(scores, tPrV, scores.b_slots(shared.sdO), None),
            WgmmaProduct(of_dv, None, of_dv.b_slots(sdOt), of_dv.accumulator()),
            WgmmaProduct(of_dk, None, of_dk.b_slots(sQt), of_dk.accumulator()),
        )


@dataclass(frozen=True)
class KeyGradients:
    config: BackwardConfig
    shared: Shared
    products: Products
    wg: Int32

    @staticmethod
    def of(config: BackwardConfig, shared: Shared) -> KeyGradients:
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        return KeyGradients(config, shared, Products.of(config, shared, wg), wg)

    # ---- over the queries

    @cute.jit
    def run(self) -> None:
        """Sum dK and dV over the blocks of queries of all heads that share the keys."""
        s = self.shared
        self.products.dk.acc.fill(0.0)
        self.products.dv.acc.fill(0.0)
        blocks, own = s.m_blocks(), self.own_blocks()
        total = (blocks.end - blocks.first) * s.heads_per_kv
        s.k_loaded.wait(0)
        s.v_loaded.wait(0)
        if total > 0:
            if cutlass.const_expr(self.config.overlap):
                self.overlapped(blocks, own, total)
            else:
                self.in_order(blocks, own, total)

    def own_blocks(self) -> Blocks:
        """The blocks of queries that see one of this warpgroup's keys."""
        s = self.shared
        n_block = s.tile.n_block * self.config.warpgroups + self.wg
        lengths = s.tile.seq_q.length, s.tile.seq_k.length
        return s.info._replace(tile_n=ROWS).m_blocks(n_block, *lengths)

    @cute.jit
    def in_order(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Run one product after the other."""
        state, m_block = self.shared.q.consumer(), blocks.first
        for _ in cutlass.range(total, unroll=1):
            acc_s, (rP, rdS) = self.start_s(state), self.operands()
            warpgroup.wait_group(0)
            if cutlass.const_expr(self.config.softcap):
                self.capped_probabilities(acc_s, rP, m_block, own, state)
            else:
                self.probabilities(acc_s, m_block, own, state)
            self.rest(acc_s, (rP, rdS), state)
            self.start_sums(rP, rdS, state)
            warpgroup.wait_group(0)
            self.release(state)
            state.advance()
            m_block = self.following(m_block, blocks)

    @cute.jit
    def overlapped(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Run dV and dK of a block behind S^T of the next, under its exponentials."""
        state, m_block = self.shared.q.consumer(), blocks.first
        rP, rdS = self.operands()
        acc_s = self.start_s(state)
        warpgroup.wait_group(0)
        self.probabilities(acc_s, m_block, own, state)
        self.rest(acc_s, (rP, rdS), state)
        for _ in cutlass.range(total - 1, unroll=1):
            m_block = self.following(m_block, blocks)
            before = PipelineState(state.num_slots, state.slot, state.phase)
            state.advance()
            acc_s = self.start_s(state)
            self.start_sums(rP, rdS, before)
            warpgroup.wait_group(2)
            self.probabilities(acc_s, m_block, own, state)
            warpgroup.wait_group(0)
            self.release(before)
            self.rest(acc_s, (rP, rdS), state)
        self.start_sums(rP, rdS, state)
        warpgroup.wait_group(0)

    @staticmethod
    @cute.jit
    def following(m_block: Int32, blocks: Blocks) -> Int32:
        """The block after `m_block`, of the next head if it is a head's last."""
        return blocks.first if m_block + 1 == blocks.end else m_block + 1

    def release(self, state: PipelineState) -> None:
        self.shared.q.release(state)
        self.shared.do.release(state)

    # ---- a block

    def operands(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers for P^T and dS^T as operands A."""
        tile_m, products = self.config.tile_m, self.products
        return products.dv.mma.a_registers(tile_m), products.dk.mma.a_registers(tile_m)

    @cute.jit
    def start_s(self, state: PipelineState) -> cute.Tensor:
        """Start S^T of the block in Q's slot."""
        acc_s = self.products.s.mma.accumulator()
        self.shared.q.wait_full(state)
        self.products.s.into(acc_s).issue(state.slot, False)
        return acc_s

    @cute.jit
    def start_sums(self, rP: cute.Tensor, rdS: cute.Tensor, state: PipelineState) -> None:
        """Start dV += P^T dO and dK += dS^T Q."""
        self.products.dv.of(rP).issue(state.slot, True)
        self.products.dk.of(rdS).issue(state.slot, True)

    @cute.jit
    def rest(
        self,
        acc_s: cute.Tensor,
        operands: tuple[cute.Tensor, cute.Tensor],
        state: PipelineState,
    ) -> None:
        """Compute dP^T, with P^T in `acc_s` both operands, and hand over dS^T."""
        s = self.shared
        acc_dp = self.products.dp.mma.accumulator()
        s.do.wait_full(state)
        self.products.dp.into(acc_dp).issue(state.slot, False)
        warpgroup.wait_group(0)
        self.gradients(acc_s, acc_dp, operands, state)
        s.ds.wait_empty(state)
        sdS = s.sdS[None, None, state.slot * self.config.warpgroups + self.wg]
        write_fragment(operands[1], self.products.s.mma, sdS)
        s.ds.hand_over(state)

    @cute.jit
    def probabilities(
        self, acc_s: cute.Tensor, m_block: Int32, own: Blocks, state: PipelineState
    ) -> None:
        """Turn S^T into P^T."""
        passed = self.shared.passed
        scores = rows_of(acc_s)
        scale_log2 = passed.scale * LOG2_E
        if (m_block < own.clean_first) | (m_block >= own.clean_end):
            self.mask().apply(scores, m_block)
        lse = self.of_columns(0, state)  # (columns)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, c] = exp2(scores[r, c] * scale_log2 - lse[c])

    @cute.jit
    def capped_probabilities(
        self,
        acc_s: cute.Tensor,
        rP: cute.Tensor,
        m_block: Int32,
        own: Blocks,
        state: PipelineState,
    ) -> None:
        """Round P^T into rP, and turn S^T into P^T times the derivative of the soft cap, by which
        dS^T is multiplied."""
        passed = self.shared.passed
        scores = rows_of(acc_s)
        factor, scale_log2 = passed.scale / passed.softcap, passed.softcap * LOG2_E
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = tanh(scores[i] * factor)
        if (m_block < own.clean_first) | (m_block >= own.clean_end):
            self.mask().apply(scores, m_block)
        lse = self.of_columns(0, state)  # (columns)
        probabilities = cute.make_rmem_tensor_like(acc_s)
        rows = rows_of(probabilities)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                rows[r, c] = exp2(scores[r, c] * scale_log2 - lse[c])
                # NOTE: 0 also for the -inf of a score that does not count
                slope = cute.arch.fmax(1.0 - scores[r, c] * scores[r, c], Float32(0.0))
                scores[r, c] = rows[r, c] * slope
        round_operand(rP, probabilities)

    @cute.jit
    def gradients(
        self,
        acc_s: cute.Tensor,
        acc_dp: cute.Tensor,
        operands: tuple[cute.Tensor, cute.Tensor],
        state: PipelineState,
    ) -> None:
        """Round P^T, and dS^T = P^T * (dP^T - delta)."""
        rP, rdS = operands
        scores, dp = rows_of(acc_s), rows_of(acc_dp)
        if cutlass.const_expr(not self.config.softcap):
            round_operand(rP, acc_s)
        delta = self.of_columns(1, state)  # (columns)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, c] *= dp[r, c] - delta[c]
        round_operand(rdS, acc_s)

    @cute.jit
    def of_columns(self, which: cutlass.Constexpr[int], state: PipelineState) -> cute.Tensor:
        """LSE (0) or delta (1) of the columns of this thread's scores."""
        thread, _, _ = cute.arch.thread_idx()
        tile_m = self.config.tile_m
        stats = self.shared.stats[None, state.slot].iterator + which * tile_m + 2 * (thread % 4)
        pairs = cute.make_layout((2, tile_m // 8), stride=(1, 8))
        mine = cute.make_tensor(stats.align(8), pairs)
        found = cute.make_rmem_tensor(cute.make_layout(pairs.shape), Float32)
        for j in cutlass.range_constexpr(tile_m // 8):
            cute.autovec_copy(mine[None, j], found[None, j])
        return found

    def mask(self) -> KeyMask:
        s = self.shared
        thread, _, _ = cute.arch.thread_idx()
        first = (s.tile.n_block * self.config.warpgroups + self.wg) * ROWS
        key = first + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
        lengths = s.tile.seq_q.length, s.tile.seq_k.length
        return KeyMask(s.info.band, self.config.tile_m, *lengths, (key, key + 8), thread % 4)

    # ---- out

    @cute.jit
    def store(self, dk: cpasync.TmaInfo, dv: cpasync.TmaInfo) -> None:
        """Store dV through V's slot, and dK, times the scale, through K's, once nobody reads it."""
        s = self.shared
        acc_dk = self.products.dk.acc
        acc_dk.store(acc_dk.load() * s.passed.scale)
        self.store_tile(dv, self.products.dv, s.sV)
        s.k_read.wait(0)
        self.store_tile(dk, self.products.dk, s.sK)
        if cute.arch.warp_idx() % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_tile(self, to: cpasync.TmaInfo, of: WgmmaProduct, sX: cute.Tensor) -> None:
        """Round a product's accumulator, write it to this warpgroup's slot of sX, and start its
        store, which leaves out rows past the end."""
        s, acc = self.shared, of.acc
        rounded = cute.make_rmem_tensor(cute.make_layout(cute.size(acc)), sX.element_type)
        units = cute.make_layout((8, cute.size(acc) // 8))
        narrow, wide = (cute.make_tensor(x.iterator, units) for x in (rounded, acc))
        for unit in cutlass.range_constexpr(cute.size(acc) // 8):
            narrow[None, unit].store(wide[None, unit].load().to(sX.element_type))
        write_fragment(rounded, of.mma, sX[None, None, self.wg])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=STORE_BARRIER + self.wg, number_of_threads=WARPGROUP)
        if cute.arch.warp_idx() % 4 == 0:
            tile = (ROWS, cute.size(sX, mode=[1]))
            rows = Rows(to, 1, self.config.ragged_k)
            gX = rows.tiles(s.tile.head_kv, s.tile.batch, s.tile.seq_k, tile)
            from_smem, to_gmem = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
            bSG_sX, bSG_gX = cpasync.tma_partition(
                to.atom, 0, cute.make_layout(1), from_smem, to_gmem
            )  # (TMA, WG), (TMA, Rest)
            n_block = s.tile.n_block * self.config.warpgroups + self.wg
            cute.copy(to.atom, bSG_sX[None, self.wg], bSG_gX[None, n_block])
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def round_operand(tCrA: cute.Tensor, acc: cute.Tensor) -> None:
    """Round an accumulator into an operand A, before what follows."""
    round_to(tCrA, acc)
    words = cute.recast_tensor(tCrA, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pinned(words[i])


@cute.jit
def write_fragment(rX: cute.Tensor, mma: Wgmma, sX: cute.Tensor) -> None:
    """Write a warpgroup's accumulator, rounded, to sX (64, columns)."""
    thread, _, _ = cute.arch.thread_idx()
    to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), sX.element_type)
    r2s = cute.make_tiled_copy_C(to_smem, mma.tiled())
    tRS_sX = r2s.get_slice(thread % WARPGROUP).partition_D(sX)
    layout = cute.make_rmem_tensor(tRS_sX.shape, sX.element_type).layout
    cute.copy(r2s, cute.make_tensor(rX.iterator, layout), tRS_sX)

"""WideKeys and WideValues: the roles of two warpgroups that own the same 64 keys, for head dims of
which dK and dV together do not fit the registers of one: one sums dK, the other dV.

    WideKeys    S^T, dP^T, P^T, dS^T, dK += dS^T Q; dS^T also goes to smem, for dQ
    WideValues  S^T, P^T, dV += P^T dO

so S^T and P^T are computed twice, which is a sixth product beside the five; nothing but dS^T passes
between warpgroups. The product of a block is computed behind S^T of the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.scores import Products, Scores, round_operand
from cutex.kernels.attention.backward.sm90.shared import Shared


@dataclass(frozen=True)
class WideKeys(Scores):
    @staticmethod
    def of(config: BackwardConfig, shared: Shared) -> WideKeys:
        return WideKeys(config, shared, Products.of(config, shared, Int32(0), ("dk",)), 0)

    @cute.jit
    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Sum dK, behind S^T and dP^T of the next block."""
        state, m_block = self.shared.q.consumer(), blocks.first
        dk, early = self.products[0].dk, self.config.dp_start == 0
        rdS = dk.mma.a_registers(self.config.tile_m)
        acc_s, acc_dp = self.start_s(state), self.start_dp(state)
        warpgroup.wait_group(1)
        self.slopes(acc_s, m_block, own, state)
        warpgroup.wait_group(0)
        self.gradients(acc_s, acc_dp, rdS, state)
        self.hand_over(rdS, self.shared.ds.state(0))
        for i in cutlass.range(1, total, unroll=1):
            m_block = self.following(m_block, blocks)
            before = PipelineState(state.num_slots, state.slot, state.phase)
            state.advance()
            acc_s = self.start_s(state)
            if cutlass.const_expr(early):
                acc_dp = self.start_dp(state)
            dk.of(rdS).issue(before.slot, True)
            warpgroup.wait_group(1 + early)
            self.slopes(acc_s, m_block, own, state)
            warpgroup.wait_group(0)
            self.release(before)
            if cutlass.const_expr(not early):
                acc_dp = self.start_dp(state)
                warpgroup.wait_group(0)
            self.gradients(acc_s, acc_dp, rdS, state)
            self.hand_over(rdS, self.shared.ds.state(i))
        dk.of(rdS).issue(state.slot, True)
        warpgroup.wait_group(0)

    @cute.jit
    def slopes(self, acc_s: cute.Tensor, m_block: Int32, own: Blocks, state: PipelineState) -> None:
        """Turn S^T into what dP^T - delta is multiplied by."""
        if cutlass.const_expr(self.config.softcap):
            self.capped_probabilities(acc_s, None, m_block, own, state)
        else:
            self.probabilities(acc_s, m_block, own, state)

    @cute.jit
    def store(self, dk: cpasync.TmaInfo) -> None:
        with cute.arch.elect_one():
            self.shared.v_read.arrive()
        self.store_dk(dk)
        self.stored()


@dataclass(frozen=True)
class WideValues(Scores):
    @staticmethod
    def of(config: BackwardConfig, shared: Shared) -> WideValues:
        return WideValues(config, shared, Products.of(config, shared, Int32(0), ("dv",)), 0)

    @cute.jit
    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Sum dV, behind S^T of the next block."""
        state, m_block = self.shared.q.consumer(), blocks.first
        dv = self.products[0].dv
        rP = dv.mma.a_registers(self.config.tile_m)
        acc_s = self.start_s(state)
        warpgroup.wait_group(0)
        self.weights(acc_s, rP, m_block, own, state)
        for _ in cutlass.range(1, total, unroll=1):
            m_block = self.following(m_block, blocks)
            before = PipelineState(state.num_slots, state.slot, state.phase)
            state.advance()
            self.shared.do.wait_full(before)
            acc_s = self.start_s(state)
            dv.of(rP).issue(before.slot, True)
            warpgroup.wait_group(1)
            self.weights(acc_s, rP, m_block, own, state)
            self.release(before)
        self.shared.do.wait_full(state)
        dv.of(rP).issue(state.slot, True)
        warpgroup.wait_group(0)

    @cute.jit
    def weights(
        self,
        acc_s: cute.Tensor,
        rP: cute.Tensor,
        m_block: Int32,
        own: Blocks,
        state: PipelineState,
    ) -> None:
        """Round P^T of the scores S^T into rP, once the product that reads it is done."""
        if cutlass.const_expr(self.config.softcap):
            warpgroup.wait_group(0)
            self.capped_probabilities(acc_s, rP, m_block, own, state)
        else:
            self.probabilities(acc_s, m_block, own, state)
            warpgroup.wait_group(0)
            round_operand(rP, acc_s)

    @cute.jit
    def store(self, dv: cpasync.TmaInfo) -> None:
        """Store dV through V's slot, once nobody reads it."""
        with cute.arch.elect_one():
            self.shared.k_read.arrive()
        self.shared.v_read.wait(0)
        self.store_tile(dv, self.products[0].dv, self.shared.sV)
        self.stored()

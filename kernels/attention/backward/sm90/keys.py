"""The roles of the warpgroups that sum the gradients of 64 keys.

    KeyGradients          dK and dV
    WideValues, WideKeys  dV, dK: of head dims of which both do not fit the registers of one

Of wide head dims two warpgroups own the same keys. One computes scores, and has P^T in registers
for dV; the other reads dS^T from smem, where it is for dQ's sake, for dK.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import OrderedBarrier, PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.scores import (
    STORE_BARRIER,
    Products,
    Scores,
    round_operand,
)
from cutex.kernels.attention.backward.sm90.shared import Shared
from cutex.kernels.attention.tail import Piece, Tail
from cutex.schedulers.dispatch import Ticket

ALTERNATION = OrderedBarrier(first_barrier=STORE_BARRIER + 2)


@dataclass(frozen=True)
class KeyGradients(Scores):
    """The role of a warpgroup that owns 64 keys, of which it sums dK and dV.

        dV += P^T dO, dK += dS^T Q

    dS^T also goes to smem, for dQ. With `overlap`, dV and dK of a block are computed behind S^T of
    the next, under its exponentials. With `alternate`, one warpgroup starts its products of a step
    when the other has started all of its own, so that one has the tensor cores while the other has
    exponentials.
    """

    @staticmethod
    def of(config: BackwardConfig, shared: Shared) -> KeyGradients:
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        products = Products.of(config, shared, wg, ("dv", "dk"))
        return KeyGradients(config, shared, products, wg)

    @cute.jit
    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        if cutlass.const_expr(self.config.overlap):
            self.overlapped(blocks, own, total)
        else:
            self.in_order(blocks, own, total)

    @cute.jit
    def in_order(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Run one product after another."""
        state, m_block = self.shared.q.consumer(), blocks.first
        for i in cutlass.range(total, unroll=1):
            for part in cutlass.range_constexpr(self.config.parts):
                acc_s, (rP, rdS) = self.start_s(state, part), self.operands()
                warpgroup.wait_group(0)
                if cutlass.const_expr(self.config.softcap):
                    self.capped_probabilities(acc_s, rP, m_block, own, state, part)
                else:
                    self.probabilities(acc_s, m_block, own, state, part)
                    round_operand(rP, acc_s)
                acc_dp = self.start_dp(state, part)
                warpgroup.wait_group(0)
                self.gradients(acc_s, acc_dp, rdS, state, part)
                self.hand_over(rdS, self.shared.ds.state(i), part)
                self.start_sums(rP, rdS, state, part)
                warpgroup.wait_group(0)
            self.release(state)
            state.advance()
            m_block = self.following(m_block, blocks)

    @cute.jit
    def overlapped(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Run dV and dK of a part of a block after S^T of the next part, under its exponentials."""
        last = self.config.parts - 1
        state, m_block = self.shared.q.consumer(), blocks.first
        rP, rdS = self.operands()
        if cutlass.const_expr(self.config.alternate):  # noqa: SIM102 - known when tracing
            if self.keys == 1:
                self.leave()
        self.enter()
        acc_s, acc_dp = self.start_s(state), self.start_dp(state)
        self.leave()
        warpgroup.wait_group(1)
        self.probabilities(acc_s, m_block, own, state)
        warpgroup.wait_group(0)
        round_operand(rP, acc_s)
        self.gradients(acc_s, acc_dp, rdS, state)
        self.hand_over(rdS, self.shared.ds.state(0))
        for part in cutlass.range_constexpr(1, self.config.parts):
            self.step(rP, rdS, m_block, own, Int32(0), (state, part), (state, part - 1))
        for i in cutlass.range(1, total, unroll=1):
            m_block = self.following(m_block, blocks)
            before = PipelineState(state.num_slots, state.slot, state.phase)
            state.advance()
            self.step(rP, rdS, m_block, own, i, (state, 0), (before, last))
            for part in cutlass.range_constexpr(1, self.config.parts):
                self.step(rP, rdS, m_block, own, i, (state, part), (state, part - 1))
        self.enter()
        self.start_sums(rP, rdS, state, last)
        if cutlass.const_expr(self.config.alternate):  # noqa: SIM102 - known when tracing
            if self.keys == 0:
                self.leave()
        warpgroup.wait_group(0)

    def enter(self) -> None:
        """Wait until the other warpgroup has started its products."""
        if self.config.alternate:
            ALTERNATION.wait(self.keys)

    def leave(self) -> None:
        """Let the other warpgroup start its products."""
        if self.config.alternate:
            ALTERNATION.signal(1 - self.keys)

    @cute.jit
    def step(
        self,
        rP: cute.Tensor,
        rdS: cute.Tensor,
        m_block: Int32,
        own: Blocks,
        number: Int32,
        now: tuple[PipelineState, cutlass.Constexpr[int]],
        before: tuple[PipelineState, cutlass.Constexpr[int]],
    ) -> None:
        """Compute P^T and dS^T of a part of block `number`, and dV and dK of the part before, whose
        operands are rP and rdS."""
        c = self.config
        state, part = now
        self.enter()
        acc_s = self.start_s(state, part)
        if cutlass.const_expr(c.dp_start == 0):
            acc_dp = self.start_dp(state, part)
        self.start_sums(rP, rdS, *before)
        if cutlass.const_expr(c.dp_start == 0):
            self.leave()
        lse = self.of_columns(0, state, part) if c.alternate or c.early_stats else None
        delta = self.of_columns(1, state, part) if c.early_stats else None
        warpgroup.wait_group(3 if c.dp_start == 0 else 2)
        self.probabilities(acc_s, m_block, own, state, part, lse)
        if cutlass.const_expr(c.dp_start > 0):
            warpgroup.wait_group(2 - c.dp_start)
            acc_dp = self.start_dp(state, part)
            self.leave()
        if cutlass.const_expr(c.dp_start == 2 and part == 0):
            self.release(before[0])
        warpgroup.wait_group(0)
        if cutlass.const_expr(c.dp_start < 2 and part == 0):
            self.release(before[0])
        round_operand(rP, acc_s)
        self.gradients(acc_s, acc_dp, rdS, state, part, delta)
        self.hand_over(rdS, self.shared.ds.state(number), part)

    def operands(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers for P^T and dS^T as operands A."""
        score_m, products = self.config.score_m, self.products[0]
        return products.dv.mma.a_registers(score_m), products.dk.mma.a_registers(score_m)

    @cute.jit
    def start_sums(
        self,
        rP: cute.Tensor,
        rdS: cute.Tensor,
        state: PipelineState,
        part: cutlass.Constexpr[int],
    ) -> None:
        """Start dV += P^T dO and dK += dS^T Q of a part of a block."""
        self.products[part].dv.of(rP).issue(state.slot, True)
        self.products[part].dk.of(rdS).issue(state.slot, True)

    @cute.jit
    def store(self, dk: cpasync.TmaInfo, dv: cpasync.TmaInfo) -> None:
        """Store dV through V's slot, and dK through K's."""
        self.store_tile(dv, self.products[0].dv, self.shared.sV)
        self.store_dk(dk)
        self.stored()

    @cute.jit
    def finish_piece(
        self,
        tail: Tail,
        ticket: Ticket,
        piece: Piece,
        out: tuple[Any, ...],
    ) -> None:
        """Store dK and dV of a tile by `store`, which takes `out`, with what others have summed of
        it; or keep what this CTA has of it for the one that has the last piece."""
        share = ticket.index - tail.whole
        sums = self.sums
        if piece.end < tail.steps_of(piece.index):
            self.kept(share).keep(sums)
        else:
            missing = piece.first > 0
            while missing:
                share -= 1
                self.kept(share).add(sums, self.config.sums_at_once)
                missing = tail.cut(share) > tail.start(piece.index)
            self.store(*out)


@dataclass(frozen=True)
class WideValues(Scores):
    """S^T, dP^T, P^T, dS^T, dV += P^T dO; dS^T goes to smem, for dK and dQ."""

    @staticmethod
    def of(config: BackwardConfig, shared: Shared) -> WideValues:
        return WideValues(config, shared, Products.of(config, shared, Int32(0), ("dv",)), 0)

    @cute.jit
    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Sum dV after S^T of the next block, or after its S^T and dP^T."""
        state, m_block = self.shared.q.consumer(), blocks.first
        dv, early = self.products[0].dv, self.config.dp_start == 0
        rP, rdS = (dv.mma.a_registers(self.config.tile_m) for _ in range(2))
        acc_s, acc_dp = self.start_s(state), self.start_dp(state)
        warpgroup.wait_group(1)
        self.weights(acc_s, rP, m_block, own, state)
        warpgroup.wait_group(0)
        self.shared.q.release(state)
        self.slopes(acc_s, acc_dp, rP, rdS, state)
        self.hand_over(rdS, self.shared.ds.state(0))
        for i in cutlass.range(1, total, unroll=1):
            m_block = self.following(m_block, blocks)
            before = PipelineState(state.num_slots, state.slot, state.phase)
            state.advance()
            acc_s = self.start_s(state)
            if cutlass.const_expr(early):
                acc_dp = self.start_dp(state)
            dv.of(rP).issue(before.slot, True)
            warpgroup.wait_group(1 + early)
            if cutlass.const_expr(self.config.softcap):
                warpgroup.wait_group(0)  # for the registers of P
            self.weights(acc_s, rP, m_block, own, state)
            warpgroup.wait_group(0)
            self.shared.q.release(state)
            self.shared.do.release(before)
            if cutlass.const_expr(not early):
                acc_dp = self.start_dp(state)
                warpgroup.wait_group(0)
            self.slopes(acc_s, acc_dp, rP, rdS, state)
            self.hand_over(rdS, self.shared.ds.state(i))
        dv.of(rP).issue(state.slot, True)
        warpgroup.wait_group(0)

    @cute.jit
    def weights(
        self, acc_s: cute.Tensor, rP: cute.Tensor, m_block: Int32, own: Blocks, state: PipelineState
    ) -> None:
        """Replace S^T by the factor of dP^T - delta; with a soft cap, also round P^T into rP."""
        if cutlass.const_expr(self.config.softcap):
            self.capped_probabilities(acc_s, rP, m_block, own, state)
        else:
            self.probabilities(acc_s, m_block, own, state)

    @cute.jit
    def slopes(
        self,
        acc_s: cute.Tensor,
        acc_dp: cute.Tensor,
        rP: cute.Tensor,
        rdS: cute.Tensor,
        state: PipelineState,
    ) -> None:
        """Round P^T into rP and dS^T into rdS while no product reads them."""
        if cutlass.const_expr(not self.config.softcap):
            round_operand(rP, acc_s)
        self.gradients(acc_s, acc_dp, rdS, state)

    @cute.jit
    def store(self, dv: cpasync.TmaInfo) -> None:
        """Store dV through V's slot."""
        with cute.arch.elect_one():
            self.shared.k_read.arrive()
        self.store_tile(dv, self.products[0].dv, self.shared.sV)
        self.stored()


@dataclass(frozen=True)
class WideKeys(Scores):
    """dK += dS^T Q, with dS^T from smem. With `dk_loads`, its first warp loads what follows into
    the slots of a block."""

    load: Any  # a Load

    @staticmethod
    def of(config: BackwardConfig, shared: Shared, load: Any) -> WideKeys:
        return WideKeys(config, shared, Products.of(config, shared, Int32(0), ("dk",)), 0, load)

    @cute.jit
    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        s, dk, state = self.shared, self.products[0].dk, self.shared.q.consumer()
        tKrdS = dk.mma.a_slots(s.sdS)  # (MMA, MMA_M, MMA_K, SLOT)
        for i in cutlass.range(total, unroll=1):
            ds = s.ds.state(i)
            s.q.wait_full(state)
            s.ds.full.wait(ds.phase, ds.slot)
            dk.of(tKrdS[None, None, None, ds.slot]).issue(state.slot, True)
            warpgroup.wait_group(0)
            s.ds.release_here(ds)
            s.q.release(state)
            if cutlass.const_expr(self.config.dk_loads):
                following = i + self.config.num_stages
                if (cute.arch.warp_idx() % 4 == 0) & (following < total):
                    # NOTE: slots are emptied with the parity that they were full with
                    self.load.queries(following, state)
            state.advance()

    @cute.jit
    def store(self, dk: cpasync.TmaInfo) -> None:
        self.store_dk(dk)
        self.stored()

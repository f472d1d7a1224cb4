"""PairMma: the role of the warp of the leader that starts the products of both CTAs.

dQ is between the first and the last queries of dK: these hide the exchange of dS, and the time
until dQ is in registers, which dP of the next block waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.sm100.config import PART, ROWS
from cutex.kernels.attention.backward.sm100.mma import transposed
from cutex.kernels.attention.backward.sm100.pairs.config import CTAS, HALF, PairConfig
from cutex.kernels.attention.backward.sm100.pairs.shared import PairShared

LATE = 4  # steps of K of dK, of 8, that are started behind dQ


class PairProducts(NamedTuple):
    s: UmmaProduct
    dp: UmmaProduct
    less: UmmaProduct  # of one step of K, whose A of slot 0 is S's, of slot 1 dP's
    dv: UmmaProduct
    dk: UmmaProduct
    dq: UmmaProduct

    @staticmethod
    @cute.jit
    def of(shared: PairShared) -> PairProducts:
        x, c, tmem, dtype = shared, shared.config, shared.tmem, shared.sQ.element_type
        major, keys = OperandMajorMode.MN, CTAS * ROWS
        scores = Umma(keys, c.tile_m, dtype, pair=True)
        sums = Umma(keys, c.head_dim, dtype, b_major=major, pair=True)
        of_dq = Umma(c.tile_m, c.head_dim, dtype, a_major=major, b_major=major, pair=True)
        sdS = cute.local_tile(x.sdS, (HALF, keys, 1), (0, 0, 0))  # (64, 256, 1)
        tSrK, tPrV, tQrdS = (
            mma.a_slots(sX)[None, None, None, 0]
            for mma, sX in ((scores, x.sK), (scores, x.sV), (of_dq, sdS))
        )  # (MMA, MMA_M, MMA_K)
        sQt, sdOt, sKt = (transposed(sX, 1) for sX in (x.sQt, x.sdOt, x.sKt))
        acc, summed = scores.accumulator(tmem), sums.accumulator(tmem + c.dv_column)
        product = UmmaProduct(scores, tSrK, scores.b_slots(x.sQ), acc)
        dv = UmmaProduct(sums, operand(sums, tmem, 0), sums.b_slots(sdOt), summed)
        return PairProducts(
            product,
            UmmaProduct(scores, tPrV, scores.b_slots(x.sdO), acc).at(c.dp_column),
            UmmaProduct(scores, scores.a_slots(x.sMinus), scores.b_slots(x.sRows), acc),
            dv,
            UmmaProduct(
                sums, operand(sums, tmem, c.dp_column), sums.b_slots(sQt), summed
            ).at(c.dk_column - c.dv_column),
            UmmaProduct(of_dq, tQrdS, of_dq.b_slots(sKt), of_dq.accumulator(tmem + dq_column(c))),
        )  # fmt: skip


def dq_column(c: PairConfig) -> int:
    """The first column of dQ, behind dS."""
    return c.dp_column + HALF


def operand(mma: Umma, tmem: cute.Pointer, column: int) -> cute.Tensor:
    """P^T or dS^T in tensor memory from `column` on, as an operand A whose K is the queries in
    their order: 16 of a step, two steps of a part, a part of each warpgroup, twice."""
    one = mma.a_tmem(tmem, column, HALF * CTAS)  # (MMA, MMA_M, MMA_K)
    step = mma.k * mma.a_dtype.width // 32  # fp32 columns
    # NOTE: strides are of 16-bit elements
    unit = one.stride[2]
    ways = cute.make_layout(
        (*one.shape[:2], (2, 2, 2)), stride=(*one.stride[:2], (unit, PART // step * unit, 2 * unit))
    )
    return cute.make_tensor(one.iterator, ways)  # (MMA, MMA_M, (STEP, GROUP, PART))


@dataclass(frozen=True)
class PairMma:
    """The role of the leader's warp that starts the products of both CTAs."""

    shared: PairShared
    products: PairProducts

    @cute.jit
    def run(self) -> None:
        s, b = self.shared, self.shared.barriers
        total = s.total(s.m_blocks())
        q, do, qt, dot = (x.consumer() for x in (b.q, b.do, b.qt, b.dot))
        ahead, rows = b.rows.consumer(), b.rows.consumer()
        if total > 0:
            b.k_loaded.wait(0)
            self.start_s(q, ahead)
            self.start_dp(Int32(0), do, rows)
            for i in cutlass.range(total, unroll=1):
                self.start_dv(i, dot)
                q.advance()
                do.advance()
                dot.advance()
                ahead.advance()
                rows.advance()
                if i + 1 < total:
                    self.start_s(q, ahead)
                self.start_dk_and_dq(i, qt)
                qt.advance()
                if i + 1 < total:
                    self.start_dp(i + 1, do, rows)
            commit(b.sums_done[0], pair=True)

    @cute.jit
    def start_s(self, q: PipelineState, rows: PipelineState) -> None:
        b = self.shared.barriers
        b.q.wait_full(q)
        b.rows.wait_full(rows)
        fence_after_sync()
        self.products.s.issue(q.slot, Boolean(False))
        self.subtract(0, rows)
        commit(b.q.empty[q.slot], pair=True)
        commit(b.s_full[0], pair=True)

    @cute.jit
    def start_dp(self, i: Int32, do: PipelineState, rows: PipelineState) -> None:
        b = self.shared.barriers
        if i == 0:
            b.v_loaded.wait(0)
        b.do.wait_full(do)
        b.dq_empty.wait((i & 1) ^ 1)
        fence_after_sync()
        self.products.dp.issue(do.slot, Boolean(False))
        self.subtract(1, rows)
        commit(b.do.empty[do.slot], pair=True)
        commit(b.rows.empty[rows.slot], pair=True)
        commit(b.dp_full[0], pair=True)

    @cute.jit
    def subtract(self, which: cutlass.Constexpr[int], rows: PipelineState) -> None:
        """Start the subtraction of LSE from S (0) or of delta from dP (1)."""
        less = self.products.less
        less = less.of(less.a[None, None, None, which]).at(which * self.shared.config.dp_column)
        less.issue(rows.slot, Boolean(True))

    @cute.jit
    def start_dv(self, i: Int32, dot: PipelineState) -> None:
        b = self.shared.barriers
        b.p_full.wait(i & 1)
        b.dot.wait_full(dot)
        fence_after_sync()
        self.products.dv.issue(dot.slot, i > 0)
        commit(b.dot.empty[dot.slot], pair=True)

    @cute.jit
    def start_dk_and_dq(self, i: Int32, qt: PipelineState) -> None:
        """Start dQ between the first and the last queries of dK: these hide the exchange of dS, and
        the time until dQ is in registers."""
        b, p = self.shared.barriers, self.products
        b.ds_full.wait(i & 1)
        b.qt.wait_full(qt)
        fence_after_sync()
        steps = range(self.shared.config.tile_m // p.dk.mma.k)
        p.dk.issue(qt.slot, i > 0, steps[:-LATE])
        b.received.wait(i & 1)
        b.sent.wait(i & 1)
        fence_after_sync()
        p.dq.issue(0, Boolean(False))
        commit(b.dq_full[0], pair=True)
        p.dk.issue(qt.slot, Boolean(True), steps[-LATE:])
        commit(b.qt.empty[qt.slot], pair=True)

"""Mma: the role of the warp that starts the five products.

    S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K

Where two CTAs own the same keys, each has half of the columns of dK, dV and dQ. Of Q the other half
is read by S alone, so its slot is free long before dK has read this CTA's own, of which there are
two (`halves`): S of the next block does not wait for dK of this one.

P^T and dS^T are operands A in tensor memory, each warpgroup's share of the queries over the scores
that it is computed from; dS is operand A in smem, with the queries contiguous. Where dQ is over
dP^T, dK is started behind it, with dS^T from the same smem (`late_dk`): it hides the time until dQ
is in registers, which dP^T of the next block has to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode

from cutex.device.atoms.mma import contiguous_rows_layout, slots_layout
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import Umma, UmmaProduct, commit
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.sm100.config import ROWS, Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.shared import Shared


@dataclass(frozen=True)
class Products:
    """The five products."""

    s: UmmaProduct
    dp: UmmaProduct
    less: Any  # UmmaProduct of one step of K, whose A of slot 0 is S's, of slot 1 dP's
    dv: UmmaProduct
    dk: UmmaProduct
    dq: UmmaProduct  # B of all columns, in parts of dq_width

    @staticmethod
    @cute.jit
    def of(shared: Shared) -> Products:
        c, dtype, tmem = shared.config, shared.sQ.element_type, shared.tmem
        major = OperandMajorMode.MN
        scores = Umma(ROWS, c.tile_m, dtype)
        of_dv = Umma(ROWS, c.dv_width, dtype, b_major=major)
        of_dk = Umma(ROWS, c.dk_width, dtype, b_major=major)
        of_dq = Umma(c.tile_m, c.dq_width, dtype, a_major=major, b_major=major)
        sdOt = transposed(shared.sdO, c.do_stages)  # (DV, bM, SLOT)
        at = (shared.split, 0, 0)  # of this CTA's columns
        sdOt = cute.local_tile(sdOt, (c.dv_width, c.tile_m, c.do_stages), at)  # (dvWidth, bM, SLOT)
        sQt = transposed(shared.sQ, c.q_slots)  # (D, bM, SLOT)
        if cutlass.const_expr(not c.halves):  # else these columns have slots of their own
            sQt = cute.local_tile(sQt, (c.dk_width, c.tile_m, c.q_slots), at)  # (dkWidth, bM, SLOT)
        sKt = transposed(shared.sK, 1)  # (D, 128, 1)
        # every part of the columns is a slot
        parts = cute.flat_divide(sKt, (c.dq_width, ROWS, 1))  # (width, 128, 1, Parts, 1, 1)
        sKt = parts[None, None, 0, None, 0, 0]  # (width, 128, PART)
        tSrK = scores.a_slots(shared.sK)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        tPrV = scores.a_slots(shared.sV)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        tVrP = shares(of_dv, tmem, 0, c)  # (MMA, MMA_M, MMA_K)
        if cutlass.const_expr(c.late_dk):
            of_keys = slots_layout(dtype, ROWS, c.tile_m, 1, 128)
            sdSt = cute.make_tensor(shared.sdS.iterator, of_keys.outer)  # (128, bM, 1)
            tKrdS = of_dk.a_slots(sdSt)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        else:
            tKrdS = shares(of_dk, tmem, c.dp_column, c)  # (MMA, MMA_M, MMA_K)
        tQrdS = of_dq.a_slots(shared.sdS)[None, None, None, 0]  # (MMA, MMA_M, MMA_K)
        less = None
        if cutlass.const_expr(c.folded):
            rows, minus = scores.b_slots(shared.sRows), scores.a_slots(shared.sMinus)
            less = UmmaProduct(scores, minus, rows, scores.accumulator(tmem))
        return Products(
            UmmaProduct(scores, tSrK, scores.b_slots(shared.sQ), scores.accumulator(tmem)),
            UmmaProduct(
                scores, tPrV, scores.b_slots(shared.sdO), scores.accumulator(tmem + c.dp_column)
            ),
            less,
            UmmaProduct(of_dv, tVrP, of_dv.b_slots(sdOt), of_dv.accumulator(tmem + c.dv_column)),
            UmmaProduct(of_dk, tKrdS, of_dk.b_slots(sQt), of_dk.accumulator(tmem + c.dk_column)),
            UmmaProduct(of_dq, tQrdS, of_dq.b_slots(sKt), of_dq.accumulator(tmem)),
        )  # fmt: skip


def transposed(sX: cute.Tensor, num_slots: int) -> cute.Tensor:
    """sX (rows, columns, SLOT), columns contiguous, as (columns, rows, SLOT)."""
    rows, columns = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    layout = contiguous_rows_layout(sX.element_type, columns, rows, num_slots)
    return cute.make_tensor(sX.iterator, layout.outer)


def half(tXrA: cute.Tensor, which: Int32) -> cute.Tensor:
    """Half `which` of K of an operand A (MMA, MMA_M, MMA_K)."""
    blocks = cute.size(tXrA, mode=[2]) // 2
    halves = cute.logical_divide(tXrA, (None, None, blocks))  # (MMA, MMA_M, (MMA_K / 2, HALF))
    return halves[None, None, (None, which)]  # (MMA, MMA_M, MMA_K / 2)


def shares(mma: Umma, tmem: cute.Pointer, column: int, config: Sm100BackwardConfig) -> cute.Tensor:
    """Operand A in tensor memory of which each warpgroup's share of K is over its share of the
    scores from `column` on."""
    one = mma.a_tmem(tmem, column, config.share)  # (MMA, MMA_M, MMA_K / groups)
    shape, stride = one.shape, one.stride
    step = config.share * 32 // mma.a_dtype.width  # a share has that many fp32 columns
    layout = cute.make_layout(
        (*shape[:2], (shape[2], config.groups)), stride=(*stride[:2], (stride[2], step))
    )
    return cute.make_tensor(one.iterator, layout)


@dataclass(frozen=True)
class Mma:
    """The MMA role."""

    shared: Shared
    products: Products

    @staticmethod
    @cute.jit
    def of(shared: Shared) -> Mma:
        return Mma(shared, Products.of(shared))

    @cute.jit
    def run(self) -> None:
        s = self.shared
        b, total = s.barriers, s.total(s.m_blocks())
        if total > 0:
            b.k_loaded.wait(s.phase)
            if cutlass.const_expr(s.config.ahead):
                self.scores_ahead(total)
            else:
                self.in_order(total)
            commit(b.sums_done[0], pair=False)
        elif cutlass.const_expr(s.config.persistent):
            self.no_block()

    @cute.jit
    def no_block(self) -> None:
        """Keep step with the other roles where no query sees the keys."""
        s, b = self.shared, self.shared.barriers
        b.k_loaded.wait(s.phase)
        b.v_loaded.wait(s.phase)
        commit(b.sums_done[0], pair=False)

    @cute.jit
    def in_order(self, total: Int32) -> None:
        """Start the products of one block after those of the other."""
        s, b = self.shared, self.shared.barriers
        q, do = s.begun(b.q.consumer()), s.begun(b.do.consumer())
        for i in cutlass.range(total, unroll=1):
            self.start_s(q)
            self.start_dp(i, q, do)
            self.start_dv(i, do)
            self.start_dk_and_dq(i, q)
            q.advance()
            do.advance()

    @cute.jit
    def scores_ahead(self, total: Int32) -> None:
        """Start S of the next block behind dV of this one, so that its exponentials run under dK
        and dQ."""
        s, b = self.shared, self.shared.barriers
        q, following, do = (s.begun(x.consumer()) for x in (b.q, b.q, b.do))
        self.start_s(following)
        self.start_dp(Int32(0), following, do)
        for i in cutlass.range(total, unroll=1):
            self.start_dv(i, do)
            following.advance()
            do.advance()
            if i + 1 < total:
                self.start_s(following)
            self.start_dk_and_dq(i, q)
            if i + 1 < total:
                self.start_dp(i + 1, following, do)
            q.advance()

    # ---- the products of block i

    @cute.jit
    def start_s(self, q: PipelineState) -> None:
        b = self.shared.barriers
        b.q.wait_full(q)
        self.multiply_s(q)
        self.subtract(0, q)
        commit(b.s_full[0], pair=False)

    @cute.jit
    def start_dp(self, i: Int32, q: PipelineState, do: PipelineState) -> None:
        c, b = self.shared.config, self.shared.barriers
        if i == 0:
            b.v_loaded.wait(self.shared.phase)
        b.do.wait_full(do)
        if cutlass.const_expr(c.dp_column in c.dq_columns):
            self.wait_dq_empty(i, c.dq_columns.index(c.dp_column))
        self.products.dp.issue(do.slot, Boolean(False))
        self.subtract(1, q)
        commit(b.dp_full[0], pair=False)

    @cute.jit
    def multiply_s(self, q: PipelineState) -> None:
        s, product = self.shared, self.products.s
        if cutlass.const_expr(s.config.early_s):
            blocks = range(cute.size(product.a, mode=[2]))
            first = len(blocks) // 2
            product.issue(q.slot, Boolean(False), blocks[:first])
            s.barriers.q_rest.wait(q.phase, q.slot)
            product.issue(q.slot, Boolean(True), blocks[first:])
        elif cutlass.const_expr(not s.config.halves):
            product.issue(q.slot, Boolean(False))
        else:
            product.of(half(product.a, s.split)).issue(q.slot, Boolean(False))
            product.of(half(product.a, 1 - s.split)).issue(s.other_half, Boolean(True))

    @cute.jit
    def subtract(self, which: cutlass.Constexpr[int], q: PipelineState) -> None:
        """Start the subtraction of LSE from S (0) or of delta from dP (1)."""
        c = self.shared.config
        if cutlass.const_expr(c.folded):
            less = self.products.less
            less = less.of(less.a[None, None, None, which]).at(which * c.dp_column)
            less.issue(q.slot, Boolean(True))

    @cute.jit
    def start_dv(self, i: Int32, do: PipelineState) -> None:
        b = self.shared.barriers
        b.p_full.wait(self.shared.count(i) & 1)
        fence_after_sync()
        self.products.dv.issue(do.slot, i > 0)
        commit(b.do.empty[do.slot], pair=False)

    @cute.jit
    def start_dk_and_dq(self, i: Int32, q: PipelineState) -> None:
        self.shared.barriers.ds_full.wait(self.shared.count(i) & 1)
        fence_after_sync()
        if cutlass.const_expr(self.shared.config.late_dk):
            self.start_dq(i)
            self.start_dk(i, q)
        else:
            self.start_dk(i, q)
            self.start_dq(i)

    @cute.jit
    def start_dk(self, i: Int32, q: PipelineState) -> None:
        self.products.dk.issue(q.slot, i > 0)
        commit(self.shared.barriers.q.empty[q.slot], pair=False)

    @cute.jit
    def start_dq(self, i: Int32) -> None:
        """Start dQ of a block whose dS is there."""
        s = self.shared
        c, b = s.config, s.barriers
        for part in cutlass.range_constexpr(c.dq_parts):
            self.wait_dq_empty(i, part)
            place = part % len(c.dq_columns)
            dq = self.products.dq.at(c.dq_columns[place])
            dq.issue(s.split * c.dq_parts + part, Boolean(False))
            commit(b.dq_full[place], pair=False)

    @cute.jit
    def wait_dq_empty(self, i: Int32, part: cutlass.Constexpr[int]) -> None:
        """Wait until what was before part `part` of dQ of block i in its place has been read."""
        c, use = self.shared.config, self.shared.config.dq_use(self.shared.count(i), part)
        self.shared.barriers.dq_empty.wait((use & 1) ^ 1, part % len(c.dq_columns))
        fence_after_sync()

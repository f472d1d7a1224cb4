"""Compute: the role of the warpgroups that turn S^T into P^T, and dP^T into dS^T.

A thread has a key and a share of a block's queries:

    P^T = 2^(S^T - LSE), dS^T = P^T * (dP^T - delta)

LSE and delta belong to columns: the products have subtracted both, or they are read from smem. P^T
goes over the scores that it is computed from, as an operand of dV; dS to smem, for dQ, and dS^T
over dP^T, for dK, unless that reads it from smem, too. At the end one warpgroup stores dV, another
dK, by way of the smem of V and K, which nobody reads any more. Of a persistent CTA both go by way
of dS's where it has room, dV else of a slot of Q if that is large enough, so that the next tile's K
and V are loaded meanwhile; and Store, a warp, waits until TMA has read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.packed import fma2, mul2, sub2
from cutex.device.atoms.scalar import exp2, tanh
from cutex.device.atoms.tmem import LANES, fence_after_sync, fence_before_sync
from cutex.device.attention.mask import KeyMask
from cutex.device.attention.rows import Rows
from cutex.device.attention.softmax import LOG2_E
from cutex.device.attention.tmem_rows import columns_of, flat, rounded, store_columns
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.sm100.config import PART, ROWS
from cutex.kernels.attention.backward.sm100.shared import Shared, following

CAPPED = 4  # columns of LSE that are read at a time beside a soft cap, for want of registers
STORE_BARRIER = 1  # the first of one named barrier for each warpgroup


@dataclass(frozen=True)
class Compute:
    """The role of a warpgroup: P^T and dS^T of its share of each block, then dV or dK."""

    shared: Shared
    group: Int32  # the number of the warpgroup, and of its share of a block's queries
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo

    @property
    def parts(self) -> int:
        """The parts of a thread's row."""
        return self.shared.config.share // PART

    @cute.jit
    def run(self) -> None:
        """Compute P^T and dS^T of all blocks, then store dK and dV."""
        s = self.shared
        blocks = s.m_blocks()
        state, m_block = s.begun(s.barriers.q.consumer()), blocks.first
        for i in cutlass.range(s.total(blocks), unroll=1):
            if cutlass.const_expr(not s.config.folded):
                s.barriers.q.wait_full(state)
            masked = (m_block < blocks.clean_first) | (m_block >= blocks.clean_end)
            rows = self.probabilities(i, state, m_block, masked)
            self.gradients(i, state, rows)
            state.advance()
            m_block = following(m_block, blocks)
        self.store()

    # ---- a block

    @cute.jit
    def probabilities(
        self, i: Int32, state: PipelineState, m_block: Int32, masked: Boolean
    ) -> list[cute.Tensor]:
        """Store P^T of block i; returns the factors of dP^T - delta, in parts."""
        s = self.shared
        c, b = s.config, s.barriers
        b.s_full.wait(s.count(i) & 1)
        fence_after_sync()
        parts = self.row(0)
        loaded = [parts.start_load(part) for part in range(self.parts)]
        parts.wait_loads()
        rows = [flat(x) for x in loaded]
        if cutlass.const_expr(c.softcap):
            factor = s.args.scale / s.args.softcap
            for row in rows:
                for k in cutlass.range_constexpr(PART):
                    row[k] = tanh(row[k] * factor)
        if masked:
            for part in cutlass.range_constexpr(self.parts):
                scores = cute.make_tensor(rows[part].iterator, cute.make_layout((1, PART)))
                self.mask().apply(scores, self.part_of(m_block, part))
        for part in cutlass.range_constexpr(self.parts):
            probabilities = self.exponentials(rows[part], state, part)
            words = cute.recast_tensor(rounded(probabilities, s.sQ.element_type), Float32)
            store_columns(s.tmem, self.operand(part), words)
        cute.arch.fence_view_async_tmem_store()
        fence_before_sync()
        with cute.arch.elect_one():
            b.p_full.arrive()
        return rows

    @cute.jit
    def exponentials(
        self, row: cute.Tensor, state: PipelineState, part: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """P^T of part `part` of a row; `row` is replaced by P^T times the derivative of a soft
        cap."""
        args = self.shared.args
        if cutlass.const_expr(self.shared.config.folded):
            scale = args.scale * LOG2_E
            for k in cutlass.range_constexpr(0, PART, 2):
                x = mul2((row[k], row[k + 1]), (scale, scale))
                row[k], row[k + 1] = exp2(x[0]), exp2(x[1])
            return row
        if cutlass.const_expr(not self.shared.config.softcap):
            lse, down = self.of_columns(0, state, part * PART, PART), -args.scale * LOG2_E
            for k in cutlass.range_constexpr(0, PART, 2):
                x = fma2((row[k], row[k + 1]), (down, down), (lse[k], lse[k + 1]))
                row[k], row[k + 1] = exp2(-x[0]), exp2(-x[1])
            return row
        found = cute.make_rmem_tensor(cute.make_layout(PART), Float32)
        scale_log2 = args.softcap * LOG2_E
        for first in cutlass.range_constexpr(0, PART, CAPPED):
            cute.arch.sync_warp()
            lse = self.of_columns(0, state, part * PART + first, CAPPED)
            for k in cutlass.range_constexpr(first, first + CAPPED):
                x = row[k]
                found[k] = exp2(x * scale_log2 - lse[k - first])
                # NOTE: 0 also for the -inf of a score that does not count
                row[k] = found[k] * cute.arch.fmax(1.0 - x * x, Float32(0.0))
        return found

    @cute.jit
    def gradients(self, i: Int32, state: PipelineState, rows: list[cute.Tensor]) -> None:
        """Store dS^T of block i in smem and, unless dK is late, in tensor memory."""
        s = self.shared
        c, b = s.config, s.barriers
        b.dp_full.wait(s.count(i) & 1)
        if cutlass.const_expr(c.persistent):  # noqa: SIM102 - known when tracing
            if i == 0:
                await_staging(s)
        fence_after_sync()
        parts = self.row(c.dp_column)
        loaded = parts.start_load(0)
        for part in cutlass.range_constexpr(self.parts):
            dp, row = flat(loaded), rows[part]
            parts.wait_loads()
            if cutlass.const_expr(part + 1 < self.parts):
                loaded = parts.start_load(part + 1)
            if cutlass.const_expr(not c.folded):
                delta = self.of_columns(1, state, part * PART, PART)  # (PART)
                for k in cutlass.range_constexpr(0, PART, 2):
                    dp[k], dp[k + 1] = sub2((dp[k], dp[k + 1]), (delta[k], delta[k + 1]))
            for k in cutlass.range_constexpr(0, PART, 2):
                row[k], row[k + 1] = mul2((row[k], row[k + 1]), (dp[k], dp[k + 1]))
            ds = rounded(row, s.sQ.element_type)
            if cutlass.const_expr(not c.late_dk):
                words = cute.recast_tensor(ds, Float32)
                store_columns(s.tmem, c.dp_column + self.operand(part), words)
            cute.autovec_copy(ds, self.ds_row(part))
        if cutlass.const_expr(not c.late_dk):
            cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_view_async_shared()
        fence_before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.tell_of_ds()

    # ---- where a block's numbers are

    def row(self, column: int) -> Any:
        """This thread's share of the scores, from `column` of tensor memory on, in parts."""
        c = self.shared.config
        return columns_of(self.shared.tmem, column + self.group * c.share, c.share)

    def operand(self, part: int) -> Int32:
        """The first column of a part of P^T, given that of S^T; or of dS^T, given dP^T's."""
        return self.group * self.shared.config.share + part * (PART // 2)

    def ds_row(self, part: int) -> cute.Tensor:
        """Where a part of this thread's row of dS is stored in smem."""
        mine = self.shared.sdS[None, self.key(), 0]  # (bM)
        return cute.local_tile(mine, (PART,), (self.group * self.parts + part,))  # (PART)

    def tell_of_ds(self) -> None:
        """Signal that this warp's dS is ready to be read. One thread calls it."""
        self.shared.barriers.ds_full.arrive()

    @cute.jit
    def of_columns(
        self,
        which: cutlass.Constexpr[int],
        state: PipelineState,
        column: cutlass.Constexpr[int],
        count: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """LSE (0) or delta (1) for `count` of this thread's columns from `column` on, in
        registers."""
        c = self.shared.config
        stats = self.shared.stats[None, state.slot].iterator
        first = which * c.tile_m + self.group * c.share + column
        mine = cute.make_tensor((stats + first).align(16), cute.make_layout(count))
        found = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        cute.autovec_copy(mine, found)
        return found  # (count)

    def key(self) -> Int32:
        """The row of the CTA's keys that belongs to this thread."""
        thread, _, _ = cute.arch.thread_idx()
        return thread % LANES

    def part_of(self, m_block: Int32, part: int) -> Int32:
        """The number of PART queries: part `part` of this share of block `m_block`."""
        return m_block * (self.shared.config.groups * self.parts) + self.group * self.parts + part

    def mask(self) -> KeyMask:
        s = self.shared
        lengths = s.tile.seq_q.length, s.tile.seq_k.length
        return KeyMask(s.info.band, PART, *lengths, (s.tile.n_block * ROWS + self.key(),))

    # ---- out

    @cute.jit
    def store(self) -> None:
        """Store dV (first warpgroup) or dK (second), or hand them to STORE."""
        s, b = self.shared, self.shared.barriers
        c = s.config
        any_block = s.total(s.m_blocks()) > 0
        if cutlass.const_expr(c.persistent):
            b.sums_done.wait(s.phase)
            if not any_block:
                await_staging(s)
        elif any_block:
            b.sums_done.wait(0)
        fence_after_sync()
        if self.group == 0:
            sD = staging(s, self.dv, s.sV, 1)  # (128, DV, 1)
            self.stage(sD, c.dv_column, any_block, Float32(1.0))
            self.hand_over(sD, self.dv, b.dv_staged)
        elif self.group == 1:
            sD = staging(s, self.dk, s.sK, 0)  # (128, D, 1)
            self.stage(sD, c.dk_column, any_block, s.args.scale)
            self.hand_over(sD, self.dk, b.dk_staged)

    @cute.jit
    def stage(
        self,
        sD: cute.Tensor,
        column: cutlass.Constexpr[int],
        any_block: Boolean,
        factor: Float32,
    ) -> None:
        """Round a sum times `factor`, 0 without `any_block`, and write it to smem."""
        s = self.shared
        parts = columns_of(s.tmem, column, cute.size(sD, mode=[1]))
        for part in cutlass.range_constexpr(parts.num_parts):
            values = cute.make_rmem_tensor(parts.tTR_cAcc.shape, Float32)
            values.fill(0.0)
            if any_block:
                parts.start_load_into(values, part)
                parts.wait_loads()
            row = flat(values)
            for k in cutlass.range_constexpr(PART):
                row[k] *= factor
            mine = cute.local_tile(sD[self.key(), None, 0], (PART,), (part,))  # (bPart)
            cute.autovec_copy(rounded(row, sD.element_type), mine)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def hand_over(self, sD: cute.Tensor, to: cpasync.TmaInfo, staged: Any) -> None:
        """Store what this warpgroup has `staged`, or signal STORE."""
        if cutlass.const_expr(self.shared.config.persistent):
            fence_before_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                staged.arrive()
        else:
            cute.arch.barrier(barrier_id=STORE_BARRIER + self.group, number_of_threads=LANES)
            if cute.arch.warp_idx() % 4 == 0:
                start_store(self.shared, sD, to)
                cute.arch.cp_async_bulk_wait_group(0, read=True)


# ---- dK and dV by way of smem


@cute.jit
def staging(
    shared: Shared, to: cpasync.TmaInfo, sX: cute.Tensor, number: cutlass.Constexpr[int]
) -> cute.Tensor:
    """The smem through which sum `number`, dK or dV, is stored: dS's, a slot of Q, or that of its
    operand sX."""
    s, c, layout = shared, shared.config, to.smem_layout.outer
    smem = s.sdS.iterator
    if cutlass.const_expr(number >= c.staged_in_ds):
        if cutlass.const_expr(not c.staged_in_q):
            return cute.make_tensor(sX.iterator, layout)  # (128, width, 1)
        slot = (s.number + s.total(s.m_blocks()) + 1) % c.num_stages
        smem = s.sQ[None, None, slot].iterator
    pointer = cute.recast_ptr(smem, to.smem_layout.inner, sX.element_type)
    if cutlass.const_expr(0 < number < c.staged_in_ds):
        pointer += ROWS * c.dk_width
    return cute.make_tensor(pointer, layout)


def await_staging(shared: Shared) -> None:
    """Wait until what the last tile stored through dS's smem has been read."""
    b, c = shared.barriers, shared.config
    for empty in (b.k_empty, b.v_empty)[: c.staged_in_ds]:
        empty.wait(shared.phase ^ 1)


@cute.jit
def start_store(shared: Shared, sD: cute.Tensor, to: cpasync.TmaInfo) -> None:
    """Start the store of sD (128, width, 1), without rows past the end. A whole warp calls it."""
    s = shared
    rows = Rows(to, 1, s.config.ragged_k)
    of = (s.tile.head_kv, s.tile.batch, s.tile.seq_k)
    gX = rows.tiles(*of, (ROWS, cute.size(sD, mode=[1])), s.split)
    bSG_sX, bSG_gX = cpasync.tma_partition(
        to.atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA, 1), (TMA, Rest)
    cute.copy(to.atom, bSG_sX[None, 0], bSG_gX[None, s.tile.n_block])
    cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class Store:
    """The role of the warp that stores a persistent CTA's dV and dK."""

    shared: Shared
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo

    @cute.jit
    def run(self) -> None:
        s, b = self.shared, self.shared.barriers
        b.dv_staged.wait(s.phase)
        start_store(s, staging(s, self.dv, s.sV, 1), self.dv)
        b.dk_staged.wait(s.phase)
        start_store(s, staging(s, self.dk, s.sK, 0), self.dk)
        for left, empty in ((1, b.v_empty), (0, b.k_empty)):
            cute.arch.cp_async_bulk_wait_group(left, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                empty.arrive()

"""AllGradients: the role of a warpgroup that owns 64 keys, sums dK and dV of them, and computes
half of the columns of dQ over all keys of its CTA.

    dV += P^T dO, dQ = dS K, dK += dS^T Q

Each of two such warpgroups writes its dS^T to smem, and waits for the other's before it starts dQ.
The third warpgroup only loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.keys import KeyGradients
from cutex.kernels.attention.backward.sm90.load import Load
from cutex.kernels.attention.backward.sm90.queries import QueryGradients
from cutex.kernels.attention.backward.sm90.scores import Products, round_operand
from cutex.kernels.attention.backward.sm90.shared import Shared


@dataclass(frozen=True)
class AllGradients(KeyGradients):
    queries: QueryGradients  # whose product and adds are this role's

    @staticmethod
    def of_all(config: BackwardConfig, shared: Shared, queries: QueryGradients) -> AllGradients:
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        products = Products.of(config, shared, wg, ("dv", "dk"))
        return AllGradients(config, shared, products, wg, queries)

    @cute.jit
    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Sum over the blocks; dK of a block runs while its dQ goes to smem."""
        s, products = self.shared, self.products[0]
        state, m_block = s.q.consumer(), blocks.first
        tile = s.tiles.tile(self.config, s.first_head(), s.tile.batch, s.tile.seq_q)
        rP, rdS = self.operands()
        for i in cutlass.range(total, unroll=1):
            acc_s, acc_dp = self.start_s(state), self.start_dp(state)
            lse = self.of_columns(0, state, 0)
            warpgroup.wait_group(1)
            self.probabilities(acc_s, m_block, own, state, 0, lse)
            warpgroup.wait_group(0)
            round_operand(rP, acc_s)
            self.gradients(acc_s, acc_dp, rdS, state)
            ds = s.ds.state(i)
            self.hand_over(rdS, ds)
            products.dv.of(rP).issue(state.slot, True)
            acc_dq = self.start_dq(ds)
            products.dk.of(rdS).issue(state.slot, True)
            warpgroup.wait_group(1)
            s.do.release(state)
            s.ds.release(ds)
            self.queries.add_from_smem(acc_dq, tile + m_block, self.keys, self.keys)
            warpgroup.wait_group(0)
            s.q.release(state)
            state.advance()
            m_block += 1
            if m_block == blocks.end:
                m_block = blocks.first
                tile += s.tiles.per_head

    @cute.jit
    def start_dq(self, ds: PipelineState) -> cute.Tensor:
        """Start this warpgroup's columns of dQ of a block, once both have handed dS over."""
        c, s = self.config, self.shared
        s.ds.full.wait(ds.phase, ds.slot)
        dq = self.queries.product(s.sK, c.head_dim, self.keys)
        acc = dq.mma.accumulator()
        for keys in cutlass.range_constexpr(c.key_tiles):
            tQrdS = dq.a[None, None, None, ds.slot * c.key_tiles + keys]
            dq.of(tQrdS).into(acc).issue(keys, keys > 0)
        return acc

    @cute.jit
    def store(self, dk: cpasync.TmaInfo, dv: cpasync.TmaInfo) -> None:
        """Store dV and dK, once both warpgroups have read K for the last time."""
        with cute.arch.elect_one():
            self.shared.k_read.arrive()
        self.store_tile(dv, self.products[0].dv, self.shared.sV)
        self.store_dk(dk)
        # NOTE: every warp has adds that read smem
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class Supply:
    """The role of the third warpgroup, of which one warp loads everything."""

    config: BackwardConfig
    shared: Shared
    load: Load

    @cute.jit
    def run(self) -> None:
        blocks = self.shared.m_blocks()
        total = (blocks.end - blocks.first) * self.shared.heads_per_kv
        if cute.arch.warp_idx() % 4 == 0:
            fill = self.shared.q.producer()
            self.load.keys()
            for i in cutlass.range(total, unroll=1):
                self.load.queries(i, fill)
                fill.advance()

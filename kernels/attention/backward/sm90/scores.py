"""Scores: what every warpgroup that sums gradients of keys does with a block of queries.

Scores are transposed, their rows are keys:

    S^T = K Q^T, dP^T = V dO^T, P^T = 2^(S^T - LSE), dS^T = P^T * (dP^T - delta)

so that P^T and dS^T are operands A in the registers that they were computed in. LSE and delta
belong to columns: a thread reads those of its columns from smem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from cutex.device.atoms.mma import contiguous_rows_layout
from cutex.device.atoms.scalar import exp2, pinned, tanh
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, Wgmma, WgmmaProduct, round_to, write_fragment
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.mask import KeyMask
from cutex.device.attention.rows import Rows
from cutex.device.attention.softmax import LOG2_E, rows_of
from cutex.device.kept_sums import KeptSums
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.sm90.shared import Shared

STORE_BARRIER = 1  # the first of one named barrier for each warpgroup


@dataclass(frozen=True)
class Products:
    """A warpgroup's products with a part of a block of queries; operands A and accumulators that
    change are passed later."""

    s: WgmmaProduct
    dp: WgmmaProduct
    dv: WgmmaProduct  # without an accumulator in a warpgroup that does not sum it
    dk: WgmmaProduct

    @staticmethod
    def of(
        config: BackwardConfig, shared: Shared, keys: Int32 | int, sums: tuple[str, ...]
    ) -> tuple[Products, ...]:
        """The products of keys number `keys` (64 of the CTA's) with each part of a block; those in
        `sums` have accumulators shared by all parts."""
        c, dtype, major = config, shared.sQ.element_type, OperandMajorMode.MN
        scores, of_dk = Wgmma(c.score_m, dtype), Wgmma(c.head_dim, dtype, b_major=major)
        of_dv = Wgmma(c.head_dim_v, dtype, b_major=major)
        transposed = contiguous_rows_layout(dtype, c.head_dim, c.tile_m, c.num_stages)
        sQt = cute.make_tensor(shared.sQ.iterator, transposed.outer)  # (D, bM, SLOT)
        transposed = contiguous_rows_layout(dtype, c.head_dim_v, c.tile_m, c.num_stages)
        sdOt = cute.make_tensor(shared.sdO.iterator, transposed.outer)  # (DV, bM, SLOT)
        tSrK = scores.a_slots(shared.sK)[None, None, None, keys]  # (MMA, MMA_M, MMA_K)
        tPrV = scores.a_slots(shared.sV)[None, None, None, keys]  # (MMA, MMA_M, MMA_K)
        dv, dk = (mma.accumulator() if name in sums else None
                  for name, mma in (("dv", of_dv), ("dk", of_dk)))  # fmt: skip
        found = []
        for part in range(c.parts):
            rows = (c.score_m, None, None), (part, 0, 0)
            columns = (None, c.score_m, None), (0, part, 0)
            s, dp = (scores.b_slots(part_of(x, *rows)) for x in (shared.sQ, shared.sdO))
            found.append(
                Products(
                    WgmmaProduct(scores, tSrK, s, None),
                    WgmmaProduct(scores, tPrV, dp, None),
                    WgmmaProduct(of_dv, None, of_dv.b_slots(part_of(sdOt, *columns)), dv),
                    WgmmaProduct(of_dk, None, of_dk.b_slots(part_of(sQt, *columns)), dk),
                )
            )
        return tuple(found)


@dataclass(frozen=True)
class Scores:
    """A warpgroup that sums the gradients of 64 keys, number `keys` of the CTA's."""

    config: BackwardConfig
    shared: Shared
    products: tuple[Products, ...]  # with each part of a block of queries
    keys: Int32 | int

    # ---- over the queries

    @cute.jit
    def run(self) -> None:
        """Sum over the blocks of queries of all heads that share the keys."""
        s = self.shared
        for product in (self.products[0].dk, self.products[0].dv):
            if cutlass.const_expr(product.acc is not None):
                product.acc.fill(0.0)
        blocks, own = s.m_blocks(), self.own_blocks()
        total = (blocks.end - blocks.first) * s.heads_per_kv
        s.k_loaded.wait(0)
        s.v_loaded.wait(0)
        if total > 0:
            self.sum(blocks, own, total)

    def sum(self, blocks: Blocks, own: Blocks, total: Int32) -> None:
        """Sum over `total` blocks of queries, of which `own` see these 64 keys; a role defines
        it."""
        raise NotImplementedError

    def own_blocks(self) -> Blocks:
        """The blocks of queries that see any of this warpgroup's keys."""
        s = self.shared
        lengths = s.tile.seq_q.length, s.tile.seq_k.length
        return s.info._replace(tile_n=ROWS).m_blocks(self.tile_of_keys(), *lengths)

    def tile_of_keys(self) -> Int32:
        """The number of the 64 keys in their sequence."""
        return self.shared.tile.n_block * self.config.key_tiles + self.keys

    @staticmethod
    @cute.jit
    def following(m_block: Int32, blocks: Blocks) -> Int32:
        """The block after `m_block`, of the next head if it is a head's last."""
        return blocks.first if m_block + 1 == blocks.end else m_block + 1

    def release(self, state: PipelineState) -> None:
        self.shared.q.release(state)
        self.shared.do.release(state)

    # ---- a block

    @cute.jit
    def start_s(self, state: PipelineState, part: cutlass.Constexpr[int] = 0) -> cute.Tensor:
        """Start S^T of a part of the block in Q's slot."""
        product = self.products[part].s
        acc_s = product.mma.accumulator()
        if cutlass.const_expr(part == 0):
            self.shared.q.wait_full(state)
        product.into(acc_s).issue(state.slot, False)
        return acc_s

    @cute.jit
    def start_dp(self, state: PipelineState, part: cutlass.Constexpr[int] = 0) -> cute.Tensor:
        """Start dP^T of a part of the block in dO's slot."""
        product = self.products[part].dp
        acc_dp = product.mma.accumulator()
        if cutlass.const_expr(part == 0):
            self.shared.do.wait_full(state)
        product.into(acc_dp).issue(state.slot, False)
        return acc_dp

    @cute.jit
    def hand_over(
        self, rdS: cute.Tensor, ds: PipelineState, part: cutlass.Constexpr[int] = 0
    ) -> None:
        """Write a part of dS^T to its slot in smem, for dQ, once the slot is empty; after the last
        part hand the slot over."""
        if cutlass.const_expr(part == 0):
            self.shared.ds.wait_empty(ds)
        self.write_ds(rdS, ds, part)
        if cutlass.const_expr(part == self.config.parts - 1):
            self.shared.ds.hand_over(ds)

    @cute.jit
    def write_ds(
        self, rdS: cute.Tensor, ds: PipelineState, part: cutlass.Constexpr[int] = 0
    ) -> None:
        """Write a part of dS^T to its (empty) slot."""
        s, c = self.shared, self.config
        sdS = s.sdS[None, None, ds.slot * c.key_tiles + self.keys]
        sdS = cute.local_tile(sdS, (ROWS, c.score_m), (0, part))  # (bKeys, bQueries)
        write_fragment(rdS, self.products[part].s.mma, sdS)

    @cute.jit
    def probabilities(
        self,
        acc_s: cute.Tensor,
        m_block: Int32,
        own: Blocks,
        state: PipelineState,
        part: cutlass.Constexpr[int] = 0,
        lse: Any = None,
    ) -> None:
        """Replace S^T by P^T; `lse` is that of the columns, if it has been read."""
        args = self.shared.args
        scores = rows_of(acc_s)
        scale_log2 = args.scale * LOG2_E
        if (m_block < own.clean_first) | (m_block >= own.clean_end):
            self.mask().apply(scores, m_block * self.config.parts + part)
        if cutlass.const_expr(lse is None):
            lse = self.of_columns(0, state, part)  # (columns)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, c] = exp2(scores[r, c] * scale_log2 - lse[c])

    @cute.jit
    def capped_probabilities(
        self,
        acc_s: cute.Tensor,
        rP: Any,
        m_block: Int32,
        own: Blocks,
        state: PipelineState,
        part: cutlass.Constexpr[int] = 0,
    ) -> None:
        """Round P^T into rP, if there is one, and replace S^T by P^T times the derivative of the
        soft cap, the factor of dS^T."""
        args = self.shared.args
        scores = rows_of(acc_s)
        factor, scale_log2 = args.scale / args.softcap, args.softcap * LOG2_E
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = tanh(scores[i] * factor)
        if (m_block < own.clean_first) | (m_block >= own.clean_end):
            self.mask().apply(scores, m_block * self.config.parts + part)
        lse = self.columns(0, state, part)  # (2, columns / 2)
        units = cute.make_layout((8, cute.size(acc_s) // 8))
        capped = cute.make_tensor(acc_s.iterator, units)  # (8, K)
        # NOTE: 16 columns at a time, so that few of P^T wait to be rounded
        for k in cutlass.range_constexpr(cute.size(units, mode=[1])):
            probabilities = cute.make_rmem_tensor(8, Float32)
            for i in cutlass.range_constexpr(8):
                x = capped[i, k]
                probabilities[i] = exp2(x * scale_log2 - lse[i % 2, 2 * k + i // 4])
                # NOTE: 0 also for the -inf of a score that does not count
                capped[i, k] = probabilities[i] * cute.arch.fmax(1.0 - x * x, Float32(0.0))
            if cutlass.const_expr(rP is not None):
                round_operand(cute.make_tensor(rP.iterator, units)[None, k], probabilities)

    @cute.jit
    def gradients(
        self,
        acc_s: cute.Tensor,
        acc_dp: cute.Tensor,
        rdS: cute.Tensor,
        state: PipelineState,
        part: cutlass.Constexpr[int] = 0,
        delta: Any = None,
    ) -> None:
        """Round dS^T = P^T * (dP^T - delta); `delta` is that of the columns, if it has been
        read."""
        scores, dp = rows_of(acc_s), rows_of(acc_dp)
        if cutlass.const_expr(delta is None):
            delta = self.of_columns(1, state, part)  # (columns)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, c] *= dp[r, c] - delta[c]
        round_operand(rdS, acc_s)

    @cute.jit
    def columns(
        self,
        which: cutlass.Constexpr[int],
        state: PipelineState,
        part: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """LSE (0) or delta (1) for the columns of this thread's scores, (2, columns / 2), in
        smem."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        first = which * c.tile_m + part * c.score_m + 2 * (thread % 4)
        stats = self.shared.stats[None, state.slot].iterator + first
        return cute.make_tensor(
            stats.align(8), cute.make_layout((2, c.score_m // 8), stride=(1, 8))
        )

    @cute.jit
    def of_columns(
        self,
        which: cutlass.Constexpr[int],
        state: PipelineState,
        part: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """LSE (0) or delta (1) for the columns of this thread's scores, in registers."""
        mine = self.columns(which, state, part)
        found = cute.make_rmem_tensor(cute.make_layout(mine.shape), Float32)
        for j in cutlass.range_constexpr(cute.size(mine, mode=[1])):
            cute.autovec_copy(mine[None, j], found[None, j])
        return found

    def mask(self) -> KeyMask:
        s = self.shared
        thread, _, _ = cute.arch.thread_idx()
        first = self.tile_of_keys() * ROWS
        key = first + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
        lengths = s.tile.seq_q.length, s.tile.seq_k.length
        return KeyMask(s.info.band, self.config.score_m, *lengths, (key, key + 8), thread % 4)

    # ---- out

    @property
    def sums(self) -> tuple[cute.Tensor, ...]:
        """The accumulators of dV and dK that this warpgroup sums."""
        found = self.products[0].dv.acc, self.products[0].dk.acc
        return tuple(acc for acc in found if acc is not None)

    def store(self, *out: Any) -> None:
        """Store the sums; a role defines it."""
        raise NotImplementedError

    @cute.jit
    def store_or_keep(self, *out: Any) -> None:
        """Store the sums by the role's `store`, which takes `out`; where the query heads are
        divided, the last part's with those of all parts, others being kept for it."""
        if cutlass.const_expr(not (self.config.head_parts or self.config.last_parts)):
            self.store(*out)
        else:
            parts, tile = self.shared.parts, self.shared.tile
            if cutlass.const_expr(self.config.last_parts):
                parts = tile.last
            part = parts.part(tile)
            first = parts.share(self.config, tile, Int32(0))
            if part + 1 < parts.count:
                self.kept(first + part).keep(self.sums)
            else:
                self.kept(first).await_several(part, self.config.sum_warps)
                while part > 0:
                    part -= 1
                    self.kept(first + part).add_kept(self.sums, self.config.sums_at_once)
                self.store(*out)

    def kept(self, share: Int32) -> KeptSums:
        """The sums that this warp keeps of a share: a piece of a tile, or a part of its heads."""
        c, args = self.config, self.shared.args
        warp = share * c.sum_warps + cute.arch.warp_idx()
        return KeptSums.of(args.partials, args.counter.iterator + 2, warp, c.sums_of_keys)

    @cute.jit
    def store_tile(self, to: cpasync.TmaInfo, of: WgmmaProduct, sX: cute.Tensor) -> None:
        """Round a product's accumulator, write it to the slot of these keys of sX, and start its
        store, which leaves out rows past the end."""
        s, acc = self.shared, of.acc
        rounded = cute.make_rmem_tensor(cute.make_layout(cute.size(acc)), sX.element_type)
        units = cute.make_layout((8, cute.size(acc) // 8))
        narrow, wide = (cute.make_tensor(x.iterator, units) for x in (rounded, acc))
        for unit in cutlass.range_constexpr(cute.size(acc) // 8):
            narrow[None, unit].store(wide[None, unit].load().to(sX.element_type))
        write_fragment(rounded, of.mma, sX[None, None, self.keys])
        cute.arch.fence_view_async_shared()
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        cute.arch.barrier(barrier_id=STORE_BARRIER + wg, number_of_threads=WARPGROUP)
        if cute.arch.warp_idx() % 4 == 0:
            tile = (ROWS, cute.size(sX, mode=[1]))
            rows = Rows(to, 1, self.config.ragged_k)
            gX = rows.tiles(s.tile.key_head, s.tile.batch, s.tile.seq_k, tile)
            from_smem, to_gmem = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
            bSG_sX, bSG_gX = cpasync.tma_partition(
                to.atom, 0, cute.make_layout(1), from_smem, to_gmem
            )  # (TMA, WG), (TMA, Rest)
            cute.copy(to.atom, bSG_sX[None, self.keys], bSG_gX[None, self.tile_of_keys()])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_dk(self, to: cpasync.TmaInfo) -> None:
        """Store dK, times the scale, through K's slots, once they are no longer read."""
        acc = self.products[0].dk.acc
        acc.store(acc.load() * self.shared.args.scale)
        self.shared.k_read.wait(0)
        self.store_tile(to, self.products[0].dk, self.shared.sK)

    @cute.jit
    def stored(self) -> None:
        """Wait until the stores have read smem."""
        if cute.arch.warp_idx() % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def part_of(sX: cute.Tensor, shape: tuple[int | None, ...], place: tuple[int, ...]) -> cute.Tensor:
    """The tile of sX at `place`; a None in `shape` takes a mode whole."""
    tile = tuple(cute.size(sX, mode=[i]) if n is None else n for i, n in enumerate(shape))
    return cute.local_tile(sX, tile, place)


@cute.jit
def round_operand(tCrA: cute.Tensor, acc: cute.Tensor) -> None:
    """Round an accumulator into an operand A before anything that follows."""
    round_to(tCrA, acc)
    words = cute.recast_tensor(tCrA, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pinned(words[i])

"""The Blackwell backward by pairs of CTAs, which own 256 keys and exchange dS, for head dim 128.

One MMA is of both CTAs: 256 keys are the rows of S^T, dP^T, dV and dK, and of the other operand
each CTA holds half: of Q and dO 64 of a block's 128 queries for S and dP, 64 of the 128 columns for
dK and dV. So the smem port reads Q and dO half as often. dQ of the block, over all 256 keys, has 64
queries in each CTA: a CTA sends dS of its keys for the other's queries, 16 KB a block, by a bulk
copy from smem to smem. So sums of dQ are added once for 256 keys, not for 128.

    smem      bytes                         of each CTA
    sK, sV    128 keys x 128                65536
    sKt       256 keys x 64, B of dQ        32768
    sQ, sdO   64 queries x 128, B of S, dP  32768
    sQt, sdOt 128 queries x 64, B of dK, dV 32768
    sdS       64 queries x 256 keys         32768
    sent      64 queries x 128 keys         16384, behind sdS
    sRows     64 x 32 x 2                   4096
    sMinus    128 x 32 x 2                  8192

    tmem      columns
    S, P      0 to 127, P in the first 64
    dP, dS    128 to 255, dS in the first 64, dQ in the others once dP has been read
    dV, dK    256, 384

A warpgroup has queries 0 to 31 and 64 to 95 of a block, or 32 to 63 and 96 to 127, so that what is
left of S and of dP is contiguous, and half of each thread's dS is the other CTA's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cutex.device.atoms.dsmem import copy_to_cta
from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.rows import tma_operand
from cutex.device.attention.tmem_rows import columns_of, flat
from cutex.device.pipeline import is_leader, publish_barriers, sync_cluster
from cutex.kernels.attention.backward.config import ELEMENT
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles, Tensors
from cutex.kernels.attention.backward.sm100 import backward as single
from cutex.kernels.attention.backward.sm100.compute import Compute
from cutex.kernels.attention.backward.sm100.config import PART, ROWS, TMEM_COLUMNS
from cutex.kernels.attention.backward.sm100.pairs.config import CTAS, HALF, PairConfig
from cutex.kernels.attention.backward.sm100.pairs.mma import PairMma, PairProducts, dq_column
from cutex.kernels.attention.backward.sm100.pairs.shared import (
    PairBarriers,
    PairLoad,
    PairLoads,
    PairShared,
)
from cutex.kernels.attention.backward.sm100.queries import Add
from cutex.kernels.attention.backward.tiles import Sizes, Tile, sizes_of, tile_of


class SplitRow(NamedTuple):
    """A thread's share of a row, whose two parts are 64 columns apart."""

    tmem: cute.Pointer
    column: Int32

    def start_load(self, part: int) -> cute.Tensor:
        return columns_of(self.tmem, self.column + part * HALF, PART).start_load(0)

    def wait_loads(self) -> None:
        columns_of(self.tmem, self.column, PART).wait_loads()


@dataclass(frozen=True)
class PairCompute(Compute):
    """Compute, whose dS of one half of a block's queries is the other CTA's."""

    shared: PairShared

    def row(self, column: int) -> SplitRow:
        return SplitRow(self.shared.tmem, column + self.group * PART)

    def operand(self, part: int) -> Int32:
        return self.group * PART + part * (PART // 2)

    def part_of(self, m_block: Int32, part: int) -> Int32:
        return m_block * (2 * CTAS) + 2 * part + self.group

    def ds_row(self, part: int) -> cute.Tensor:
        s = self.shared
        of_keys = CTAS - s.rank if part else CTAS * s.rank
        mine = s.sdS[None, of_keys * ROWS + self.key(), 0]  # (64)
        return cute.local_tile(mine, (PART,), (self.group,))  # (PART)

    def tell_of_ds(self) -> None:
        self.shared.barriers.ds_full.arrive()
        self.shared.barriers.staged.arrive()


@dataclass(frozen=True)
class Exchange:
    """The role of the warp that sends dS of this CTA's keys to the other."""

    shared: PairShared

    @cute.jit
    def run(self) -> None:
        s, b = self.shared, self.shared.barriers
        num_bytes = HALF * ROWS * ELEMENT
        there = s.sdS[None, s.rank * ROWS, 0].iterator
        here = s.sdS[None, CTAS * ROWS, 0].iterator
        for i in cutlass.range(s.total(s.m_blocks()), unroll=1):
            b.staged.wait(i & 1)
            with cute.arch.elect_one():
                b.received.arrive_expecting(num_bytes)
                copy_to_cta(there, here, num_bytes, b.received[0], 1 - s.rank)
            b.received.wait(i & 1)
            with cute.arch.elect_one():
                if s.rank == 1:
                    b.sent.arrive()


@dataclass(frozen=True)
class PairAdd(Add):
    """Add, of 64 queries: warps 0 and 1 have the first 64 columns of 32 each, warps 2 and 3 the
    others."""

    shared: PairShared

    @cute.jit
    def add(self, i: Int32, tile: Int32, part: cutlass.Constexpr[int]) -> None:
        s = self.shared
        s.barriers.dq_full.wait(i & 1)
        fence_after_sync()
        columns = columns_of(s.tmem, dq_column(s.config), HALF)
        loaded = [columns.start_load(j) for j in range(HALF // PART)]
        columns.wait_loads()
        fence_before_sync()
        with cute.arch.elect_one():
            s.barriers.dq_empty.arrive()
        warp, lane, sums = cute.arch.warp_idx() % 4, cute.arch.lane_idx(), self.sums(tile)
        of_rows = (s.rank * 2 + warp % 2) * s.config.head_dim
        for j in cutlass.range_constexpr(HALF // PART):
            fours = cute.logical_divide(flat(loaded[j]), cute.make_layout(4))  # (4, NumV)
            first = (of_rows + warp // 2 * HALF + j * PART) // 4 * 32 + lane
            for k in cutlass.range_constexpr(PART // 4):
                sums.add(first + k * 32, fours[None, k])


class PairMain(single.Main):
    """The kernel of a pair."""

    config: PairConfig

    @property
    def exchange_warp(self) -> int:
        return self.load_warp + 1

    @cute.jit
    def launch(self, tensors: Tensors, args: KernelArgs, stream) -> None:
        c = self.config
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO)
        store = cpasync.CopyBulkTensorTileS2GOp()
        of_q, of_k = self.rows(None, "q"), self.rows(None, "k")
        rows, whole, keys = (HALF, c.head_dim), (c.tile_m, HALF), (ROWS, c.head_dim)
        halves = cute.make_layout(
            (2 * cute.size(tensors.stats, mode=[0]), c.row_stats * HALF),
            stride=(c.row_stats * HALF, 1),
        )
        numbers = cute.make_tensor(tensors.stats.iterator, halves)
        slots = cute.make_layout(
            (1, c.row_stats * HALF, c.num_stages), stride=(0, 1, 2 * c.row_stats * HALF)
        )
        loads = (
            tma_operand(load, tensors.q, of_q, rows, 1),
            tma_operand(load, tensors.do, of_q, rows, 1),
            tma_operand(load, tensors.q, of_q, whole, 1),
            tma_operand(load, tensors.do, of_q, whole, 1),
            tma_operand(load, tensors.k, of_k, keys, 1),
            tma_operand(load, tensors.v, of_k, keys, 1),
            tma_operand(load, tensors.k, of_k, (CTAS * ROWS, HALF), 1),
            cpasync.make_tiled_tma_atom(load, numbers, slots, (1, c.row_stats * HALF)),
        )
        stores = tuple(tma_operand(store, x, of_k, keys, 1) for x in (tensors.dk, tensors.dv))
        sizes, tiles = sizes_of(c, tensors, args)
        pairs = cute.ceil_div(sizes.num_n_blocks, CTAS)
        self.kernel(loads, stores, tensors.dq_sums, args, sizes, tiles).launch(
            grid=(pairs * CTAS * sizes.heads_kv * sizes.batch, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple[cpasync.TmaInfo, ...],
        stores: tuple[cpasync.TmaInfo, ...],
        dq_sums: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        tiles: RowTiles,
    ) -> None:
        c = self.config
        index, _, _ = cute.arch.block_idx()
        tile = tile_of(c, index, args, sizes)
        if tile.has_keys(c):
            warp, smem = cute.arch.warp_idx(), SmemAllocator()
            shared, tmem = self.pair_shared(smem, loads, args, sizes, tiles, tile)
            add, compute, other = c.registers
            if warp >= self.mma_warp:
                cute.arch.setmaxregister_decrease(other)
                if warp == self.mma_warp:
                    if is_leader():
                        PairMma(shared, PairProducts.of(shared)).run()
                elif warp == self.load_warp:
                    sides = "qqqqkkk"
                    of = (self.rows(x, side) for x, side in zip(loads[:-1], sides, strict=True))
                    PairLoad(shared, PairLoads._make((*of, loads[-1]))).run()
                elif warp == self.exchange_warp:
                    Exchange(shared).run()
            elif warp < self.add_warps.end:
                cute.arch.setmaxregister_increase(add)
                PairAdd(shared, dq_sums).run()
            else:
                cute.arch.setmaxregister_increase(compute)
                group = (warp - self.compute_warps.first) // 4
                PairCompute(shared, group, *stores).run()
            fence_before_sync()
            sync_cluster()
            if warp == self.mma_warp:
                fence_after_sync()
                tmem.free(shared.tmem)

    @cute.jit
    def pair_shared(
        self,
        smem: SmemAllocator,
        loads: tuple[cpasync.TmaInfo, ...],
        args: KernelArgs,
        sizes: Sizes,
        tiles: RowTiles,
        tile: Tile,
    ) -> tuple[PairShared, Tmem]:
        """Allocate smem and tensor memory, and publish the barriers."""
        c = self.config
        dtype = loads[0].atom.value_type
        sQ, sdO, sQt, sdOt, sK, sV, sKt = (
            allocate_slots(smem, dtype, x.smem_layout) for x in loads[:-1]
        )
        sdS = allocate_slots(smem, dtype, contiguous_rows_layout(dtype, HALF, 3 * ROWS, 1))
        stats, sRows, sMinus = self.row_slots(smem, dtype)
        barriers = PairBarriers.of(smem, c)
        tmem = Tmem.allocate(smem, columns=TMEM_COLUMNS, pair=True)
        if cute.arch.warp_idx() == self.mma_warp:
            tmem.acquire()
        publish_barriers(barriers.all, cluster=True, with_data=True)
        info = BlockInfo(c.tile_m, CTAS * ROWS, args.band(c.causal))
        return PairShared(
            c, sK, sV, sQ, sdO, sdS, None, stats, sRows, sMinus, barriers, tmem.pointer(), info,
            args, tiles, tile, 0, sizes.heads_per_kv, 0, 0, sQt, sdOt, sKt,
            cute.arch.block_idx_in_cluster(),
        ), tmem  # fmt: skip


class Backward(single.Backward):
    """The three launches, of which the main one is by pairs of CTAs."""

    name = "sm100_attention_backward_pairs"
    main = PairMain

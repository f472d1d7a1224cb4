"""The FlashAttention backward on Blackwell, in three launches: preprocess, main and convert.

shared.py   barriers, the state that the roles of main share, and the role that loads
mma.py      starts the five products
compute.py  S^T to P^T, dP^T to dS^T, by all other warps, and stores dK and dV
queries.py  adds dQ to fp32 sums in global memory, by four warps; converts them
rows.py     preprocess and convert, as far as they are the same on every arch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout, slots_layout
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.rows import Rows, tma_operand
from cutex.device.attention.softmax import LOG2_E
from cutex.device.pipeline import Barrier, Warps, publish_barriers
from cutex.kernels.attention.backward import rows
from cutex.kernels.attention.backward.signature import (
    KernelArgs,
    RowTiles,
    Tensors,
)
from cutex.kernels.attention.backward.sm100.compute import Compute, Store
from cutex.kernels.attention.backward.sm100.config import FOLDED, ROWS, TERMS, Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.mma import Mma
from cutex.kernels.attention.backward.sm100.queries import Add, Convert
from cutex.kernels.attention.backward.sm100.shared import Barriers, Load, Shared, run_each
from cutex.kernels.attention.backward.tiles import (
    Sizes,
    Walk,
    sizes_of,
    tile_of,
    tile_order,
)
from cutex.schedulers.clc import ClcDispatch

LARGEST = 2.0**127  # P of a row with this LSE is 0; the largest power of two of bf16


class Preprocess(rows.Preprocess):
    """Preprocess, of which LSE and delta of a row are one more step of K of the products S and dP.

        [Q, lse_0, lse_1, lse_2, delta_0, delta_1, delta_2] of a row, 16 bits each

    where lse_0 + lse_1 + lse_2 = LSE / scale and delta_0 + ... = delta, to 24 bits. Keys have -1 in
    the first three places for S, in the last three for dP, so that tensor cores subtract both, and
    nobody reads them.
    """

    config: Sm100BackwardConfig

    @cute.jit
    def keep(
        self, stats: cute.Tensor, place: Int32, lse: Float32, delta: Float32, args: KernelArgs
    ) -> None:
        if cutlass.const_expr(not self.config.folded):
            stats[place] = lse
            stats[self.config.tile_m + place] = delta
        else:
            terms = cute.make_rmem_tensor(cute.make_layout(FOLDED), BFloat16)
            terms.fill(0.0)
            for first, x in ((0, lse / (args.scale * LOG2_E)), (TERMS, delta)):
                rest = cutlass.min(cutlass.max(x, Float32(-LARGEST)), Float32(LARGEST))
                rest = rest if x == x else x  # NaN stays
                for i in cutlass.range_constexpr(TERMS):
                    terms[first + i] = rest.to(BFloat16)
                    rest -= terms[first + i].to(Float32)
            words = cute.recast_tensor(terms, Float32)  # (FOLDED / 2)
            of_row = cute.make_layout(FOLDED // 2)
            folded = cute.logical_divide(stats, of_row)  # (FOLDED / 2, bM)
            cute.autovec_copy(words, folded[None, place])


class Operands(NamedTuple):
    """The TMA operands: those loaded, and dK and dV, which are stored."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    do: cpasync.TmaInfo
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo


class Main:
    """The kernel that does the work, its memory and registers; its barriers are in shared.py. A CTA
    owns 128 keys, whose dK and dV stay in tensor memory.

    smem     bytes                               hd 64    hd 128   192/128  hd 256
    sK, sV   128 * (D + DV) * 2                  32768    65536    81920    131072
    sQ       tile_m * q_width * 2 * q_slots      32768    65536    49152    49152
    sdO      tile_m * DV * 2 * do_stages         32768    32768    32768    32768
    sdS      tile_m * 128 * 2                    32768    32768    16384    16384
    sRows    tile_m * 32 * num_stages            8192     8192     4096     -
    sMinus   128 * 32 * 2                        8192     8192     8192     -
    barriers less than 1024

    Not folded, LSE and delta take tile_m * 8 * num_stages instead of the last two; sdQ, where dQ is
    added from smem, tile_m * 128 * dq_slots.

    tmem     columns                             hd 64    hd 128   192/128  hd 256
    S, P     tile_m, P in the first half of      0        0        0        0
             each warpgroup's share
    dP, dS   tile_m, likewise                    128      128      64       64
    dV       DV / splits                         256      256      128      128
    dK       D / splits                          320      384      256      256
    dQ       dq_width, over dP if none are left, 384      128      448, 64  384
             or in turn where it is in parts
    end                                          448      512      512      512

    registers        threads   of each
    ADD              128       152
    COMPUTE          256       136
    MMA, LOAD        128       88
    """

    def __init__(self, config: Sm100BackwardConfig) -> None:
        self.config = config

    @property
    def add_warps(self) -> Warps:
        return Warps(first=0, count=4)

    @property
    def compute_warps(self) -> Warps:
        return Warps(first=self.add_warps.end, count=4 * self.config.groups)

    @property
    def mma_warp(self) -> int:
        return self.compute_warps.end

    @property
    def load_warp(self) -> int:
        """The load warp; it, the MMA warp and two idle warps make up a warpgroup."""
        return self.mma_warp + 1

    @property
    def schedule_warp(self) -> int:
        """The warp that asks for tiles, if CTAs are persistent."""
        return self.load_warp + 1

    @property
    def store_warp(self) -> int:
        """The warp that stores dK and dV, if CTAs are persistent."""
        return self.schedule_warp + 1

    def rows(self, info: Any, side: str) -> Rows:
        """The rows of Q and dO (side "q") or of K and V ("k"), as TMA sees them."""
        c = self.config
        return Rows(info, 1, c.ragged_q if side == "q" else c.ragged_k)

    @cute.jit
    def launch(self, tensors: Tensors, args: KernelArgs, stream) -> None:
        c = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        of_q, of_k = self.rows(None, "q"), self.rows(None, "k")
        operands = Operands(
            tma_operand(load, tensors.q, of_q, (c.tile_m, c.q_width), c.q_slots),
            tma_operand(load, tensors.k, of_k, (ROWS, c.head_dim), 1),
            tma_operand(load, tensors.v, of_k, (ROWS, c.head_dim_v), 1),
            tma_operand(load, tensors.do, of_q, (c.tile_m, c.head_dim_v), c.do_stages),
            tma_operand(store, tensors.dk, of_k, (ROWS, c.dk_width), 1),
            tma_operand(store, tensors.dv, of_k, (ROWS, c.dv_width), 1),
        )
        sizes, tiles = sizes_of(c, tensors, args)
        self.kernel(operands, tensors.stats, tensors.dq_sums, args, sizes, tiles).launch(
            grid=(sizes.num_n_blocks * sizes.heads_kv * sizes.batch * c.splits, 1, 1),
            block=(c.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        stats: cute.Tensor,
        dq_sums: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        tiles: RowTiles,
    ) -> None:
        if cutlass.const_expr(self.config.persistent):
            self.several_tiles(operands, stats, dq_sums, args, sizes, tiles)
        else:
            self.one_tile(operands, stats, dq_sums, args, sizes, tiles)

    @cute.jit
    def one_tile(self, operands, stats, dq_sums, args: KernelArgs, sizes, tiles) -> None:
        """Take the tile of keys of this CTA's number."""
        c = self.config
        index, _, _ = cute.arch.block_idx()
        tile = tile_of(c, index // c.splits, args, sizes)
        if tile.n_block * ROWS < tile.seq_k.length:
            warp, smem = cute.arch.warp_idx(), SmemAllocator()
            shared, tmem = self.shared(smem, operands, args, sizes, tiles, tile)
            self.roles(warp, shared, operands, stats, dq_sums, lambda role: role.run())
            self.free(warp, shared, tmem)

    @cute.jit
    def several_tiles(self, operands, stats, dq_sums, args: KernelArgs, sizes, tiles) -> None:
        """Take one tile of keys after the other, as launch control hands them out."""
        c, warp, smem = self.config, cute.arch.warp_idx(), SmemAllocator()
        dispatch = ClcDispatch.allocate(smem, tile_order(c, sizes), self.store_warp + 1, ctas=1)
        more = dispatch.barriers
        shared, tmem = self.shared(smem, operands, args, sizes, tiles, None, more)
        walk = Walk(c, dispatch, args, sizes)
        self.roles(warp, shared, operands, stats, dq_sums, lambda role: run_each(role, walk))
        if warp == self.schedule_warp:
            dispatch.schedule()
        self.free(warp, shared, tmem)

    @cute.jit
    def roles(
        self,
        warp: Int32,
        shared: Shared,
        operands: Operands,
        stats: cute.Tensor,
        dq_sums: cute.Tensor,
        run: cutlass.Constexpr[Callable[[Any], None]],
    ) -> None:
        """Have each warp `run` its role."""
        add, compute, other = self.config.registers
        if warp >= self.mma_warp:
            cute.arch.setmaxregister_decrease(other)
            if warp == self.mma_warp:
                run(Mma.of(shared))
            elif warp == self.load_warp:
                q, k, v, do = (
                    self.rows(x, side)
                    for x, side in zip(operands[:4], ("q", "k", "k", "q"), strict=True)
                )
                run(Load(shared, q, k, v, do, stats))
            elif cutlass.const_expr(self.config.persistent):  # noqa: SIM102 - known when tracing
                if warp == self.store_warp:
                    run(Store(shared, operands.dk, operands.dv))
        elif warp < self.add_warps.end:
            cute.arch.setmaxregister_increase(add)
            run(Add(shared, dq_sums))
        else:
            cute.arch.setmaxregister_increase(compute)
            group = (warp - self.compute_warps.first) // 4
            run(Compute(shared, group, operands.dk, operands.dv))

    @cute.jit
    def free(self, warp: Int32, shared: Shared, tmem: Tmem) -> None:
        """Give tensor memory back when all roles are done."""
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == self.mma_warp:
            fence_after_sync()
            tmem.free(shared.tmem)

    @cute.jit
    def shared(
        self,
        smem: SmemAllocator,
        operands: Operands,
        args: KernelArgs,
        sizes: Sizes,
        tiles: RowTiles,
        tile: Any,  # Tile; None of a persistent CTA, whose roles have one each
        more: cutlass.Constexpr[tuple[Barrier, ...]] = (),
    ) -> tuple[Shared, Tmem]:
        """Allocate smem and tensor memory, and publish the barriers and `more`."""
        c = self.config
        dtype = operands.q.atom.value_type
        sK, sV, sQ, sdO = (
            allocate_slots(smem, dtype, x.smem_layout)
            for x in (operands.k, operands.v, operands.q, operands.do)
        )
        ds = contiguous_rows_layout(dtype, c.tile_m, ROWS, 1)
        sdS = allocate_slots(smem, dtype, ds)
        sdQ = None
        if cutlass.const_expr(c.dq_slots > 0):
            of_dq = cute.make_layout((c.dq_bytes // 16, 4, c.dq_slots))
            sdQ = smem.allocate_tensor(Float32, of_dq, byte_alignment=128)
        stats, sRows, sMinus = self.row_slots(smem, dtype)
        barriers = Barriers.allocate(smem, c)
        tmem = Tmem.allocate(smem, columns=c.columns)
        if cute.arch.warp_idx() == self.mma_warp:
            tmem.acquire()
        publish_barriers((*barriers.all, *more))
        info = BlockInfo(c.tile_m, ROWS, args.band(c.causal))
        split = 0
        if cutlass.const_expr(c.splits > 1):
            split = cute.arch.block_idx()[0] % c.splits
        return Shared(
            c, sK, sV, sQ, sdO, sdS, sdQ, stats, sRows, sMinus, barriers, tmem.pointer(), info,
            args, tiles, tile, split, sizes.heads_per_kv,
        ), tmem  # fmt: skip

    @cute.jit
    def row_slots(self, smem: SmemAllocator, dtype: cutlass.Constexpr) -> tuple[Any, Any, Any]:
        """The slots of LSE and delta, also as a step of K, and what keys have there, written."""
        c = self.config
        rows = c.tile_m // c.key_ctas
        count = c.row_stats * rows
        if cutlass.const_expr(not c.folded):
            layout = cute.make_layout((count, c.num_stages))
            return smem.allocate_tensor(Float32, layout, byte_alignment=128), None, None
        assert dtype is BFloat16, "folded=True needs bf16's range, for LSE and delta"
        # NOTE: without a swizzle a step of K is two columns of 8 elements, the second of zeros
        of_rows = slots_layout(dtype, rows, 2 * FOLDED, c.num_stages, 16)
        sRows = allocate_slots(smem, dtype, of_rows)
        sMinus = allocate_slots(smem, dtype, slots_layout(dtype, ROWS, 2 * FOLDED, 2, 16))
        numbers = cute.recast_ptr(sRows.iterator, dtype=Float32)
        layout = cute.make_layout((count, c.num_stages), stride=(1, 2 * count))
        row, _, _ = cute.arch.thread_idx()
        eight = cute.make_rmem_tensor(cute.make_layout(FOLDED), dtype)
        if row < ROWS:
            for which in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(2):
                    eight.fill(0.0)
                    if cutlass.const_expr(column == 0):
                        for i in cutlass.range_constexpr(TERMS):
                            eight[which * TERMS + i] = dtype(-1.0)
                    mine = sMinus[row, None, which]
                    cute.autovec_copy(eight, cute.local_tile(mine, (FOLDED,), (column,)))
        eight.fill(0.0)
        if row < rows:
            for slot in cutlass.range_constexpr(c.num_stages):
                mine = sRows[row, None, slot]
                cute.autovec_copy(eight, cute.local_tile(mine, (FOLDED,), (1,)))
        cute.arch.fence_view_async_shared()
        return cute.make_tensor(numbers, layout), sRows, sMinus


class Backward(rows.BackwardKernel[Sm100BackwardConfig]):
    """The backward on Blackwell."""

    arch = "sm_100a"
    name = "sm100_attention_backward"
    preprocess, main, convert = Preprocess, Main, Convert

    def workspace(self, tensors: Tensors) -> Tensors:
        # NOTE: rows are padded to 128 in either case, and where a caller counts tiles of 64
        # queries, the two of a block follow each other
        c = self.config
        stats = rows.by_tiles(tensors.stats, c.row_stats * c.tile_m)
        return tensors._replace(
            stats=stats, dq_sums=rows.by_tiles(tensors.dq_sums, c.tile_m * c.head_dim)
        )

"""The roles of Blackwell's kernel of 4-bit weights: load, widen, MMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.tma import tile_loads
from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import UmmaProduct
from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.pipeline import AccRing, Ring
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.w4.fragments import WORDS, Fragments, WeightLoads, warpgroup_mma
from cutex.problem.w4.layout import HALF_K, HALVES


@dataclass(frozen=True)
class Rings:
    """The ring of packed blocks, and that of A and B, whose A the widening warps write."""

    weights: Ring
    ab: Ring


@dataclass(frozen=True)
class Load:
    """The load role: one warp fills the ring of packed blocks, and B of the other ring."""

    mW: cute.Tensor  # (STRIP, RestK, WORDS)
    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    x: cpasync.TmaInfo
    sX: cute.Tensor  # (bN, bK, SLOT)

    @cute.jit
    def run(self, rings: cutlass.Constexpr[Rings], tile: WorkTile) -> None:
        cpasync.prefetch_descriptor(self.x.atom)
        blocks = WeightLoads(self.mW, self.sW, tile.m * cute.size(self.sW, mode=[1]))
        x = tile_loads(self.x, self.sX, tile.n)
        cute.arch.griddepcontrol_wait()
        fill_w, fill = rings.weights.producer(), rings.ab.producer()
        for k_tile in cutlass.range(blocks.num_k_tiles, unroll=1):
            blocks.load(k_tile, fill_w.slot, rings.weights.acquire(fill_w))
            x.load(k_tile, fill.slot, rings.ab.acquire(fill))
            fill_w.advance()
            fill.advance()
        cute.arch.griddepcontrol_launch_dependents()


@dataclass(frozen=True)
class Widen:
    """The widening role: four warps make A of packed blocks, in smem."""

    weights: Fragments
    sA: cute.Tensor  # (bM, bK, SLOT)

    @cute.jit
    def run(self, rings: cutlass.Constexpr[Rings], num_k_tiles: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        tiled_mma = warpgroup_mma(self.weights.kind)
        store = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.weights.kind)
        r2s = cute.make_tiled_copy_A(store, tiled_mma).get_slice(thread % WARPGROUP)
        tAsA = r2s.partition_D(self.sA)  # (R2S, R2S_M, R2S_K, SLOT)
        layout = cute.make_layout(((2, 2, 2), 1, HALF_K // 16))
        tCrA = cute.make_rmem_tensor(layout, self.weights.kind)  # (MMA, 1, MMA_K)
        tArA = r2s.retile(tCrA)  # (R2S, 1, R2S_K)
        take, fill = rings.weights.consumer(), rings.ab.producer()
        for _ in cutlass.range(num_k_tiles, unroll=1):
            rings.weights.wait_full(take)
            rings.ab.empty.wait(fill.phase, fill.slot)
            for strip in cutlass.range_constexpr(cute.size(self.sA, mode=[0]) // 64):
                factors = self.weights.factors(strip, take.slot)
                for half in cutlass.range_constexpr(HALVES):
                    codes = self.weights.codes(strip, half, take.slot)
                    self.weights.widen(codes, factors, half, tCrA)
                    for i in cutlass.range_constexpr(WORDS):
                        to = tAsA[None, strip, half * WORDS + i, fill.slot]
                        cute.copy(r2s, tArA[None, 0, i], to)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                rings.ab.full.arrive(fill.slot)
            rings.weights.release(take)
            take.advance()
            fill.advance()


@dataclass(frozen=True)
class Mma:
    """The MMA role: one warp starts the MMAs of a tile."""

    @cute.jit
    def run(self, mma: UmmaProduct, ab: Ring, acc: AccRing, num_k_tiles: Int32) -> None:
        take = ab.consumer()
        into: Any = mma.into(Int32(0))
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            ab.wait_full(take)
            fence_after_sync()
            into.issue(take.slot, accumulate=k_tile > 0)
            into.commit(ab.empty[take.slot])
            take.advance()
        into.commit(acc.full[0])

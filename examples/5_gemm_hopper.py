"""C = A B^T on Hopper's tensor cores: wgmma reads shared memory and adds up in registers."""

import cutlass
import torch
from cutlass import BFloat16, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import AbLoads, load_operand, tile_loads
from cutex.device.atoms.wgmma import Wgmma
from cutex.device.pipeline import Barrier, publish_barriers

BM, BN, BK = 128, 64, 64  # two warpgroups of 64 rows; one wgmma takes 16 of K


@cute.kernel
def gemm_kernel(tiled_mma: cute.TiledMma, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor):
    smem = SmemAllocator()
    sA = allocate_slots(smem, BFloat16, a.smem_layout)  # (bM, bK, SLOT)
    sB = allocate_slots(smem, BFloat16, b.smem_layout)  # (bN, bK, SLOT)
    loaded = Barrier.allocate(smem, "loaded", arrivals=1)
    publish_barriers([loaded])
    m, n, _ = cute.arch.block_idx()
    loads = AbLoads(tile_loads(a, sA, m), tile_loads(b, sB, n))
    thr_mma = tiled_mma.get_slice(cute.arch.thread_idx()[0])
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, SLOT)
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, SLOT)
    tCgC = thr_mma.partition_C(cute.local_tile(mC, (BM, BN), (m, n)))  # (MMA, MMA_M, MMA_N)
    tCrC = tiled_mma.make_fragment_C(tCgC.shape)  # (MMA, MMA_M, MMA_N)
    for k_tile in cutlass.range(loads.num_k_tiles, unroll=1):
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                loaded.arrive_expecting((BM + BN) * BK * 2)
            loads.load(k_tile, 0, loaded[0])
        loaded.wait(k_tile % 2)
        warpgroup.fence()
        for k in cutlass.range_constexpr(BK // 16):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, k_tile + k > 0)
            cute.gemm(tiled_mma, tCrC, tCrA[None, None, k, 0], tCrB[None, None, k, 0], tCrC)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()
    tCgC.store(tCrC.load())


@cute.jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    a, b = (load_operand(m, slots_layout(BFloat16, n, BK, 1, 128)) for m, n in ((mA, BM), (mB, BN)))
    mma, grid = Wgmma(BN, BFloat16, warpgroups=2).tiled(), cute.ceil_div(mC.shape, (BM, BN))
    gemm_kernel(mma, a, b, mC).launch(grid=[*grid, 1], block=[mma.size, 1, 1])


if __name__ == "__main__":
    a, b = (torch.randint(-3, 4, (256, 192), device="cuda").bfloat16() for _ in "ab")
    c = torch.zeros(256, 256, device="cuda")
    gemm(*(from_dlpack(x, assumed_align=16) for x in (a, b, c)))
    assert torch.equal(c, a.float() @ b.float().T)
    print(f"{c.numel()} products are right")

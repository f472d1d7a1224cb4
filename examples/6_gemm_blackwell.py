"""C = A B^T on Blackwell's tensor cores: one thread starts the MMA, which adds in tensor memory."""

import torch
from cutlass import BFloat16, Float32, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import AbLoads, load_operand, tile_loads
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync, make_load
from cutex.device.atoms.umma import Umma, umma
from cutex.device.pipeline import Barrier, publish_barriers

BM, BN, K = 128, 64, 192  # all of K is in shared memory at once


@cute.kernel
def gemm_kernel(a, b, mC: cute.Tensor):
    smem, warp, (m, n, _) = SmemAllocator(), cute.arch.warp_idx(), cute.arch.block_idx()
    sA, sB = (allocate_slots(smem, BFloat16, x.smem_layout) for x in (a, b))  # (bM | bN, bK, SLOT)
    loaded, done = (Barrier.allocate(smem, name, arrivals=1) for name in ("loaded", "MMA done"))
    tmem = Tmem.allocate(smem, columns=BN)
    if warp == 0:
        tmem.acquire()
    publish_barriers([loaded, done])
    mma = umma(Umma(BM, BN, BFloat16), sA, sB, tmem.pointer())
    if warp == 0:
        with cute.arch.elect_one():
            loaded.arrive_expecting((BM + BN) * K * 2)
        AbLoads(tile_loads(a, sA, m), tile_loads(b, sB, n)).load(0, 0, loaded[0])
        loaded.wait(0)
        mma.issue(0, accumulate=False)
        mma.commit(done[0])
    done.wait(0)
    fence_after_sync()
    tAcc = mma.acc[(None, None), 0, 0]  # (bM, bN) in tensor memory
    load = make_load(tAcc).get_slice(cute.arch.thread_idx()[0])
    tTR_gC = load.partition_D(cute.local_tile(mC, (BM, BN), (m, n)))  # (T2R, T2R_M, T2R_N)
    tTR_rC = cute.make_rmem_tensor(tTR_gC.shape, Float32)
    cute.copy(load, load.partition_S(tAcc), tTR_rC)
    cute.arch.fence_view_async_tmem_load()
    tTR_gC.store(tTR_rC.load())
    fence_before_sync()
    cute.arch.sync_threads()
    if warp == 0:
        tmem.free(tmem.pointer())


@cute.jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    a, b = (load_operand(m, slots_layout(BFloat16, n, K, 1, 128)) for m, n in ((mA, BM), (mB, BN)))
    gemm_kernel(a, b, mC).launch(grid=[*cute.ceil_div(mC.shape, (BM, BN)), 1], block=[128, 1, 1])


if __name__ == "__main__":
    a, b = (torch.randint(-3, 4, (256, K), device="cuda").bfloat16() for _ in "ab")
    c = torch.zeros(256, 256, device="cuda")
    gemm(*(from_dlpack(x, assumed_align=16) for x in (a, b, c)))
    assert torch.equal(c, a.float() @ b.float().T)
    print(f"{c.numel()} products are right")

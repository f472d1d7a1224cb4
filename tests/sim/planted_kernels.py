"""Five small correct kernels, in which test_planted.py plants faults, a line at a time."""

from __future__ import annotations

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, tcgen05, warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import load_operand, tile_loads
from cutex.device.atoms.tmem import make_load
from cutex.device.atoms.umma import Umma, umma
from cutex.device.atoms.wgmma import Wgmma

TILE = (32, 64)  # rows, columns
TILE_BYTES = 32 * 64 * 4


def partition(operand, sX, tile):
    gX = cute.local_tile(operand.tma_tensor, TILE, tile)
    flat = (cute.group_modes(t, 0, 2) for t in (sX, gX))
    return cpasync.tma_partition(operand.atom, 0, cute.make_layout(1), *flat)


@cute.kernel
def add_one_kernel(x: cpasync.TmaInfo, y: cpasync.TmaInfo):
    """Load a tile by TMA into shared memory, add one by 64 threads, and store it by TMA."""
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout(TILE, stride=(64, 1)), 128)
    loaded = smem.allocate_array(Int64, 1)
    thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)  # of a thread
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()  # of the barrier
    tile = cute.arch.block_idx()[:2]
    tXsX, tXgX = partition(x, sX, tile)
    tYsY, tYgY = partition(y, sX, tile)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, TILE_BYTES)
        cute.copy(x.atom, tXgX, tXsX, tma_bar_ptr=loaded)
    cute.arch.mbarrier_wait(loaded, 0)
    for row in cutlass.range(TILE[0], unroll=1):
        sX[row, thread] = sX[row, thread] + 1
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()  # of the sums
    if warp == 0:
        cute.copy(y.atom, tYsY, tYgY)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def add_one(mX: cute.Tensor, mY: cute.Tensor):
    layout = cute.make_layout(TILE, stride=(64, 1))
    x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, TILE)
    y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mY, layout, TILE)
    add_one_kernel(x, y).launch(grid=[1, 2, 1], block=[64, 1, 1])


SLOTS, ADDERS = 2, 2  # warps that add
PART = 32 * ADDERS


@cute.kernel
def sums_kernel(x: cpasync.TmaInfo, mSum: cute.Tensor):
    """Sum rows: a warp loads parts of a row into a ring of two slots, two warps add."""
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout((1, PART, SLOTS)), 128)
    full = smem.allocate_array(Int64, SLOTS)
    empty = smem.allocate_array(Int64, SLOTS)
    partial = smem.allocate_tensor(Float32, cute.make_layout(ADDERS))
    thread, warp, row = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.block_idx()[0]
    if thread < SLOTS:
        cute.arch.mbarrier_init(full + thread, 1)
        cute.arch.mbarrier_init(empty + thread, PART)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    gX = cute.local_tile(x.tma_tensor, (1, PART), (row, None))
    flat = (cute.group_modes(t, 0, 2) for t in (sX, gX))
    tXsX, tXgX = cpasync.tma_partition(x.atom, 0, cute.make_layout(1), *flat)
    total = Float32(0)
    for part in cutlass.range(cute.size(gX, mode=[2]), unroll=1):
        slot, phase = part % SLOTS, part // SLOTS % 2
        if warp == ADDERS:
            cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, PART * 4)
            cute.copy(x.atom, tXgX[None, part], tXsX[None, slot], tma_bar_ptr=full + slot)
        else:
            cute.arch.mbarrier_wait(full + slot, phase)
            total += sX[0, thread, slot]
            cute.arch.mbarrier_arrive(empty + slot)
    total = cute.arch.warp_reduction_sum(total)
    if warp < ADDERS:
        partial[warp] = total
        cute.arch.barrier(barrier_id=1, number_of_threads=PART)
        if thread == 0:
            cute.arch.atomic_add(mSum.iterator, partial[0] + partial[1])


@cute.jit
def sums(mX: cute.Tensor, mSum: cute.Tensor):
    load, slot = cpasync.CopyBulkTensorTileG2SOp(), cute.make_layout((1, PART))
    x = cpasync.make_tiled_tma_atom(load, mX, slot, (1, PART))
    sums_kernel(x, mSum).launch(grid=[2, 1, 1], block=[PART + 32, 1, 1])


@cute.kernel
def exchange_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """Two CTAs of a cluster, with 168 registers a thread, each store the smem of the other."""
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout(64))
    thread, cta = cute.arch.thread_idx()[0] % 64, cute.arch.block_idx()[0]
    cute.arch.setmaxregister_increase(168)
    sX[thread] = mX[cta * 64 + thread]
    cute.arch.cluster_arrive()  # both have stored
    cute.arch.cluster_wait()
    peer = cute.arch.map_dsmem_ptr(sX.iterator, cta ^ 1)
    theirs = cute.make_tensor(peer + thread, cute.make_layout(1))
    mine = cute.make_rmem_tensor(1, Float32)
    load = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=32)
    cute.copy(load, theirs, mine)
    mY[cta * 64 + thread] = mine[0]
    cute.arch.cluster_arrive()  # no thread leaves before
    cute.arch.cluster_wait()


@cute.jit
def exchange(mX: cute.Tensor, mY: cute.Tensor):
    exchange_kernel(mX, mY).launch(grid=[2, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1])


BM, BN, BK = 64, 32, 64


@cute.kernel
def hopper_kernel(
    tiled_mma: cute.TiledMma, a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor
):
    """C = A B^T by wgmma, one buffer."""
    smem = SmemAllocator()
    sA = allocate_slots(smem, BFloat16, a.smem_layout)  # by wgmma
    sB = allocate_slots(smem, BFloat16, b.smem_layout)
    loaded = smem.allocate_array(Int64, 1)
    thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    load_a, load_b = tile_loads(a, sA, 0), tile_loads(b, sB, 0)
    thr_mma = tiled_mma.get_slice(thread)
    tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
    tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
    tCgC = thr_mma.partition_C(cute.local_tile(mC, (BM, BN), (0, 0)))
    tCrC = tiled_mma.make_fragment_C(tCgC.shape)
    for k_tile in cutlass.range(cute.size(load_a.gmem, mode=[1]), unroll=1):
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, (BM + BN) * BK * 2)
            cute.copy(a.atom, load_a.gmem[None, k_tile], load_a.smem[None, 0], tma_bar_ptr=loaded)
            cute.copy(b.atom, load_b.gmem[None, k_tile], load_b.smem[None, 0], tma_bar_ptr=loaded)
        cute.arch.mbarrier_wait(loaded, k_tile % 2)
        warpgroup.fence()
        for k in cutlass.range_constexpr(BK // 16):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, k_tile + k > 0)
            cute.gemm(tiled_mma, tCrC, tCrA[None, None, k, 0], tCrB[None, None, k, 0], tCrC)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # of the buffer
    tCgC.store(tCrC.load())


@cute.jit
def hopper(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    a = load_operand(mA, slots_layout(BFloat16, BM, BK, 1, 128))
    b = load_operand(mB, slots_layout(BFloat16, BN, BK, 1, 128))
    hopper_kernel(Wgmma(BN, BFloat16).tiled(), a, b, mC).launch(grid=[1, 1, 1], block=[128, 1, 1])


@cute.kernel
def blackwell_kernel(a: cpasync.TmaInfo, b: cpasync.TmaInfo, mC: cute.Tensor):
    """C = A B^T by tcgen05.mma, one buffer, the accumulator in tensor memory."""
    smem = SmemAllocator()
    sA = allocate_slots(smem, BFloat16, a.smem_layout)
    sB = allocate_slots(smem, BFloat16, b.smem_layout)
    loaded = smem.allocate_array(Int64, 1)
    done = smem.allocate_array(Int64, 1)
    address = smem.allocate_array(Int32, 1)
    thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
    if warp == 0:
        cute.arch.alloc_tmem(32, address)
        cute.arch.relinquish_tmem_alloc_permit()
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    acc = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    load_a, load_b = tile_loads(a, sA, 0), tile_loads(b, sB, 0)
    mma = umma(Umma(128, 32, BFloat16), sA, sB, acc)
    if warp == 0:
        for k_tile in cutlass.range(cute.size(load_a.gmem, mode=[1]), unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, (128 + 32) * BK * 2)
            load_a.load(k_tile, 0, loaded)
            load_b.load(k_tile, 0, loaded)
            cute.arch.mbarrier_wait(loaded, k_tile % 2)
            mma.issue(0, accumulate=k_tile > 0)
            with cute.arch.elect_one():
                tcgen05.commit(done)
            cute.arch.mbarrier_wait(done, k_tile % 2)
    cute.arch.sync_threads()  # of the accumulator
    load = make_load(mma.acc[(None, None), 0, 0])
    thr_load = load.get_slice(thread)
    tTR_tAcc = thr_load.partition_S(mma.acc[(None, None), 0, 0])
    tTR_gC = thr_load.partition_D(mC)
    tTR_rAcc = cute.make_rmem_tensor(tTR_gC.shape, Float32)
    cute.copy(load, tTR_tAcc, tTR_rAcc)
    cute.arch.fence_view_async_tmem_load()
    tTR_gC.store(tTR_rAcc.load())
    cute.arch.sync_threads()  # of the loads
    if warp == 0:
        cute.arch.dealloc_tmem(acc, 32)


@cute.jit
def blackwell(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    a = load_operand(mA, slots_layout(BFloat16, 128, BK, 1, 128))
    b = load_operand(mB, slots_layout(BFloat16, 32, BK, 1, 128))
    blackwell_kernel(a, b, mC).launch(grid=[1, 1, 1], block=[128, 1, 1])


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()


def operands(kernel: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arguments of a kernel, its result last, and the expected result."""
    if kernel == "add_one":
        x = integers(32, 128)
        return [x, torch.zeros_like(x)], x + 1
    if kernel == "sums":
        x = integers(2, 6 * PART)
        return [x, torch.zeros(1)], x.sum()[None]
    if kernel == "exchange":
        x = integers(128)
        return [x, torch.zeros(128)], x.view(2, 64).flip(0).reshape(-1)
    m, n = (64, 32) if kernel == "hopper" else (128, 32)
    a, b = integers(m, 3 * BK), integers(n, 3 * BK)
    return [a.bfloat16(), b.bfloat16(), torch.zeros(m, n)], a @ b.T

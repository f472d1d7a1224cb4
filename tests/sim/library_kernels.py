"""Four correct kernels by the DSL's own building blocks (tiled copies, pipelines, schedulers), in
which test_library.py plants faults, a part of a line at a time.
"""

from __future__ import annotations

import cutlass
import torch
from cutlass import Float16, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp
from cutlass.memory import SmemAllocator

BM, BN, BK, STAGES = 64, 64, 32, 3


@cute.kernel
def product_kernel(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mC: cute.Tensor,
    layout: cute.ComposedLayout,
    load: cute.TiledCopy,
    mma: cute.TiledMma,
):
    """C = A B^T by mma.sync, from a ring of cp.async."""
    thread = cute.arch.thread_idx()[0]
    m, n, _ = cute.arch.block_idx()
    smem = SmemAllocator()
    tiles = ((mA, (BM, BK), m), (mB, (BN, BK), n))
    sA, sB = (smem.allocate_tensor(Float16, layout.outer, 128, swizzle=layout.inner) for _ in tiles)
    source, target = [], []
    for (tensor, shape, at), shared in zip(tiles, (sA, sB), strict=True):
        mine = load.get_slice(thread)
        source.append(mine.partition_S(cute.local_tile(tensor, shape, (at, None))))
        target.append(mine.partition_D(shared))
    rounds = cute.size(source[0], mode=[3])
    for k in cutlass.range_constexpr(STAGES - 1):
        for frm, to in zip(source, target, strict=True):
            cute.copy(load, frm[None, None, None, k], to[None, None, None, k])
        cute.arch.cp_async_commit_group()  # of a first slab
    part = mma.get_slice(thread)
    tCgC = part.partition_C(cute.local_tile(mC, (BM, BN), (m, n)))
    tCrC = mma.make_fragment_C(tCgC)
    tCrC.fill(0.0)
    tCrA = mma.make_fragment_A(part.partition_A(sA)[None, None, None, 0])
    tCrB = mma.make_fragment_B(part.partition_B(sB)[None, None, None, 0])
    matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), Float16)
    of_a, of_b = cute.make_tiled_copy_A(matrices, mma), cute.make_tiled_copy_B(matrices, mma)
    tSsA, tSsB = (c.get_slice(thread).partition_S(s) for c, s in ((of_a, sA), (of_b, sB)))
    tSrA, tSrB = (c.get_slice(thread).retile(r) for c, r in ((of_a, tCrA), (of_b, tCrB)))
    for k in cutlass.range(rounds, unroll=1):
        cute.arch.cp_async_wait_group(STAGES - 2)
        cute.arch.sync_threads()  # of a slab
        ahead = k + STAGES - 1
        if ahead < rounds:
            for frm, to in zip(source, target, strict=True):
                cute.copy(load, frm[None, None, None, ahead], to[None, None, None, ahead % STAGES])
        cute.arch.cp_async_commit_group()  # of the slab ahead
        for i in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            cute.copy(of_a, tSsA[None, None, i, k % STAGES], tSrA[None, None, i])
            cute.copy(of_b, tSsB[None, None, i, k % STAGES], tSrB[None, None, i])
            cute.gemm(mma, tCrC, tCrA[None, None, i], tCrB[None, None, i], tCrC)
    cute.copy(cute.make_copy_atom(CopyUniversalOp(), Float32), tCrC, tCgC)


@cute.jit
def product(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    swizzle = cute.make_swizzle(2, 4, 3)
    atom = cute.make_composed_layout(swizzle, 0, cute.make_layout((8, BK), stride=(BK, 1)))
    layout = cute.tile_to_shape(atom, (BM, BK, STAGES), (0, 1, 2))
    copy = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
    load = cute.make_tiled_copy_tv(
        cute.make_copy_atom(copy, Float16, num_bits_per_copy=128),
        cute.make_layout((32, 4), stride=(4, 1)),
        cute.make_layout((1, 8)),
    )
    op = warp.MmaF16BF16Op(Float16, Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(op, cute.make_layout((2, 2, 1)), permutation_mnk=(32, 32, 16))
    grid = [mC.shape[0] // BM, mC.shape[1] // BN, 1]
    product_kernel(mA, mB, mC, layout, load, mma).launch(grid=grid, block=[128, 1, 1])


ROWS, COLUMNS, ADDERS = 32, 64, 128


@cute.kernel
def doubled_kernel(x: cpasync.TmaInfo, y: cpasync.TmaInfo, tiles: Int32):
    """Persistent CTAs: a warp loads tiles into a pipeline, four double them and store by TMA."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    ctas, role = cute.arch.grid_dim()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = SmemAllocator()
    slots = cute.make_layout((ROWS, COLUMNS, 3), stride=(COLUMNS, 1, ROWS * COLUMNS))
    sX, sY = (smem.allocate_tensor(Float32, slots, 128) for _ in "xy")
    pipe = pipeline.PipelineTmaAsync.create(
        num_stages=3,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, ADDERS // 32),
        tx_count=ROWS * COLUMNS * 4,
        barrier_storage=smem.allocate_array(Int64, 6),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    parts = []
    for operand, shared in ((x, sX), (y, sY)):
        box = cute.local_tile(operand.tma_tensor, (ROWS, COLUMNS), (None, 0))
        flat = (cute.group_modes(t, 0, 2) for t in (shared, box))
        parts.append(cpasync.tma_partition(operand.atom, 0, cute.make_layout(1), *flat))
    (tXsX, tXgX), (tYsY, tYgY) = parts
    if role == ADDERS // 32:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 3)
        for tile in cutlass.range(cta, tiles, ctas, unroll=1):
            pipe.producer_acquire(state)
            barrier = pipe.producer_get_barrier(state)
            cute.copy(x.atom, tXgX[None, tile], tXsX[None, state.index], tma_bar_ptr=barrier)
            pipe.producer_commit(state)
            state.advance()
        pipe.producer_tail(state)
    else:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 3)
        for tile in cutlass.range(cta, tiles, ctas, unroll=1):
            pipe.consumer_wait(state)
            if role == 0:
                cute.arch.cp_async_bulk_wait_group(2, read=True)
            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)  # of room for the result
            for i in cutlass.range_constexpr(ROWS // 2):
                at = (2 * i + thread // COLUMNS, thread % COLUMNS, state.index)
                sY[at] = sX[at] * 2.0
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=ADDERS)  # of the result
            pipe.consumer_release(state)
            if role == 0:
                cute.copy(y.atom, tYsY[None, state.index], tYgY[None, tile])
                cute.arch.cp_async_bulk_commit_group()
            state.advance()
        if role == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # before the CTA ends


@cute.jit
def doubled(mX: cute.Tensor, mY: cute.Tensor):
    tile, layout = (ROWS, COLUMNS), cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, tile)
    y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mY, layout, tile)
    tiles = cute.ceil_div(mX.shape[0], ROWS)
    doubled_kernel(x, y, tiles).launch(grid=[2, 1, 1], block=[ADDERS + 32, 1, 1])


@cute.kernel
def scan_kernel(mX: cute.Tensor, mY: cute.Tensor, mFlag: cute.Tensor, mSum: cute.Tensor):
    """Running sums: each CTA waits for the sum of those before it."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(5))
    value = mX[cta * 128 + thread]
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, offset=1 << i, mask_and_clamp=0)
        value = value + other if thread % 32 >= (1 << i) else value
    if thread % 32 == 31:
        sums[thread // 32] = value
    cute.arch.sync_threads()  # of the warps' sums
    for i in cutlass.range_constexpr(3):
        value = value + sums[i] if thread // 32 > i else value
    if thread == 127:
        before = Int32(0)
        if cta > 0:
            flag = Int32(0)
            while flag == 0:
                flag = cute.arch.load(mFlag.iterator + (cta - 1), Int32, sem="acquire", scope="gpu")
            before = mSum[cta - 1]
        mSum[cta] = before + value
        cute.arch.store(mFlag.iterator + cta, Int32(1), sem="release", scope="gpu")
        sums[4] = before
    cute.arch.sync_threads()  # of the sum before
    mY[cta * 128 + thread] = value + sums[4]


@cute.jit
def scan(mX: cute.Tensor, mFlag: cute.Tensor, mSum: cute.Tensor, mY: cute.Tensor):
    ctas = cute.size(mX) // 128
    scan_kernel(mX, mY, mFlag, mSum).launch(grid=[ctas, 1, 1], block=[128, 1, 1])


@cute.kernel
def sent_kernel(atom: cute.CopyAtom, tensor: cute.Tensor, mY: cute.Tensor, layout: cute.Layout):
    """Each CTA of a pair loads a half of a tile for both, and stores it times its rank plus one."""
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    role = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, layout, 128)
    loaded = smem.allocate_array(Int64, 1)
    if role == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()  # both have a barrier
    cute.arch.cluster_wait()
    tile = cute.local_tile(tensor, (32, 32), (None, 0))
    flat = (cute.group_modes(t, 0, 2) for t in (sX, tile))
    tXsX, tXgX = cpasync.tma_partition(atom, rank, cute.make_layout(2), *flat)
    if role == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, 32 * 32 * 4)
        both = cutlass.Int16(3)
        cute.copy(atom, tXgX[None, cta // 2], tXsX, tma_bar_ptr=loaded, mcast_mask=both)
    cute.arch.mbarrier_wait(loaded, 0)
    for i in cutlass.range(32, unroll=1):
        if thread < 32:
            mY[cta * 32 + i, thread] = sX[i, thread] * Float32(rank + 1)


@cute.jit
def sent(mX: cute.Tensor, mY: cute.Tensor):
    layout = cute.make_layout((32, 32), stride=(32, 1))
    load = cpasync.CopyBulkTensorTileG2SMulticastOp()
    x = cpasync.make_tiled_tma_atom(load, mX, layout, (32, 32), num_multicast=2)
    kernel = sent_kernel(x.atom, x.tma_tensor, mY, layout)
    kernel.launch(grid=[mY.shape[0] // 32, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1])


KERNELS = ("product", "doubled", "scan", "sent")


def operands(kernel: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arguments of a kernel, its result last, and the expected result."""
    chance = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=chance).float()

    if kernel == "product":
        a, b = integers(64, 160).half(), integers(64, 160).half()
        return [a, b, torch.zeros(64, 64)], a.float() @ b.float().T
    if kernel == "doubled":
        x = integers(ROWS * 7 + 5, COLUMNS)
        return [x, torch.zeros_like(x)], 2 * x
    if kernel == "scan":
        x = integers(128 * 5).int()
        flags, sums = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        return [x, flags, sums, torch.zeros_like(x)], x.cumsum(0).int()
    x = integers(64, 32)
    both = [part * rank for part in x.split(32) for rank in (1, 2)]
    return [x, torch.zeros(128, 32)], torch.cat(both)

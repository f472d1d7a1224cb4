"""Ten small correct kernels without an MMA, each of another style; test_styled.py plants a fault in
each.
"""

from __future__ import annotations

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.memory import SmemAllocator

WARPS = 4
THREADS = 32 * WARPS


def copy_atom(bits):
    return cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=bits)


@cute.kernel
def add_kernel(mX: cute.Tensor, mY: cute.Tensor, mZ: cute.Tensor):
    """Add vectors of four elements, except those behind the end."""
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    at = block * THREADS + thread
    x, y, z = (cute.local_tile(t, (4,), (at,)) for t in (mX, mY, mZ))
    if at * 4 < cute.size(mX):
        z.store(x.load() + y.load())


@cute.jit
def add(mX: cute.Tensor, mY: cute.Tensor, mZ: cute.Tensor):
    blocks = cute.ceil_div(cute.size(mX), THREADS * 4)
    add_kernel(mX, mY, mZ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


@cute.jit
def block_sum(value: Float32, sums: cute.Tensor):
    """Sum by shuffles in each warp, then by shared memory; every thread gets the sum."""
    for i in cutlass.range_constexpr(5):
        value += cute.arch.shuffle_sync_bfly(value, 1 << i)
    thread = cute.arch.thread_idx()[0]
    if thread % 32 == 0:
        sums[thread // 32] = value
    cute.arch.sync_threads()  # of the sums
    total = Float32(0.0)
    for warp in cutlass.range_constexpr(WARPS):
        total += sums[warp]
    return total


@cute.kernel
def norm_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """A row less its mean, divided by its sum of absolute values: two reductions by one buffer."""
    smem = SmemAllocator()
    sums = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
    row, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    x = mX[row, thread]
    x -= block_sum(x, sums) / THREADS
    cute.arch.sync_threads()  # before the buffer is used again
    size = block_sum(x if x > 0 else -x, sums)
    mY[row, thread] = x / size


@cute.jit
def norm(mX: cute.Tensor, mY: cute.Tensor):
    norm_kernel(mX, mY).launch(grid=[mX.shape[0], 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def histogram_kernel(mX: cute.Tensor, mBins: cute.Tensor):
    """A histogram by atomics, first in shared memory, then in global memory."""
    smem = SmemAllocator()
    bins = smem.allocate_tensor(Int32, cute.make_layout(16))
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    if thread < 16:
        bins[thread] = 0
    cute.arch.sync_threads()  # of the zeros
    for i in cutlass.range(8, unroll=1):
        value = mX[(block * 8 + i) * THREADS + thread]
        cute.arch.atomic_add(bins.iterator + value, Int32(1), scope="cta")
    cute.arch.sync_threads()  # of the counts
    if thread < 16:
        cute.arch.atomic_add(mBins.iterator + thread, bins[thread], scope="gpu")


@cute.jit
def histogram(mX: cute.Tensor, mBins: cute.Tensor):
    blocks = cute.size(mX) // (8 * THREADS)
    histogram_kernel(mX, mBins).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def prefix_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """An inclusive prefix sum, from one buffer to the other and back (Hillis and Steele)."""
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout((THREADS, 2)))
    thread = cute.arch.thread_idx()[0]
    sX[thread, 0] = mX[thread]
    for i in cutlass.range_constexpr(7):
        cute.arch.sync_threads()  # of a step
        value = sX[thread, i % 2]
        if thread >= 1 << i:
            value += sX[thread - (1 << i), i % 2]
        sX[thread, (i + 1) % 2] = value
    mY[thread] = sX[thread, 1]


@cute.jit
def prefix(mX: cute.Tensor, mY: cute.Tensor):
    prefix_kernel(mX, mY).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def transpose_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """Transpose a 32x32 tile by shared memory with swizzled rows."""
    smem = SmemAllocator()
    rows = cute.make_layout((32, 32), stride=(32, 1))
    tile = smem.allocate_tensor(Float32, rows, 128, cute.make_swizzle(5, 2, 5))
    column, row = cute.arch.thread_idx()[0], cute.arch.thread_idx()[1]
    x, y, _ = cute.arch.block_idx()
    for i in cutlass.range_constexpr(0, 32, 4):
        tile[row + i, column] = mX[y * 32 + row + i, x * 32 + column]
    cute.arch.sync_threads()  # of the tile
    for i in cutlass.range_constexpr(0, 32, 4):
        mY[x * 32 + row + i, y * 32 + column] = tile[column, row + i]


@cute.jit
def transpose(mX: cute.Tensor, mY: cute.Tensor):
    m, n = mX.shape
    transpose_kernel(mX, mY).launch(grid=[n // 32, m // 32, 1], block=[32, 4, 1])


@cute.kernel
def stencil_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """Sums of three neighbours, of tiles that cp.async loads into two buffers in turn."""
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout((THREADS + 2, 2)))
    thread, tiles = cute.arch.thread_idx()[0], cute.size(mY) // THREADS
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
    for tile in cutlass.range_constexpr(tiles + 1):
        if cutlass.const_expr(tile < tiles):
            for i in cutlass.range_constexpr(2):
                at = thread + i * THREADS
                if at < THREADS + 2:
                    cute.copy(
                        atom,
                        cute.make_tensor(mX.iterator + tile * THREADS + at, cute.make_layout(1)),
                        cute.make_tensor(
                            sX.iterator + tile % 2 * (THREADS + 2) + at, cute.make_layout(1)
                        ),
                    )
            cute.arch.cp_async_commit_group()
        if cutlass.const_expr(tile > 0):
            cute.arch.cp_async_wait_group(1 if tile < tiles else 0)  # of the tile before
            cute.arch.sync_threads()  # of it
            total = Float32(0.0)
            for i in cutlass.range_constexpr(3):
                total += sX[thread + i, (tile - 1) % 2]
            mY[(tile - 1) * THREADS + thread] = total
            cute.arch.sync_threads()  # before its buffer is loaded again


@cute.jit
def stencil(mX: cute.Tensor, mY: cute.Tensor):
    stencil_kernel(mX, mY).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def last_kernel(mX: cute.Tensor, mPartial: cute.Tensor, mCount: cute.Tensor, mSum: cute.Tensor):
    """The CTA that counts last adds up the sums that all have stored."""
    smem = SmemAllocator()
    sums = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
    last = smem.allocate_tensor(Int32, cute.make_layout(1))
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    blocks = cute.arch.grid_dim()[0]
    total = block_sum(mX[block * THREADS + thread], sums)
    if thread == 0:
        mPartial[block] = total
        before = cute.arch.atomic_add(mCount.iterator, Int32(1), sem="acq_rel", scope="gpu")
        last[0] = Int32(before == blocks - 1)
    cute.arch.sync_threads()  # of who is last
    if last[0] == 1:
        value = mPartial[thread] if thread < blocks else Float32(0.0)
        total = block_sum(value, sums)
        if thread == 0:
            mSum[0] = total


@cute.jit
def last(mX: cute.Tensor, mPartial: cute.Tensor, mCount: cute.Tensor, mSum: cute.Tensor):
    blocks = cute.size(mX) // THREADS
    last_kernel(mX, mPartial, mCount, mSum).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def cluster_kernel(mX: cute.Tensor, mSum: cute.Tensor):
    """Four CTAs add up a row each and store their sums into the first one's shared memory."""
    smem = SmemAllocator()
    sums = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
    parts = smem.allocate_tensor(Float32, cute.make_layout(4))
    arrived = smem.allocate_array(Int64, 1)
    thread, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 4)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()  # all have an mbarrier
    cute.arch.cluster_wait()
    total = block_sum(mX[cute.arch.block_idx()[0], thread], sums)
    if thread == 0:
        theirs = cute.arch.map_dsmem_ptr(parts.iterator + rank, 0)
        mine = cute.make_rmem_tensor(1, Float32)
        mine[0] = total
        cute.copy(copy_atom(32), mine, cute.make_tensor(theirs, cute.make_layout(1)))
        cute.arch.mbarrier_arrive(arrived, 0)  # at the first CTA's
    if rank == 0 and thread == 0:
        cute.arch.mbarrier_wait(arrived, 0)  # for all four
        total = Float32(0.0)
        for i in cutlass.range_constexpr(4):
            total += parts[i]
        mSum[cute.arch.block_idx()[0] // 4] = total


@cute.jit
def cluster(mX: cute.Tensor, mSum: cute.Tensor):
    cluster_kernel(mX, mSum).launch(
        grid=[mX.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[4, 1, 1]
    )


@cute.kernel
def pipe_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """A warp loads tiles by bulk copies into two slots; the others double them."""
    smem = SmemAllocator()
    size = THREADS - 32
    sX = smem.allocate_tensor(Float32, cute.make_layout((size, 2)), 128)
    full, empty = smem.allocate_array(Int64, 2), smem.allocate_array(Int64, 2)
    thread, warp, tiles = cute.arch.thread_idx()[0], cute.arch.warp_idx(), 5
    if thread == 0:
        for slot in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(full + slot, 1)
            cute.arch.mbarrier_init(empty + slot, WARPS - 1)  # a warp arrives once
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == WARPS - 1:
        load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        for tile in cutlass.range(tiles, unroll=1):
            slot, turn = tile % 2, tile // 2 % 2
            cute.arch.mbarrier_wait(empty + slot, turn ^ 1)  # for room
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, size * 4)
                cute.copy(
                    load,
                    cute.make_tensor(mX.iterator + tile * size, cute.make_layout(size)),
                    cute.make_tensor(sX.iterator + slot * size, cute.make_layout(size)),
                    mbar_ptr=full + slot,
                )
    else:
        for tile in cutlass.range(tiles, unroll=1):
            slot, turn = tile % 2, tile // 2 % 2
            cute.arch.mbarrier_wait(full + slot, turn)  # for a tile
            mY[tile * size + thread] = sX[thread, slot] * 2
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + slot)


@cute.jit
def pipe(mX: cute.Tensor, mY: cute.Tensor):
    pipe_kernel(mX, mY).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def first_kernel(mX: cute.Tensor, mBetween: cute.Tensor):
    at = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_launch_dependents()
    mBetween[at] = mX[at] + 1


@cute.kernel
def second_kernel(mBetween: cute.Tensor, mY: cute.Tensor):
    at = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()  # for the kernel before
    mY[at] = mBetween[at] * 3


@cute.jit
def dependent(mX: cute.Tensor, mBetween: cute.Tensor, mY: cute.Tensor):
    """Two kernels, of which the second starts while the first runs."""
    grid, block = [cute.size(mX) // THREADS, 1, 1], [THREADS, 1, 1]
    first_kernel(mX, mBetween).launch(grid=grid, block=block)
    second_kernel(mBetween, mY).launch(grid=grid, block=block, use_pdl=True)


KERNELS = (
    "add", "norm", "histogram", "prefix", "transpose", "stencil", "last", "cluster", "pipe",
    "dependent",
)  # fmt: skip


def operands(kernel: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arguments of a kernel, its result last, and the expected result."""
    chance = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=chance).float()

    if kernel == "add":
        x, y = integers(1000), integers(1000)
        return [x, y, torch.zeros(1000)], x + y
    if kernel == "norm":
        x = integers(3, THREADS)
        less = x - x.mean(1, keepdim=True)
        return [x, torch.zeros_like(x)], less / less.abs().sum(1, keepdim=True)
    if kernel == "histogram":
        values = torch.randint(0, 16, (3 * 8 * THREADS,), generator=chance, dtype=torch.int32)
        return [values, torch.zeros(16, dtype=torch.int32)], values.bincount(minlength=16).int()
    if kernel == "transpose":
        x = integers(96, 64)
        return [x, torch.zeros(64, 96)], x.T
    if kernel == "stencil":
        x = integers(4 * THREADS + 2)
        return [x, torch.zeros(4 * THREADS)], x[:-2] + x[1:-1] + x[2:]
    if kernel == "last":
        x = integers(6 * THREADS)
        count = torch.zeros(1, dtype=torch.int32)
        return [x, torch.zeros(6), count, torch.zeros(1)], x.sum()[None]
    if kernel == "cluster":
        x = integers(8, THREADS)
        return [x, torch.zeros(2)], x.view(2, -1).sum(1)
    if kernel == "pipe":
        x = integers(5 * (THREADS - 32))
        return [x, torch.zeros_like(x)], x * 2
    x = integers(THREADS if kernel == "prefix" else 3 * THREADS)
    if kernel == "prefix":
        return [x, torch.zeros_like(x)], x.cumsum(0)
    return [x, torch.zeros_like(x), torch.zeros_like(x)], (x + 1) * 3

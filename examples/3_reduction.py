"""Sums of rows: a warp loads parts of a row into a ring of two slots, four warps add them up."""

import cutlass
import torch
from cutlass import Float32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

SLOTS, ADDERS = 2, 4  # ADDERS: so many warps add, the one behind them loads
PART = 32 * ADDERS  # elements of a row in a slot, one for each thread that adds


@cute.kernel
def sum_kernel(x: cpasync.TmaInfo, mSum: cute.Tensor):
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, cute.make_layout((1, PART, SLOTS)), 128)  # (1, bN, SLOT)
    full, empty = smem.allocate_array(Int64, SLOTS), smem.allocate_array(Int64, SLOTS)
    thread, warp, row = cute.arch.thread_idx()[0], cute.arch.warp_idx(), cute.arch.block_idx()[0]
    if thread < SLOTS:
        cute.arch.mbarrier_init(full + thread, 1)
        cute.arch.mbarrier_init(empty + thread, PART)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    gX = cute.local_tile(x.tma_tensor, (1, PART), (row, None))  # (1, bN, Parts)
    flat = (cute.group_modes(t, 0, 2) for t in (sX, gX))
    tXsX, tXgX = cpasync.tma_partition(x.atom, 0, cute.make_layout(1), *flat)  # (TMA, SLOT | Parts)
    total = Float32(0)
    for part in cutlass.range(cute.size(gX, mode=[2]), unroll=1):
        slot, phase = part % SLOTS, part // SLOTS % 2
        if warp == ADDERS:
            cute.arch.mbarrier_wait(empty + slot, phase ^ 1)  # at once in the first round
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, PART * 4)
            cute.copy(x.atom, tXgX[None, part], tXsX[None, slot], tma_bar_ptr=full + slot)
        else:
            cute.arch.mbarrier_wait(full + slot, phase)
            total += sX[0, thread, slot]
            cute.arch.mbarrier_arrive(empty + slot)
    total = cute.arch.warp_reduction_sum(total)  # 0 in the warp that loads
    with cute.arch.elect_one():
        cute.arch.atomic_add(mSum.iterator + row, total)


@cute.jit
def row_sums(mX: cute.Tensor, mSum: cute.Tensor):
    load, slot = cpasync.CopyBulkTensorTileG2SOp(), cute.make_layout((1, PART))
    x = cpasync.make_tiled_tma_atom(load, mX, slot, (1, PART))
    sum_kernel(x, mSum).launch(grid=[mX.shape[0], 1, 1], block=[PART + 32, 1, 1])


if __name__ == "__main__":
    x, sums = torch.randint(-8, 9, (3, 1000), device="cuda").float(), torch.zeros(3, device="cuda")
    row_sums(from_dlpack(x, assumed_align=16), from_dlpack(sums))
    assert torch.equal(sums, x.sum(1))
    print(f"{len(sums)} sums are right")

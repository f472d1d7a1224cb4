"""TMA copy: one thread asks for a tile, an mbarrier tells when its bytes are in shared memory."""

import torch
from cutlass import Float32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

TILE = 32, 64  # rows, columns
TILE_BYTES = TILE[0] * TILE[1] * 4


@cute.kernel
def copy_kernel(x: cpasync.TmaInfo, y: cpasync.TmaInfo):
    smem = SmemAllocator()
    sX = smem.allocate_tensor(Float32, x.smem_layout, 128)  # (bM, bN)
    full = smem.allocate_array(Int64, 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_init(full, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    m, n, _ = cute.arch.block_idx()
    tXsX, tXgX = partition(x, sX, (m, n))
    tYsX, tYgY = partition(y, sX, (m, n))
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_BYTES)
    cute.copy(x.atom, tXgX, tXsX, tma_bar_ptr=full)
    cute.arch.mbarrier_wait(full, 0)
    cute.copy(y.atom, tYsX, tYgY)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0)


def partition(operand: cpasync.TmaInfo, sX: cute.Tensor, tile: tuple) -> tuple:
    """A tile in shared and in global memory, as the copy instruction takes it."""
    gX = cute.local_tile(operand.tma_tensor, TILE, tile)  # (bM, bN)
    flat = (cute.group_modes(t, 0, 2) for t in (sX, gX))  # ((bM, bN))
    return cpasync.tma_partition(operand.atom, 0, cute.make_layout(1), *flat)  # (TMA)


@cute.jit
def copy(mX: cute.Tensor, mY: cute.Tensor):
    layout = cute.make_layout(TILE, stride=(TILE[1], 1))
    x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, TILE)
    y = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mY, layout, TILE)
    grid = cute.ceil_div(mX.shape, TILE)
    copy_kernel(x, y).launch(grid=[*grid, 1], block=[32, 1, 1])


if __name__ == "__main__":
    x = torch.randn(100, 200, device="cuda")
    y = torch.zeros_like(x)
    copy(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16))
    assert torch.equal(x, y)
    print(f"{y.numel()} elements copied")

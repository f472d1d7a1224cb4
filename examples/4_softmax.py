"""Softmax of rows: the threads of a CTA share a row, and a TMA store takes what they wrote."""

import torch
from cutlass import Float32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

WARPS, PART = 2, 4  # PART: elements of a thread
ROW = 1, 32 * WARPS * PART


@cute.kernel
def softmax_kernel(mX: cute.Tensor, y: cpasync.TmaInfo):
    smem = SmemAllocator()
    sY = smem.allocate_tensor(Float32, y.smem_layout, 128)  # (1, bN)
    shared = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
    thread, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    x = cute.zipped_divide(mX[row, None], (PART,))[None, thread].load()  # (PART)
    top = reduce(x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0), cute.arch.fmax, shared)
    e = cute.math.exp(x - top)
    total = reduce(e.reduce(cute.ReductionOp.ADD, Float32(0), 0), lambda a, b: a + b, shared)
    cute.zipped_divide(sY[0, None], (PART,))[None, thread] = e / total

    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    gY = cute.local_tile(y.tma_tensor, ROW, (row, 0))  # (1, bN)
    flat = (cute.group_modes(t, 0, 2) for t in (sY, gY))
    tYsY, tYgY = cpasync.tma_partition(y.atom, 0, cute.make_layout(1), *flat)  # (TMA)
    if cute.arch.warp_idx() == 0:
        cute.copy(y.atom, tYsY, tYgY)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def reduce(value: Float32, op, shared: cute.Tensor) -> Float32:
    """`op` of the values of all threads of the CTA."""
    value, warp = cute.arch.warp_reduction(value, op), cute.arch.warp_idx()
    with cute.arch.elect_one():
        shared[warp] = value
    cute.arch.sync_threads()
    value = op(shared[0], shared[1])
    cute.arch.sync_threads()  # before the next call overwrites what others still read
    return value


@cute.jit
def softmax(mX: cute.Tensor, mY: cute.Tensor):
    store = cpasync.CopyBulkTensorTileS2GOp()
    y = cpasync.make_tiled_tma_atom(store, mY, cute.make_layout(ROW), ROW)
    softmax_kernel(mX, y).launch(grid=[mX.shape[0], 1, 1], block=[32 * WARPS, 1, 1])


if __name__ == "__main__":
    x = torch.randn(5, ROW[1], device="cuda")
    y = torch.zeros_like(x)
    softmax(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16))
    torch.testing.assert_close(y, x.softmax(1))
    print(f"{len(y)} rows are right")

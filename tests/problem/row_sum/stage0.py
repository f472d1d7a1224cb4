"""A CTA adds up a part of a row; then a thread adds up the parts."""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute
from cutlass.memory import SmemAllocator

from cutex.arch import KNOWN
from cutex.compile import Operand
from row_sum import PARTS


class Stage0:
    name, archs, dtypes = "rowsum_stage0", tuple(KNOWN), ("fp32", "bf16", "fp16")

    def __init__(self, config):
        self.config, self.warps = config, config.threads // 32

    @property
    def kernels(self):
        return {"partial": type(self).partial, "combine": type(self).combine}

    def operands(self, dtype):
        shapes = {"x": (("r", "c"), dtype), "parts": (("r", "p"), "fp32"), "sums": (("r",), "fp32")}
        return tuple(Operand(n, *x, aligned=False, whole=False) for n, x in shapes.items())

    @cute.jit
    def __call__(self, mX: cute.Tensor, mParts: cute.Tensor, mSums: cute.Tensor, stream):
        rows, block = mX.shape[0], (self.config.threads, 1, 1)
        self.partial(mX, mParts).launch(grid=(PARTS, rows, 1), block=block, stream=stream)
        grid = (cute.ceil_div(rows, self.config.threads), 1, 1)
        self.combine(mParts, mSums).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def partial(self, mX: cute.Tensor, mParts: cute.Tensor):
        part, row, _ = cute.arch.block_idx()
        thread, threads = cute.arch.thread_idx()[0], self.config.threads
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.warps), 16)  # (WARP)
        total = Float32(0)
        for column in cutlass.range(part * threads + thread, mX.shape[1], PARTS * threads):
            total += mX[row, column].to(Float32)
        total = cute.arch.warp_reduction_sum(total)
        sSums[thread // 32] = total
        cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0)
            for warp in cutlass.range_constexpr(self.warps):
                total += sSums[warp]
            mParts[row, part] = total

    @cute.kernel
    def combine(self, mParts: cute.Tensor, mSums: cute.Tensor):
        row = cute.arch.block_idx()[0] * self.config.threads + cute.arch.thread_idx()[0]
        if row < mSums.shape[0]:
            total = Float32(0)
            for part in cutlass.range_constexpr(PARTS):
                total += mParts[row, part]
            mSums[row] = total

"""Vector add: a layout cuts a vector into parts of 16 bytes, and each thread adds one part."""

import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

THREADS = 128
PART = 4  # elements of a thread: 16 bytes, the widest load


@cute.kernel
def add_kernel(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    gA, gB, gC = (cute.zipped_divide(m, (PART,)) for m in (mA, mB, mC))  # (PART, Parts)
    part = block * THREADS + thread
    if part < cute.size(gC, mode=[1]):
        gC[None, part] = gA[None, part].load() + gB[None, part].load()


@cute.jit
def add(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    blocks = cute.ceil_div(cute.size(mC), PART * THREADS)
    add_kernel(mA, mB, mC).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


if __name__ == "__main__":
    a, b = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    c = torch.zeros_like(a)
    add(*(from_dlpack(x, assumed_align=16) for x in (a, b, c)))
    assert torch.equal(c, a + b)
    print(f"{c.numel()} sums are right")

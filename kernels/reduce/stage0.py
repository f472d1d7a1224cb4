"""Stage 0: a tree in smem, neighbours first.

Each CTA adds up as many elements as it has threads, and a launch leaves one sum a CTA: three
launches, one after the other, add up all. In round r the threads whose number is a multiple of
2 * r add what lies r further on. Half of the threads of every warp idle in the first round, three
quarters in the second, and all warps stay busy to the last.
"""

from __future__ import annotations

from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.kernels.reduce import ARCHS
from cutex.kernels.reduce.config import ReduceConfig

WARP = 32


class Stage0:
    """total = the sum of x (N), by way of one sum for each CTA of a first and a second launch."""

    archs: tuple[str, ...] = ARCHS
    dtypes = ("fp32", "bf16", "fp16")

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return f"reduce_{type(self).__name__.lower()}"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        shapes = {"x": ("n", dtype), "first": ("p", "fp32"), "second": ("q", "fp32"),
                  "total": ("one", "fp32")}  # fmt: skip
        return tuple(Operand(name, (n,), d, whole=False) for name, (n, d) in shapes.items())

    def elements(self, mX: cute.Tensor) -> int:
        """The elements of mX that a CTA adds up."""
        return self.config.threads

    @cute.jit
    def __call__(self, mX, mFirst, mSecond, mTotal, stream) -> None:
        for mSums in (mFirst, mSecond, mTotal):
            ctas = cute.ceil_div(cute.size(mX), self.elements(mX))
            self.level(mX, mSums).launch(
                grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
            )
            mX = cute.make_tensor(mSums.iterator, cute.make_layout(ctas))  # (CTA)

    @cute.kernel
    def level(self, mX: cute.Tensor, mSums: cute.Tensor) -> None:
        sums = SmemAllocator().allocate_tensor(
            Float32, cute.make_layout(self.config.threads), 16
        )  # (THREAD)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        total = self.total(self.loaded(mX, block, thread), sums, thread)
        if thread == 0:
            mSums[block] = total

    @cute.jit
    def loaded(self, mX: cute.Tensor, block: Int32, thread: Int32) -> Float32:
        """What this thread starts with: one element; 0 past the last."""
        at = block * self.config.threads + thread
        x = Float32(0)
        if at < cute.size(mX):
            x = mX[at].to(Float32)
        return x

    @cute.jit
    def total(self, x: Float32, sums: cute.Tensor, thread: Int32) -> Float32:
        """The sum of x over the CTA, in thread 0."""
        sums[thread] = x
        cute.arch.sync_threads()
        step = Int32(1)
        while step < self.config.threads:
            if thread % (2 * step) == 0:
                sums[thread] = sums[thread] + sums[thread + step]
            cute.arch.sync_threads()
            step *= 2
        return sums[0]

    kernels = {"level": level}  # noqa: RUF012

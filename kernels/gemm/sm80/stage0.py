"""Stage 0: cp.async, ldmatrix, mma.sync, one after the other.

Idea: a CTA computes 128x128 of C with four warps, 64x64 each. For each 32 of K all threads copy the
tiles of A and B to smem by cp.async, wait for them, load fragments by ldmatrix and multiply; only
then may the next tiles overwrite the buffer.

The buffer is not swizzled: rows are 64 bytes apart, so the 8 rows that an ldmatrix reads at one
place are in two places of the 32 banks, and take four wavefronts instead of one.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cutex.compile import Operand
from cutex.kernels.gemm.launch import row_major
from cutex.kernels.gemm.signature import ladder
from cutex.kernels.gemm.sm80.config import Sm80Config
from cutex.kernels.gemm.sm80.general import General, fill
from cutex.kernels.gemm.sm80.mma import WarpProduct


class Stage0(General):
    """The ladder's operands, mA (M, K), mB (N, K), mC (M, N), row-major, and a mainloop in order.

    barrier   arrives                      waits
    (CTA)     all threads, their copies    all threads, before they read the tiles
              being there
    (CTA)     all threads, having read     all threads, before the next tiles are copied
    """

    min_stages = 1
    swizzled = False

    def __init__(self, tiles: Sm80Config) -> None:
        super().__init__(ladder(tiles))

    @property
    def name(self) -> str:
        return f"gemm_mma_{type(self).__name__.lower()}"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return row_major(dtype)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        self.launch(mA, mB, mC, (), stream)

    @cute.jit
    def mainloop(self, product: WarpProduct, copies, k_tiles: Int32, thread: Int32) -> None:
        for k_tile in cutlass.range(k_tiles, unroll=1):
            fill(copies, k_tile, 0)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            for k_block in cutlass.range_constexpr(product.k_blocks):
                product.load(k_block, 0, thread)
                product.multiply(k_block)
            cute.arch.sync_threads()

"""Stage 0: a thread computes an element of C.

Each thread walks along K of its row of A and of its row of B. The lanes of a warp take neighbouring
rows of C: at each step they ask for 32 words of A that are a row apart, each in a sector of its
own, 4 bytes of 32; and in the end they store so. Two loads an FMA.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, cute

from cutex.compile import Operand
from cutex.kernels.gemm.simt import ARCHS
from cutex.kernels.gemm.simt.config import SimtConfig

WARP = 32


class Stage0:
    """C[M,N] = A[M,K] @ B[N,K]^T. A stage defines `kernel`, and what it changes."""

    archs = ARCHS
    dtypes = ("fp32",)

    def __init__(self, config: SimtConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return f"gemm_simt_{type(self).__name__.lower()}"

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    @property
    def ctas_per_sm(self) -> int:
        """The CTAs that must fit an SM by their registers."""
        return 1

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        whole = {"k": self.config.whole_k, "n": self.config.whole_n}
        shapes = (("mA", ("m", "k")), ("mB", ("n", "k")), ("mC", ("m", "n")))
        return tuple(
            Operand(name, sizes, dtype, aligned=whole[sizes[1]], whole=whole[sizes[1]])
            for name, sizes in shapes
        )

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        tile = self.config.tile_m, self.config.tile_n
        rest_m, rest_n = (cute.ceil_div(cute.size(mC, mode=[i]), tile[i]) for i in range(2))
        self.kernel(mA, mB, mC).launch(
            grid=(rest_m, rest_n, 1), block=(self.num_threads, 1, 1),
            min_blocks_per_mp=self.ctas_per_sm, stream=stream,
            preferred_smem_carveout=100 if self.ctas_per_sm > 1 else None,  # else it asks a GPU
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor) -> None:
        thread, (block_m, block_n, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        m = block_m * self.config.tile_m + thread % WARP
        n = block_n * self.config.tile_n + thread // WARP
        if m < cute.size(mC, mode=[0]) and n < cute.size(mC, mode=[1]):
            total = Float32(0)
            for k in cutlass.range(cute.size(mA, mode=[1]), unroll=4):
                total += mA[m, k] * mB[n, k]
            mC[m, n] = total

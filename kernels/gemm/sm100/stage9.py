"""Stage 9: the tile, the order and the side that is cut are chosen for each problem.

Idea: no tile is best everywhere, so let one kernel, the general one (general.py), take every tile
that the hardware has room for, and choose by the problem (kernels/gemm/choose.py).

- tile_m = 512: a pair computes two accumulators that share B. A CTA loads 48 KB for 1024 cycles of
  MMA instead of 64: 171 FLOP a byte instead of 128, a quarter less through L2. All of tensor memory
  is one tile. So at its end one accumulator takes its last steps before the other, and at the
  beginning of the next its first ones: while one is read out, the other computes.
- tile_m = 256, two accumulators, tile_n from 64 to 256 by 32: stage 8's overlap, and a width that
  fills the last wave. 512x8192x5376 takes 64 tiles of 256x256, 64 of 74 pairs; or 74 of 256x224.
- swap_ab: where M is small, compute C^T = B A^T: the 256 rows of a tile come from N.
- split_k: where there are too few tiles, pairs of one cluster share the K of a tile. Each leaves
  its sums in smem, and each adds up a share of the columns from all of them, always in the same
  order: no workspace, no second kernel, the same bits in every run.

Changed since stage 8: the MMA and epilogue roles loop over the accumulators of a tile; a sub-tile
is loaded from tensor memory while the one before is stored; C may be stored transposed, and leaves
L2 first, for A and B to stay; and the kernel starts while the one before it ends (griddepcontrol):
barriers and tensor memory are ready when its results are.

Public figures: 512x256 gives about 1.1 times at 4096 and above, wave fit 1.15
times where it applies, the early start up to 1.16 times on the smallest problems.
"""

from __future__ import annotations

from cutlass import cute

from cutex.compile import Operand
from cutex.kernels.gemm.launch import row_major
from cutex.kernels.gemm.signature import ladder
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.kernels.gemm.sm100.general import General


class Stage9(General):
    """The general kernel on the ladder's operands: mA (M, K), mB (N, K), mC (M, N), row-major."""

    number = 9

    def __init__(self, tiles: Sm100Config) -> None:
        super().__init__(ladder(tiles))

    @property
    def name(self) -> str:
        return "sm100_gemm_stage9"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return row_major(dtype)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        self.launch(mA, mB, mC, (), stream)

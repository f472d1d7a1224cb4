"""Stage 9: chosen per problem.

Idea: no tile is the best for all. One kernel, the general one (general.py), composes what the
stages before have built, cooperative or ping-pong, any tile, cluster and order, by a config for
each problem (kernels/gemm/choose.py proposes, cutex/bench/autotune.py confirms). Seven things are
new, and small problems need them:

- `swap_ab`: wgmma computes at least 64 rows, so with M = 16 three quarters of it were for nothing.
  C^T = B A^T has N rows and M columns, which may be as few as 16. stmatrix transposes it, so C is
  written as before.
- `split_k`: where there are fewer tiles than SMs, CTAs of a cluster share the K of one tile. Each
  sends the others its fp32 sums of the parts that they store, into their smem, and adds up its own
  part always in the same order: no workspace, no second kernel, and the same bits in every run.
  CTAs of one share may have loads in common, too, as without it (`cluster_m`, `cluster_n`).
- `spread`: where the tiles nearly fill the SMs once, as many as there are SMs, which overlap
  (schedulers/spread.py). `columns`: where one round of tiles covers C, a tile for each cluster, and
  no raster to look it up in (schedulers/one_round.py). With one tile a CTA nothing hides its
  epilogue: up to 32 columns each warp stores its own rows, and waits for no other warp and for no
  TMA (`WarpStore`).
- Swapped, two CTAs may share a tile of the weights (`cluster_n`), each with half of the columns: L2
  is asked for 2 MB for each, not 3, at M = 128.
- The next kernel in the stream may start its CTAs when this one's end (programmatic dependent
  launch). Such a CTA asks at once, before its barriers, for the first 32 KB of what it streams, so
  that memory has work while one kernel ends and the other is not allowed to begin.
- With one tile a CTA, none loads faster than memory could serve all (load.py): SMs that get their
  answers sooner would go ahead, and what two ask of B at one time comes from L2 but once. Up to 32
  columns each cluster asks L2 for another K tile of B, once its first loads are started. With more,
  a slot whose MMA is done may be loaded before the next slot is full.

Measured, times stage 8: 1.00 at 8192x8192x4096, where the choice is stage 8's own tile, 1.15 at
4096x4096x4096 (128x128), 1.5 at 2048x2048x2048, 2.5 with M = 16, 1.7 with M = 128. Beside the best
of cuBLAS and quack: 1.02 in the mean of seven large problems, 0.995 to 1.047; for few rows see
docs/facts/gemm.md. The pace gives 1.01 to 1.02 of it, 1.05 with N = 7168. Of the 31 us with M = 16,
N = K = 8192, memory is idle for 2, between one kernel's last load and the next one's first.
"""

from __future__ import annotations

from cutlass import cute

from cutex.compile import Operand
from cutex.kernels.gemm.launch import row_major
from cutex.kernels.gemm.signature import ladder
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General


class Stage9(General):
    """The general kernel on the ladder's operands: mA (M, K), mB (N, K), mC (M, N), row-major."""

    number = 9

    def __init__(self, tiles: Sm90Config) -> None:
        if tiles.workspace is not None:
            raise ValueError(f"stream_k={tiles.stream_k}: the ladder has no workspace to pass")
        super().__init__(ladder(tiles))

    @property
    def name(self) -> str:
        return "sm90_gemm_stage9"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return row_major(dtype)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        self.launch(mA, mB, mC, (), stream)

"""Stage 1: P stays in tensor memory, over S.

Idea: tcgen05.mma takes operand A from tensor memory, too, 16 bits wide, two elements in a column.
P of 128 keys takes 64 columns, and when a thread writes them it has read the 128 of S that they
overwrite. So P costs neither smem nor columns (FlashAttention-4).

Changed since stage 0: `p_slots` and `probabilities`, and with them where the second product reads
its operand A (`p_in_smem`).

Of a block it saves 32 KB written to smem and 32 of the 128 KB that the two products read from
there: at 128 bytes a cycle 256 of its 1024 cycles, which Q, K and V then have for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.umma import Umma
from cutex.device.attention.tmem_rows import store_columns
from cutex.kernels.attention.forward.sm100.stage0 import Stage0


@dataclass(frozen=True)
class TmemP:
    """The probabilities of a Q tile in tensor memory, as operand A of the second product."""

    tmem: cute.Pointer
    column: Int32 | int
    tCrA: cute.Tensor  # (MMA, MMA_M, MMA_K)

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        return self.tCrA.element_type

    @cute.jit
    def store(self, probabilities: cute.Tensor, part: cutlass.Constexpr[int]) -> None:
        """Store part `part` of this thread's row, (PART)."""
        words = cute.recast_tensor(probabilities, Float32)
        store_columns(self.tmem, self.column + part * cute.size(words), words)

    def fence(self) -> None:
        cute.arch.fence_view_async_tmem_store()


class Stage1(Stage0):
    """The kernel of stage 1: its barriers and its memory.

    barriers: as in stage 0.

    smem      bytes (head_dim 128)              tmem   columns
    sQ        tile_m * head_dim * 2    32768    S, P   tile_n      128
    sK        tile_n * head_dim * 2    32768    O      head_dim    128
    sV        tile_n * head_dim * 2    32768
    barriers  24, and 4 for the address of tmem
    """

    number = 1

    def p_slots(self, smem: SmemAllocator, dtype: type[cutlass.Numeric]) -> None:
        return None

    def probabilities(self, pv_mma: Umma, sP, tmem, column, dtype) -> TmemP:
        tCrA = pv_mma.a_tmem(tmem, column, self.config.tile_n)
        return TmemP(tmem, column, tCrA)

"""Convert on Blackwell: the sums of dQ lie by rows of tensor memory (queries.py)."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.kernels.attention.backward import convert
from cutex.kernels.attention.backward.convert import THREADS, WIDE
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig

BESIDE = 4  # neighbouring threads that have neighbouring units of a row: 64 bytes of dQ


class Convert(convert.Convert):
    config: Sm100BackwardConfig

    @cute.jit
    def tile(
        self,
        thread: Int32,
        sums: cute.Tensor,
        gdQ: cute.Tensor,
        seqlen: SeqlenInfo,
        m_block: Int32,
        scale: Float32,
    ) -> None:
        c = self.config
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        at_once = THREADS // BESIDE  # rows
        rounds = c.tile_m // at_once
        for i in cutlass.range_constexpr(c.tile_m * c.head_dim // (WIDE * THREADS)):
            row = i % rounds * at_once + thread // BESIDE
            unit = i // rounds * BESIDE + thread % BESIDE
            numbers = cute.make_rmem_tensor(cute.make_layout((2, 1, WIDE // 2)), Float32)
            flat = cute.make_tensor(numbers.iterator, cute.make_layout((4, WIDE // 4)))
            first = row // c.dq_rows * (c.head_dim // 4) + unit * (WIDE // 4)
            for j in cutlass.range_constexpr(WIDE // 4):
                at = (first + j) * c.dq_rows + row % c.dq_rows
                cute.autovec_copy(vectors[None, at], flat[None, j])
            self.write(numbers, 0, gdQ, seqlen, m_block * c.tile_m + row, unit, scale)

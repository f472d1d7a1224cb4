"""Stage 6: loads and stores of 16 bytes.

A thread's rows come in fours that are neighbours in smem, so 4 loads bring the 16 words of 64 FMAs
instead of 16; from memory a thread brings 4 neighbours of K at a time. An instruction that is not
issued is a slot for an FMA.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cutex.kernels.gemm.simt.config import VECTOR
from cutex.kernels.gemm.simt.stage5 import SIDE, Lines, Stage5


def vector(mX: cute.Tensor, coordinates: tuple) -> cute.Tensor:
    """VECTOR neighbours of mX from `coordinates`, a multiple of 16 bytes: (VECTOR,)."""
    at = mX.iterator + cute.crd2idx(coordinates, mX.layout)
    return cute.make_tensor(at.align(16), cute.make_layout(VECTOR))


class Stage6(Stage5):
    @cute.jit
    def load(self, mX: cute.Tensor, sX: cute.Tensor, row: Int32, k_tile: Int32, thread: Int32):
        if cutlass.const_expr(not self.config.whole_k):
            Stage5.load(self, mX, sX, row, k_tile, thread)
        else:
            lanes = self.config.tile_k // VECTOR  # along K
            k, first = thread % lanes * VECTOR, thread // lanes
            step = self.num_threads // lanes
            for i in cutlass.range_constexpr(cute.size(sX, mode=[0]) // step):
                at = first + i * step
                rX = cute.make_rmem_tensor(VECTOR, Float32)
                rX.fill(0)
                from_k = k_tile * self.config.tile_k + k
                if row + at < cute.size(mX, mode=[0]) and from_k < cute.size(mX, mode=[1]):
                    cute.autovec_copy(vector(mX, (row + at, from_k)), rX)
                for v in cutlass.range_constexpr(VECTOR):
                    sX[at, k + v] = rX[v]

    def rows(self, thread: Int32) -> Lines:
        return _in_fours(thread // SIDE, self.config.thread_m)

    def columns(self, thread: Int32) -> Lines:
        return _in_fours(thread % SIDE, self.config.thread_n)

    def words(self, sX: cute.Tensor, lines: Lines, k: int) -> list[Float32]:
        found: list[Float32] = []
        for row in lines.all()[::VECTOR]:
            rX = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(vector(sX, (row, k)), rX)
            found += [rX[v] for v in range(VECTOR)]
        return found

    @cute.jit
    def store(self, mC: cute.Tensor, rAcc: cute.Tensor, corner, thread: Int32) -> None:
        if cutlass.const_expr(not self.config.whole_n):
            Stage5.store(self, mC, rAcc, corner, thread)
        else:
            rows, columns = self.rows(thread).all(), self.columns(thread).all()
            for i in cutlass.range_constexpr(len(rows)):
                for j in cutlass.range_constexpr(0, len(columns), VECTOR):
                    m, n = corner[0] + rows[i], corner[1] + columns[j]
                    rC = cute.make_rmem_tensor(VECTOR, Float32)
                    for v in cutlass.range_constexpr(VECTOR):
                        rC[v] = rAcc[i, j + v]
                    if m < cute.size(mC, mode=[0]) and n < cute.size(mC, mode=[1]):
                        cute.autovec_copy(rC, vector(mC, (m, n)))


def _in_fours(lane: Int32, count: int) -> Lines:
    """`count` rows: four neighbours, then those of the other lanes."""
    steps = (SIDE * VECTOR * i + v for i in range(count // VECTOR) for v in range(VECTOR))
    return Lines(VECTOR * lane, tuple(steps))

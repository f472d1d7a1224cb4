"""Softmax of contiguous rows of any length, several of them copied as one run of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.row import in_smem
from cutex.device.row.columns import Columns
from cutex.device.row.tile import VECTOR_BYTES, WARP, RowTile
from cutex.device.row.words import Words
from cutex.kernels.row.kernel import RowKernel, launch_of, matrix, reductions
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.norm_dense import run
from cutex.kernels.row.softmax import above, combined, exp, exponentials_by_fma, largest


@dataclass(frozen=True)
class DenseRowsConfig:
    """How dense rows of any length are processed, all of a CTA at one time. The tile's vectors are
    those of all rows of a CTA.

    words: the 32-bit words per thread of a row; the first and last word are partly the neighbouring
    rows'.
    """

    tile: RowTile
    words: int


class SoftmaxDense(RowKernel):
    """y = exp(x - max) / sum of exp(x - max) of dense rows. All rows of a CTA are copied to smem
    (cp.async), overwritten there, and stored by vectors."""

    title = "softmax_dense"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return tuple(matrix(name, dtype, self.tile) for name in ("x", "y"))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, stream) -> None:
        self.kernel(mX, mY).launch(**launch_of(self.tile, mX, stream))

    @property
    def chunk(self) -> RowTile:
        """The tile of all rows of a CTA, as one."""
        return replace(self.tile, rows=1, threads=self.tile.num_threads)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        c, tile, chunk = self.config, self.tile, self.chunk
        (reduction,) = reductions(tile, 2)
        slots = cute.make_layout(chunk.threads * chunk.vectors * chunk.width)
        sX = SmemAllocator().allocate_tensor(mX.element_type, slots, VECTOR_BYTES)
        first = Int32(cute.arch.block_idx()[0] * tile.rows)
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        count = cutlass.min(rows - first, tile.rows)
        gX, gY = (run(m, first, count) for m in (mX, mY))
        columns = Columns.of(chunk, gX)
        between = (first > 0) & (first + count < rows) & (n >= chunk.width)
        in_smem.fetch(columns, gX, sX, between)
        own = Int32(cute.arch.thread_idx()[0] // tile.threads)
        row = cutlass.min(own, count - 1)  # past the last row that one again
        begin = Int32(cute.arch.thread_idx()[0] * chunk.width) - columns.first + row * n
        per = 32 // mX.element_type.width
        words = Words(tile.threads, c.words, per, begin % per, n)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        rX = scores(words, sX, begin)
        own_top = largest(rX)
        e, rest = exponentials_by_fma(words.elements(rX), own_top)
        top, total = combined(reduction, (own_top, folded(e, plus) * rest))
        factor = exp(own_top - above(top)) * rest * cute.arch.rcp_approx(total)
        rE = cute.make_rmem_tensor(len(e), Float32)
        for i in cutlass.range_constexpr(len(e)):
            rE[i] = e[i] * factor
        rY = cute.make_rmem_tensor(len(e), mX.element_type)
        rY.store(rE.load().to(mX.element_type))
        # a word that two rows share is read by both: nobody stores before all have read
        if cutlass.const_expr(tile.threads <= WARP):  # else they have met to combine their sums
            cute.arch.sync_threads()
        if own < count:
            words.store(rY, sX, begin)
        cute.arch.sync_threads()
        in_smem.store(columns, sX, gY)


def scores(words: Words, sX: cute.Tensor, begin: Int32) -> cute.Tensor:
    """This thread's elements of the row at sX[begin]; -inf outside the row."""
    rX = cute.make_rmem_tensor(words.count * words.per, sX.element_type)
    rX.fill(-Float32.inf)
    rWords, own = cute.recast_tensor(rX, Int32), words.own_words(sX, begin)
    for word in range(words.count):
        if words.is_edge(word):
            mask = words.mask(word)
            rWords[word] = (words.begun(own, word) & mask) | (rWords[word] & ~mask)
        else:
            rWords[word] = own[word]
    return rX

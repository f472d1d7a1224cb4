"""Zeros in the rows of a matrix that belong to no group, as a gradient has them; on any arch."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp

from cutex.compile import Argument, Operand
from cutex.schedulers.ragged import clamp

WARP = 32
THREADS = 256
CTAS = 256  # at most, a row each at a time


@dataclass(frozen=True)
class ZerosConfig:
    """Whether rows consist of whole vectors of 16 bytes, and whether edges count the rows of groups
    that are padded to equal parts."""

    whole: bool = True
    padded: bool = False


class Zeros:
    """A CTA writes zeros to one row after another: those past the last group's, or with `padded`
    after each one's."""

    archs = ("sm_90a", "sm_100a")

    def __init__(self, config: ZerosConfig) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return "grouped_zeros"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        whole = self.config.whole
        return (
            Operand("out", ("m", "n"), dtype, aligned=whole, whole=whole),
            Operand("edges", ("e",), "int32", aligned=False, whole=False),
        )

    @cute.jit
    def __call__(self, mOut: cute.Tensor, edges: cute.Tensor, stream) -> None:
        """Launch with out (M, N), edges (E), and a stream."""
        ctas = cutlass.min(cute.size(mOut, mode=[0]), CTAS)
        self.kernel(mOut, edges).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, mOut: cute.Tensor, edges: cute.Tensor) -> None:
        """Write the zeros."""
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        rows, groups = cute.size(mOut, mode=[0]), cute.size(edges)
        cute.arch.griddepcontrol_wait()
        pitch = rows // groups
        if cutlass.const_expr(not self.config.padded):
            first += last_end(edges, rows)
        for row in cutlass.range(first, rows, step, unroll=1):
            if cutlass.const_expr(self.config.padded):
                group = row // pitch
                if row - group * pitch >= edges[group]:
                    self.write(mOut, row, thread)
            else:
                self.write(mOut, row, thread)

    @cute.jit
    def write(self, mOut: cute.Tensor, row: Int32, thread: Int32) -> None:
        """Write zeros to a row. All threads call it."""
        dtype = mOut.element_type
        width = 128 // dtype.width if self.config.whole else 1
        gRow = cute.logical_divide(mOut[row, None], cute.make_layout(width))  # (V, NumV)
        zeros = cute.make_rmem_tensor(width, dtype)  # (V)
        zeros.fill(0.0)
        store = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=width * dtype.width)
        for v in cutlass.range(thread, cute.size(gRow, mode=[1]), THREADS, unroll=1):
            cute.copy(store, zeros, gRow[None, v])


@cute.jit
def last_end(edges: cute.Tensor, rows: Int32) -> Int32:
    """Where the last group's rows end. The groups after one that ends too early, which no grouping
    has, are empty (schedulers/ragged.py): the farthest end counts. A whole warp calls it."""
    end = Int32(0)
    for group in cutlass.range(cute.arch.lane_idx(), cute.size(edges), WARP, unroll=1):
        end = cutlass.max(end, clamp(edges[group], rows))
    return Int32(cute.arch.warp_reduction(end, lambda x, y: cutlass.max(x, y)))

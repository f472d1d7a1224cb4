"""Norms of long rows, staged in smem instead of registers."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.row.columns import Columns
from cutex.device.row.tile import VECTOR_BYTES
from cutex.device.stream_order import wait_for_kernel_before
from cutex.kernels.row.kernel import ThisRow, meet, reductions
from cutex.kernels.row.norm import Norm, NormConfig, Normed

LEAST, MOST = 1536, 6144  # vectors of a CTA: docs/facts/rows.md#rows-norm-by-smem


def is_staged(config: NormConfig, element_bytes: int) -> bool:
    """Whether a norm stages its rows in smem: rows of whole vectors, of which each CTA of a cluster
    (or, for a layer norm, of the whole row) has many."""
    tile = config.tile
    whole = tile.aligned and tile.width * element_bytes == VECTOR_BYTES
    vectors = tile.threads * tile.vectors
    many = config.meets_once if config.centred else tile.ctas > 1 and vectors >= LEAST
    return config.is_plain and whole and many and vectors <= MOST


class NormStaged(Norm):
    """The norm of aligned rows, without a residual.

    Each thread copies its own vectors to smem (cp.async) and reads them there twice: loads in
    flight take no registers, so more of them fit on an SM. The threads of a row synchronise once;
    for a layer norm they exchange moments. Weights are loaded after the reduction."""

    title = "norm_staged"

    def __init__(self, config: NormConfig) -> None:
        super().__init__(config)
        if config.residual or not self.tile.aligned or config.centred > config.meets_once:
            raise ValueError("rows by smem are aligned, meet once and have no residual")

    @cute.kernel
    def kernel(
        self, mX: cute.Tensor, mY: cute.Tensor, optional: dict[str, cute.Tensor], eps: Float32
    ) -> None:
        c, tile = self.config, self.tile
        sums = reductions(tile, *c.reduced, later=True, by_cta=True)
        shape = cute.make_layout((tile.width, tile.num_threads, tile.vectors))
        words = SmemAllocator().allocate_tensor(mX.element_type, shape, VECTOR_BYTES)
        sX = words[None, cute.arch.thread_idx()[0], None]  # (V, NumV)
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        wait_for_kernel_before()
        self.fetch(columns, this(mX), sX)
        meet(tile)
        _, mean, squares = self.moments(sums, self.staged(columns, sX), columns)
        rstd = cute.math.rsqrt(squares / Float32(columns.n) + eps)
        if this.exists:
            for i in cutlass.range_constexpr(tile.vectors):
                if columns.has(i):
                    y = in_fp32(sX[None, i])  # (V)
                    y = (y - mean if c.centred else y) * rstd
                    if cutlass.const_expr(c.weight):
                        y = y * in_fp32(columns.vector(optional["weight"], i))
                    if cutlass.const_expr(c.bias):
                        y = y + in_fp32(columns.vector(optional["bias"], i))
                    rY = cute.make_rmem_tensor(tile.width, mY.element_type)
                    rY.store(y.to(mY.element_type))
                    cute.autovec_copy(rY, columns.vector(this(mY), i))
            self.store_rest(Normed(this, columns, None, None, mean, rstd), optional)

    @cute.jit
    def fetch(self, columns: Columns, gX: cute.Tensor, sX: cute.Tensor) -> None:
        """Copy this thread's vectors of gX (N) to sX (V, NumV), and wait for them."""
        bits = columns.tile.width * gX.element_type.width
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), gX.element_type, num_bits_per_copy=bits)
        for i in cutlass.range_constexpr(columns.tile.vectors):
            if columns.has(i):
                cute.copy(atom, columns.vector(gX, i), sX[None, i])
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def staged(self, columns: Columns, sX: cute.Tensor) -> Any:
        """sX (V, NumV) in fp32, 0 outside the row."""
        rX = cute.make_rmem_tensor((columns.tile.width, columns.tile.vectors), sX.element_type)
        rX.fill(0)
        for i in cutlass.range_constexpr(columns.tile.vectors):
            if columns.has(i):
                cute.autovec_copy(sX[None, i], rX[None, i])
        return rX.load().to(Float32)


def in_fp32(x: cute.Tensor) -> Any:
    """A vector (V) of smem or gmem in registers, in fp32."""
    rX = cute.make_rmem_tensor(cute.size(x), x.element_type)
    cute.autovec_copy(x, rX)
    return rX.load().to(Float32)

"""Copies of a row of any alignment to smem and back, by vectors of gmem."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.row.columns import Columns


@cute.jit
def fetch(columns: Columns, gX: cute.Tensor, sX: cute.Tensor, between: Boolean) -> None:
    """Copy this thread's vectors of the row gX to sX (cp.async, one group). sX starts with the gmem
    vector in which the row starts. Partial vectors at the ends are copied whole if the row is
    `between` others, otherwise element by element."""
    tile = columns.tile
    bits = tile.width * gX.element_type.width
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), gX.element_type, num_bits_per_copy=bits)
    for i in cutlass.range_constexpr(tile.vectors):
        slot, first = vector(columns, sX, i), columns.first + i * columns.step
        if columns.has(i) | (between & columns.overlaps(i)):
            cute.copy(atom, columns.vector(gX, i), slot)
        elif columns.is_end(i):
            for j in range(slot.shape[0]):
                if columns.holds(first + j):
                    slot[j] = gX[first + j]
    cute.arch.cp_async_commit_group()


@cute.jit
def store(columns: Columns, sY: cute.Tensor, gY: cute.Tensor) -> None:
    """Write this thread's vectors of sY to the row gY."""
    tile = columns.tile
    rY = cute.make_rmem_tensor((tile.width, tile.vectors), gY.element_type)
    for i in cutlass.range_constexpr(tile.vectors):
        if columns.overlaps(i):
            cute.autovec_copy(vector(columns, sY, i), rY[None, i])
    columns.store(rY, gY)


def vector(columns: Columns, sX: cute.Tensor, i: int) -> cute.Tensor:
    """This thread's vector i of a row in smem."""
    tile = columns.tile
    number = cute.arch.thread_idx()[0] % tile.threads + i * tile.threads
    return cute.local_tile(sX, (tile.width,), (number,))

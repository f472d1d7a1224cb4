"""A row on its way to smem and back, vector by vector of memory, wherever it begins."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.row.columns import Columns


@cute.jit
def fetch(columns: Columns, gX: cute.Tensor, sX: cute.Tensor, between: Boolean) -> None:
    """Send this thread's vectors of the row gX to sX (cp.async, one group), which begins with the
    vector in which the row begins; those at its ends whole, too, where it lies `between` others,
    else by the element."""
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
    """Write this thread's vectors of the row that sY has to gY."""
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

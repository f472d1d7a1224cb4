"""Loads of single rows by cp.async, and the ring that such loads fill.

TMA takes a copy for each row and 128 bytes of it, which a warp issues one after the other. Here
eight lanes copy 128 bytes of a row, 16 each, so that a warp has four rows under way with one
instruction; several warps have a part of each tile's rows. What is beyond a row's columns, and a
row that does not count, are zeros in smem.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from cutex.device.atoms.async_copy import copy_async
from cutex.device.pipeline import PipelineState, Ring

WARP = 32  # lanes
UNIT_BYTES = 16  # of a lane's copy
CHUNK_BYTES = 128  # of a row, whose units the swizzle exchanges
UNITS = CHUNK_BYTES // UNIT_BYTES  # of a chunk, and lanes that copy one
TOGETHER = WARP // UNITS  # rows that a warp copies at a time
NO_ROW = -1


class CopiedRing(Ring):
    """The ring of slots that threads fill by cp.async, and an MMA role empties.

    full[slot]:  1 arrival of each thread that copies, when its copies are there.
    empty[slot]: `consumers` arrivals, when no read of the slot is outstanding.
    """

    def acquire(self, state: PipelineState) -> cute.Pointer:
        """Wait until the slot is empty; return its full barrier, on which `RowCopies` arrives."""
        self.empty.wait(state.phase, state.slot)
        return self.full[state.slot]

    def wait_full(self, state: PipelineState) -> None:
        """Wait until the slot is full, and let the tensor cores see it."""
        self.full.wait(state.phase, state.slot)
        cute.arch.fence_view_async_shared()


@dataclass(frozen=True)
class RowCopies:
    """The copies of one warp, of `warps` that fill a tile together: the rows `number` * (bRows /
    warps) and on of each tile."""

    rows: cute.Tensor  # (Rows, heads, D)
    sX: cute.Tensor  # (bRows, bD, SLOT) in chunks of 128 bytes (slots_layout)
    head: Int32
    number: Int32
    warps: int

    @property
    def count(self) -> int:
        """The rows of a tile that this warp copies: one for each lane at most."""
        return cute.size(self.sX, mode=[0]) // self.warps

    @cute.jit
    def load(self, place: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the copies of this warp's rows into `slot`: lane i says the place in `rows` of row
        i, or NO_ROW. This lane arrives on `full` when its own are there. A whole warp calls it."""
        element = self.rows.element_type.width // 8
        width, rows = UNIT_BYTES // element, cute.size(self.sX, mode=[0])
        chunks = cute.size(self.sX, mode=[1]) * element // CHUNK_BYTES
        of_row, of_head, _ = self.rows.stride
        lane = cute.arch.lane_idx()
        unit, units = lane % UNITS, cute.size(self.rows, mode=[2]) // width
        column = self.rows.iterator + (Int64(self.head) * of_head + unit * width)
        sX = cute.recast_ptr(self.sX.iterator, cute.make_swizzle(0, 4, 3))
        sX = sX + slot * cute.cosize(self.sX[None, None, 0].layout)
        for i in cutlass.range_constexpr(self.count // TOGETHER):
            mine = i * TOGETHER + lane // UNITS
            at = cute.arch.shuffle_sync(place, mine)
            row = self.number * self.count + mine
            to = sX + (row * (CHUNK_BYTES // element) + (unit ^ (row % UNITS)) * width)
            source = column + Int64(cutlass.max(at, 0)) * of_row
            for c in cutlass.range_constexpr(chunks):
                exists = (at >= 0) & (c * UNITS + unit < units)
                copy_async(
                    to + c * rows * (CHUNK_BYTES // element),
                    source + c * (CHUNK_BYTES // element),
                    UNIT_BYTES,
                    UNIT_BYTES if exists else Int32(0),
                )
        cute.arch.cp_async_mbarrier_arrive_noinc(full)

"""TMA loads of a tile in several boxes, all of them inside its matrix.

TMA fills rows outside a matrix with zeros, but slowly: such a row takes as long as four inside
(docs/facts/gemm.md#row-tma-box-lies), so a partial last tile takes up to twice as long as a full
one. Here a tile is loaded in boxes of some of its rows, and a box that would be outside is replaced
by the last one inside. The rows loaded instead of zeros belong to elements of C that are never
stored.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.mma import contiguous_rows_layout, slots_layout

SWIZZLE_BYTES = 128  # the contiguous bytes of a box


class BoxLoads(NamedTuple):
    """The loads of this CTA's part of each tile in boxes, into the smem of all CTAs in `mask`.

    The part is boxes along its rows, from the matrix's box `first` on, and boxes along K.
    """

    atom: cute.CopyAtom
    gmem: cute.Tensor  # (TMA, RestBox, RestK)
    smem: cute.Tensor  # (TMA, BOX, K_BOX, SLOT)
    first: Int32
    mask: Int16 | None = None

    @property
    def num_k_tiles(self) -> Int32:
        return cute.ceil_div(cute.size(self.gmem, mode=[2]), cute.size(self.smem, mode=[2]))

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the loads of tile `k_tile` into `slot`. A whole warp calls it."""
        more = {}
        if cutlass.const_expr(self.mask is not None):
            more = {"mcast_mask": self.mask}
        for k_box in cutlass.range_constexpr(cute.size(self.smem, mode=[2])):
            for box in cutlass.range_constexpr(cute.size(self.smem, mode=[1])):
                gX = self.gmem[None, self.inside(box), self.k_box(k_tile, k_box)]
                cute.copy(
                    self.atom, gX, self.smem[None, box, k_box, slot], tma_bar_ptr=full, **more
                )

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        """Have L2 load what `load` would."""
        for k_box in cutlass.range_constexpr(cute.size(self.smem, mode=[2])):
            for box in cutlass.range_constexpr(cute.size(self.smem, mode=[1])):
                gX = self.gmem[None, self.inside(box), self.k_box(k_tile, k_box)]
                cute.prefetch(self.atom, gX)

    def inside(self, box: int) -> Int32:
        """The matrix's box that is loaded as the part's box number `box`."""
        return cutlass.min(self.first + box, cute.size(self.gmem, mode=[1]) - 1)

    def k_box(self, k_tile: Int32, k_box: int) -> Int32:
        return k_tile * cute.size(self.smem, mode=[2]) + k_box


class BoxLoadsInTurn(NamedTuple):
    """The loads of whole tiles in boxes, of every tile along K whose number, modulo `sharers`, is
    `turn`."""

    boxes: BoxLoads
    turn: Int32
    sharers: int

    @property
    def num_k_tiles(self) -> Int32:
        return self.boxes.num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        if k_tile % self.sharers == self.turn:
            self.boxes.load(k_tile, slot, full)

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        self.boxes.prefetch(k_tile)


@cute.jit
def box_operand(
    mX: cute.Tensor,
    slots: cute.ComposedLayout,
    rows: cutlass.Constexpr[int],
    k: cutlass.Constexpr[int],
    k_major: cutlass.Constexpr[bool],
    shared: cutlass.Constexpr[bool],
) -> cpasync.TmaInfo:
    """The tensor map of `mX` (rows, K) that loads boxes of `rows` x `k` into tiles of the smem
    layout `slots`; for all CTAs of a mask, if `shared`."""
    layout = slots_layout(mX.element_type, rows, k, 1, SWIZZLE_BYTES)
    if cutlass.const_expr(not k_major):
        layout = contiguous_rows_layout(mX.element_type, rows, k, 1)
    op = cpasync.CopyBulkTensorTileG2SOp()
    if cutlass.const_expr(shared):
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    info = cpasync.make_tiled_tma_atom(op, mX, cute.select(layout, mode=[0, 1]), (rows, k))
    return cpasync.TmaInfo(info.atom, info.tma_tensor, slots)


@cute.jit
def box_loads(
    operand: cpasync.TmaInfo,
    sX: cute.Tensor,
    box: cutlass.Constexpr[tuple[int, int]],
    row_tile: Int32,
    number: Int32,
    sharers: cutlass.Constexpr[tuple[int, int]],
    mask: Int16,
    in_turn: cutlass.Constexpr[int] = 1,
) -> BoxLoads | BoxLoadsInTurn:
    """The loads of each tile in row `row_tile` that fall to CTA `number` of those that share it,
    in boxes of `box` (rows, K).

    `sharers`: the CTAs that each load a part of its rows, and those that each load a part of its K;
    `in_turn`: those that load whole tiles in turn instead. sX is (bRows, bK, SLOT).
    """
    of_rows, of_k = sharers
    sX = cute.flat_divide(sX, box)  # (boxRows, boxK, BOX, K_BOX, SLOT)
    gX = cute.flat_divide(operand.tma_tensor, box)  # (boxRows, boxK, RestBox, RestK)
    boxes, k_boxes = cute.size(sX, mode=[2]), cute.size(sX, mode=[3])
    first = row_tile * boxes
    if cutlass.const_expr(of_rows > 1):
        boxes = boxes // of_rows
        first += number * boxes
        # (boxRows, boxK, BOX / sharers, K_BOX, SLOT)
        sX = cute.logical_divide(sX, (None, None, boxes))[None, None, (None, number), None, None]
    if cutlass.const_expr(of_k > 1):
        k_boxes = k_boxes // of_k
        # (boxRows, boxK, BOX, K_BOX / sharers, SLOT), (boxRows, boxK, RestBox, RestK / sharers)
        sX = cute.logical_divide(sX, (None, None, None, k_boxes))[
            None, None, None, (None, number), None
        ]
        gX = cute.logical_divide(gX, (None, None, None, of_k))[None, None, None, (number, None)]
    tXsX, tXgX = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA, BOX, K_BOX, SLOT), (TMA, RestBox, RestK)
    loads = BoxLoads(operand.atom, tXgX, tXsX, first, mask if max(*sharers, in_turn) > 1 else None)
    return loads if in_turn == 1 else BoxLoadsInTurn(loads, number, in_turn)

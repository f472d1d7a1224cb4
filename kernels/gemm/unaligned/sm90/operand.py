"""An operand (M, K) with M contiguous and any pitch from one row of K to the next.

A tensor map takes strides of multiples of 16 bytes, and loads from multiples of 16 bytes. FOLD
strides of 2-byte elements always are one: here FOLD rows of K are one row of the tensor map. For a
K tile, one box brings the rows with equal number modulo FOLD, each from the multiple of FOLD
elements before the tile on; where the tile starts in the box depends on that number alone.

Threads read single elements from there: those of the MMA's operand A, which they hold in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import SMEM_ALIGN
from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.atoms.tma import AbLoads
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.unaligned.config import UnalignedConfig
from cutex.schedulers.order import select

LANES = 4  # of a warp that hold a row of operand A; K blocks of a tile, too


class Folded(NamedTuple):
    """The tensor map of A as (FOLD strides, K / FOLD), and the elements of a stride."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    stride: Int32


@cute.jit
def folded(mA: cute.Tensor, tiles: cutlass.Constexpr[UnalignedConfig]) -> Folded:
    """The tensor map of mA (M, K), of which K is a multiple of tiles.fold."""
    m, k = mA.shape
    stride = Int64(mA.stride[1])
    # NOTE: not FOLD strides: the last row may end where the memory does
    shape = Int32((tiles.fold - 1) * stride) + m, k // tiles.fold
    apart = cute.assume(tiles.fold * stride, divby=tiles.fold)
    tensor = cute.make_tensor(mA.iterator, cute.make_layout(shape, stride=(1, apart)))
    box = tiles.box_columns, tiles.k_of(16) // tiles.fold
    layout = cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, cute.make_layout(box))
    info = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)
    return Folded(info.atom, info.tma_tensor, Int32(stride))


def allocate(smem: SmemAllocator, kind: Any, tiles: UnalignedConfig) -> cute.Tensor:
    """The slots of A, (boxM, boxK, FOLD, SLOT)."""
    shape = tiles.box_columns, tiles.k_of(16) // tiles.fold, tiles.fold, tiles.num_stages
    return smem.allocate_tensor(kind, cute.make_layout(shape), SMEM_ALIGN)


class FoldedLoads(NamedTuple):
    """The loads of A for one row of tiles."""

    a: Folded
    sA: cute.Tensor  # (boxM, boxK, FOLD, SLOT)
    first: Int32  # the tile's first row

    @property
    def num_k_tiles(self) -> Int32:
        return cute.ceil_div(cute.size(self.a.tensor, mode=[1]), cute.size(self.sA, mode=[1]))

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the loads of K tile `k_tile` into `slot`. A whole warp calls it."""
        for residue in cutlass.range_constexpr(cute.size(self.sA, mode=[2])):
            sX, gX = self.box(k_tile, residue, slot)
            cute.copy(self.a.atom, gX, sX, tma_bar_ptr=full)

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        """Have L2 load K tile `k_tile`. A whole warp calls it."""
        for residue in cutlass.range_constexpr(cute.size(self.sA, mode=[2])):
            _, gX = self.box(k_tile, residue, Int32(0))
            cute.prefetch(self.a.atom, gX)

    def box(self, k_tile: Int32, residue: int, slot: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """The box of the rows of K that are `residue` modulo FOLD, in smem and in memory."""
        columns, rows, fold, _ = self.sA.shape
        column = residue * self.a.stride // fold * fold + self.first
        gX = cute.domain_offset((column, 0), self.a.tensor)
        gX = cute.local_tile(gX, (columns, rows), (0, k_tile))  # (boxM, boxK)
        sX = self.sA[None, None, residue, slot]  # (boxM, boxK)
        return cpasync.tma_partition(
            self.a.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sX, 0, 2),
            cute.group_modes(gX, 0, 2),
        )  # (TMA,), (TMA,)


@dataclass(frozen=True)
class UnalignedOperands:
    """A with its slots, and B as the general kernel's second operand."""

    a: Folded
    sA: cute.Tensor  # (boxM, boxK, FOLD, SLOT)
    general: AbOperands  # of which only b is there
    tile_m: int

    @property
    def b(self) -> Any:
        return self.general.b

    @property
    def num_k_tiles(self) -> Int32:
        return FoldedLoads(self.a, self.sA, Int32(0)).num_k_tiles

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`: its rows of A, and its part of B."""
        m, _ = cluster.place()
        x, sharers = self.general, cluster.size_m
        b = x.loads_of(1, x.b, x.sB, tile.n, m, sharers, cluster.column_mask())
        return AbLoads(FoldedLoads(self.a, self.sA, tile.m * self.tile_m), b)


class Rows(NamedTuple):
    """What this thread reads of its warpgroup's 64 rows of A in a slot.

    In wgmma's operand A, lane l of a warp holds, for each 16 of K, rows l / 4 and l / 4 + 8, and k
    = 2 (l % 4), the next, and both 8 further on (PTX ISA, "Register Fragments for
    wgmma.mma_async"). All boxes start in the same bank: the four lanes of a row read the K blocks
    of a tile in four different orders, so that a warp reads from all banks, and exchange registers
    afterwards.
    """

    elements: cute.Tensor  # all of A in smem
    places: Any  # of the elements (4 of K, 4 K blocks) of the thread's first row in slot 0
    slot_elements: int
    turn: Int32  # the first K block that this thread reads

    @cute.jit
    def read(self, slot: Int32) -> cute.Tensor:
        """Registers ((2, 2, 2), 4): of 2 of K, 2 rows, 2 halves of 16 of K, in this thread's order
        of K blocks."""
        kind = self.elements.element_type
        raw = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), LANES)), kind)
        first = slot * self.slot_elements
        for block in cutlass.range_constexpr(LANES):
            for k in cutlass.range_constexpr(4):
                at = first + self.places[k, block]
                for row in cutlass.range_constexpr(2):
                    raw[(k % 2, row, k // 2), block] = self.elements[at + 8 * row]
        return raw

    @cute.jit
    def ordered(self, raw: cute.Tensor, tCrA: cute.Tensor) -> None:
        """Write what was read to operand A, K block by K block."""
        words = cute.recast_tensor(raw, Int32)  # ((1, 2, 2), 4)
        size = cute.size(words) // LANES
        found = [[words[i + size * block] for i in range(size)] for block in range(LANES)]
        for step in (1, 2):
            turned = (self.turn & step) != 0
            found = [
                [select(turned, found[block - step][i], found[block][i]) for i in range(size)]
                for block in range(LANES)
            ]
        to = cute.recast_tensor(tCrA, Int32)
        for block in cutlass.range_constexpr(LANES):
            for i in cutlass.range_constexpr(size):
                to[i + size * block] = found[block][i]


@cute.jit
def rows_of(sA: cute.Tensor, stride: Int32, warpgroup: Int32) -> Rows:
    """The rows of this thread, which is of the CTA's MMA warpgroup `warpgroup`."""
    columns, rows, fold, slots = sA.shape
    slot_elements = columns * rows * fold
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
    turn = lane % LANES
    first = warpgroup * 64 + warp * 16 + lane // LANES
    places = cute.make_rmem_tensor(cute.make_layout((4, LANES)), Int32)
    for k in cutlass.range_constexpr(4):
        half = 8 * (k // 2)  # k is 0, 1, 8, 9 of the 16
        residue = (2 * turn + k % 2 + half) % fold
        column = first + residue * stride % fold
        for block in cutlass.range_constexpr(LANES):
            at = (block + turn) % LANES
            row = at * (16 // fold) + half // fold
            places[k, block] = residue * (columns * rows) + row * columns + column
    elements = cute.make_tensor(sA.iterator, cute.make_layout(slot_elements * slots))
    return Rows(elements, places, slot_elements, turn)

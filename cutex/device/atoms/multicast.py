"""TMA multicast: the CTAs of a cluster load the tiles that they have in common once.

In a cluster of (m, n) CTAs, the CTAs in one row work on the same rows of C, and so need the same
tiles of A; those in one column need the same tiles of B. Each loads an equal part of a shared tile,
or, where its rows do not divide into whole swizzle atoms, whole tiles in turn; TMA writes it into
the smem of all sharers, at the same offset, and counts its bytes on each CTA's own barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.boxes import BoxLoads, BoxLoadsInTurn, box_loads
from cutex.device.atoms.tma import AbLoads, TileLoads, load_operand, matrix, tile_loads
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.device.work_tile import WorkTile, place_in_cluster
from cutex.schedulers.order import select

ATOM_ROWS = 8  # of a 128-byte swizzle atom


@dataclass(frozen=True)
class Cluster:
    """CTAs that share loads: size_m x size_n, where CTA (m, n) has rank m + n * size_m.

    With `splits` > 1 the cluster has as many such groups, one for each share of a tile's K, and
    the ranks of a group begin at a multiple of its size.
    """

    size_m: int
    size_n: int
    splits: int = 1

    @property
    def size(self) -> int:
        """The number of CTAs that share loads."""
        return self.size_m * self.size_n

    @property
    def neighbours(self) -> int:
        """The number of CTAs in this one's row or column, itself counted once."""
        return self.size_m + self.size_n - 1

    def place(self) -> tuple[Int32, Int32]:
        return place_in_cluster(self.size_m, self.size_n, self.splits)

    def first_rank(self) -> Int32 | int:
        """The rank of the first CTA of this one's group."""
        if self.splits == 1:
            return 0
        rank = cute.arch.block_idx_in_cluster()
        return rank - rank % self.size

    def row_mask(self) -> Int16:
        """The multicast mask of the CTAs with the same m, which share A."""
        m, _ = self.place()
        row = sum(1 << (j * self.size_m) for j in range(self.size_n))
        return Int16(row << (m + self.first_rank()))

    def column_mask(self) -> Int16:
        """The multicast mask of the CTAs with the same n, which share B."""
        _, n = self.place()
        return Int16(((1 << self.size_m) - 1) << (n * self.size_m + self.first_rank()))

    def neighbour(self, number: Int32) -> Int32:
        """The rank of one of the `neighbours`, numbered from 0: first the column, then the row."""
        m, n = self.place()
        if cutlass.const_expr(self.size_m > 1 and self.size_n > 1):
            number = self._of_both(number, m, n)
        return self.first_rank() + number

    @cute.jit
    def _of_both(self, number: Int32, m: Int32, n: Int32) -> Int32:
        rank = number + n * self.size_m
        if number >= self.size_m:
            other = number - self.size_m
            if other >= n:
                other += 1
            rank = m + other * self.size_m
        return rank


def parts_of(rows: int, sharers: int) -> int:
    """The number of parts in which `sharers` CTAs load a tile of `rows` rows: one for each, or 1,
    the tile as a whole, if parts would not be whole swizzle atoms."""
    return sharers if rows % (ATOM_ROWS * sharers) == 0 else 1


@cute.jit
def shared_operand(
    mX: cute.Tensor, smem_layout: cute.ComposedLayout, sharers: cutlass.Constexpr[int]
) -> cpasync.TmaInfo:
    """The tensor map of `mX` (rows, K) with which `sharers` CTAs load a tile together, each an
    equal part of its rows, or all of it in turn."""
    if cutlass.const_expr(sharers == 1):
        return load_operand(mX, smem_layout)
    tile = cute.size(smem_layout, mode=[0]), cute.size(smem_layout, mode=[1])
    op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    parts = parts_of(tile[0], sharers)
    return cpasync.make_tiled_tma_atom(op, mX, smem_layout, tile, num_multicast=parts)


class SharedTileLoads(NamedTuple):
    """The loads of this CTA's part of each tile, into the smem of all CTAs in `mask`."""

    atom: cute.CopyAtom
    gmem: cute.Tensor  # (TMA, RestK)
    smem: cute.Tensor  # (TMA, SLOT)
    mask: Int16

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.gmem, mode=[1])

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        gX, sX = self.gmem[None, k_tile], self.smem[None, slot]
        cute.copy(self.atom, gX, sX, tma_bar_ptr=full, mcast_mask=self.mask)

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        cute.prefetch(self.atom, self.gmem[None, k_tile])


class TileLoadsInTurn(NamedTuple):
    """The loads of this CTA's turns: of every tile along K whose number, modulo `sharers`, is
    `turn`, into the smem of all CTAs in `mask`."""

    atom: cute.CopyAtom
    gmem: cute.Tensor  # (TMA, RestK)
    smem: cute.Tensor  # (TMA, SLOT)
    mask: Int16
    turn: Int32
    sharers: int

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.gmem, mode=[1])

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        if k_tile % self.sharers == self.turn:
            SharedTileLoads(self.atom, self.gmem, self.smem, self.mask).load(k_tile, slot, full)

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        cute.prefetch(self.atom, self.gmem[None, k_tile])


@cute.jit
def shared_tile_loads(
    operand: cpasync.TmaInfo,
    sX: cute.Tensor,
    row_tile: Int32,
    number: Int32,
    sharers: cutlass.Constexpr[int],
    mask: Int16,
) -> TileLoads | SharedTileLoads | TileLoadsInTurn:
    """The loads of each tile in row `row_tile` that fall to CTA `number` of the `sharers`: of its
    part of the rows, or in its turns; `sX` is (bRows, bK, SLOT)."""
    if cutlass.const_expr(sharers == 1):
        return tile_loads(operand, sX, row_tile)
    tile = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    gX = cute.local_tile(operand.tma_tensor, tile, (row_tile, None))  # (bRows, bK, RestK)
    sX, gX = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    parts = parts_of(tile[0], sharers)
    part = number if parts > 1 else 0
    tXsX, tXgX = cpasync.tma_partition(
        operand.atom, part, cute.make_layout(parts), sX, gX
    )  # (TMA, SLOT), (TMA, RestK)
    if cutlass.const_expr(parts > 1):
        return SharedTileLoads(operand.atom, tXgX, tXsX, mask)
    return TileLoadsInTurn(operand.atom, tXgX, tXsX, mask, number, sharers)


@cute.jit
def k_shared_operand(
    mX: cute.Tensor,
    smem_layout: cute.ComposedLayout,
    part_layout: cute.ComposedLayout,
    sharers: cutlass.Constexpr[int],
) -> cpasync.TmaInfo:
    """The tensor map of `mX` (rows, K) with which `sharers` CTAs load a tile together, each an
    equal part of K with the smem layout `part_layout`.

    Operands contiguous along their rows take this one: their rows cannot be divided into TMA boxes
    of whole swizzle atoms.
    """
    if cutlass.const_expr(sharers == 1):
        return load_operand(mX, smem_layout)
    part = cute.size(part_layout, mode=[0]), cute.size(part_layout, mode=[1])
    op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    info = cpasync.make_tiled_tma_atom(op, mX, part_layout, part)
    return cpasync.TmaInfo(info.atom, info.tma_tensor, smem_layout)


@cute.jit
def k_shared_tile_loads(
    operand: cpasync.TmaInfo,
    sX: cute.Tensor,
    row_tile: Int32,
    part: Int32,
    sharers: cutlass.Constexpr[int],
    mask: Int16,
) -> TileLoads | SharedTileLoads:
    """The loads of part number `part`, of `sharers` along K, of each tile in row `row_tile`; `sX`
    is (bRows, bK, SLOT)."""
    if cutlass.const_expr(sharers == 1):
        return tile_loads(operand, sX, row_tile)
    tile = cute.size(sX, mode=[0]), cute.size(sX, mode=[1]) // sharers
    gX = cute.local_tile(operand.tma_tensor, tile, (row_tile, None))  # (bRows, partK, RestPartK)
    gX = cute.logical_divide(gX, (None, None, sharers))[None, None, (part, None)]  # (.., RestK)
    sX = cute.logical_divide(sX, (None, tile[1], None))[None, (None, part), None]  # (.., SLOT)
    tXsX, tXgX = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA, SLOT), (TMA, RestK)
    return SharedTileLoads(operand.atom, tXgX, tXsX, mask)


@dataclass(frozen=True)
class AbOperands:
    """The tensor maps of A and B, and the smem slots that they load into.

    `k_major` says of each operand whether it is contiguous along K, and `boxes` the rows and the K
    of the boxes (boxes.py) that its tensor map loads; None: the whole of a CTA's part.
    """

    a: cpasync.TmaInfo
    b: cpasync.TmaInfo
    sA: cute.Tensor  # (bM, bK, SLOT)
    sB: cute.Tensor  # (bN, bK, SLOT)
    k_major: tuple[bool, bool] = (True, True)
    boxes: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)

    @property
    def num_k_tiles(self) -> Int32:
        return cute.ceil_div(cute.size(self.a.tma_tensor, mode=[1]), cute.size(self.sA, mode=[1]))

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`, its own tile of C: its part of what `cluster`
        shares."""
        m, n = cluster.place()
        a, b = matrix(self.a, tile), matrix(self.b, tile)
        return AbLoads(
            self.loads_of(0, a, self.sA, tile.m, n, cluster.size_n, cluster.row_mask()),
            self.loads_of(1, b, self.sB, tile.n, m, cluster.size_m, cluster.column_mask()),
        )

    @cute.jit
    def loads_of(
        self,
        which: cutlass.Constexpr[int],
        operand: cpasync.TmaInfo,
        sX: cute.Tensor,
        row_tile: Int32,
        number: Int32,
        sharers: cutlass.Constexpr[int],
        mask: Int16,
    ) -> TileLoads | SharedTileLoads | TileLoadsInTurn | BoxLoads | BoxLoadsInTurn:
        """The loads of operand 0 (A) or 1 (B) that fall to CTA `number` of the `sharers`."""
        k_major, box = self.k_major[which], self.boxes[which]
        if cutlass.const_expr(box is None):
            loads = shared_tile_loads if k_major else k_shared_tile_loads
            return loads(operand, sX, row_tile, number, sharers, mask)
        parts = parts_of(cute.size(sX, mode=[0]), sharers) if k_major else 1
        of_k = 1 if k_major else sharers
        return box_loads(
            operand, sX, box, row_tile, number, (parts, of_k), mask, sharers // (parts * of_k)
        )


@dataclass(frozen=True)
class SharedRing(Ring):
    """The ring of a CTA whose slots its neighbours in the cluster fill, too.

    full[slot]:  1 arrival, of this CTA's load warp, and `slot_bytes`, whoever loaded them.
    empty[slot]: the MMA warps of all neighbours: this CTA may then write into the smem of each.
    """

    cluster: Cluster = Cluster(1, 1)

    @staticmethod
    def of_cluster(
        smem: SmemAllocator,
        name: str,
        num_slots: int,
        slot_bytes: int,
        warps: int,
        cluster: Cluster,
    ) -> SharedRing:
        """Allocate a ring whose slots `warps` warps of each CTA empty."""
        full = Barrier.allocate(smem, f"{name} full", arrivals=1, slots=num_slots)
        arrivals = warps * cluster.neighbours
        empty = Barrier.allocate(smem, f"{name} empty", arrivals=arrivals, slots=num_slots)
        return SharedRing(num_slots, slot_bytes, full, empty, cluster)

    @cute.jit
    def release(self, state: PipelineState) -> None:
        """Arrive once at each neighbour for this warp: its reads of the slot are complete."""
        if cutlass.const_expr(self.cluster.size == 1):
            with cute.arch.elect_one():
                self.empty.arrive(state.slot)
        else:
            lane = cute.arch.lane_idx()
            if lane < self.cluster.neighbours:
                peer = self.cluster.neighbour(lane)
                cute.arch.mbarrier_arrive(self.empty[state.slot], peer)

    @cute.jit
    def release_before(
        self, state: PipelineState, exists: Boolean, steps: cutlass.Constexpr[int] = 1
    ) -> None:
        """Release the slot `steps` before `state`'s, whose wgmmas are done, if one `exists` in use.

        NOTE: a branch here, with wgmmas in flight that have operand A in registers, would have
        ptxas wait for each one at once; this arrival is predicated.
        """
        slot = select(state.slot == 0, state.num_slots, state.slot) - 1
        if cutlass.const_expr(steps > 1):
            slot = select(state.slot < steps, state.slot + state.num_slots, state.slot) - steps
        lane = cute.arch.lane_idx()
        if (lane < self.cluster.neighbours) & exists:
            if cutlass.const_expr(self.cluster.size == 1):
                self.empty.arrive(slot)
            else:
                cute.arch.mbarrier_arrive(self.empty[slot], self.cluster.neighbour(lane))

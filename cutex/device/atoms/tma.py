"""TMA: copies of tiles between a matrix in global memory and slots of smem, by one elected
thread."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from cutex.device.work_tile import WorkTile

EVICT_FIRST = 0x12F0_0000_0000_0000  # an L2 cache policy, as createpolicy.fractional encodes it


@cute.jit
def load_operand(
    mX: cute.Tensor, smem_layout: cute.ComposedLayout, pair: cutlass.Constexpr[bool] = False
) -> cpasync.TmaInfo:
    """The tensor map that loads tiles of `mX` (rows, K) into slots of `smem_layout` (bRows, bK,
    SLOT).

    With `pair`, each CTA loads its own tiles, and all bytes are counted on the leader's barrier.
    """
    rows, k = cute.size(smem_layout, mode=[0]), cute.size(smem_layout, mode=[1])
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    op = cpasync.CopyBulkTensorTileG2SOp(group)
    return cpasync.make_tiled_tma_atom(op, mX, smem_layout, (rows, k))


def matrix(operand: cpasync.TmaInfo, tile: WorkTile) -> cpasync.TmaInfo:
    """The matrix of the tile's batch entry; an operand with a single entry serves all tiles."""
    mX = operand.tma_tensor
    if cute.rank(mX) == 3:
        entry = cutlass.min(tile.batch, cute.size(mX, mode=[2]) - 1)
        mX = mX[None, None, entry]
    return cpasync.TmaInfo(operand.atom, mX, operand.smem_layout)


class KLoads(Protocol):
    """The loads of one row of tiles of an operand, wherever its rows are in memory (also those of
    device/row_source.py)."""

    @property
    def num_k_tiles(self) -> Int32: ...

    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the load of tile `k_tile` into `slot`; its bytes arrive on `full`."""


class TileLoads(NamedTuple):
    """The loads of one row of tiles of an operand, a tile for each step of K."""

    atom: cute.CopyAtom
    gmem: cute.Tensor  # (TMA, RestK)
    smem: cute.Tensor  # (TMA, SLOT)

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.gmem, mode=[1])

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the load of tile `k_tile` into `slot`; its bytes arrive on `full`. A whole warp
        calls it."""
        cute.copy(self.atom, self.gmem[None, k_tile], self.smem[None, slot], tma_bar_ptr=full)

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        """Have L2 load tile `k_tile`. A whole warp calls it."""
        cute.prefetch(self.atom, self.gmem[None, k_tile])


@cute.jit
def tile_loads(operand: cpasync.TmaInfo, sX: cute.Tensor, row_tile: Int32) -> TileLoads:
    """The loads of the tiles in row `row_tile`; `sX` is (bRows, bK, SLOT)."""
    tile = (cute.size(sX, mode=[0]), cute.size(sX, mode=[1]))
    gX = cute.local_tile(operand.tma_tensor, tile, (row_tile, None))  # (bRows, bK, RestK)
    tXsX, tXgX = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA, SLOT), (TMA, RestK)
    return TileLoads(operand.atom, tXgX, tXsX)


class AbLoads(NamedTuple):
    """The loads of A and B that one CTA's tile of C needs."""

    a: Any  # KLoads each
    b: Any

    @property
    def num_k_tiles(self) -> Int32:
        return self.a.num_k_tiles

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start both loads of K tile `k_tile` into `slot`. A whole warp calls it."""
        self.a.load(k_tile, slot, full)
        self.b.load(k_tile, slot, full)


class PairOperands(NamedTuple):
    """The tensor maps of A and B for a pair of CTAs, and the slots of this CTA."""

    a: cpasync.TmaInfo
    b: cpasync.TmaInfo
    sA: cute.Tensor  # (bM / 2, bK, SLOT)
    sB: cute.Tensor  # (bN / 2, bK, SLOT)

    @property
    def k(self) -> Int32:
        return cute.size(self.a.tma_tensor, mode=[1])

    def prefetch(self) -> None:
        """Prefetch the tensor maps."""
        for operand in (self.a, self.b):
            cpasync.prefetch_descriptor(operand.atom)

    @cute.jit
    def loads(self, tile: WorkTile) -> AbLoads:
        """The loads of this CTA's half of the rows of A and of B; `tile.m` counts tiles of one CTA,
        `tile.n` tiles of the pair."""
        rank = cute.arch.block_idx_in_cluster() % 2
        a, b = matrix(self.a, tile), matrix(self.b, tile)
        return AbLoads(tile_loads(a, self.sA, tile.m), tile_loads(b, self.sB, 2 * tile.n + rank))


@cute.jit
def store_operand(mX: cute.Tensor, smem_layout: cute.ComposedLayout) -> cpasync.TmaInfo:
    """The tensor map that stores slots of `smem_layout` (bRows, bCols, SLOT) to tiles of `mX`
    (rows, cols). TMA leaves out elements outside of mX."""
    tile = (cute.size(smem_layout, mode=[0]), cute.size(smem_layout, mode=[1]))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, smem_layout, tile)


class TileStores(NamedTuple):
    """The stores of one row of tiles of an operand."""

    atom: cute.CopyAtom
    smem: cute.Tensor  # (TMA, SLOT)
    gmem: cute.Tensor  # (TMA, RestCols)

    @cute.jit
    def store(self, slot: Int32, column_tile: Int32) -> None:
        """Start the store of `slot`, as a bulk group of its own. A whole warp, always the same one,
        calls it."""
        cute.copy(self.atom, self.smem[None, slot], self.gmem[None, column_tile])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def tile_stores(
    operand: cpasync.TmaInfo,
    sX: cute.Tensor,
    row_tile: Int32,
    policy: cutlass.Constexpr[int | None] = None,
) -> TileStores:
    """The stores to the tiles in row `row_tile`; `sX` is (bRows, bCols, SLOT); `policy` is an L2
    cache policy."""
    tile = (cute.size(sX, mode=[0]), cute.size(sX, mode=[1]))
    gX = cute.local_tile(operand.tma_tensor, tile, (row_tile, None))  # (bRows, bCols, RestCols)
    tXsX, tXgX = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA, SLOT), (TMA, RestCols)
    atom = operand.atom
    if cutlass.const_expr(policy is not None):
        atom = atom.with_(cache_policy=Int64(policy))
    return TileStores(atom, tXsX, tXgX)


@cute.jit
def bulk_load(from_gmem: cute.Tensor, to_smem: cute.Tensor, full: cute.Pointer) -> None:
    """Start the copy of a vector whose bytes arrive on `full`. A whole warp calls it."""
    op = cpasync.CopyBulkG2SOp()
    bits = cute.size(to_smem) * to_smem.element_type.width
    atom = cute.make_copy_atom(op, from_gmem.element_type, num_bits_per_copy=bits)
    source = cute.make_tensor(from_gmem.iterator, to_smem.layout)  # its size is known
    with cute.arch.elect_one():
        cute.copy(atom, source, to_smem, mbar_ptr=full)

"""Accumulator -> registers -> global memory, on Blackwell also by way of smem and TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms import tmem
from cutex.device.atoms.mma import WARPGROUP, Umma, Wgmma, make_wgmma
from cutex.device.atoms.tma import TileStores, tile_stores
from cutex.schedulers.one_tile import WorkTile

SUB_TILE_BARRIER = 1  # the named barrier of the four epilogue warps; 0 is the whole CTA's
WARP_ROWS = 16  # of a wgmma's 64, that each of its warps holds
FIRST_WARPGROUP_BARRIER = 1  # on sm_90a each warpgroup has one


@cute.jit
def store_vectors(
    rX: cute.Tensor, gX: cute.Tensor, cX: cute.Tensor, bounds: cute.Coord, width: cutlass.Constexpr
) -> None:
    """Store rX to gX, `width` elements at a time, where cX, the global coordinate, is in bounds.

    All three are alike in shape; consecutive elements lie in a row, and a vector that starts in
    bounds must end in bounds.
    """
    vectors = cute.make_layout((width, cute.size(rX) // width))
    rX = cute.composition(rX, vectors)  # (V, NumV)
    gX = cute.composition(gX, vectors)  # (V, NumV)
    cX = cute.composition(cX, vectors)  # (V, NumV)
    store = cute.make_copy_atom(
        CopyUniversalOp(), gX.element_type, num_bits_per_copy=width * gX.element_type.width
    )
    for v in cutlass.range(cute.size(rX, mode=[1]), unroll_full=True):
        if cute.elem_less(cX[0, v], bounds):
            cute.copy(store, rX[None, v], gX[None, v])


@cute.jit
def store_registers(
    mma: Wgmma, mC: cute.Tensor, tile: WorkTile, tile_mn: cutlass.Constexpr, thread: Int32
) -> None:
    """Round this thread's accumulators and store them to its tile, (bM, bN), of mC (M, N).

    A wgmma accumulator holds 2 neighbours of a row in one thread, 4 bytes; 4 threads fill a row of
    8 columns.
    """
    thr_mma = mma.tiled_mma.get_slice(thread)
    gC = cute.local_tile(mC, tile_mn, (tile.m, tile.n))  # (bM, bN)
    cC = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, (tile.m, tile.n))
    tCgC = thr_mma.partition_C(gC)  # (MMA, MMA_M, MMA_N)
    tCcC = thr_mma.partition_C(cC)  # (MMA, MMA_M, MMA_N)
    tCrC = cute.make_rmem_tensor_like(mma.tCrAcc, mC.element_type)
    tCrC.store(mma.tCrAcc.load().to(mC.element_type))
    store_vectors(tCrC, tCgC, tCcC, mC.shape, width=2)


@cute.jit
def store_tmem(mma: Umma, mC: cute.Tensor, tile: WorkTile, thread: Int32) -> None:
    """Load the accumulator, round it and store it to its tile of mC (M, N). 128 threads, 0 to 127.

    Each thread holds a whole row, so it stores 16 bytes at a time.
    """
    tAcc = mma.tCtAcc[(None, None), 0, 0]  # (bM, bN)
    tile_mn = tAcc.shape
    gC = cute.local_tile(mC, tile_mn, (tile.m, tile.n))  # (bM, bN)
    cC = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, (tile.m, tile.n))
    part = (tmem.LANES, tmem.load_columns(tile_mn[1]))
    tAcc, gC, cC = (cute.flat_divide(x, part)[None, None, 0, None] for x in (tAcc, gC, cC))
    load = tmem.make_load(tAcc[None, None, 0])
    thr_load = load.get_slice(thread)
    tTR_tAcc = thr_load.partition_S(tAcc)  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_gC = thr_load.partition_D(gC)  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_cC = thr_load.partition_D(cC)  # (T2R, T2R_M, T2R_N, NumParts)
    for i in cutlass.range_constexpr(cute.size(tTR_gC, mode=[3])):
        tTR_rAcc = cute.make_rmem_tensor(tTR_gC[None, None, None, 0].shape, cutlass.Float32)
        cute.copy(load, tTR_tAcc[None, None, None, i], tTR_rAcc)
        cute.arch.fence_view_async_tmem_load()
        tTR_rC = cute.make_rmem_tensor_like(tTR_rAcc, mC.element_type)
        tTR_rC.store(tTR_rAcc.load().to(mC.element_type))
        out, coord = tTR_gC[None, None, None, i], tTR_cC[None, None, None, i]
        store_vectors(tTR_rC, out, coord, mC.shape, width=128 // mC.element_type.width)


class SubTiles(NamedTuple):
    """One epilogue thread's row of C on its way out, a sub-tile of columns at a time:
    tensor memory -> registers -> a slot of smem -> TMA. Threads 0 to 127, each one row.

    NOTE: one barrier a sub-tile orders both ways. Behind it lie all warps' writes of this slot,
    fenced for TMA to read; and warp 0, which starts the stores, goes through it only when the
    store before last has read the slot that comes next.
    """

    copy: cute.TiledCopy
    tTR_tAcc: cute.Tensor  # (T2R, T2R_M, T2R_N, NumParts)
    tTR_cAcc: cute.Tensor  # (T2R, T2R_M, T2R_N) coordinates in a sub-tile
    tTR_sC: Any  # (T2R, T2R_M, T2R_N, SLOT); None where C leaves from registers

    @property
    def num_parts(self) -> int:
        return cute.size(self.tTR_tAcc, mode=[3])

    @cute.jit
    def load(self, part: cutlass.Constexpr[int]) -> cute.Tensor:
        """Sub-tile `part` of the accumulator, in registers when this returns."""
        tTR_rAcc = self.start_load(part)
        self.wait_loads()
        return tTR_rAcc

    @cute.jit
    def start_load(self, part: cutlass.Constexpr[int]) -> cute.Tensor:
        """The registers that sub-tile `part` of the accumulator is on its way to."""
        tTR_rAcc = cute.make_rmem_tensor(self.tTR_cAcc.shape, cutlass.Float32)
        self.start_load_into(tTR_rAcc, part)
        return tTR_rAcc

    @cute.jit
    def start_load_into(self, tTR_rAcc: cute.Tensor, part: Int32) -> None:
        cute.copy(self.copy, self.tTR_tAcc[None, None, None, part], tTR_rAcc)

    def wait_loads(self) -> None:
        cute.arch.fence_view_async_tmem_load()

    @cute.jit
    def store(
        self,
        tTR_rAcc: cute.Tensor,
        stores: TileStores,
        part: cutlass.Constexpr[int],
        column_tile: Int32,
    ) -> None:
        """Round sub-tile `part`, of any shape, put it into its slot and start its store to
        `column_tile`."""
        num_slots = cute.size(self.tTR_sC, mode=[3])
        pending = stores_until_reuse((part + 1) % self.num_parts, self.num_parts, num_slots) - 2
        self.leave(tTR_rAcc, stores, part % num_slots, column_tile, pending)

    @cute.jit
    def store_next(
        self, tTR_rAcc: cute.Tensor, stores: TileStores, part: Int32, column_tile: Int32
    ) -> None:
        """The same in a loop that is not unrolled, over all parts of a tile."""
        num_slots = cute.size(self.tTR_sC, mode=[3])
        counts = [stores_until_reuse(p, self.num_parts, num_slots) for p in range(self.num_parts)]
        self.leave(tTR_rAcc, stores, part % num_slots, column_tile, min(counts) - 2)

    @cute.jit
    def leave(
        self,
        tTR_rAcc: cute.Tensor,
        stores: TileStores,
        slot: Int32,
        column_tile: Int32,
        pending: cutlass.Constexpr[int],
    ) -> None:
        """By way of `slot`; `pending` stores may be unread when the next slot is written."""
        tTR_sC = self.tTR_sC[None, None, None, slot]
        tTR_rC = cute.make_rmem_tensor(tTR_sC.shape, tTR_sC.element_type)
        flat = cute.make_layout(cute.size(tTR_rC))
        rounded = cute.make_tensor(tTR_rAcc.iterator, flat).load().to(tTR_sC.element_type)
        cute.make_tensor(tTR_rC.iterator, flat).store(rounded)
        cute.autovec_copy(tTR_rC, tTR_sC)
        cute.arch.fence_view_async_shared()
        warp = cute.arch.warp_idx()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.barrier(barrier_id=SUB_TILE_BARRIER, number_of_threads=tmem.LANES)
        if warp == 0:
            stores.store(slot, column_tile)


def stores_until_reuse(part: int, num_parts: int, num_slots: int) -> int:
    """How many stores after the last use of its slot the store of `part` comes, tile upon tile."""
    if part >= num_slots:
        return num_slots
    last_use = part + (num_parts - 1 - part) // num_slots * num_slots  # in the tile before
    return part + num_parts - last_use


@cute.jit
def drain_stores() -> None:
    """Wait until TMA has read every slot that warp 0 stores from: smem may then go."""
    if cute.arch.warp_idx() == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def sub_tiles(
    tAcc: cute.Tensor,
    sC: cute.Tensor | None,
    thread: Int32,
    columns: cutlass.Constexpr[int] = 0,
) -> SubTiles:
    """`thread`'s part of tAcc (128, bN) in tensor memory and of sC (128, epiN, SLOT); of tAcc it
    takes `columns` at a time, if that is not epiN."""
    if cutlass.const_expr(columns == 0):
        columns = cute.size(sC, mode=[1])
    parts = cute.flat_divide(tAcc, (tmem.LANES, columns))[None, None, 0, None]
    load = tmem.make_load(parts[None, None, 0])  # of (128, columns, NumParts)
    thr_load = load.get_slice(thread)
    tTR_cAcc = thr_load.partition_D(cute.make_identity_tensor((tmem.LANES, columns)))
    tTR_sC = None
    if cutlass.const_expr(sC is not None):
        narrow = cute.flat_divide(tAcc, (tmem.LANES, cute.size(sC, mode=[1])))
        row = tmem.make_load(narrow[None, None, 0, 0]).get_slice(thread)
        tTR_sC = row.partition_D(sC)  # (T2R, T2R_M, T2R_N, SLOT)
    return SubTiles(load, thr_load.partition_S(parts), tTR_cAcc, tTR_sC)


class TileOut(NamedTuple):
    """SubTiles, and where in C they go."""

    parts: SubTiles
    stores: TileStores
    first_column: Int32  # of the tile, in sub-tiles

    @cute.jit
    def store(self, tTR_rAcc: cute.Tensor, turn: cutlass.Constexpr[int], part: Int32) -> None:
        """Sub-tile `part`, as the `turn`-th of this tile to leave."""
        self.parts.store(tTR_rAcc, self.stores, turn, self.first_column + part)


@dataclass(frozen=True)
class WayOut:
    """What C leaves through: a tensor map and slots of smem."""

    out: cpasync.TmaInfo
    sC: cute.Tensor  # (128, epiN, SLOT)
    policy: int | None = None  # what L2 keeps of C
    sums: cute.Tensor | None = None  # smem for those of a tile whose K is shared (stage 9)

    def prefetch(self) -> None:
        cpasync.prefetch_descriptor(self.out.atom)

    @cute.jit
    def of(self, tAcc: cute.Tensor, tile: WorkTile, row_tile: Int32) -> TileOut:
        """Of this thread's row of tAcc (128, bN), which is row_tile's, by 128, of the tile."""
        thread, _, _ = cute.arch.thread_idx()
        parts = sub_tiles(tAcc, self.sC, thread)
        stores = tile_stores(self.out, self.sC, row_tile, self.policy)
        return TileOut(parts, stores, tile.n * parts.num_parts)


def accumulator_parts(acc: cute.Tensor, tRS_sC: cute.Tensor) -> cute.Tensor:
    """A thread's accumulators by parts, each as large as a slot of tRS_sC (R2S, R2S_M, R2S_N,
    SLOT), columns first: (V, PART)."""
    size = cute.size(tRS_sC[None, None, None, 0])
    return cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))


@cute.jit
def round_to_smem(r2s: cute.TiledCopy, values: cute.Tensor, tRS_sC: cute.Tensor) -> None:
    """Round a part's `values` (V) and put them into a slot, (R2S, R2S_M, R2S_N)."""
    tRS_rC = cute.make_rmem_tensor(tRS_sC.shape, tRS_sC.element_type)
    flat = cute.make_tensor(tRS_rC.iterator, cute.make_layout(cute.size(tRS_rC)))
    flat.store(values.load().to(tRS_sC.element_type))
    cute.copy(r2s, tRS_rC, tRS_sC)


class WarpgroupStores(NamedTuple):
    """One warpgroup's way out: accumulators -> registers -> slots of its own in smem -> TMA, 64
    rows by epiN columns at a time.

    stmatrix writes 8 rows of 16 bytes at once, which the swizzle puts into different banks; TMA
    leaves out what lies outside of C. The store of one part runs while the next is rounded.
    """

    r2s: cute.TiledCopy
    tRS_sC: cute.Tensor  # (R2S, R2S_M, R2S_N, SLOT)
    atom: cute.CopyAtom
    bSG_sC: cute.Tensor  # (TMA, SLOT)
    bSG_gC: cute.Tensor  # (TMA, RestM, RestN)
    barrier: Int32  # the named barrier of this warpgroup
    stores: cutlass.Boolean  # whether this warp starts the stores

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """`acc` holds blocks of 64 rows, `row_step` blocks apart from block `row_tile` on; its
        columns begin at `column_tile`. Both count in parts, 64 x epiN."""
        parts = self.parts(acc)  # (V, PART)
        per_row = cute.size(parts, mode=[1]) // cute.size(acc, mode=[1])
        for part in cutlass.range_constexpr(cute.size(parts, mode=[1])):
            if cutlass.const_expr(part == 0 or self.num_slots == 1):
                self.wait(0)
            row, column = row_tile + part // per_row * row_step, column_tile + part % per_row
            self.store_part(parts[None, part], part % self.num_slots, row, column)

    @property
    def num_slots(self) -> int:
        return cute.size(self.tRS_sC, mode=[3])

    def parts(self, acc: cute.Tensor) -> cute.Tensor:
        """A thread's accumulators by parts, 64 x epiN, columns first: (V, PART)."""
        return accumulator_parts(acc, self.tRS_sC)

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        """Round a part's `values` (V), put them into `slot`, which is free, start its store, and
        see to it that the slot after is free."""
        round_to_smem(self.r2s, values, self.tRS_sC[None, None, None, slot])
        cute.arch.fence_view_async_shared()
        self.wait(max(0, self.num_slots - 2), pending=self.num_slots > 1)
        if self.stores:
            cute.copy(self.atom, self.bSG_sC[None, slot], self.bSG_gC[None, row, column])
            cute.arch.cp_async_bulk_commit_group()

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        return self.tRS_sC.element_type

    @cute.jit
    def wait(self, groups: cutlass.Constexpr[int], pending: cutlass.Constexpr[bool] = True) -> None:
        """A barrier of the warpgroup, passed when all but the last `groups` stores are read."""
        if cutlass.const_expr(pending):  # noqa: SIM102 - known when tracing, the next is not
            if self.stores:
                cute.arch.cp_async_bulk_wait_group(groups, read=True)
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)

    @cute.jit
    def drain(self) -> None:
        """Wait until TMA has read every slot: smem may then go."""
        if self.stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class WarpStores(NamedTuple):
    """One warp's way out, transposed: accumulators -> registers -> smem of its own, where stmatrix
    turns them -> registers -> global memory, whole sectors of 32 bytes at a time.

    For a CTA with one tile, whose last instructions nothing hides: no warp waits for another, nor
    for TMA to begin.
    """

    r2s: cute.TiledCopy
    tRS_sC: cute.Tensor  # (R2S, R2S_M, R2S_N, SLOT)
    sC: cute.Tensor  # (64, epiN, SLOT) of this warpgroup
    mC: cute.Tensor  # (M, N), its rows contiguous and of a multiple of 16 bytes
    first_row: Int32  # of mC, from which tiles are counted

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """As WarpgroupStores.store."""
        rows, columns, num_slots = (cute.size(self.sC, mode=[i]) for i in range(3))
        parts = accumulator_parts(acc, self.tRS_sC)  # (V, PART)
        per_row = cute.size(parts, mode=[1]) // cute.size(acc, mode=[1])
        for part in cutlass.range_constexpr(cute.size(parts, mode=[1])):
            slot = part % num_slots
            if cutlass.const_expr(part >= num_slots):
                cute.arch.sync_warp()  # the last part's lanes have read it
            round_to_smem(self.r2s, parts[None, part], self.tRS_sC[None, None, None, slot])
            cute.arch.sync_warp()
            row = self.first_row + (row_tile + part // per_row * row_step) * rows
            self.to_global(slot, row, (column_tile + part % per_row) * columns)

    @cute.jit
    def to_global(self, slot: cutlass.Constexpr[int], row: Int32, column: Int32) -> None:
        """The rows of this warp: 2 lanes have a column's, 16 bytes each."""
        width = 128 // self.mC.element_type.width
        vector = cute.make_copy_atom(CopyUniversalOp(), self.mC.element_type, num_bits_per_copy=128)
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        of_warp = WARP_ROWS // width  # vectors in a column
        columns_at_once = 32 // of_warp
        place, lane_column = warp * of_warp + lane % of_warp, lane // of_warp
        vectors = cute.logical_divide(self.sC[None, None, slot], (width, 1))  # ((V, ROW), (1, COL))
        passes = cute.size(self.sC, mode=[1]) // columns_at_once
        values = cute.make_rmem_tensor((width, passes), self.mC.element_type)
        for i in cutlass.range_constexpr(passes):
            here = lane_column + i * columns_at_once
            cute.copy(vector, vectors[(None, place), (0, here)], values[None, i])
        row, column = row + place * width, column + lane_column
        here = cute.domain_offset((row, column), self.mC)
        address = here.iterator.toint()
        for i in cutlass.range_constexpr(passes):
            if cute.elem_less((row, column + i * columns_at_once), self.mC.shape):
                elements = cute.crd2idx((0, i * columns_at_once), here.layout)
                to = cute.make_ptr(
                    self.mC.element_type,
                    address + elements * (self.mC.element_type.width // 8),
                    cute.AddressSpace.gmem,
                    assumed_align=16,
                )
                cute.copy(vector, values[None, i], cute.make_tensor(to, (width,)))

    def drain(self) -> None:
        """Nothing reads smem when its lanes are through."""


@cute.jit
def warp_stores(
    mC: cute.Tensor, sC: cute.Tensor, num_slots: cutlass.Constexpr[int], first_row: Int32
) -> WarpStores:
    """Of this thread's warp; sC is (64, epiN, SLOT), each warpgroup has `num_slots`."""
    r2s, tRS_sC, sC = warpgroup_slots(sC, num_slots, StMatrix8x8x16bOp(True, 4))
    return WarpStores(r2s, tRS_sC, sC, mC, first_row)


@cute.jit
def warpgroup_slots(
    sC: cute.Tensor, num_slots: cutlass.Constexpr[int], op: Any, bits: cutlass.Constexpr[int] = 0
) -> tuple[cute.TiledCopy, cute.Tensor, cute.Tensor]:
    """What writes a wgmma's accumulators to smem with `op`, `bits` at a time where it leaves that
    open, where it writes them, (R2S, R2S_M, R2S_N, SLOT), and the `num_slots` of this thread's
    warpgroup, (64, epiN, SLOT)."""
    thread, _, _ = cute.arch.thread_idx()
    warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
    sC = cute.logical_divide(sC, (None, None, num_slots))  # (64, epiN, (SLOT, WARPGROUP))
    sC = sC[None, None, (None, warpgroup)]  # (64, epiN, SLOT)
    how = {"num_bits_per_copy": bits} if bits else {}
    to_smem = cute.make_copy_atom(op, sC.element_type, **how)
    # NOTE: every wgmma of fp32 accumulators lays them out alike, whatever it multiplies
    mma = make_wgmma(1, cute.size(sC, mode=[1]), cutlass.BFloat16)
    r2s = cute.make_tiled_copy_C(to_smem, mma)
    return r2s, r2s.get_slice(thread % WARPGROUP).partition_D(sC), sC


@cute.jit
def warpgroup_stores(
    operand: cpasync.TmaInfo,
    sC: cute.Tensor,
    num_slots: cutlass.Constexpr[int],
    transpose: cutlass.Constexpr[bool] = False,
    words: cutlass.Constexpr[int] = 0,
) -> WarpgroupStores:
    """Of this thread's warpgroup; sC is (64, epiN, SLOT), each warpgroup has `num_slots`. With
    `transpose`, the 64 rows are what is contiguous in sC and in global memory. Elements of 32 bits,
    which stmatrix does not take, go to smem `words` at a time."""
    part = cute.size(sC, mode=[0]), cute.size(sC, mode=[1])
    op, bits = StMatrix8x8x16bOp(transpose, 4), 0
    if cutlass.const_expr(words > 0):
        op, bits = CopyUniversalOp(), 32 * words
    r2s, tRS_sC, sC = warpgroup_slots(sC, num_slots, op, bits)
    gC = cute.flat_divide(operand.tma_tensor, part)  # (64, epiN, RestM, RestN)
    bSG_sC, bSG_gC = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
    )  # (TMA, SLOT), (TMA, RestM, RestN)
    warp = cute.arch.warp_idx()
    barrier = FIRST_WARPGROUP_BARRIER + warp // 4
    return WarpgroupStores(r2s, tRS_sC, operand.atom, bSG_sC, bSG_gC, barrier, warp % 4 == 0)

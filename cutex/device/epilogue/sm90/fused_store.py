"""Stores of a wgmma's accumulators through an epilogue's operations.

Accumulators are processed in parts of 64 rows by epiN columns: operations, rounding, then TMA
(FusedStore) or stores of single elements, to any strides (ElementStore). A matrix that is added may
be loaded by TMA, into the slots that the result is stored from (PartLoads).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from cutex.device.atoms.wgmma import WARPGROUP, Wgmma
from cutex.device.epilogue.epilogue_ops import BoundOps, Fragment
from cutex.device.epilogue.sm90.tma_store import (
    TURNS_BARRIER,
    WarpgroupStore,
    registers_of,
    warpgroup_store,
)
from cutex.device.pipeline import Barrier

QUAD = 0x1C1F  # operand c of a shuffle: lanes count within their four (PTX ISA, shfl.sync)


def apply_to_part(
    ops: BoundOps,
    values: cute.Tensor,
    corner: tuple[Int32, Int32],
    batch: Int32 | int,
    preloaded: cute.Tensor | None = None,
) -> Fragment:
    """The fragment of a part's `values` (V) after `ops`; its first element is at `corner` of the
    product, and `preloaded` is laid out like `values`.

    A thread holds 2 neighbours in each of 2 rows, 8 apart, for every 8 columns (PTX ISA, wgmma,
    "Register Fragments").
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % 32, thread // 32 % 4
    eights = cute.size(values) // 4
    rX = cute.make_rmem_tensor(cute.size(values), Float32)  # (V)
    rX.store(values.load())
    across, along = (2, 2), ((2, eights), (1, 4))
    row, column = corner[0] + 16 * warp + lane // 4, corner[1] + 2 * (lane % 4)
    rows = tuple(row + 8 * i for i in range(2))
    columns = tuple(column + 8 * j + e for j in range(eights) for e in range(2))
    if ops.transposed:
        rows, columns = columns, rows
        layout = cute.make_layout((along[0], across[0]), stride=(along[1], across[1]))
    else:
        layout = cute.make_layout((across[0], along[0]), stride=(across[1], along[1]))
    rX = cute.make_tensor(rX.iterator, layout)  # (R, C)
    if preloaded is not None:
        preloaded = cute.make_tensor(preloaded.iterator, layout)  # (R, C)
    x = Fragment(rX, rows, columns, batch, ops.bounds, run=1 if ops.transposed else 2)
    return ops.apply(x, preloaded)


@cute.jit
def write_part(
    x: Fragment, gated: cutlass.Constexpr[bool], r2s: cute.TiledCopy, tRS_sC: cute.Tensor
) -> None:
    """Round a part after its operations and write it to a slot, (R2S, R2S_M, R2S_N)."""
    size = cute.size(x.values)  # gates leave half
    tRS_rC = registers_of(tRS_sC, size)
    flat = cute.make_layout(size)
    kind = tRS_sC.element_type
    rounded = cute.make_rmem_tensor(size, kind)  # (V)
    rounded.store(cute.make_tensor(x.values.iterator, flat).load().to(kind))
    if cutlass.const_expr(gated):
        rounded = neighbours(rounded)
    cute.make_tensor(tRS_rC.iterator, flat).store(rounded.load())
    cute.copy(r2s, tRS_rC, tRS_sC)


@dataclass(frozen=True)
class PartLoads:
    """Loads of a matrix as large as out, part by part: TMA -> slots of smem -> registers. The
    result is written over what was read, and stored from the same slots.

    barrier      arrives                                       waits
    full[slot]   1: the warp that stores, and the bytes by     the warpgroup, before it reads
                 TMA; once more at the end of a tile where     the slot
                 a slot had an odd number of parts

    NOTE: so every tile begins with all barriers in phase 0, and no phase is carried from tile to
    tile.
    """

    atom: cute.CopyAtom
    bGS_gX: cute.Tensor  # (TMA, RestM, RestN), or with a mode L
    bGS_sX: cute.Tensor  # (TMA, SLOT)
    s2r: cute.TiledCopy
    tSR_sX: cute.Tensor  # (S2R, S2R_M, S2R_N, SLOT)
    full: Barrier
    first: Int32  # index of the first of this warpgroup's barriers
    bytes: int  # bytes of a part

    @cute.jit
    def start(self, slot: cutlass.Constexpr[int], row: Int32, column: Int32, batch: Int32) -> None:
        """Start the load of the part at (row, column), counted in parts, into `slot`, which is
        free. One warp calls it."""
        where: tuple = (None, row, column)
        if cutlass.const_expr(cute.rank(self.bGS_gX) == 4):
            where = (None, row, column, batch)
        barrier = self.first + slot
        with cute.arch.elect_one():
            self.full.arrive_expecting(self.bytes, barrier)
        cute.copy(
            self.atom, self.bGS_gX[where], self.bGS_sX[None, slot], tma_bar_ptr=self.full[barrier]
        )

    @cute.jit
    def prefetch(self, row: Int32, column: Int32, batch: Int32) -> None:
        """Have L2 load the part at (row, column). One warp calls it."""
        where: tuple = (None, row, column)
        if cutlass.const_expr(cute.rank(self.bGS_gX) == 4):
            where = (None, row, column, batch)
        cute.prefetch(self.atom, self.bGS_gX[where])

    @cute.jit
    def read(self, slot: cutlass.Constexpr[int], use: cutlass.Constexpr[int]) -> cute.Tensor:
        """This thread's values (V) of the tile's `use`-th part in `slot`, in the order of the
        accumulator's."""
        self.full.wait(use % 2, self.first + slot)
        tSR_sX = self.tSR_sX[None, None, None, slot]  # (S2R, S2R_M, S2R_N)
        tSR_rX = cute.make_rmem_tensor(tSR_sX.shape, tSR_sX.element_type)  # (S2R, S2R_M, S2R_N)
        cute.copy(self.s2r, tSR_sX, tSR_rX)
        return cute.make_tensor(tSR_rX.iterator, cute.make_layout(cute.size(tSR_rX)))

    @cute.jit
    def even_out(self, slot: cutlass.Constexpr[int]) -> None:
        """Complete one more phase of `slot`'s barrier. One warp calls it, when all have waited for
        the phase before."""
        with cute.arch.elect_one():
            self.full.arrive(self.first + slot)


@cute.jit
def part_loads(
    operand: cpasync.TmaInfo,
    sX: cute.Tensor,
    full: Barrier,
    num_slots: cutlass.Constexpr[int],
    transpose: cutlass.Constexpr[bool],
) -> PartLoads:
    """The loads of this thread's warpgroup; the arguments are those of `warpgroup_store`."""
    thread, _, _ = cute.arch.thread_idx()
    warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
    part = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    slots = cute.logical_divide(sX, (None, None, num_slots))  # (64, epiN, (SLOT, WG))
    sX = slots[None, None, (None, warpgroup)]  # (64, epiN, SLOT)
    gX = cute.flat_divide(operand.tma_tensor, part)  # (64, epiN, RestM, RestN)
    bGS_sX, bGS_gX = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )  # (TMA, SLOT), (TMA, RestM, RestN)
    width = sX.element_type.width
    if cutlass.const_expr(width == 16):
        to_registers = cute.make_copy_atom(LdMatrix8x8x16bOp(transpose, 4), sX.element_type)
    else:
        bits = width if transpose else 2 * width
        to_registers = cute.make_copy_atom(
            CopyUniversalOp(), sX.element_type, num_bits_per_copy=bits
        )
    s2r = cute.make_tiled_copy_C(to_registers, Wgmma(part[1], cutlass.BFloat16).tiled())
    tSR_sX = s2r.get_slice(thread % WARPGROUP).partition_S(sX)  # (S2R, S2R_M, S2R_N, SLOT)
    num_bytes = part[0] * part[1] * width // 8
    first = warpgroup * num_slots
    return PartLoads(operand.atom, bGS_gX, bGS_sX, s2r, tSR_sX, full, first, num_bytes)


@dataclass(frozen=True)
class FusedStore:
    """The store of one warpgroup's accumulators through operations, by TMA."""

    plain: WarpgroupStore  # bSG_gC (TMA, RestM, RestN), or with a mode L
    ops: BoundOps
    part: tuple[int, int]  # (rows, columns) of the product; gates leave half its columns
    loads: PartLoads | None = None
    batch: Int32 | int = 0
    at_once: bool = False  # whether parts that have a slot each are written behind one barrier
    turns: int = 1  # warpgroups that take turns at one slot, so that the ring has more smem

    @property
    def num_slots(self) -> int:
        return self.plain.num_slots

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """Store `acc`; the arguments are those of WarpgroupStore.store."""
        parts = self.parts(acc)  # (V, PART)
        where = self.places(acc, row_tile, row_step, column_tile)
        if cutlass.const_expr(self.at_once and 1 < len(where) <= self.num_slots):
            self.wait(0)
            for part in cutlass.range_constexpr(len(where)):
                self.round(parts[None, part], part, *where[part])
            self.wait(0, pending=False)
            if self.plain.stores:
                for part in cutlass.range_constexpr(len(where)):
                    self.start_store(part, *where[part])
        elif cutlass.const_expr(self.turns > 1):
            self.store_in_turns(parts, where)
        elif cutlass.const_expr(self.loads is None):
            for part in cutlass.range_constexpr(len(where)):
                if cutlass.const_expr(part == 0 or self.num_slots == 1):
                    self.wait(0)
                self.store_part(parts[None, part], part % self.num_slots, *where[part])
        else:
            self.store_preloaded(self.loads, parts, where)

    @cute.jit
    def expect(
        self,
        acc: cute.Tensor,
        row_tile: Int32,
        row_step: Int32,
        column_tile: Int32,
        soon: cutlass.Boolean,
    ) -> None:
        """Have L2 load what the store of `acc` will add, if it is `soon`: from memory it would take
        as long as several parts (docs/facts/gemm.md#added-early)."""
        assert self.loads is not None
        if soon:  # noqa: SIM102
            if self.plain.stores:
                for row, column in self.places(acc, row_tile, row_step, column_tile):
                    self.loads.prefetch(row, column, self.batch)

    def places(
        self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32
    ) -> list[tuple[Int32, Int32]]:
        """The row and the column of each part of `acc`, in parts of out."""
        count = cute.size(self.parts(acc), mode=[1])
        per_row = count // cute.size(acc, mode=[1])
        return [
            (row_tile + part // per_row * row_step, column_tile + part % per_row)
            for part in range(count)
        ]

    @cute.jit
    def store_in_turns(
        self, parts: cute.Tensor, where: cutlass.Constexpr[list[tuple[Int32, Int32]]]
    ) -> None:
        """Store all parts; a warpgroup writes the slot when TMA has read what the one before it
        wrote."""
        mine = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        for part in cutlass.range_constexpr(len(where)):
            for turn in cutlass.range_constexpr(self.turns):
                if self.plain.stores:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(
                    barrier_id=TURNS_BARRIER, number_of_threads=self.turns * WARPGROUP
                )
                if mine == turn:
                    self.store_part(parts[None, part], 0, *where[part])

    @cute.jit
    def store_preloaded(
        self,
        loads: PartLoads,
        parts: cute.Tensor,
        where: cutlass.Constexpr[list[tuple[Int32, Int32]]],
    ) -> None:
        """Store all parts; in one slot each, the added matrix is loaded, read, overwritten by the
        result, stored.

        NOTE: when a part is to be stored, all stores before it have read their slots, so the slot
        of the part before takes the next load: the more slots, the more loads in flight.
        """
        slots, count = self.num_slots, len(where)
        if self.plain.stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            for part in cutlass.range_constexpr(min(slots, count)):
                loads.start(part, *where[part], self.batch)
        for part in cutlass.range_constexpr(count):
            slot, later = part % slots, part - 1 + slots
            held = loads.read(slot, part // slots)
            self.round(parts[None, part], slot, *where[part], held)
            if self.plain.stores:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if cutlass.const_expr(part > 0 and later < count):
                    loads.start(later % slots, *where[later], self.batch)
            self.wait(0, pending=False)
            if self.plain.stores:
                self.start_store(slot, *where[part])
                if cutlass.const_expr(part + slots >= count and part // slots % 2 == 0):
                    loads.even_out(slot)

    def parts(self, acc: cute.Tensor) -> cute.Tensor:
        """A thread's accumulators (V, PART) in parts of 64 x epiN, columns first."""
        size = self.part[0] * self.part[1] // WARPGROUP
        return cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))

    def wait(self, groups: int, pending: bool = True) -> None:
        self.plain.wait(groups, pending)

    def drain(self) -> None:
        self.plain.drain()

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        """Store a part's `values` (V) through `slot`; `row` and `column` count in parts."""
        self.round(values, slot, row, column)
        self.wait(max(0, self.num_slots - 2), pending=self.num_slots > 1)
        if self.plain.stores:
            self.start_store(slot, row, column)

    @cute.jit
    def round(
        self,
        values: cute.Tensor,
        slot: cutlass.Constexpr[int],
        row: Int32,
        column: Int32,
        held: cute.Tensor | None = None,
    ) -> None:
        """Run the operations on a part's `values` (V), and write the rounded result to `slot`."""
        plain = self.plain
        corner = row * self.part[0], column * self.part[1]
        x = apply_to_part(self.ops, values, corner, self.batch, held)
        write_part(x, self.ops.gated, plain.r2s, plain.tRS_sC[None, None, None, slot])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def start_store(self, slot: cutlass.Constexpr[int], row: Int32, column: Int32) -> None:
        """Start the store of `slot`. The one warp that stores calls it."""
        plain = self.plain
        where: tuple = (None, row, column)
        if cutlass.const_expr(cute.rank(plain.bSG_gC) == 4):
            where = (None, row, column, self.batch)
        cute.copy(plain.atom, plain.bSG_sC[None, slot], plain.bSG_gC[where])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def neighbours(gated: cute.Tensor) -> cute.Tensor:
    """The 16-bit results of gates (V), moved between threads to where a wgmma of half the columns
    holds them.

    Of the columns of four gates in turn, a thread holds one, its lane's, in each of 2 rows: (2,
    FOURS). Two fours make eight columns, of which it needs two neighbours: (2, 2, EIGHTS).
    """
    size = cute.size(gated)
    across = cute.make_layout((2, 2, size // 4), stride=(2, 1, 4))  # (FOUR, ROW, EIGHT)
    pairs = cute.make_rmem_tensor(size, gated.element_type)  # (V)
    pairs.store(cute.make_tensor(gated.iterator, across).load().reshape((size,)))
    words = cute.recast_tensor(pairs, Int32)  # ((ROW, EIGHT)): of both fours
    lane = cute.arch.lane_idx() % 4
    halves = Int32(0x5410) if lane < 2 else Int32(0x7632)  # lanes 0 and 1 take from the first four
    for i in cutlass.range_constexpr(cute.size(words)):
        both = [
            cute.arch.shuffle_sync_op(words[i], (2 * lane + e) % 4, mask_and_clamp=QUAD)
            for e in range(2)
        ]
        words[i] = Int32(cute.arch.prmt(both[0], both[1], halves))
    return pairs


def fused_store(
    operand: cpasync.TmaInfo,
    sC: cute.Tensor,
    num_slots: int,
    columns_contiguous: bool,
    ops: BoundOps,
    full: Barrier | None,
    turns: int = 1,
) -> FusedStore:
    """The store of this thread's warpgroup; sC is (64, epiN, SLOT), each warpgroup has `num_slots`,
    or all `turns` of them have one; `full` are the barriers of PartLoads."""
    rows, columns = cute.size(sC, mode=[0]), cute.size(sC, mode=[1])
    if ops.gated:
        columns *= 2
    by_stmatrix = sC.element_type.width == 16
    transpose = by_stmatrix and not columns_contiguous
    words = 0 if by_stmatrix else 2 if columns_contiguous else 1
    plain = warpgroup_store(operand, sC, num_slots, transpose, words, turns > 1)
    loads = None
    if full is not None and ops.preloaded is not None:
        matrix = ops.arguments[ops.preloaded]
        loads = part_loads(matrix, sC, full, num_slots, not columns_contiguous)
    return FusedStore(plain, ops, (rows, columns), loads, turns=turns)


@dataclass(frozen=True)
class ElementStore:
    """The store of one warpgroup's accumulators through operations, to out of any strides."""

    out: cute.Tensor  # (M, N) or (M, N, L), oriented as the accumulator
    epi_n: int
    ops: BoundOps
    batch: Int32 | int = 0

    store = WarpgroupStore.store
    num_slots = 2  # there are no slots: with 2, no part waits for another

    def parts(self, acc: cute.Tensor) -> cute.Tensor:
        size = 64 * self.epi_n // WARPGROUP
        return cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))

    def wait(self, groups: int, pending: bool = True) -> None:
        """Do nothing: this store uses no smem slots."""

    def drain(self) -> None:
        """Do nothing: this store uses no smem slots."""

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        corner = row * 64, column * self.epi_n
        x = apply_to_part(self.ops, values, corner, self.batch)
        out = self.out
        if cutlass.const_expr(cute.rank(out) == 3):
            out = out[None, None, self.batch]  # (M, N)
        self.ops.store_elements(x, out)

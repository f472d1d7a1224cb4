"""A warpgroup's accumulators on their way out of an SM90 kernel, through the epilogue's operations.

The accumulators go part by part, 64 rows by epiN columns: pieces, rounding, then by TMA
(FusedStores) or element by element to any strides (DirectStores). A matrix that a piece adds may
come in by TMA, through the same slots that the result leaves by (PartLoads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from cutex.device.atoms.mma import WARPGROUP, make_wgmma
from cutex.device.epilogue import epilogue_ops as fusion
from cutex.device.epilogue.stores import WarpgroupStores, warpgroup_stores
from cutex.device.pipeline import Barrier

QUAD = 0x1C1F  # of a shuffle: lanes count within their four (PTX ISA, shfl.sync)


@dataclass(frozen=True)
class Fusion:
    """The pieces with what was passed for them, and where the tile lies in out."""

    pieces: tuple[fusion.Piece, ...]
    passed: tuple[Any, ...]
    bounds: tuple[Int32, Int32]  # M and N of out
    transposed: bool  # the accumulator's rows are out's columns
    staged: int | None = None  # which of `passed` comes with the part, by PartLoads

    def fragment(
        self,
        values: cute.Tensor,
        row: Int32,
        column: Int32,
        batch: Int32 | int,
        held: cute.Tensor | None = None,
    ) -> fusion.Fragment:
        """The part whose first accumulator is at (row, column), after the pieces; `held` lies like
        `values`.

        A thread holds 2 neighbours in each of 2 rows, 8 apart, for every 8 columns (PTX ISA,
        wgmma, "Register Fragments").
        """
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32 % 4
        eights = cute.size(values) // 4
        rX = cute.make_rmem_tensor(cute.size(values), Float32)
        rX.store(values.load())
        across, along = (2, 2), ((2, eights), (1, 4))
        row, column = row + 16 * warp + lane // 4, column + 2 * (lane % 4)
        rows = tuple(row + 8 * i for i in range(2))
        columns = tuple(column + 8 * j + e for j in range(eights) for e in range(2))
        if self.transposed:
            rows, columns = columns, rows
            layout = cute.make_layout((along[0], across[0]), stride=(along[1], across[1]))
        else:
            layout = cute.make_layout((across[0], along[0]), stride=(across[1], along[1]))
        rX = cute.make_tensor(rX.iterator, layout)  # (R, C)
        passed = self.passed
        if held is not None and self.staged is not None:
            held = fusion.Held(cute.make_tensor(held.iterator, layout))  # (R, C)
            passed = (*passed[: self.staged], held, *passed[self.staged + 1 :])
        x = fusion.Fragment(rX, rows, columns, batch, self.bounds, run=1 if self.transposed else 2)
        return fusion.apply(self.pieces, x, passed)

    @cute.jit
    def store_elements(self, x: fusion.Fragment, out: cute.Tensor) -> None:
        """Each within bounds by itself, to out, which lies as the accumulator does.

        NOTE: columns first: a thread has few rows, and keeps their addresses.
        """
        for c in cutlass.range_constexpr(len(x.columns)):
            for r in cutlass.range_constexpr(len(x.rows)):
                if x.rows[r] < x.bounds[0] and x.columns[c] < x.bounds[1]:
                    where = x.rows[r], x.columns[c]
                    if cutlass.const_expr(self.transposed):
                        where = x.columns[c], x.rows[r]
                    out[where] = x.values[r, c].to(out.element_type)


@dataclass(frozen=True)
class PartLoads:
    """A matrix as large as out on its way in, part by part: TMA -> slots of smem -> registers. The
    result is written over what was read and leaves from the same slots.

    barrier      arrives                                       waits
    full[slot]   1: the warp that stores, and the bytes by     the warpgroup, before it reads
                 TMA; once more at the end of a tile where     the slot
                 a slot had an odd number of parts

    NOTE: so every tile begins with all barriers in phase 0, and nobody carries phases from tile to
    tile.
    """

    atom: cute.CopyAtom
    bGS_gX: cute.Tensor  # (TMA, RestM, RestN), or with a mode L
    bGS_sX: cute.Tensor  # (TMA, SLOT)
    s2r: cute.TiledCopy
    tSR_sX: cute.Tensor  # (S2R, S2R_M, S2R_N, SLOT)
    full: Barrier
    first: Int32  # of this warpgroup's barriers
    bytes: int  # of a part

    @cute.jit
    def start(self, slot: cutlass.Constexpr[int], row: Int32, column: Int32, batch: Int32) -> None:
        """Of the part at (row, column), counted in parts, into `slot`, which is free. One warp."""
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
    def read(self, slot: cutlass.Constexpr[int], use: cutlass.Constexpr[int]) -> cute.Tensor:
        """This thread's (V) of the part that is the tile's `use`-th in `slot`, like values."""
        self.full.wait(use % 2, self.first + slot)
        tSR_sX = self.tSR_sX[None, None, None, slot]
        tSR_rX = cute.make_rmem_tensor(tSR_sX.shape, tSR_sX.element_type)
        cute.copy(self.s2r, tSR_sX, tSR_rX)
        return cute.make_tensor(tSR_rX.iterator, cute.make_layout(cute.size(tSR_rX)))

    @cute.jit
    def even_out(self, slot: cutlass.Constexpr[int]) -> None:
        """Complete one more phase. One warp, when all have waited for the one before."""
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
    """Of this thread's warpgroup; arguments as of `warpgroup_stores`."""
    thread, _, _ = cute.arch.thread_idx()
    warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
    part = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    sX = cute.logical_divide(sX, (None, None, num_slots))[None, None, (None, warpgroup)]
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
    s2r = cute.make_tiled_copy_C(to_registers, make_wgmma(1, part[1], cutlass.BFloat16))
    tSR_sX = s2r.get_slice(thread % WARPGROUP).partition_S(sX)  # (S2R, S2R_M, S2R_N, SLOT)
    num_bytes = part[0] * part[1] * width // 8
    first = warpgroup * num_slots
    return PartLoads(operand.atom, bGS_gX, bGS_sX, s2r, tSR_sX, full, first, num_bytes)


@dataclass(frozen=True)
class FusedStores:
    """WarpgroupStores with pieces, and with a batch."""

    ways: WarpgroupStores  # bSG_gC (TMA, RestM, RestN), or with a mode L
    fusion: Fusion
    part: tuple[int, int]  # of the product; gates leave half its columns
    loads: PartLoads | None = None
    batch: Int32 | int = 0

    @property
    def num_slots(self) -> int:
        return self.ways.num_slots

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """As of WarpgroupStores."""
        parts = self.parts(acc)  # (V, PART)
        per_row = cute.size(parts, mode=[1]) // cute.size(acc, mode=[1])
        where = [
            (row_tile + part // per_row * row_step, column_tile + part % per_row)
            for part in range(cute.size(parts, mode=[1]))
        ]
        if cutlass.const_expr(self.loads is None):
            for part in cutlass.range_constexpr(len(where)):
                if cutlass.const_expr(part == 0 or self.num_slots == 1):
                    self.wait(0)
                self.store_part(parts[None, part], part % self.num_slots, *where[part])
        else:
            self.store_staged(self.loads, parts, where)

    @cute.jit
    def store_staged(
        self,
        loads: PartLoads,
        parts: cute.Tensor,
        where: cutlass.Constexpr[list[tuple[Int32, Int32]]],
    ) -> None:
        """Each slot goes round: a part comes in, is read, the result written over it and stored.

        NOTE: when a part is to be stored, all stores before it have been read, so the slot of the
        one before takes the next load: the more slots, the more loads on their way.
        """
        slots, count = self.num_slots, len(where)
        if self.ways.stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            for part in cutlass.range_constexpr(min(slots, count)):
                loads.start(part, *where[part], self.batch)
        for part in cutlass.range_constexpr(count):
            slot, later = part % slots, part - 1 + slots
            held = loads.read(slot, part // slots)
            self.round(parts[None, part], slot, *where[part], held)
            if self.ways.stores:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if cutlass.const_expr(part > 0 and later < count):
                    loads.start(later % slots, *where[later], self.batch)
            self.wait(0, pending=False)
            if self.ways.stores:
                self.start_store(slot, *where[part])
                if cutlass.const_expr(part + slots >= count and part // slots % 2 == 0):
                    loads.even_out(slot)

    def parts(self, acc: cute.Tensor) -> cute.Tensor:
        """A thread's accumulators by parts, 64 x epiN, columns first: (V, PART)."""
        size = self.part[0] * self.part[1] // WARPGROUP
        return cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))

    def wait(self, groups: int, pending: bool = True) -> None:
        self.ways.wait(groups, pending)

    def drain(self) -> None:
        self.ways.drain()

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        """As of WarpgroupStores: row and column count in parts."""
        self.round(values, slot, row, column)
        self.wait(max(0, self.num_slots - 2), pending=self.num_slots > 1)
        if self.ways.stores:
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
        """A part's `values` (V) through the pieces, rounded, into `slot`."""
        ways = self.ways
        corner = row * self.part[0], column * self.part[1]
        x = self.fusion.fragment(values, *corner, self.batch, held)
        tRS_rC = cute.make_rmem_tensor(ways.tRS_sC[None, None, None, 0].shape, ways.dtype)
        flat = cute.make_layout(cute.size(tRS_rC))
        rounded = cute.make_rmem_tensor(cute.size(tRS_rC), ways.dtype)
        rounded.store(cute.make_tensor(x.values.iterator, flat).load().to(ways.dtype))
        if cutlass.const_expr(fusion.gated(self.fusion.pieces)):
            rounded = neighbours(rounded)
        cute.make_tensor(tRS_rC.iterator, flat).store(rounded.load())
        cute.copy(ways.r2s, tRS_rC, ways.tRS_sC[None, None, None, slot])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def start_store(self, slot: cutlass.Constexpr[int], row: Int32, column: Int32) -> None:
        """Of a whole slot, by the warp that stores."""
        ways = self.ways
        where: tuple = (None, row, column)
        if cutlass.const_expr(cute.rank(ways.bSG_gC) == 4):
            where = (None, row, column, self.batch)
        cute.copy(ways.atom, ways.bSG_sC[None, slot], ways.bSG_gC[where])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def neighbours(gated: cute.Tensor) -> cute.Tensor:
    """What gates leave (V), of 16 bits, as a wgmma of half the columns would hold it.

    Of four gates' columns in turn, a thread holds one, its lane's, in each of 2 rows: (2, FOURS).
    Two fours make eight columns, of which it shall hold two neighbours: (2, 2, EIGHTS).
    """
    size = cute.size(gated)
    across = cute.make_layout((2, 2, size // 4), stride=(2, 1, 4))  # (FOUR, ROW, EIGHT)
    pairs = cute.make_rmem_tensor(size, gated.element_type)
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


def fused_stores(
    operand: cpasync.TmaInfo,
    sC: cute.Tensor,
    num_slots: int,
    columns_contiguous: bool,
    pieces: Fusion,
    full: Barrier | None,
) -> FusedStores:
    """Of this thread's warpgroup; sC is (64, epiN, SLOT), each warpgroup has `num_slots`; `full`
    are the barriers of what comes by PartLoads."""
    rows, columns = cute.size(sC, mode=[0]), cute.size(sC, mode=[1])
    if fusion.gated(pieces.pieces):
        columns *= 2
    if sC.element_type.width == 16:
        ways = warpgroup_stores(operand, sC, num_slots, transpose=not columns_contiguous)
    else:
        ways = warpgroup_stores(operand, sC, num_slots, words=2 if columns_contiguous else 1)
    loads = None
    if full is not None and pieces.staged is not None:
        matrix = pieces.passed[pieces.staged]
        loads = part_loads(matrix, sC, full, num_slots, not columns_contiguous)
    return FusedStores(ways, pieces, (rows, columns), loads)


@dataclass(frozen=True)
class DirectStores:
    """Every element by itself, to out of any strides: as the accumulator, or with a mode L."""

    out: cute.Tensor
    epi_n: int
    fusion: Fusion
    batch: Int32 | int = 0

    store = WarpgroupStores.store
    num_slots = 2  # none: no part waits for another

    def parts(self, acc: cute.Tensor) -> cute.Tensor:
        size = 64 * self.epi_n // WARPGROUP
        return cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))

    def wait(self, groups: int, pending: bool = True) -> None:
        """No slot has to become free."""

    def drain(self) -> None:
        """Nothing leaves by way of smem."""

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        x = self.fusion.fragment(values, row * 64, column * self.epi_n, self.batch)
        out = self.out
        if cutlass.const_expr(cute.rank(out) == 3):
            out = out[None, None, self.batch]  # (M, N)
        self.fusion.store_elements(x, out)

"""Stores of a wgmma's accumulators through shared memory, by TMA or by each warp itself.

Accumulators are stored in parts of 64 rows by epiN columns: registers -> stmatrix -> a slot of
smem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.wgmma import WARPGROUP, Wgmma

WARP_ROWS = 16  # rows of a wgmma's 64 that each of its warps holds
FIRST_WARPGROUP_BARRIER = 1  # the named barrier of warpgroup 0; each warpgroup has one
TURNS_BARRIER = 6  # of all warpgroups that store


def accumulator_parts(acc: cute.Tensor, elements: int) -> cute.Tensor:
    """A thread's accumulators (V, PART) in parts of `elements` per warpgroup, columns first."""
    size = elements // WARPGROUP
    return cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))


def registers_of(tRS_sC: cute.Tensor, count: int) -> cute.Tensor:
    """The `count` registers that a copy to a slot, (R2S, R2S_M, R2S_N), takes.

    NOTE: an stmatrix of two 8x8 matrices ignores the row addresses of half the lanes.
    """
    (vector, *rest), *others = tRS_sC.shape
    shape = ((vector * count // cute.size(tRS_sC), *rest), *others)
    return cute.make_rmem_tensor(shape, tRS_sC.element_type)


@cute.jit
def round_to_smem(r2s: cute.TiledCopy, values: cute.Tensor, tRS_sC: cute.Tensor) -> None:
    """Round a part's `values` (V) and write them to a slot, (R2S, R2S_M, R2S_N)."""
    tRS_rC = registers_of(tRS_sC, cute.size(values))
    flat = cute.make_tensor(tRS_rC.iterator, cute.make_layout(cute.size(tRS_rC)))
    flat.store(values.load().to(tRS_sC.element_type))
    cute.copy(r2s, tRS_rC, tRS_sC)


class WarpgroupStore(NamedTuple):
    """The store of one warpgroup's accumulators: registers -> slots of its own in smem -> TMA.

    stmatrix writes 8 rows of 16 bytes at once, which the swizzle puts into different banks; TMA
    leaves out elements outside of C. The store of one part runs while the next is rounded.
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
        """Store `acc`: blocks of 64 rows, `row_step` blocks apart from block `row_tile` on, whose
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
        """A thread's accumulators (V, PART) in parts of 64 x epiN, columns first."""
        return accumulator_parts(acc, cute.size(self.bSG_sC, mode=[0]))

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        """Round a part's `values` (V), write them to `slot`, which is free, start its store, and
        wait until the next slot is free."""
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
        """Wait at a barrier of the warpgroup until TMA has read the slots of all but the last
        `groups` stores."""
        if cutlass.const_expr(pending):  # noqa: SIM102 - known when tracing, the next is not
            if self.stores:
                cute.arch.cp_async_bulk_wait_group(groups, read=True)
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)

    @cute.jit
    def drain(self) -> None:
        """Wait until TMA has read every slot, so that the smem may be released."""
        if self.stores:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class WarpStore(NamedTuple):
    """The transposed store of one warp's accumulators: registers -> smem of its own, where stmatrix
    transposes them -> registers -> global memory, whole sectors of 32 bytes at a time.

    No warp waits for another, nor for TMA to start: for a CTA with one tile, whose last
    instructions nothing overlaps.
    """

    r2s: cute.TiledCopy
    tRS_sC: cute.Tensor  # (R2S, R2S_M, R2S_N, SLOT)
    sC: cute.Tensor  # (64, epiN, SLOT) of this warpgroup
    mOut: cute.Tensor  # (M, N), its rows contiguous and of a multiple of 16 bytes
    first_row: Int32  # the row of mOut from which tiles are counted

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """Store `acc`; the arguments are those of WarpgroupStore.store."""
        rows, columns, num_slots = (cute.size(self.sC, mode=[i]) for i in range(3))
        parts = accumulator_parts(acc, rows * columns)  # (V, PART)
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
        """Copy this warp's rows of `slot` to mOut: 2 lanes per column, 16 bytes each."""
        width = 128 // self.mOut.element_type.width
        vector = cute.make_copy_atom(
            CopyUniversalOp(), self.mOut.element_type, num_bits_per_copy=128
        )
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        of_warp = WARP_ROWS // width  # vectors in a column
        columns_at_once = 32 // of_warp
        place, lane_column = warp * of_warp + lane % of_warp, lane // of_warp
        vectors = cute.logical_divide(self.sC[None, None, slot], (width, 1))  # ((V, ROW), (1, COL))
        passes = cute.size(self.sC, mode=[1]) // columns_at_once
        values = cute.make_rmem_tensor((width, passes), self.mOut.element_type)  # (V, PASS)
        for i in cutlass.range_constexpr(passes):
            here = lane_column + i * columns_at_once
            cute.copy(vector, vectors[(None, place), (0, here)], values[None, i])
        row, column = row + place * width, column + lane_column
        here = cute.domain_offset((row, column), self.mOut)
        address = here.iterator.toint()
        for i in cutlass.range_constexpr(passes):
            if cute.elem_less((row, column + i * columns_at_once), self.mOut.shape):
                elements = cute.crd2idx((0, i * columns_at_once), here.layout)
                to = cute.make_ptr(
                    self.mOut.element_type,
                    address + elements * (self.mOut.element_type.width // 8),
                    cute.AddressSpace.gmem,
                    assumed_align=16,
                )
                cute.copy(vector, values[None, i], cute.make_tensor(to, (width,)))

    def drain(self) -> None:
        """Nothing to wait for: no asynchronous store reads the smem."""


@cute.jit
def warp_store(
    mOut: cute.Tensor, sC: cute.Tensor, num_slots: cutlass.Constexpr[int], first_row: Int32
) -> WarpStore:
    """The store of this thread's warp; sC is (64, epiN, SLOT), each warpgroup has `num_slots`."""
    r2s, tRS_sC, sC = warpgroup_slots(sC, num_slots, StMatrix8x8x16bOp(True, 4))
    return WarpStore(r2s, tRS_sC, sC, mOut, first_row)


@cute.jit
def warpgroup_slots(
    sC: cute.Tensor,
    num_slots: cutlass.Constexpr[int],
    op: Any,
    bits: cutlass.Constexpr[int] = 0,
    shared: cutlass.Constexpr[bool] = False,
) -> tuple[cute.TiledCopy, cute.Tensor, cute.Tensor]:
    """The copy of a wgmma's accumulators to smem by `op` (`bits` at a time where `op` leaves it
    open), its destinations (R2S, R2S_M, R2S_N, SLOT), and the slots of this thread's warpgroup,
    (64, epiN, SLOT), or those that all have (`shared`)."""
    thread, _, _ = cute.arch.thread_idx()
    warpgroup = Int32(0)
    if cutlass.const_expr(not shared):
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
    sC = cute.logical_divide(sC, (None, None, num_slots))  # (64, epiN, (SLOT, WARPGROUP))
    sC = sC[None, None, (None, warpgroup)]  # (64, epiN, SLOT)
    how = {"num_bits_per_copy": bits} if bits else {}
    to_smem = cute.make_copy_atom(op, sC.element_type, **how)
    # NOTE: every wgmma of fp32 accumulators lays them out alike, whatever it multiplies
    mma = Wgmma(cute.size(sC, mode=[1]), cutlass.BFloat16).tiled()
    r2s = cute.make_tiled_copy_C(to_smem, mma)
    return r2s, r2s.get_slice(thread % WARPGROUP).partition_D(sC), sC


@cute.jit
def warpgroup_store(
    operand: cpasync.TmaInfo,
    sC: cute.Tensor,
    num_slots: cutlass.Constexpr[int],
    transpose: cutlass.Constexpr[bool] = False,
    words: cutlass.Constexpr[int] = 0,
    shared: cutlass.Constexpr[bool] = False,
) -> WarpgroupStore:
    """The store of this thread's warpgroup; sC is (64, epiN, SLOT), each warpgroup has `num_slots`,
    or all have the same (`shared`).

    With `transpose`, the 64 rows are contiguous in sC and in global memory. Elements of 32 bits,
    which stmatrix does not take, are written to smem `words` at a time.
    """
    part = cute.size(sC, mode=[0]), cute.size(sC, mode=[1])
    op, bits = StMatrix8x8x16bOp(transpose, 4 if part[1] % 16 == 0 else 2), 0
    if cutlass.const_expr(words > 0):
        op, bits = CopyUniversalOp(), 32 * words
    r2s, tRS_sC, sC = warpgroup_slots(sC, num_slots, op, bits, shared)
    gC = cute.flat_divide(operand.tma_tensor, part)  # (64, epiN, RestM, RestN)
    bSG_sC, bSG_gC = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
    )  # (TMA, SLOT), (TMA, RestM, RestN)
    warp = cute.arch.warp_idx()
    barrier = FIRST_WARPGROUP_BARRIER + warp // 4
    return WarpgroupStore(r2s, tRS_sC, operand.atom, bSG_sC, bSG_gC, barrier, warp % 4 == 0)

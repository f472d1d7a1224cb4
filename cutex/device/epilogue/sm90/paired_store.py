"""The store of a wgmma's accumulators of whose rows two, 8 apart, are a gate and what it gates.

Of each 16 rows, the first 8 gate the last 8: a thread holds both, and half the rows are left. Those
of four warps, 8 each, are contiguous in smem and in global memory: registers -> stmatrix, which
transposes them -> a slot of smem -> TMA.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.epilogue.epilogue_ops import BoundOps, Fragment
from cutex.device.epilogue.sm90.tma_store import FIRST_WARPGROUP_BARRIER

ROWS = 32  # of a part, after the gate
WARP_ROWS = 8  # of them, that a warp holds
AT_ONCE = 32  # columns that one stmatrix writes


def paired_slots(dtype: type[cutlass.Numeric], columns: int, num_slots: int) -> cute.ComposedLayout:
    """The layout (32, columns, SLOT) of slots contiguous along their rows, 64-byte swizzle."""
    atom = cute.make_composed_layout(
        cute.make_swizzle(2, 4, 3), 0, cute.make_layout((ROWS, 8), stride=(1, ROWS))
    )
    return cute.tile_to_shape(atom, (ROWS, columns, num_slots), order=(0, 1, 2))


@dataclass(frozen=True)
class PairedStore:
    """The store of one warpgroup's accumulators, through a gate."""

    ops: BoundOps  # a gate
    atom: cute.CopyAtom
    bSG_sC: cute.Tensor  # (TMA, SLOT)
    bSG_gC: cute.Tensor  # (TMA, RestM, RestN)
    sC: cute.Tensor  # (32, epiN, SLOT) of this warpgroup
    columns: Int32  # of the tile: parts after them are left out
    barrier: Int32  # the named barrier of this warpgroup
    stores: Boolean  # whether this warp starts the stores

    @cute.jit
    def store(self, acc: cute.Tensor, row_tile: Int32, row_step: Int32, column_tile: Int32) -> None:
        """Store `acc`; the arguments are those of WarpgroupStore.store."""
        columns, slots = (cute.size(self.sC, mode=[i]) for i in (1, 2))
        size = 64 * columns // WARPGROUP
        parts = cute.make_tensor(acc.iterator, cute.make_layout((size, cute.size(acc) // size)))
        blocks = cute.size(acc, mode=[1])
        per_row = cute.size(parts, mode=[1]) // blocks
        for block in cutlass.range_constexpr(blocks):
            for part in cutlass.range_constexpr(per_row):
                if part * columns < self.columns:
                    self.wait(0 if part == 0 else slots - 1)
                    where = row_tile + block * row_step, column_tile + part
                    self.round(parts[None, block * per_row + part], part % slots, where)
                    cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)
                    if self.stores:
                        gC = self.bSG_gC[(None, *where)]
                        cute.copy(self.atom, self.bSG_sC[None, part % slots], gC)
                        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait(self, groups: cutlass.Constexpr[int]) -> None:
        """Wait at the warpgroup's barrier until TMA has read the slots of all but the last `groups`
        stores."""
        if self.stores:
            cute.arch.cp_async_bulk_wait_group(groups, read=True)
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP)

    @cute.jit
    def round(
        self,
        values: cute.Tensor,
        slot: cutlass.Constexpr[int],
        where: cutlass.Constexpr[tuple[Int32, Int32]],
    ) -> None:
        """Run the gate on the `values` (V) of a part, which is `where` in parts, and write the
        rounded result to `slot`."""
        eights = cute.size(values) // 4
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        pairs = cute.make_layout(((2, eights), 2), stride=((1, 4), 2))
        first = where[1] * cute.size(self.sC, mode=[1]) + 2 * (lane % 4)
        rows = tuple(first + 8 * i + e for i in range(eights) for e in range(2))
        gate = 2 * (where[0] * ROWS + WARP_ROWS * warp + lane // 4)
        held = cute.make_tensor(values.iterator, pairs)  # (R, 2)
        x = Fragment(held, rows, (gate, gate + 1), 0, self.ops.bounds, run=2)
        gated = self.ops.apply(x).values  # (2 * eights, 1)
        flat = cute.make_tensor(gated.iterator, cute.make_layout(2 * eights))
        rounded = cute.make_rmem_tensor(2 * eights, self.sC.element_type)
        rounded.store(flat.load().to(self.sC.element_type))
        to_smem = cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), self.sC.element_type)
        vectors = cute.logical_divide(self.sC, (WARP_ROWS, 1, 1))  # ((V, WARP), (1, epiN), ..)
        fours = cute.make_tensor(rounded.iterator, cute.make_layout((8, eights // 4)))
        for i in cutlass.range_constexpr(eights // 4):
            here = vectors[(None, warp), (0, i * AT_ONCE + lane), (0, slot)]  # (V)
            cute.copy(to_smem, fours[None, i], here)
        cute.arch.fence_view_async_shared()


@cute.jit
def paired_store(
    operand: cpasync.TmaInfo,
    sC: cute.Tensor,
    num_slots: cutlass.Constexpr[int],
    ops: cutlass.Constexpr[BoundOps],
    columns: Int32,
) -> PairedStore:
    """The store of this thread's warpgroup through the gate of `ops`; sC is (32, epiN, SLOT), each
    warpgroup has `num_slots`."""
    thread, _, _ = cute.arch.thread_idx()
    warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
    sC = cute.logical_divide(sC, (None, None, num_slots))  # (32, epiN, (SLOT, WARPGROUP))
    sC = sC[None, None, (None, warpgroup)]  # (32, epiN, SLOT)
    part = ROWS, cute.size(sC, mode=[1])
    gC = cute.flat_divide(operand.tma_tensor, part)  # (32, epiN, RestM, RestN)
    bSG_sC, bSG_gC = cpasync.tma_partition(
        operand.atom, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
    )  # (TMA, SLOT), (TMA, RestM, RestN)
    warp = cute.arch.warp_idx()
    barrier = FIRST_WARPGROUP_BARRIER + warp // 4
    return PairedStore(ops, operand.atom, bSG_sC, bSG_gC, sC, columns, barrier, warp % 4 == 0)

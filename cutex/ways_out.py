"""A warpgroup's accumulators on their way out of an SM90 kernel, through pieces of cutex/fusion.py.

The accumulators go part by part, 64 rows by epiN columns: pieces, rounding, then by TMA
(FusedStores) or element by element to any strides (DirectStores).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex import fusion
from cutex.atoms.mma import WARPGROUP
from cutex.epilogue import WarpgroupStores, warpgroup_stores


@dataclass(frozen=True)
class Fusion:
    """The pieces with what was passed for them, and where the tile lies in out."""

    pieces: tuple[fusion.Piece, ...]
    passed: tuple[Any, ...]
    bounds: tuple[Int32, Int32]  # M and N of out
    transposed: bool  # the accumulator's rows are out's columns

    def fragment(
        self, values: cute.Tensor, row: Int32, column: Int32, batch: Int32 | int
    ) -> fusion.Fragment:
        """The part whose first accumulator is at (row, column), after the pieces.

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
        x = fusion.Fragment(rX, rows, columns, batch, self.bounds, run=1 if self.transposed else 2)
        return fusion.apply(self.pieces, x, self.passed)


@dataclass(frozen=True)
class FusedStores:
    """WarpgroupStores with pieces, and with a batch."""

    ways: WarpgroupStores  # bSG_gC (TMA, RestM, RestN), or with a mode L
    fusion: Fusion
    part: tuple[int, int]
    batch: Int32 | int = 0

    store = WarpgroupStores.store

    @property
    def num_slots(self) -> int:
        return self.ways.num_slots

    def parts(self, acc: cute.Tensor) -> cute.Tensor:
        return self.ways.parts(acc)

    def wait(self, groups: int, pending: bool = True) -> None:
        self.ways.wait(groups, pending)

    def drain(self) -> None:
        self.ways.drain()

    @cute.jit
    def store_part(
        self, values: cute.Tensor, slot: cutlass.Constexpr[int], row: Int32, column: Int32
    ) -> None:
        """As of WarpgroupStores: row and column count in parts."""
        ways = self.ways
        x = self.fusion.fragment(values, row * self.part[0], column * self.part[1], self.batch)
        tRS_rC = cute.make_rmem_tensor(ways.tRS_sC[None, None, None, 0].shape, ways.dtype)
        flat = cute.make_layout(cute.size(tRS_rC))
        rounded = cute.make_tensor(x.values.iterator, flat).load().to(ways.dtype)
        cute.make_tensor(tRS_rC.iterator, flat).store(rounded)
        cute.copy(ways.r2s, tRS_rC, ways.tRS_sC[None, None, None, slot])
        cute.arch.fence_view_async_shared()
        ways.wait(max(0, self.num_slots - 2), pending=self.num_slots > 1)
        if ways.stores:
            where: tuple = (None, row, column)
            if cutlass.const_expr(cute.rank(ways.bSG_gC) == 4):
                where = (None, row, column, self.batch)
            cute.copy(ways.atom, ways.bSG_sC[None, slot], ways.bSG_gC[where])
            cute.arch.cp_async_bulk_commit_group()


def fused_stores(
    operand: cpasync.TmaInfo,
    sC: cute.Tensor,
    num_slots: int,
    columns_contiguous: bool,
    pieces: Fusion,
) -> FusedStores:
    """Of this thread's warpgroup; sC is (64, epiN, SLOT), each warpgroup has `num_slots`."""
    part = cute.size(sC, mode=[0]), cute.size(sC, mode=[1])
    if sC.element_type.width == 16:
        ways = warpgroup_stores(operand, sC, num_slots, transpose=not columns_contiguous)
    else:
        ways = warpgroup_stores(operand, sC, num_slots, words=2 if columns_contiguous else 1)
    return FusedStores(ways, pieces, part)


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
        for r in cutlass.range_constexpr(len(x.rows)):
            for c in cutlass.range_constexpr(len(x.columns)):
                if x.rows[r] < x.bounds[0] and x.columns[c] < x.bounds[1]:
                    where = x.rows[r], x.columns[c]
                    if cutlass.const_expr(self.fusion.transposed):
                        where = x.columns[c], x.rows[r]
                    out[where] = x.values[r, c].to(out.element_type)

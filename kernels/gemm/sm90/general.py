"""The general GEMM on Hopper: every layout, dtype and batch that stage 9 can tile.

What stage 9 does is inherited, what arguments there are comes from kernels/gemm/general.py; this
class changes what the roles are given:

- wgmma reads 16-bit operands with either side contiguous in smem. Where K is not, the CTAs that
  share a tile load parts of its K instead of its rows, so that any tile can be shared.
- A tile has a batch entry. An operand with one entry for all (L = 1) is read again for each.
- The way out runs the pieces (cutex/fusion.py) on each part of the accumulator, in fp32, then
  rounds it and stores it by TMA; or element by element, where TMA cannot step through out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cutex.atoms.mma import (
    Wgmma,
    allocate_slots,
    contiguous_rows_layout,
    make_wgmma,
    slots_layout,
    transposed_slots_layout,
    wgmma,
)
from cutex.atoms.multicast import (
    Cluster,
    k_shared_operand,
    k_shared_tile_loads,
    shared_operand,
    shared_tile_loads,
)
from cutex.atoms.tma import AbLoads, store_operand
from cutex.kernels.gemm.config import ELEMENT
from cutex.kernels.gemm.general import GeneralGemm, matrix, modes
from cutex.kernels.gemm.sm90.stage9 import Stage9
from cutex.pipeline import publish_barriers
from cutex.schedulers.one_tile import WorkTile
from cutex.schedulers.persistent import BatchTile
from cutex.ways_out import DirectStores, FusedStores, Fusion, fused_stores


@dataclass(frozen=True)
class GeneralOperands:
    """What loads A and B, and the slots that they go to: AbOperands for any order and batch."""

    a: cpasync.TmaInfo
    b: cpasync.TmaInfo
    sA: cute.Tensor  # (bM, bK, SLOT)
    sB: cute.Tensor  # (bN, bK, SLOT)
    k_major: tuple[bool, bool]

    @cute.jit
    def loads(self, tile: WorkTile | BatchTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        m, n = cluster.place()
        loads_a = shared_tile_loads if self.k_major[0] else k_shared_tile_loads
        loads_b = shared_tile_loads if self.k_major[1] else k_shared_tile_loads
        a, b = matrix(self.a, tile), matrix(self.b, tile)
        return AbLoads(
            loads_a(a, self.sA, tile.m, n, cluster.size_n, cluster.row_mask()),
            loads_b(b, self.sB, tile.n, m, cluster.size_m, cluster.column_mask()),
        )


class General(GeneralGemm, Stage9):
    """Barriers, registers and smem: as in stage 9."""

    @property
    def name(self) -> str:
        return "sm90_gemm_general"

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        c = self.config
        passed, stream = rest[:-1], rest[-1]
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        mOut = modes(mOut, columns_first=c.swap_ab)
        if cutlass.const_expr(c.swap_ab):
            mA, mB = mB, mA
        a = self.load_operand(mA, c.tile_m, c.cluster_n, self.k_major[0])
        b = self.load_operand(mB, c.tile_n, c.cluster_m, self.k_major[1])
        out = mOut
        if cutlass.const_expr(c.out.tma):
            out = store_operand(mOut, self.epilogue_slots(mOut.element_type))
        self.kernel(a, b, out, passed).launch(
            grid=self.grid(self.product(mOut)),
            block=(self.num_threads, 1, 1),
            cluster=(c.cluster_m, c.cluster_n, c.split_k),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def load_operand(
        self, mX: cute.Tensor, rows: int, sharers: int, k_major: bool
    ) -> cpasync.TmaInfo:
        c, dtype = self.config, mX.element_type
        if k_major:
            slots = slots_layout(dtype, rows, c.k_elements, c.num_stages, self.swizzle)
            return shared_operand(mX, slots, sharers)
        slots = contiguous_rows_layout(dtype, rows, c.k_elements, c.num_stages)
        part = contiguous_rows_layout(dtype, rows, c.k_elements // sharers, c.num_stages)
        return k_shared_operand(mX, slots, part, sharers)

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        c = self.config
        num_slots = c.epi_stages * c.mma_warpgroups
        if c.columns_contiguous:
            return slots_layout(dtype, 64, c.epi_columns, num_slots, swizzle=c.epi_n * ELEMENT)
        return transposed_slots_layout(dtype, 64, c.epi_columns, num_slots)

    @cute.kernel
    def kernel(
        self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: Any, passed: tuple[Any, ...]
    ) -> None:
        c = self.config
        kinds = a.atom.value_type, b.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, kinds[0], a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, kinds[1], b.smem_layout)  # (bN, bK, SLOT)
        mProduct, sC = self.product(out), None
        if cutlass.const_expr(c.out.tma):
            mProduct = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        ab = self.ring(smem)
        publish_barriers((ab,), cluster=self.cluster.size * c.split_k > 1)

        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            self.give_registers()
            if warp == self.load_warps.first:
                self.load_tiles(GeneralOperands(a, b, sA, sB, self.k_major), ab, mProduct)
        else:
            self.take_registers()
            majors = tuple(OperandMajorMode.K if k else OperandMajorMode.MN for k in self.k_major)
            warpgroups = 1 if c.pingpong else c.mma_warpgroups
            mma = wgmma(make_wgmma(warpgroups, c.tile_n, *kinds, *majors), sA, sB)
            stores = self.stores(out, sC, self.fusion(mProduct, passed))
            num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), c.k_elements)
            self.compute_tiles(mma, ab, stores, num_k_tiles, mProduct)
            stores.drain()

    def stores(
        self, out: Any, sC: cute.Tensor | None, pieces: Fusion
    ) -> FusedStores | DirectStores:
        c = self.config
        if sC is None:
            return DirectStores(out, c.epi_columns, pieces)
        return fused_stores(out, sC, c.epi_stages, c.columns_contiguous, pieces)

    @cute.jit
    def store(
        self, mma: Wgmma, stores: FusedStores | DirectStores, tile: WorkTile | BatchTile
    ) -> None:
        row, step, column = self.origin(tile)
        if cutlass.const_expr(self.config.out.batched):
            stores = replace(stores, batch=tile.entry)
        stores.store(mma.tCrAcc, row, step, column)

    def origin(self, tile: WorkTile | BatchTile) -> tuple[Int32, int, Int32]:
        row, step, _ = super().origin(tile)
        c = self.config
        return row, step, tile.n * (c.tile_n // c.epi_columns)

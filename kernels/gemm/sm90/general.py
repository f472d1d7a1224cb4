"""The general GEMM on Hopper: every layout, dtype and batch that stage 9 can tile.

What stage 9 does is inherited, what arguments there are comes from kernels/gemm/general.py; this
class changes what the roles are given:

- wgmma reads 16-bit operands with either side contiguous in smem. Where K is not, the CTAs that
  share a tile load parts of its K instead of its rows, so that any tile can be shared.
- A tile has a batch entry. An operand with one entry for all (L = 1) is read again for each.
- The epilogue runs its operations on each part of the accumulator, in fp32, then rounds
  it and stores it by TMA; or element by element, where TMA cannot step through out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import (
    Wgmma,
    allocate_slots,
    contiguous_rows_layout,
    make_wgmma,
    slots_layout,
    transposed_slots_layout,
    wgmma,
)
from cutex.device.atoms.multicast import (
    Cluster,
    k_shared_operand,
    k_shared_tile_loads,
    shared_operand,
    shared_tile_loads,
)
from cutex.device.atoms.tma import AbLoads, load_operand, matrix, store_operand
from cutex.device.epilogue import epilogue_ops as fusion
from cutex.device.epilogue.sm90 import DirectStores, FusedStores, Fusion, fused_stores
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.kernels.gemm.config import ELEMENT
from cutex.kernels.gemm.general import GeneralGemm, modes
from cutex.kernels.gemm.sm90.stage9 import Stage9
from cutex.schedulers.one_tile import WorkTile
from cutex.schedulers.persistent import BatchTile


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
    """
    barrier       arrives and waits
    held[slot]    as PartLoads says, where a matrix comes in through the slots of out
    others, registers and smem: as in stage 9
    """

    @property
    def name(self) -> str:
        return "sm90_gemm_general"

    @property
    def gated(self) -> bool:
        return fusion.gated(self.config.pieces)

    @property
    def staged(self) -> int | None:
        """Which of what the pieces are passed comes in by TMA through the slots of out: the first
        matrix to add, if it lies like out and is of its dtype."""
        c, at = self.config, 0
        if not c.out.tma or c.epi_stages < 2 or c.split_k > 1 or self.gated:
            return None
        for piece in c.pieces:
            if isinstance(piece, fusion.Add):
                alike = piece.whole and piece.dtype == c.out.dtype and c.out.major == "row"
                return at if alike else None
            at += len(piece.arguments())
        return None

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        c = self.config
        passed, stream = rest[:-1], rest[-1]
        mA, mB, mOut = self.oriented(mA, mB, mOut)
        a = self.load_operand(mA, c.tile_m, c.cluster_n, self.k_major[0])
        b = self.load_operand(mB, c.tile_n, c.cluster_m, self.k_major[1])
        out = mOut
        if cutlass.const_expr(c.out.tma):
            slots = self.epilogue_slots(mOut.element_type)
            out = store_operand(mOut, slots)
            if cutlass.const_expr(self.staged is not None):
                at = self.staged
                staged = load_operand(modes(passed[at], columns_first=c.swap_ab), slots)
                passed = (*passed[:at], staged, *passed[at + 1 :])
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
        num_slots, halves = c.epi_stages * c.mma_warpgroups, 2 if self.gated else 1
        columns = c.epi_columns // halves
        if c.columns_contiguous:
            return slots_layout(dtype, 64, columns, num_slots, swizzle=c.epi_n * ELEMENT // halves)
        return transposed_slots_layout(dtype, 64, columns, num_slots)

    @cute.kernel
    def kernel(
        self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: Any, passed: tuple[Any, ...]
    ) -> None:
        c = self.config
        kinds = a.atom.value_type, b.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, kinds[0], a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, kinds[1], b.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(c.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = self.product(mOut)
        ab, held = self.ring(smem), self.held(smem)
        a, out = self.place(a, out)
        ab_operands = GeneralOperands(a, b, sA, sB, self.k_major)
        warp = cute.arch.warp_idx()
        if warp == self.load_warps.first:
            self.load_ahead(ab_operands, mProduct)
        barriers = (ab,) if held is None else (ab, held)
        publish_barriers(barriers, cluster=self.cluster.size * c.split_k > 1)

        if warp >= self.load_warps.first:
            self.give_registers()
            if warp == self.load_warps.first:
                self.load_tiles(ab_operands, ab, mProduct)
        else:
            self.take_registers()
            majors = tuple(OperandMajorMode.K if k else OperandMajorMode.MN for k in self.k_major)
            warpgroups = 1 if c.pingpong else c.mma_warpgroups
            mma = wgmma(make_wgmma(warpgroups, c.tile_n, *kinds, *majors), sA, sB)
            stores = self.stores(out, sC, self.fusion(mProduct, passed), held)
            num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), c.k_elements)
            self.compute_tiles(mma, ab, stores, num_k_tiles, mProduct)
            stores.drain()

    def held(self, smem: SmemAllocator) -> Barrier | None:
        """The barriers of what comes in through the slots of out."""
        c = self.config
        if self.staged is None:
            return None
        return Barrier.allocate(smem, "held", arrivals=1, slots=c.epi_stages * c.mma_warpgroups)

    def stores(
        self, out: Any, sC: cute.Tensor | None, pieces: Fusion, held: Barrier | None
    ) -> FusedStores | DirectStores:
        c = self.config
        if sC is None:
            return DirectStores(out, c.epi_columns, pieces)
        pieces = replace(pieces, staged=self.staged)
        return fused_stores(out, sC, c.epi_stages, c.columns_contiguous, pieces, held)

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

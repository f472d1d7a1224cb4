"""The general GEMM: out = pieces(A @ B), for every layout, dtype and batch that stage 9 can tile.

A (L, M, K), B (L, K, N) and out (L, M, N) are passed as torch holds them, L where there is one, and
oriented here. What stage 9 does is inherited; this class changes what the roles are given:

- wgmma reads 16-bit operands with either side contiguous in smem. Where K is not, the CTAs that
  share a tile load parts of its K instead of its rows, so that any tile can be shared.
- A tile has a batch entry. An operand with one entry for all (L = 1) is read again for each.
- The way out runs the pieces (cutex/fusion.py) on each part of the accumulator, in fp32, then
  rounds it and stores it by TMA; or element by element, where TMA cannot step through out.

Sizes in the config are in units of 2 bytes: tile_k = 64 is 128 elements of fp8, epi_n = 64 is 32
columns of fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cutex import fusion
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
from cutex.compile import Argument, Operand
from cutex.kernels.gemm.config import ELEMENT, GemmConfig
from cutex.kernels.gemm.sm90.stage9 import Stage9
from cutex.pipeline import publish_barriers
from cutex.schedulers.one_tile import WorkTile
from cutex.schedulers.persistent import BatchTile
from cutex.ways_out import DirectStores, FusedStores, Fusion, fused_stores

BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "e4m3": 8, "e5m2": 8}


@dataclass(frozen=True)
class Matrix:
    """How an argument lies in memory: `major` says what is contiguous, its "row"s or "column"s.

    tma: base and strides are multiples of 16 bytes; without it any strides will do.
    """

    dtype: str = "bf16"
    major: str = "row"
    batched: bool = False
    tma: bool = True

    def argument(self, name: str, rows: str, columns: str, batch: str) -> Operand:
        sizes = (batch, rows, columns) if self.batched else (rows, columns)
        contiguous = None if not self.tma else -1 if self.major == "row" else -2
        return Operand(name, sizes, self.dtype, contiguous, aligned=self.tma, whole=False)


@dataclass(frozen=True)
class GeneralConfig(GemmConfig):
    """A config of stage 9, and what is computed with it."""

    a: Matrix = field(default_factory=Matrix)
    b: Matrix = field(default_factory=Matrix)
    out: Matrix = field(default_factory=Matrix)
    pieces: tuple[fusion.Piece, ...] = ()

    @property
    def k_elements(self) -> int:
        """Of K in a tile."""
        return self.tile_k * 16 // BITS[self.a.dtype]

    @property
    def epi_columns(self) -> int:
        """Of out that leave at a time."""
        return self.epi_n * 16 // BITS[self.out.dtype]

    @property
    def columns_contiguous(self) -> bool:
        """In what the kernel computes, which with swap_ab is out transposed."""
        return (self.out.major == "row") != self.swap_ab


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


def matrix(operand: cpasync.TmaInfo, tile: WorkTile | BatchTile) -> cpasync.TmaInfo:
    """Of the tile's batch entry; one that is alone serves all."""
    mX = operand.tma_tensor
    if cute.rank(mX) == 3:
        entry = cutlass.min(tile.entry, cute.size(mX, mode=[2]) - 1)
        mX = mX[None, None, entry]
    return cpasync.TmaInfo(operand.atom, mX, operand.smem_layout)


def modes(mX: cute.Tensor, columns_first: bool) -> cute.Tensor:
    """(rows, columns) or, of (L, rows, columns), (rows, columns, L); maybe columns first."""
    order = [1, 0] if columns_first else [0, 1]
    if cute.rank(mX) == 3:
        order = [order[0] + 1, order[1] + 1, 0]
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=order))


class General(Stage9):
    """Barriers, registers and smem: as in stage 9."""

    config: GeneralConfig
    dtypes = ("bf16", "fp16", "e4m3", "e5m2", "fp32")  # fp32 is read as tf32

    @property
    def name(self) -> str:
        return "sm90_gemm_general"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        """a (M, K), b (K, N), out (M, N), each with L before where batched; then the pieces'."""
        c = self.config
        gated = fusion.gated(c.pieces)  # then out has half the columns of b
        return (
            c.a.argument("a", "m", "k", "la"),
            c.b.argument("b", "k", "n", "lb"),
            c.out.argument("out", "m", "half" if gated else "n", "l"),
            *fusion.arguments(c.pieces),
        )

    @property
    def k_major(self) -> tuple[bool, bool]:
        """Whether K is contiguous in the first and in the second operand of the MMA."""
        c = self.config
        a, b = c.a.major == "row", c.b.major == "column"
        return (b, a) if c.swap_ab else (a, b)

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

    def product(self, mOut: Any) -> Any:
        """What the tiles cover: out, or twice its columns, of which gates leave half."""
        if not fusion.gated(self.config.pieces):
            return mOut
        m, n, *batch = mOut.shape
        return cute.make_tensor(mOut.iterator, cute.make_layout((m, 2 * n, *batch)))

    def fusion(self, mProduct: cute.Tensor, passed: tuple[Any, ...]) -> Fusion:
        """The bounds are those of the product."""
        bounds = cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])
        swapped = self.config.swap_ab
        return Fusion(self.config.pieces, passed, bounds[::-1] if swapped else bounds, swapped)

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

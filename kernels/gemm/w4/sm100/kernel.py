"""The GEMM with a packed weight of 4 bits on Blackwell: out = ops(x @ W^T).

The product is computed transposed, as on Hopper. Operand A of tcgen05.mma is in smem: four warps
read packed blocks, widen codes in registers, and write what the MMA reads, K-major and swizzled;
then they store the tile. Each CTA has one tile; K is not split.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots, contiguous_lanes_layout, slots_layout
from cutex.device.atoms.tma import load_operand, store_operand
from cutex.device.atoms.tmem import LANES, Tmem, fence_after_sync
from cutex.device.atoms.umma import Umma, umma
from cutex.device.epilogue.sm100.fused_store import FusedEpilogueStore
from cutex.device.pipeline import AccRing, Barrier, Ring, publish_barriers
from cutex.kernels.gemm.signature import tile_counts, transposed
from cutex.kernels.gemm.sm100.epilogue import StoreTiles
from cutex.kernels.gemm.w4.fragments import Fragments, allocate_weights, words_of
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm100.config import W4Sm100Config
from cutex.kernels.gemm.w4.sm100.roles import Load, Mma, Rings, Widen
from cutex.schedulers.one_tile import OneTilePerCluster
from cutex.schedulers.raster import Raster, RasterOrder


class Warp(IntEnum):
    """The roles of the warps. Warps 0 to 3 widen, and then store: each may read only its own
    quarter of tensor memory."""

    LOAD = LANES // 32
    MMA = LOAD + 1
    END = MMA + 1


class W4Gemm:
    """A CTA computes a tile of out transposed.

    barrier          arrives                                   waits
    w.full[slot]     1: LOAD, and the bytes of packed blocks   the widening warps
    w.empty[slot]    1 a widening warp, having read the slot   LOAD
    ab.full[slot]    1: LOAD, and the bytes of x; 1 a widening MMA
                     warp, having written its rows of A
    ab.empty[slot]   1: the commit of its last MMA             LOAD and the widening warps
    acc.full         1: the commit of the last MMA             the same warps, to store
    acc.empty        as in the general kernel; nobody waits
    1   (sub-tile)   those of the epilogue (sm100/epilogue.py)

    smem             bytes                                     tmem   columns
    sW               weight_bytes * num_weights                acc    tile_n
    sA, sX           128 * 128 * 2, tile_n * 128 * 2, each * num_stages
    sC               128 * epi_n * 2 * epi_stages; none by element
    """

    arch = "sm_100a"
    dtypes = ("bf16", "fp16")
    num_threads = Warp.END * 32

    def __init__(self, config: W4Signature) -> None:
        if reason := config.general.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        assert isinstance(config.tiles, W4Sm100Config)
        self.config, self.tiles = config, config.tiles

    @property
    def name(self) -> str:
        return "sm100_gemm_w4"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        if dtype != self.config.dtype:
            raise ValueError(f"x={self.config.dtype}: compiled for {dtype}")
        return self.config.arguments()

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with x (M, K), the packed weight (STRIP, RestK, WORDS), out (M, N), the
        operations' arguments and a stream."""
        mW = words_of(mW)
        *passed, stream = rest
        c = self.tiles
        mOut = transposed(mOut)
        x = load_operand(mX, slots_layout(mX.element_type, c.tile_n, c.k_of(16), c.num_stages, 128))
        out = mOut
        if cutlass.const_expr(self.config.out.tma):
            out = store_operand(mOut, self.epilogue_slots(mOut.element_type))
        self.kernel(mW, x, out, tuple(passed)).launch(
            grid=(tile_counts(c, mOut).total, 1, 1),
            block=(self.num_threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """The smem layout (128, epiN, SLOT) of sub-tiles of out."""
        columns, num_slots = self.config.general.out_columns, self.tiles.epi_stages
        if self.config.general.columns_contiguous:
            return slots_layout(dtype, LANES, columns, num_slots, columns * dtype.width // 8)
        return contiguous_lanes_layout(columns, num_slots)

    def rings(self, smem: SmemAllocator) -> Rings:
        c = self.tiles
        weights = Ring.allocate(smem, "w", c.num_weights, c.weight_bytes, consumers=Warp.LOAD)
        full = Barrier.allocate(smem, "ab full", arrivals=1 + Warp.LOAD, slots=c.num_stages)
        empty = Barrier.allocate(smem, "ab empty", arrivals=1, slots=c.num_stages)
        return Rings(weights, Ring(c.num_stages, c.x_bytes, full, empty))

    @cute.kernel
    def kernel(
        self, mW: cute.Tensor, x: cpasync.TmaInfo, out: Any, passed: tuple[Any, ...]
    ) -> None:
        """Run the roles; `out` is as of the general kernel."""
        c, general = self.tiles, self.config.general
        kind = x.atom.value_type
        smem = SmemAllocator()
        a_layout = slots_layout(kind, c.tile_m, c.k_of(16), c.num_stages, 128)
        sA = allocate_slots(smem, kind, a_layout)  # (bM, bK, SLOT)
        sX = allocate_slots(smem, kind, x.smem_layout)  # (bN, bK, SLOT)
        sW = allocate_weights(smem, c.format, c.strips, c.num_weights)  # (WORDS, STRIP, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (128, epiN, SLOT)
        store = FusedEpilogueStore(out, sC, general.epi_columns, general.bind(mOut, passed))
        rings = self.rings(smem)
        acc = AccRing.of(smem, 1, readers=Warp.LOAD)
        m, n, _ = tile_counts(c, mOut)
        order = RasterOrder(Raster(c.raster_group, c.raster_along), m, n, 1)
        dispatch = OneTilePerCluster(order, 1)
        tmem = Tmem.allocate(smem, columns=c.tile_n)
        warp = cute.arch.warp_idx()
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((rings.weights, rings.ab, acc), with_data=True)
        pointer = tmem.pointer()

        mma = umma(Umma(c.tile_m, c.tile_n, kind), sA, sX, pointer, 1)
        blocks = cute.size(mW, mode=[1])
        if warp == Warp.LOAD:
            Load(mW, sW, x, sX).run(rings, dispatch.tile(dispatch.first()))
        elif warp == Warp.MMA:
            Mma().run(mma, rings.ab, acc, blocks)
        else:
            Widen(Fragments(sW, c.format, kind), sA).run(rings, blocks)
            StoreTiles(c, unrolled=False).run(mma.acc, store, acc, dispatch)
        cute.arch.sync_threads()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(pointer)

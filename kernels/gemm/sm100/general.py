"""The general GEMM on Blackwell: out = ops(A @ B) for any layout, dtype, batch and tiles.

This file holds the kernel: its barriers and memory, the warps of each role, and its tensor maps.
roles.py holds the load and the MMA role, epilogue.py the epilogue roles; a config
(config.py) chooses among them and among the dispatchers.

- tcgen05.mma reads operands with either side contiguous in smem, fp32 (as tf32) too, in a swizzle
  of its own. A CTA loads the same rows of A and of B either way.
- A tile has a batch entry. An operand with one entry for all (L = 1) is read again for each.
- The epilogue runs its operations on each sub-tile, in fp32, then rounds it and stores it by TMA;
  or element by element, where TMA cannot step through out.
- The kernel starts while the one before it ends (programmatic dependent launch): barriers and
  tensor memory are ready when the results of that one are.
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
from cutex.device.atoms.mma import (
    MAJORS,
    allocate_slots,
    contiguous_lanes_layout,
    contiguous_rows_layout,
    slots_layout,
)
from cutex.device.atoms.tma import PairOperands, load_operand, store_operand
from cutex.device.atoms.tmem import LANES, Tmem, fence_after_sync
from cutex.device.atoms.umma import Umma, umma
from cutex.device.epilogue.sm100.fused_store import FusedEpilogueStore
from cutex.device.pipeline import AccRing, PairRing, is_leader, publish_barriers, sync_cluster
from cutex.kernels.gemm.signature import GeneralConfig, modes, tile_counts, transposed
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.kernels.gemm.sm100.epilogue import SplitK, StoreTiles
from cutex.kernels.gemm.sm100.roles import Load, Mma, k_share
from cutex.schedulers.clc import CTAS, ClcDispatch
from cutex.schedulers.dispatch import Dispatcher
from cutex.schedulers.one_tile import OneTilePerCluster
from cutex.schedulers.raster import Raster, RasterOrder


class Warp(IntEnum):
    """The roles of the warps. Warps 0 to 3 are the epilogue: each may read only its own quarter of
    tensor memory."""

    LOAD = LANES // 32
    MMA = LOAD + 1
    SCHEDULE = MMA + 1
    END = SCHEDULE + 1


def operand_slots(
    c: Sm100Config, dtype: type[cutlass.Numeric], rows: int, k: int, k_major: bool
) -> cute.ComposedLayout:
    """The smem layout (bRows / ctas, bK, SLOT) of one CTA's part of `rows` of an operand, `k`
    elements at a time."""
    if k_major:
        return slots_layout(dtype, rows // c.ctas, k, c.num_stages, swizzle=128)
    return contiguous_rows_layout(dtype, rows // c.ctas, k, c.num_stages)


def store_slots(config: GeneralConfig, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
    """The smem layout (128, epiN, SLOT) of sub-tiles of one CTA's part of out."""
    columns, num_slots = config.out_columns, config.tiles.epi_stages
    if config.columns_contiguous:
        swizzle = columns * dtype.width // 8
        return slots_layout(dtype, LANES, columns, num_slots, swizzle)
    return contiguous_lanes_layout(columns, num_slots)


def dispatcher_of(c: Sm100Config, smem: SmemAllocator, mProduct: cute.Tensor) -> Dispatcher:
    """The dispatcher of the product's tiles: pairs ask the hardware, where each computes whole
    tiles; else a cluster, or a CTA, has one tile."""
    m, n, batch = tile_counts(c, mProduct)
    order = RasterOrder(Raster(c.raster_group, c.raster_along), m, n, c.ctas, batch=batch)
    if c.split_k > 1 or not c.pair:
        return OneTilePerCluster(order, c.ctas * c.split_k)
    load, epilogue, mma, schedule = 1, Warp.LOAD, 1, 1  # warps
    return ClcDispatch.allocate(smem, order, CTAS * (load + epilogue) + mma + schedule)


class General:
    """A pair of CTAs, or split_k pairs, compute tiles of out: in each CTA a load warp, an MMA warp,
    one that asks for tiles, and four that store.

    barrier          arrives                                   waits
    ab.full[slot]    1: LOAD of the leader, and the bytes of   MMA of the leader
                     both CTAs by TMA
    ab.empty[slot]   1: the commit of its last MMA, in both    LOAD of its CTA
    acc.full[slot]   1: the commit of the last MMA of one      the epilogue warps of its CTA
                     accumulator of a tile, in both CTAs
    acc.empty[slot]  1 an epilogue warp of both CTAs: 8 at     MMA of the leader, before it
                     the leader's                              computes into it
    asked, read      those of ClcDispatch; with split_k there is one tile a cluster, and no queue
    1   (sub-tile)   the epilogue warps, having written their  the same, before TMA stores the slot
                     rows of a slot of sC                      and before they write the next
    (cluster)        all threads, barriers being initialised   all threads
    (cluster)        all threads, their tiles being done       all threads, before tensor memory is
                                                               freed; with split_k the epilogue
                                                               warps, before they add up, and all
                                                               again, before smem may go

    smem of a CTA    bytes                                     tmem   columns
    sA               tile_m / 2 * k_bytes * num_stages      acc    tile_n * num_acc
    sB               tile_n / 2 * k_bytes * num_stages
    sC               128 * epi_n * 2 * epi_stages; half after a gate; none by element
    sums             128 * tile_n * 4, with split_k
    ab, acc, CLC     16 * num_stages, 16 * num_acc, 64, and 4 for the address of tmem
    """

    arch = "sm_100a"
    dtypes = ("bf16", "fp16", "e4m3", "e5m2", "fp32")  # fp32 is read as tf32
    num_threads = Warp.END * 32

    def __init__(self, config: GeneralConfig) -> None:
        if reason := config.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        assert isinstance(config.tiles, Sm100Config)  # why_not has refused every other
        if not config.tiles.pair:
            raise ValueError(f"pair={config.tiles.pair}: {self.name} takes pairs of CTAs")
        self.config = config
        self.tiles = config.tiles

    @property
    def name(self) -> str:
        return "sm100_gemm_general"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    # ---- on the host

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), each with L first where batched, then the
        operations' arguments, then a stream."""
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        self.launch(mA, mB, modes(mOut, columns_first=False), rest[:-1], rest[-1])

    @cute.jit
    def launch(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, passed: tuple[Any, ...], stream
    ) -> None:
        """Launch with mA (M, K), mB (N, K), mOut (M, N), each with L last where batched."""
        c = self.tiles
        if cutlass.const_expr(c.swap_ab):
            mA, mB, mOut = mB, mA, transposed(mOut)
        k_major = self.config.k_major
        a = load_operand(mA, self.load_slots(mA.element_type, c.tile_m, k_major[0]), pair=True)
        b = load_operand(mB, self.load_slots(mB.element_type, c.tile_n, k_major[1]), pair=True)
        out = mOut
        if cutlass.const_expr(self.config.out.tma):
            out = store_operand(mOut, store_slots(self.config, mOut.element_type))
        cluster = (CTAS * c.split_k, 1, 1)
        self.kernel(a, b, out, passed).launch(
            grid=(cluster[0] * tile_counts(c, self.config.product(mOut)).total, 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,  # smem takes a whole SM: ptxas need not save registers
            use_pdl=True,
            stream=stream,
        )

    def load_slots(
        self, dtype: type[cutlass.Numeric], rows: int, k_major: bool
    ) -> cute.ComposedLayout:
        """The smem layout (bRows / 2, bK, SLOT) of one CTA's half of `rows` of an operand."""
        return operand_slots(self.tiles, dtype, rows, self.config.k_elements, k_major)

    # ---- on the device

    @cute.kernel
    def kernel(
        self, a: cpasync.TmaInfo, b: cpasync.TmaInfo, out: Any, passed: tuple[Any, ...]
    ) -> None:
        """Run the roles. `out` is a TmaInfo, or, where TMA cannot step through it, a tensor (M, N)
        or (M, N, L)."""
        c, config = self.tiles, self.config
        kinds = a.atom.value_type, b.atom.value_type
        smem = SmemAllocator()
        sA = allocate_slots(smem, kinds[0], a.smem_layout)  # (bM / 2, bK, SLOT)
        sB = allocate_slots(smem, kinds[1], b.smem_layout)  # (bN / 2, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (128, epiN, SLOT)
        mProduct = config.product(mOut)
        store = FusedEpilogueStore(out, sC, config.epi_columns, config.bind(mProduct, passed))
        epilogue = self.epilogue_role(smem)
        warp = cute.arch.warp_idx()
        ab = PairRing.allocate(smem, "ab", c.num_stages, c.stage_bytes, consumers=1)
        acc = AccRing.of(smem, c.num_acc, readers=CTAS * Warp.LOAD)
        dispatch = dispatcher_of(c, smem, mProduct)
        tmem = Tmem.allocate(smem, columns=c.tile_n * c.num_acc, pair=True)
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((ab, acc, *dispatch.barriers), cluster=True, with_data=True)
        pointer = tmem.pointer()

        a_major, b_major = (MAJORS[k_major] for k_major in config.k_major)
        instruction = Umma(256, c.tile_n, *kinds, a_major, b_major, pair=True)
        mma = umma(instruction, sA, sB, pointer, c.num_acc)
        if warp == Warp.LOAD:
            Load(c).run(PairOperands(a, b, sA, sB), ab, dispatch)
        elif warp == Warp.MMA:
            if is_leader():
                num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), config.k_elements)
                Mma(c).run(mma, ab, acc, k_share(c, num_k_tiles), dispatch)
        elif warp < Warp.LOAD:
            epilogue.run(mma.acc, store, acc, dispatch)
        else:
            dispatch.schedule()
        sync_cluster()
        if cutlass.const_expr(c.split_k > 1):
            if warp < Warp.LOAD:
                epilogue.finish(mma.acc, store, dispatch)
            sync_cluster()
        if warp == Warp.MMA:
            fence_after_sync()
            tmem.free(pointer)

    def epilogue_role(self, smem: SmemAllocator) -> StoreTiles | SplitK:
        if self.tiles.split_k > 1:
            return SplitK(self.tiles, SplitK.allocate_sums(smem, self.tiles))
        return StoreTiles(self.tiles, unrolled=self.config.ops == () and self.config.out.tma)

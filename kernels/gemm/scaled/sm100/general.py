"""The block-scaled GEMM on Blackwell: out = ops((A * scales) @ (B * scales)), MXFP8, MXFP4, NVFP4,
or fp8 with fp4.

It is the general GEMM (kernels/gemm/sm100/general.py) with scale factors: the same load role, given
two more operands; an MMA role that copies each step's factors to tensor memory before it
multiplies; the same epilogues, and one for accumulators that leave room for the factors (all three
in roles.py). What is here is its barriers and memory, and its tensor maps.

- Factors come as cuBLAS, CUTLASS and torch swizzle them, chunks of 128 rows by 4 of K
  (device/atoms/scale_factors.py), and stay so: TMA loads them, tcgen05.cp copies them.
- A CTA has the factors of its own rows of A, and for a pair those of B of both CTAs. A tile may
  begin at any multiple of 32 rows of B: a chunk's columns of tensor memory hold 32 rows each.
- 4-bit elements beside 8-bit ones are loaded into a byte each.
"""

from __future__ import annotations

from dataclasses import replace
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
)
from cutex.device.atoms.scale_factors import BlockFactors, Factors, FactorTile
from cutex.device.atoms.tma import store_operand
from cutex.device.atoms.tmem import Tmem, fence_after_sync
from cutex.device.atoms.umma import BlockScaling, Umma, UmmaProduct
from cutex.device.epilogue.epilogue_ops import Scale
from cutex.device.epilogue.sm100.fused_store import FusedEpilogueStore
from cutex.device.pipeline import AccRing, PairRing, Ring, is_leader, publish_barriers, sync_cluster
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.scaled.sm100.roles import (
    ScaledMma,
    ScaledOperands,
    StoreOverlapped,
    load_elements,
)
from cutex.kernels.gemm.scaled.sm100.signature import ScaledConfig, unpacked
from cutex.kernels.gemm.signature import modes, tile_counts, transposed
from cutex.kernels.gemm.sm100.epilogue import SplitK, StoreTiles
from cutex.kernels.gemm.sm100.general import Warp, dispatcher_of, operand_slots, store_slots
from cutex.kernels.gemm.sm100.roles import Load
from cutex.problem.scaled.formats import BLOCK_SCALED


class Scaled:
    """A pair of CTAs, split_k pairs, or a single CTA compute tiles of out: in each CTA a load warp,
    an MMA warp, one that asks for tiles, and four that store.

    barrier          arrives                                   waits
    ab.full[slot]    1: LOAD of the leader, and the bytes of   MMA of the leader
                     A, B and their factors, of both CTAs, by
                     TMA
    ab.empty[slot]   1: the commit of its last MMA, in both    LOAD of its CTA
    acc.full[slot]   1: the commit of the last MMA of a tile,  the epilogue warps of its CTA
                     in both CTAs
    acc.empty[slot]  1 an epilogue warp of all CTAs, at the    MMA of the leader, before it
                     leader's                                  computes a tile
    (others)         as in the general kernel

    smem of a CTA    bytes
    sA, sB           (tile_m + tile_n) / ctas * k_bytes * num_stages
    sFA, sFB         512 * factor_steps * (1 + b_chunks) * num_stages
    sC, sums         as in the general kernel

    tmem             columns
    acc              tile_n * num_acc, less the `overlap` that two accumulators share
    factors          4 * factor_steps * (1 + b_chunks)

    A single CTA is its own leader, and has one tile.
    """

    arch = "sm_100a"
    dtypes = (*BLOCK_SCALED, "e4m3", "e5m2", "e2m1")  # recipes, or A's elements
    num_threads = Warp.END * 32

    def __init__(self, config: ScaledConfig) -> None:
        if reason := config.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        self.config = config
        self.tiles: ScaledTiles = config.tiles

    @property
    def name(self) -> str:
        return "sm100_gemm_scaled"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    # ---- on the host

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mOut: cute.Tensor,
        mFA: cute.Tensor,
        mFB: cute.Tensor,
        *rest,
    ) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), each with L first where batched, the
        factors of a and b (L, RestRows, RestK, WORDS), then the operations' arguments, then a
        stream."""
        c, config = self.tiles, self.config
        pair = c.pair
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        mOut = modes(mOut, columns_first=False)
        if cutlass.const_expr(c.swap_ab):
            mA, mB, mFA, mFB, mOut = mB, mA, mFB, mFA, transposed(mOut)
        kinds = self.element_types()
        k_major = config.k_major
        mA, mB = unpacked(mA, kinds[0]), unpacked(mB, kinds[1])
        unpack = [x.width == 4 and config.kind.bits == 8 for x in kinds]
        a = load_elements(mA, self.load_slots(c.tile_m, k_major[0]), pair, unpack[0])
        b = load_elements(mB, self.load_slots(c.tile_n, k_major[1]), pair, unpack[1])
        of_a, of_b = self.factor_tiles()
        factors_a = of_a.load_operand(mFA, c.num_stages, pair)
        factors_b = of_b.load_operand(mFB, c.num_stages, pair)
        out = mOut
        if cutlass.const_expr(config.out.tma):
            out = store_operand(mOut, store_slots(config, mOut.element_type))
        cluster = (c.ctas * c.split_k, 1, 1)
        self.kernel((a, b, factors_a, factors_b), out, rest[:-1]).launch(
            grid=(cluster[0] * tile_counts(c, config.product(mOut)).total, 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,  # smem takes a whole SM: ptxas need not save registers
            use_pdl=True,
            stream=rest[-1],
        )

    def element_types(self) -> tuple[type[cutlass.Numeric], type[cutlass.Numeric]]:
        """The types of the elements of A and B, in the order of the MMA."""
        a, b = (DTYPES[x.dtype].dsl for x in self.config.mma_operands)
        return a, b

    def slot_type(self) -> type[cutlass.Numeric]:
        """The type of an element in smem, where 4 bits may take a byte."""
        return cutlass.Uint8 if self.config.kind.bits == 8 else cutlass.Float4E2M1FN

    def factor_tiles(self) -> tuple[FactorTile, FactorTile]:
        """The chunks of factors of A and of B in a step of K."""
        c = self.tiles
        return FactorTile(1, c.factor_steps), FactorTile(c.b_chunks, c.factor_steps)

    def load_slots(self, rows: int, k_major: bool) -> cute.ComposedLayout:
        """The smem layout (bRows / ctas, bK, SLOT) of one CTA's part of `rows` of an operand."""
        c = self.tiles
        return operand_slots(c, self.slot_type(), rows, c.k_elements, k_major)

    # ---- on the device

    @cute.kernel
    def kernel(self, maps: tuple[cpasync.TmaInfo, ...], out: Any, passed: tuple[Any, ...]) -> None:
        """Run the roles on A, B, and their factors. `out` is a TmaInfo, or, where TMA cannot step
        through it, a tensor (M, N) or (M, N, L)."""
        c, config = self.tiles, self.config
        smem = SmemAllocator()
        operands = self.allocate_operands(smem, maps)
        mOut, sC = out, None
        if cutlass.const_expr(config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (128, epiN, SLOT)
        mProduct = config.product(mOut)
        store = FusedEpilogueStore(out, sC, config.epi_columns, config.bind(mProduct, passed))
        epilogue = self.epilogue_role(smem)
        warp = cute.arch.warp_idx()
        ring = PairRing if c.pair else Ring
        ab = ring.allocate(smem, "ab", c.num_stages, config.loaded_bytes, consumers=1)
        num_acc = 1 if c.overlap else c.num_acc
        acc = AccRing.of(smem, num_acc, readers=c.ctas * Warp.LOAD)
        dispatch = dispatcher_of(c, smem, mProduct)
        tmem = Tmem.allocate(smem, c.acc_columns + c.factor_columns, pair=c.pair)
        if warp == Warp.MMA:
            tmem.acquire()
        publish_barriers((ab, acc, *dispatch.barriers), cluster=True, with_data=True)
        pointer = tmem.pointer()

        mma = self.product(operands, pointer)
        if warp == Warp.LOAD:
            Load(c).run(operands, ab, dispatch)
        elif warp == Warp.MMA:
            if is_leader() if c.pair else True:
                k = cute.size(maps[0].tma_tensor, mode=[1])
                ScaledMma(c).run(mma, ab, acc, k, dispatch)
        elif warp < Warp.LOAD:
            epilogue.run(mma.acc, self.with_held_scales(store), acc, dispatch)
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

    def with_held_scales(self, store: FusedEpilogueStore) -> FusedEpilogueStore:
        """`store` with the tensors' own scale factors in registers, loaded once for all tiles."""
        held, at = list(store.ops.arguments), 0
        for op in self.config.ops:
            if isinstance(op, Scale) and op.by == "tensor":
                cute.arch.griddepcontrol_wait()
                one = cute.make_rmem_tensor((1,), held[at].element_type)
                one[0] = held[at][0]
                held[at] = one
            at += len(op.arguments())
        return replace(store, ops=replace(store.ops, arguments=tuple(held)))

    def allocate_operands(
        self, smem: SmemAllocator, maps: tuple[cpasync.TmaInfo, ...]
    ) -> ScaledOperands:
        """Allocate the slots of A, B and their factors."""
        c, dtype = self.tiles, self.slot_type()
        sA = allocate_slots(smem, dtype, maps[0].smem_layout)  # (bM / ctas, bK, SLOT)
        sB = allocate_slots(smem, dtype, maps[1].smem_layout)  # (bN / ctas, bK, SLOT)
        tiles = of_a, of_b = self.factor_tiles()
        sFA = of_a.allocate(smem, c.num_stages)  # (WORDS, STEPS, ROWS, SLOT)
        sFB = of_b.allocate(smem, c.num_stages)  # (WORDS, STEPS, ROWS, SLOT)
        return ScaledOperands(maps, sA, sB, sFA, sFB, tiles, c.tile_n, c.ctas)

    @cute.jit
    def product(self, operands: ScaledOperands, pointer: cute.Pointer) -> UmmaProduct:
        """The product of the operands' slots: accumulators from the first column of tensor memory
        on, `overlap` apart less than their width, then the factors."""
        c, config = self.tiles, self.config
        factor = DTYPES[config.kind.factors].dsl
        kinds, majors = self.element_types(), [MAJORS[x] for x in config.k_major]
        scaling = BlockScaling(factor, config.kind.vector)
        mma = Umma(c.tile_m, c.tile_n, *kinds, majors[0], majors[1], c.pair, scaling)
        acc = mma.accumulator(pointer)  # (MMA, MMA_M, MMA_N)
        both = cute.make_layout(c.num_acc, stride=c.tile_n - c.overlap)
        acc = cute.make_tensor(acc.iterator, cute.append(acc.layout, both))  # with a mode ACC
        of_a, of_b = operands.factors
        a = Factors(of_a, operands.sFA, pointer + c.acc_columns)
        b = Factors(of_b, operands.sFB, a.tmem + of_a.columns)
        slots = mma.a_slots(operands.sA), mma.b_slots(operands.sB)
        return UmmaProduct(mma, *slots, acc, BlockFactors(a, b))

    def epilogue_role(self, smem: SmemAllocator) -> StoreTiles | SplitK:
        c = self.tiles
        unrolled = self.config.ops == () and self.config.out.tma
        if c.split_k > 1:
            return SplitK(c, SplitK.allocate_sums(smem, c))
        if c.overlap:
            columns = self.config.epi_columns
            return StoreOverlapped(c, unrolled, shared_parts=-(-c.overlap // columns))
        return StoreTiles(c, unrolled)

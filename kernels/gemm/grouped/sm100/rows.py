"""The grouped GEMM on Blackwell: out[rows of e] = ops(A[rows of e] @ B[e]).

The general kernel's roles (kernels/gemm/sm100) on the tiles of ragged groups
(schedulers/ragged.py), whose ends are known on the device alone; as on Hopper (sm90/rows.py).

Clusters take equal steps through the tiles, since as many CTAs as there may be tiles, for the
hardware to hand out, would mostly be started for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.device.atoms.mma import MAJORS
from cutex.device.atoms.tma import AbLoads, PairOperands, load_operand
from cutex.device.atoms.umma import Umma, umma
from cutex.device.epilogue.sm100.fused_store import FusedEpilogueStore, FusedTileStore
from cutex.device.pipeline import is_leader
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.config import GroupedConfig
from cutex.kernels.gemm.grouped.sm100.kernel import GroupedKernel
from cutex.kernels.gemm.grouped.sm100.memory import GroupMemory
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand, stored_rows
from cutex.kernels.gemm.signature import modes, tile_counts
from cutex.kernels.gemm.sm100.epilogue import StoreTiles
from cutex.kernels.gemm.sm100.general import General, Warp, store_slots
from cutex.kernels.gemm.sm100.roles import Load, Mma
from cutex.schedulers.ragged import RowGroups


@dataclass(frozen=True)
class GroupedOperands:
    """A (M, K), and B (N, K, E), as a pair loads them."""

    pair: PairOperands
    groups: RowGroups

    def prefetch(self) -> None:
        self.pair.prefetch()

    def loads(self, tile: WorkTile) -> AbLoads:
        """The loads of this CTA's half of the rows of A and of B, of the tile's group."""
        a = loaded_rows(self.pair.a, self.groups.begins[tile.group])
        return self.pair._replace(a=a).loads(tile._replace(batch=tile.group))


@dataclass(frozen=True)
class GroupStore:
    """The store of accumulators to the rows of groups."""

    out: cpasync.TmaInfo  # of store_operand
    sC: cute.Tensor  # (128, epiN, SLOT)
    columns: int
    groups: RowGroups
    ops: GroupOps

    def prefetch(self) -> None:
        cpasync.prefetch_descriptor(self.out.atom)

    def tile(self, tAcc: cute.Tensor, tile: WorkTile, row_tile: Int32) -> FusedTileStore:
        """The store of tAcc (128, bN) to the 128 rows of block `row_tile` of the tile's group."""
        groups, group = self.groups, tile.group
        out = stored_rows(self.out, groups.begins[group], groups.ends[group])
        ops = self.ops.of(groups, group)
        store = FusedEpilogueStore(out, self.sC, self.columns, ops)
        return store.tile(tAcc, tile._replace(batch=group), row_tile)


class RowsKernel(GroupedKernel):
    """The grouped kernel of A (M, K) and B (E, K, N), wherever it stores."""

    slots_of_out = True  # whether the store takes smem

    def __init__(self, config: GroupedConfig) -> None:
        super().__init__(config)
        self.general = General(config.product)  # whose maps it has

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The store's destination for the kernel, and the operations' arguments, out of all
        `passed`. On the host."""
        raise NotImplementedError

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: Any, ops: GroupOps, groups: RowGroups
    ) -> Any:
        """The store of accumulators."""
        raise NotImplementedError

    def product_like(self, stored: Any, mOut: cute.Tensor, columns: Int32) -> cute.Tensor:
        """A tensor of the product's sizes (M, N)."""
        raise NotImplementedError

    # ---- on the host

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, edges: cute.Tensor, *rest
    ) -> None:
        """Launch with a (M, K), b (E, K, N), out, edges (E), what else the store takes, the
        operations' arguments, and a stream."""
        c, general = self.tiles, self.general
        *passed, stream = rest
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        a_k, b_k = self.config.product.k_major
        a = load_operand(mA, general.load_slots(mA.element_type, c.tile_m, a_k), pair=True)
        b = load_operand(mB, general.load_slots(mB.element_type, c.tile_n, b_k), pair=True)
        stored, given = self.stored(mOut, tuple(passed))
        launched = self.kernel(a, b, stored, mOut, edges, given)
        self.start(launched, self.grid(mA, mB), stream)

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        stored: Any,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles."""
        c, product = self.tiles, self.config.product
        kinds = a.atom.value_type, b.atom.value_type
        slots = stored if cutlass.const_expr(self.slots_of_out) else None
        memory = GroupMemory.allocate(c, (a, b), slots, self.config.most_groups)
        sA, sB, sC, groups, ab, acc, tmem = memory
        scheduler = self.ragged(groups)
        n = cute.size(b.tma_tensor, mode=[0])
        mProduct = self.product_like(stored, mOut, n)
        sizes = cute.size(mProduct, mode=[0]), cute.size(mProduct, mode=[1])
        warp = cute.arch.warp_idx()
        pointer = self.begin((ab, acc), tmem, scheduler, edges, sizes)
        dispatch = scheduler.walk(tile_counts(c, mProduct))

        a_major, b_major = (MAJORS[k_major] for k_major in product.k_major)
        instruction = Umma(256, c.tile_n, *kinds, a_major, b_major, pair=True)
        mma = umma(instruction, sA, sB, pointer, c.num_acc)
        ops = GroupOps(product.ops, passed, n)
        store: Any = self.store(stored, mOut, sC, ops, groups)
        operands: Any = GroupedOperands(PairOperands(a, b, sA, sB), groups)
        if warp == Warp.LOAD:
            Load(c).run(operands, ab, dispatch)
        elif warp == Warp.MMA:
            if is_leader():
                num_k_tiles = cute.ceil_div(cute.size(a.tma_tensor, mode=[1]), product.k_elements)
                Mma(c).run(mma, ab, acc, num_k_tiles, dispatch)
        elif warp < Warp.LOAD:
            StoreTiles(c, unrolled=product.ops == ()).run(mma.acc, store, acc, dispatch)
        self.end(tmem, pointer)


class GroupedRows(RowsKernel):
    """The grouped kernel that stores to out (M, N) by TMA."""

    name = "sm100_gemm_grouped_rows"
    dtypes = "bf16", "fp16", "e4m3"

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return store_operand(mOut, store_slots(self.general.config, mOut.element_type)), passed

    def product_like(self, stored: Any, mOut: cute.Tensor, columns: Int32) -> cute.Tensor:
        return self.config.product.product(mOut)

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: Any, ops: GroupOps, groups: RowGroups
    ) -> GroupStore:
        return GroupStore(stored, sC, self.config.product.epi_columns, groups, ops)

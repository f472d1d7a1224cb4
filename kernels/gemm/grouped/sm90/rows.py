"""The grouped GEMM on Hopper: out[rows of e] = ops(A[rows of e] @ B[e]).

The general kernel's roles (kernels/gemm/sm90) on the tiles of ragged groups (schedulers/ragged.py),
whose ends are known on the device alone.

- One warp of a CTA reads the ends and fills in the tables of groups; then all roles walk the same
  tiles, each at its own pace.
- One tensor map loads A, one B (E, K, N), one stores out (views.py): none is made for a group.
- Rows of no group are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.multicast import AbOperands, Cluster
from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.epilogue.sm90.fused_store import FusedStore, fused_store
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.sm90.kernel import GroupedKernel, grid
from cutex.kernels.gemm.grouped.sm90.memory import GroupMemory
from cutex.kernels.gemm.grouped.views import GroupOps, loaded_rows, store_operand, stored_rows
from cutex.kernels.gemm.signature import modes
from cutex.kernels.gemm.sm90 import mma as roles
from cutex.schedulers.ragged import RowGroups


@dataclass(frozen=True)
class GroupedOperands(AbOperands):
    """A (M, K), and B (N, K, E)."""

    groups: Any = None  # RowGroups

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`, of its group's rows and matrix."""
        a = loaded_rows(self.a, self.groups.begins[tile.group])
        operands = AbOperands(a, self.b, self.sA, self.sB, self.k_major)
        return operands.loads(tile._replace(batch=tile.group), cluster)


@dataclass(frozen=True)
class GroupStore:
    """The store of accumulators to the rows of groups."""

    out: cpasync.TmaInfo  # of store_operand
    sC: cute.Tensor  # (64, epiN, SLOT)
    num_slots: int
    groups: RowGroups
    ops: GroupOps
    at_once: bool = False  # as of FusedStore

    def of(self, group: Any) -> FusedStore:
        """The store to one group's rows."""
        groups = self.groups
        out = stored_rows(self.out, groups.begins[group], groups.ends[group])
        ops = self.ops.of(groups, group)
        store = fused_store(out, self.sC, self.num_slots, True, ops, None)
        return replace(store, batch=group, at_once=self.at_once)


class OfGroups(roles.MmaRole):
    """What an MMA role does differently: it stores to the rows of a tile's group."""

    def store(self, mma: WgmmaProduct, epilogue: Any, tile: WorkTile) -> None:
        super().store(mma, epilogue.of(tile.group), tile)


class Cooperative(OfGroups, roles.Cooperative):
    """All warpgroups compute a tile, each its own rows, and store it."""


class PingPong(OfGroups, roles.PingPong):
    """Two warpgroups alternate tiles: one stores while the other's wgmma run."""


class RowsKernel(GroupedKernel):
    """The grouped kernel of A (M, K) and B (E, K, N), wherever it stores."""

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The store's destination for the kernel, and the operations' arguments, out of all
        `passed`. On the host."""
        raise NotImplementedError

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: cute.Tensor, ops: GroupOps, groups: RowGroups
    ) -> Any:
        """The store of accumulators."""
        raise NotImplementedError

    def role(self, groups: RowGroups, announced: Any) -> roles.MmaRole:
        """The MMA role of the tiles of groups."""
        c = self.tiles
        role = PingPong if c.pingpong else Cooperative
        return role(self.config.product, c, self.ragged(groups))

    def product_like(self, stored: Any, mOut: cute.Tensor, columns: Int32) -> cute.Tensor:
        """A tensor of the product's sizes (M, N)."""
        raise NotImplementedError

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, edges: cute.Tensor, *rest
    ) -> None:
        """Launch with a (M, K), b (E, K, N), out, edges (E), what else the store takes, the
        operations' arguments, and a stream."""
        c, general = self.tiles, self.general
        *passed, stream = rest
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        k_major = self.config.product.k_major
        a = general.load_operand(mA, c.tile_m, c.cluster_n, k_major[0])
        b = general.load_operand(mB, c.tile_n, c.cluster_m, k_major[1])
        stored, given = self.stored(mOut, tuple(passed))
        launched = self.kernel(a, b, stored, mOut, edges, given)
        self.start(launched, grid(c, mA, mB), stream)

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
        product = self.config.product
        most, kind = self.config.most_groups, mOut.element_type
        smem = SmemAllocator()
        memory = GroupMemory.allocate(smem, self.general, (a, b), kind, most)
        sA, sB, sC, groups, _ = memory
        operands = GroupedOperands(a, b, sA, sB, product.k_major, groups=groups)
        tiles = self.announced_tiles(smem)
        role = self.role(groups, tiles)
        n = cute.size(b.tma_tensor, mode=[0])
        ops = GroupOps(product.ops, passed, n)
        store: Any = self.store(stored, mOut, sC, ops, groups)
        mProduct = self.product_like(stored, mOut, n)
        self.run(memory, operands, role, store, edges, mProduct, tiles)


class GroupedRows(RowsKernel):
    """The grouped kernel that stores to out (M, N) by TMA."""

    name = "sm90_gemm_grouped_rows"
    dtypes: tuple[str, ...] = ("bf16", "fp16", "e4m3")

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return store_operand(mOut, self.general.epilogue_slots(mOut.element_type)), passed

    def store(
        self, stored: Any, mOut: cute.Tensor, sC: cute.Tensor, ops: GroupOps, groups: RowGroups
    ) -> GroupStore:
        return GroupStore(stored, sC, self.tiles.epi_stages, groups, ops)

    def product_like(self, stored: Any, mOut: cute.Tensor, columns: Int32) -> cute.Tensor:
        return self.config.product.product(mOut)

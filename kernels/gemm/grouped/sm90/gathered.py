"""The grouped GEMM on Hopper with rows of A by an index: out[r] = ops(A[index[r]] @ B[group of r]).

The grouped kernel (rows.py) with another load role. Hopper's TMA gathers no rows, and a copy for
each takes longer than the MMAs of a tile (docs/facts/hardware.md#rows-tma-loads-boxes); so the four
warps of the load warpgroup load A by cp.async, 16 bytes a thread, and one of them B by TMA.

NOTE: cp.async writes in the generic proxy, and wgmma reads in the async one: each thread waits for
its own copies of a slot, and fences them, before its warp arrives on the slot's barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.multicast import AbOperands, SharedRing
from cutex.device.pipeline import Barrier, PipelineState, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.grouped.sm90.kernel import GroupedKernel, drain_stores, grid
from cutex.kernels.gemm.grouped.sm90.rows import Cooperative, GroupStore, PingPong
from cutex.kernels.gemm.grouped.views import GroupOps, store_operand
from cutex.kernels.gemm.signature import modes, tile_counts
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.mma import RoleProduct
from cutex.schedulers.ragged import RaggedTiles, RowGroups, clamp

UNIT = 8  # elements of 16 bytes, which a thread copies at a time
UNITS = 8  # of them in a row of a slot, of 128 bytes
LOADERS = 128  # threads of the load warpgroup
AHEAD = 3  # slots, at most, that are loaded before the first of them is waited for


@dataclass(frozen=True)
class TileGather:
    """The loads of the rows of one tile of A, by all threads of the load warpgroup. A thread has
    the same 16 bytes of each 16th row."""

    copy: cute.CopyAtom
    mA: cute.Tensor  # (T, K)
    rows: cute.Tensor  # (NumRows) of A, in registers
    tAsA: cute.Tensor  # (V, NumRows, 1, SLOT)
    unit: Int32

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32) -> None:
        """Start the loads of K tile `k_tile`."""
        for i in cutlass.range_constexpr(cute.size(self.rows)):
            mRow = self.mA[self.rows[i], None]  # (K)
            gRow = cute.logical_divide(mRow, cute.make_layout(UNIT))  # (UNIT, NumUnits)
            cute.copy(
                self.copy, gRow[None, k_tile * UNITS + self.unit], self.tAsA[None, i, 0, slot]
            )


@dataclass(frozen=True)
class GatheredOperands:
    """A by an index, and B (N, K, E) by TMA."""

    mA: cute.Tensor  # (T, K)
    index: cute.Tensor  # (R)
    ab: AbOperands  # B's map; of A only the slots
    groups: RowGroups

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.mA, mode=[1]) // (UNIT * UNITS)

    @cute.jit
    def gather(self, tile: WorkTile, tile_rows: cutlass.Constexpr[int]) -> TileGather:
        """The loads of a tile's rows of A. Rows past the last are others, and never stored."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % LOADERS
        mine, unit = thread // UNITS, thread % UNITS
        step = LOADERS // UNITS
        rows = cute.make_rmem_tensor(tile_rows // step, Int32)
        first = self.groups.begins[tile.group] + tile.m * tile_rows + mine
        last, most = cute.size(self.index) - 1, cute.size(self.mA, mode=[0]) - 1
        for i in cutlass.range_constexpr(tile_rows // step):
            rows[i] = clamp(self.index[cutlass.min(first + i * step, last)], most)
        past_l1 = cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL)
        copy = cute.make_copy_atom(past_l1, self.mA.element_type, num_bits_per_copy=128)
        threads = cute.make_layout((step, UNITS), stride=(UNITS, 1))
        tiled = cute.make_tiled_copy_tv(copy, threads, cute.make_layout((1, UNIT)))
        tAsA = tiled.get_slice(thread).partition_D(self.ab.sA)  # (V, NumRows, 1, SLOT)
        return TileGather(copy, self.mA, rows, tAsA, unit)

    def matrix_loads(self, tile: WorkTile, tiles: Sm90Config, general: General) -> Any:
        """The loads of the matrix of a tile's group."""
        cluster = general.cluster
        m, _ = cluster.place()
        info = self.ab.b
        b = cpasync.TmaInfo(info.atom, info.tma_tensor[None, None, tile.group], info.smem_layout)
        return self.ab.loads_of(1, b, self.ab.sB, tile.n, m, cluster.size_m, cluster.column_mask())


@dataclass(frozen=True)
class GatherRing(SharedRing):
    """A SharedRing whose slots cp.async fills beside TMA.

    full[slot]:  1 arrival as of every ring, and one of each load warp.
    """

    @cute.jit
    def publish(self, state: PipelineState) -> None:
        """Arrive for this warp, whose threads' copies to the slot are complete."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(state.slot)


@dataclass(frozen=True)
class LoadGathered:
    """The load role, of a whole warpgroup: all warps load A, its first one B."""

    tiles: Sm90Config
    general: General
    scheduler: RaggedTiles

    @cute.jit
    def run(self, operands: GatheredOperands, ab: GatherRing, mC: cute.Tensor) -> None:
        """Fill the ring for this CTA's tiles."""
        c = self.tiles
        walk = self.scheduler.walk(tile_counts(c, mC))
        warp = cute.arch.warp_idx()
        fill, landed, under_way = ab.producer(), ab.producer(), Int32(0)
        # NOTE: a slot is released when the MMAs of the next have begun, so two are published
        ahead = min(AHEAD, c.num_stages - 2)
        for number in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = walk.tile_at(number)
            gather = operands.gather(tile, c.tile_m)
            loads = operands.matrix_loads(tile, c, self.general)
            for k_tile in cutlass.range(operands.num_k_tiles, unroll=1):
                ab.empty.wait(fill.phase, fill.slot)
                if warp == self.general.load_warps.first:
                    with cute.arch.elect_one():
                        ab.full.arrive_expecting(ab.slot_bytes, fill.slot)
                    loads.load(k_tile, fill.slot, ab.full[fill.slot])
                gather.load(k_tile, fill.slot)
                cute.arch.cp_async_commit_group()
                if under_way == ahead:
                    cute.arch.cp_async_wait_group(ahead)
                    ab.publish(landed)
                    landed.advance()
                else:
                    under_way += 1
                fill.advance()
        cute.arch.cp_async_wait_group(0)
        for _ in cutlass.range(under_way, unroll=1):
            ab.publish(landed)
            landed.advance()
        ab.drain(fill)


class GroupedGathered(GroupedKernel):
    """A CTA computes tiles of groups: a warpgroup that loads, and up to three that run wgmma.

    Barriers, smem and registers are those of GroupedKernel (kernel.py), except

    ab.full[slot]   1: the first LOAD warp, and the bytes of B   MMA warps, before wgmma
                    by TMA, whichever CTA of the cluster loaded
                    them; 4: LOAD, their copies of A being
                    complete
    """

    name = "sm90_gemm_grouped_gathered"

    # ---- on the host

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        index: cute.Tensor,
        *rest,
    ) -> None:
        """Launch with a (T, K), b (E, K, N), out (R, N), edges (E), index (R), the operations'
        arguments, and a stream."""
        c, general = self.tiles, self.general
        *passed, stream = rest
        mB = modes(mB, columns_first=True)
        b = general.load_operand(mB, c.tile_n, c.cluster_m, self.config.product.k_major[1])
        out = store_operand(mOut, general.epilogue_slots(mOut.element_type))
        launched = self.kernel(mA, b, out, mOut, edges, index, tuple(passed))
        self.start(launched, grid(c, mOut, mB), stream)

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        b: cpasync.TmaInfo,
        out: cpasync.TmaInfo,
        mOut: cute.Tensor,
        edges: cute.Tensor,
        index: cute.Tensor,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles."""
        c, product, general = self.tiles, self.config.product, self.general
        kind, smem = mA.element_type, SmemAllocator()
        layout = slots_layout(kind, c.tile_m, UNIT * UNITS, c.num_stages, 128)
        sA = allocate_slots(smem, kind, layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, kind, b.smem_layout)  # (bN, bK, SLOT)
        sC = allocate_slots(smem, mOut.element_type, out.smem_layout)  # (64, epiN, SLOT)
        groups = RowGroups.allocate(smem, self.config.most_groups)
        ab = self.ring(smem)
        scheduler: Any = self.ragged(groups)
        of_b: Any = AbOperands(b, b, sA, sB, product.k_major)
        operands: Any = GatheredOperands(mA, index, of_b, groups)
        mProduct = product.product(mOut)
        rows, columns = (cute.size(mProduct, mode=[i]) for i in range(2))
        warp = cute.arch.warp_idx()
        cute.arch.griddepcontrol_wait()
        if warp == self.general.load_warps.first:
            cpasync.prefetch_descriptor(b.atom)
            scheduler.fill(edges, rows, columns, self.config.padded)
        cute.arch.griddepcontrol_launch_dependents()
        publish_barriers((ab,), cluster=general.cluster.size > 1, with_data=True)

        if warp >= self.general.load_warps.first:
            self.general.give_registers()
            LoadGathered(c, general, scheduler).run(operands, ab, mProduct)
        else:
            self.general.take_registers()
            mma = self.product(sA, sB)
            ops = GroupOps(product.ops, passed, cute.size(b.tma_tensor, mode=[0]))
            store = GroupStore(out, sC, c.epi_stages, groups, ops)
            role = PingPong if c.pingpong else Cooperative
            of_groups = RoleProduct(mma, ab, store, operands.num_k_tiles, mProduct)
            role(product, c, scheduler).run(of_groups)
            drain_stores()

    def ring(self, smem: SmemAllocator) -> GatherRing:
        """The barriers of the ring, whose bytes by TMA are B's."""
        c, general = self.tiles, self.general
        readers = 4 if c.pingpong else general.mma_warps.count
        full = Barrier.allocate(
            smem, "ab full", arrivals=1 + general.load_warps.count, slots=c.num_stages
        )
        arrivals = readers * general.cluster.neighbours
        empty = Barrier.allocate(smem, "ab empty", arrivals=arrivals, slots=c.num_stages)
        slot_bytes = c.tile_n * c.k_bytes
        return GatherRing(c.num_stages, slot_bytes, full, empty, general.cluster)

"""The general GEMM on Hopper: out = ops(A @ B) for any layout, dtype, batch and tiles.

This file holds the kernel: its barriers and memory, the warps of each role, and its tensor maps.
load.py holds the load roles, mma.py and shared_k.py the MMA roles; a config (config.py) chooses
among them and among the schedulers and epilogue stores.

- wgmma reads 16-bit operands with either side contiguous in smem. Where K is not, the CTAs that
  share a tile load parts of its K instead of its rows, so that any tile can be shared.
- A tile has a batch entry. An operand with one entry for all (L = 1) is read again for each.
- The epilogue runs its operations on each part of the accumulator, in fp32, then rounds it and
  stores it by TMA; or element by element, where TMA cannot step through out.
- The next kernel in the stream may start its CTAs before this one ends (programmatic dependent
  launch); roles wait for the kernel before only where they need its results.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.device.atoms.boxes import SWIZZLE_BYTES, box_operand
from cutex.device.atoms.mma import (
    MAJORS,
    allocate_slots,
    contiguous_rows,
    contiguous_rows_layout,
    rows_layout,
    slots_layout,
    transposed_slots_layout,
)
from cutex.device.atoms.multicast import (
    AbOperands,
    Cluster,
    SharedRing,
    k_shared_operand,
    parts_of,
    shared_operand,
)
from cutex.device.atoms.tma import load_operand, store_operand
from cutex.device.atoms.wgmma import Wgmma, WgmmaProduct, wgmma
from cutex.device.epilogue.epilogue_ops import Add, BoundOps
from cutex.device.epilogue.sm90.fused_store import ElementStore, fused_store
from cutex.device.epilogue.sm90.tma_store import warp_store, warpgroup_store
from cutex.device.pipeline import Barrier, Warps, publish_barriers
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.signature import GeneralConfig, modes, tile_counts, transposed
from cutex.kernels.gemm.sm90.config import FEW_COLUMNS, Sm90Config, box_rows
from cutex.kernels.gemm.sm90.load import (
    LoadByGpc,
    LoadOneTile,
    LoadSegments,
    LoadTiles,
    Pace,
    Scheduler,
)
from cutex.kernels.gemm.sm90.mma import (
    Cooperative,
    EpilogueStore,
    MmaRole,
    PingPong,
    RoleProduct,
)
from cutex.kernels.gemm.sm90.shared_k import Exchange, SplitK, StreamK
from cutex.schedulers.by_gpc import ByGpc, Claims
from cutex.schedulers.one_round import OneRound
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.raster import Raster
from cutex.schedulers.spread import Spread
from cutex.schedulers.stream_k import StreamedTiles


class Barriers(NamedTuple):
    """The barriers in smem of a kernel of General's roles (see its table)."""

    ab: SharedRing
    held: Barrier | None
    sums: Barrier | None

    @staticmethod
    def allocate(smem: SmemAllocator, general: General) -> Barriers:
        """Allocate those that the config of `general` needs."""
        g, c = general, general.tiles
        readers = 4 * c.row_warpgroups
        ab = SharedRing.of_cluster(smem, "ab", c.num_stages, c.stage_bytes, readers, g.cluster)
        held = sums = None
        if g.preloaded is not None:
            held = Barrier.allocate(smem, "held", arrivals=1, slots=g.num_slots)
        if c.split_k > 1:
            sums = Barrier.allocate(smem, "sums", arrivals=1)
        return Barriers(ab, held, sums)

    @property
    def all(self) -> tuple[SharedRing | Barrier, ...]:
        return tuple(x for x in self if x is not None)


class General:
    """A CTA computes tiles of out: a load warp, and up to three warpgroups that run wgmma.

    barrier         arrives                                      waits
    ab.full[slot]   1: LOAD, and the bytes by TMA, whichever     MMA warps, before wgmma
                    CTA of the cluster loaded them
    ab.empty[slot]  1 an MMA warp that reads this CTA's loads,   LOAD, before it loads into the
                    in its own CTA and in those that share them; smem of all of them, and at the end
                    with ping-pong, of the warpgroup at work
    sums            with split_k: 1: MMA warp 0, and the bytes   MMA warps, before they add up
                    by st.async of the other CTAs' sums
    held[slot]      1: the warp that stores, and the bytes by    the warpgroup, before it reads
                    TMA of a matrix to add (PartLoads)           the slot
    flags[warp]     with stream_k, in global memory: the same    that warp of the CTA that finishes
                    warp of a CTA, having left its sums of a     the tile, before it adds them up
                    tile that another CTA finishes
    0   (CTA)       all threads, barriers being initialised      all; with a cluster, its barrier
                    and, with by_gpc, a place being claimed
    1-3 (warpgroup) its threads, having written a slot of sC     the same, before TMA stores it and
                                                                 before they write the next
    3-4 (order)     with ping-pong: the warpgroup that has       the other, before it issues its own
                    issued its tile
    5   (sums)      with stream_k: the MMA warps, their wgmma    the same, before sums overwrite A
                    being done
    (cluster)       with split_k: all threads of the MMA warps,  the same, before they send sums to
                    their wgmma being done                       where the ring was
    6   (turns)     with in_turns: the MMA warps, the slot of    the same, before one warpgroup
                    sC being read                                writes it

    smem            bytes
    sA, sB          tile_m * k_bytes * num_stages, tile_n * k_bytes * num_stages, adjacent;
                    with split_k then the sums of all CTAs, for the parts that this one stores; with
                    stream_k in sA then parts of others' sums, as many as there is room for
    sC              64 * epi_n * 2 * epi_stages * warpgroups (or 1, in_turns); half after a gate
    ab, held, sums  16 * num_stages, 8 * epi_stages * warpgroups, 8
    place           4, with by_gpc

    registers       threads             of each with 1, 2, 3 warpgroups (config.py)
    LOAD            128                 alike   40 or 24     32
    MMA             128 * warpgroups    alike   232 or 240   160
    """

    arch = "sm_90a"
    dtypes = ("bf16", "fp16", "e4m3", "e5m2", "fp32")  # fp32 is read as tf32

    def __init__(self, config: GeneralConfig) -> None:
        if reason := config.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        assert isinstance(config.tiles, Sm90Config)  # why_not has refused every other
        self.config = config
        self.tiles = config.tiles
        self.claims: Claims | None = None  # with by_gpc, within the kernel

    @property
    def name(self) -> str:
        return "sm90_gemm_general"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    # ---- who does what

    @property
    def mma_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.tiles.mma_warpgroups)

    @property
    def load_warps(self) -> Warps:
        """The load warps: a whole warpgroup, since registers are reallocated by warpgroups; only
        its first warp works."""
        return Warps(first=self.mma_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return self.mma_warps.threads + self.load_warps.threads

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.tiles.cluster_m, self.tiles.cluster_n, self.tiles.split_k)

    @property
    def scheduler(self) -> Scheduler:
        c = self.tiles
        num_ctas = c.num_ctas or arch_named(self.arch).num_sms
        cluster = c.cluster_m, c.cluster_n
        if c.spread:
            return Spread(num_ctas)
        if c.columns or c.rows:
            return OneRound(cluster, c.columns, c.rows, c.split_k)
        raster = Raster(c.raster_group, c.raster_along)
        if c.stream_k:
            return StreamedTiles(raster, cluster, num_ctas, rounds=c.stream_k)
        if c.by_gpc:
            return ByGpc(raster, cluster, num_ctas, claims=self.claims)
        return StaticPersistent(raster, cluster, num_ctas, c.split_k)

    @property
    def pace(self) -> Pace:
        """The pace of CTAs with one tile; with more columns its share of the memory rate is lower,
        because L2 and the tensor cores limit, too
        (docs/facts/gemm.md#round-tiles-without-raster)."""
        few = self.tiles.cluster_columns <= FEW_COLUMNS and not self.tiles.rows
        share = 0.93 if few else 0.89
        return Pace.of(arch_named(self.arch), share)

    @property
    def load_role(self) -> LoadTiles:
        if self.tiles.one_tile:
            return LoadOneTile(self.tiles, self.cluster, self.scheduler, self.pace)
        if isinstance(self.scheduler, StreamedTiles):
            return LoadSegments(self.tiles, self.cluster, self.scheduler)
        if isinstance(self.scheduler, ByGpc):
            return LoadByGpc(self.tiles, self.cluster, self.scheduler)
        return LoadTiles(self.tiles, self.cluster, self.scheduler)

    def mma_role(
        self,
        sA: cute.Tensor,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
    ) -> MmaRole:
        c, scheduler = self.tiles, self.scheduler
        if isinstance(scheduler, StreamedTiles):
            assert workspace is not None  # as the config has it
            return StreamK(self.config, c, scheduler, Exchange(c, sA, *workspace))
        if sums is not None:
            return SplitK(self.config, c, scheduler, self.cluster, sums, sA)
        role = PingPong if c.pingpong else Cooperative
        return role(self.config, c, scheduler)

    # ---- on the host

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), each with L first where batched, the
        operations' arguments, with stream_k the workspace (sums, flags), and a stream."""
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        *passed, stream = rest
        workspace = None
        if cutlass.const_expr(self.tiles.workspace is not None):
            *passed, sums, flags = passed
            workspace = sums, flags
        mOut = modes(mOut, columns_first=False)
        self.launch(mA, mB, mOut, tuple(passed), stream, workspace)

    @cute.jit
    def launch(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mOut: cute.Tensor,
        passed: tuple[Any, ...],
        stream,
        workspace: tuple[cute.Tensor, cute.Tensor] | None = None,
    ) -> None:
        """Launch with mA (M, K), mB (N, K), mOut (M, N), each with L last where batched."""
        c = self.tiles
        if cutlass.const_expr(c.swap_ab):
            mA, mB, mOut = mB, mA, transposed(mOut)
        k_major = self.config.k_major
        a = self.load_operand(mA, c.tile_m, c.cluster_n, k_major[0])
        b = self.load_operand(mB, c.tile_n, c.cluster_m, k_major[1])
        out, rows, passed = self.stored(mOut, passed)
        self.start(self.kernel(a, b, out, rows, passed, workspace), mOut, stream)

    def stored(self, mOut: cute.Tensor, passed: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Out as the kernel takes it, a tensor map where TMA stores it; mOut if its rows are whole
        vectors; and the operations' arguments."""
        out = mOut
        if self.config.out.tma:
            slots = self.epilogue_slots(mOut.element_type)
            out = store_operand(mOut, slots)
            passed = self.preload(passed, slots)
        return out, mOut if self.config.out.whole else None, passed

    def start(self, launched: Any, mOut: cute.Tensor, stream: Any, **more: Any) -> None:
        """Launch a kernel of this one's warps for the tiles of mOut; `more` goes to the launch."""
        c = self.tiles
        launched.launch(
            grid=self.scheduler.grid(tile_counts(c, self.config.product(mOut))),
            block=(self.num_threads, 1, 1),
            cluster=c.cluster,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
            **more,
        )

    def load_operand(
        self, mX: cute.Tensor, rows: int, sharers: int, k_major: bool
    ) -> cpasync.TmaInfo:
        """The tensor map of mX (rows, K), each tile of which `sharers` CTAs load in equal parts."""
        dtype, k, num_slots = mX.element_type, self.config.k_elements, self.tiles.num_stages
        if (box := self.box(rows, sharers, k_major)) is not None:
            slots = (slots_layout(dtype, rows, k, num_slots, 128) if k_major
                     else contiguous_rows_layout(dtype, rows, k, num_slots))  # fmt: skip
            return box_operand(mX, slots, *box, k_major, sharers > 1)
        if k_major:
            return shared_operand(mX, slots_layout(dtype, rows, k, num_slots, 128), sharers)
        slots = contiguous_rows_layout(dtype, rows, k, num_slots)
        part = contiguous_rows_layout(dtype, rows, k // sharers, num_slots)
        return k_shared_operand(mX, slots, part, sharers)

    def box(self, rows: int, sharers: int, k_major: bool) -> tuple[int, int] | None:
        """The rows and the K of a box of an operand whose tiles of `rows` rows `sharers` CTAs load;
        None where each loads its part at once."""
        if not self.tiles.box_rows:
            return None
        bits = DTYPES[self.config.a.dtype].bits
        if k_major:
            part = rows // parts_of(rows, sharers)
            return box_rows(part, self.tiles.box_rows), SWIZZLE_BYTES * 8 // bits
        return contiguous_rows(rows, bits), self.config.k_elements // sharers

    def preload(self, passed: tuple[Any, ...], slots: cute.ComposedLayout) -> tuple[Any, ...]:
        """The operations' arguments; the one that is preloaded is replaced by its tensor map for
        the slots of out."""
        at = self.preloaded
        if at is None:
            return passed
        matrix = modes(passed[at], columns_first=self.tiles.swap_ab)
        return (*passed[:at], load_operand(matrix, slots), *passed[at + 1 :])

    def epilogue_slots(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """The smem layout (64, epiN, SLOT) of parts of out, each warpgroup's slots together."""
        columns = self.config.out_columns
        if self.config.columns_contiguous:
            return rows_layout(dtype, 64, columns, self.num_slots)
        return transposed_slots_layout(dtype, 64, columns, self.num_slots)

    @property
    def num_slots(self) -> int:
        """The number of slots for parts of out, of all warpgroups."""
        return self.tiles.epi_stages * self.tiles.storing_warpgroups

    @property
    def preloaded(self) -> int | None:
        """The index of the operations' argument that is loaded by TMA into the slots of out: the
        first matrix to add, if its layout and dtype are those of out; None if there is none."""
        c, at = self.config, 0
        if not (c.out.tma and self.tiles.parts_in_order) or c.gated or self.tiles.epi_stages < 2:
            return None
        for op in c.ops:
            if isinstance(op, Add):
                alike = op.whole and op.dtype == c.out.dtype and c.out.major == "row"
                return at if alike else None
            at += len(op.arguments())
        return None

    # ---- on the device

    @cute.kernel
    def kernel(
        self,
        a: cpasync.TmaInfo,
        b: cpasync.TmaInfo,
        out: Any,
        rows: cute.Tensor | None,
        passed: tuple[Any, ...],
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
    ) -> None:
        """Run the roles.

        `out`: a TmaInfo, or a tensor (M, N) or (M, N, L) where TMA cannot step through it. `rows`:
        the same as a tensor, if its rows are whole vectors of 16 bytes. `workspace`: with stream_k,
        sums and flags (Exchange).
        """
        c = self.tiles
        smem = SmemAllocator()
        sA = allocate_slots(smem, a.atom.value_type, a.smem_layout)  # (bM, bK, SLOT)
        sB = allocate_slots(smem, b.atom.value_type, b.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = self.config.product(mOut)
        barriers = Barriers.allocate(smem, self)
        a, out = self.from_first_row(a, out)
        k_major = self.config.k_major
        boxes = (self.box(c.tile_m, c.cluster_n, k_major[0]),
                 self.box(c.tile_n, c.cluster_m, k_major[1]))  # fmt: skip
        operands = AbOperands(a, b, sA, sB, k_major, boxes)
        general = self.claiming(smem, workspace) if c.by_gpc else self
        prepare = partial(general.prepare, operands, workspace, barriers.sums)
        self.run(general.load_role, operands, barriers, prepare, mProduct, (out, sC, rows, passed))

    def claiming(self, smem: SmemAllocator, workspace: tuple[cute.Tensor, ...] | None) -> General:
        """This kernel with the words and the place in smem by which its clusters claim tiles."""
        assert workspace is not None  # as the config has it
        place = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        general = copy(self)
        general.claims = Claims(workspace[1], place)
        return general

    def prepare(
        self,
        operands: AbOperands,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
    ) -> tuple[MmaRole, WgmmaProduct]:
        """The MMA role, and this warpgroup's part of A @ B^T. The MMA warps call it."""
        c, sA, sB = self.tiles, operands.sA, operands.sB
        a_major, b_major = (MAJORS[k_major] for k_major in self.config.k_major)
        kinds = sA.element_type, sB.element_type
        instruction = Wgmma(c.tile_n, *kinds, a_major, b_major, c.row_warpgroups)
        return self.mma_role(sA, workspace, sums), wgmma(instruction, sA, sB)

    @cute.jit
    def run(
        self,
        load: cutlass.Constexpr[LoadTiles],
        operands: Any,
        barriers: Barriers,
        prepare: cutlass.Constexpr[Callable[[], tuple[MmaRole, WgmmaProduct]]],
        mProduct: cute.Tensor,
        stored: tuple[Any, ...],
    ) -> None:
        """Publish the barriers; the load warp then loads, and the MMA warps compute and store.

        `stored`: out as TMA or threads store it, its slots, its rows, and the operations'
        arguments.
        """
        warp = cute.arch.warp_idx()
        if warp == self.load_warps.first:
            load.start(operands, mProduct)
        # NOTE: CTAs that share K signal each other only after a cluster barrier of their own
        publish_barriers(barriers.all, cluster=self.cluster.size > 1)

        if warp >= self.load_warps.first:
            self.give_registers()
            if warp == self.load_warps.first:
                load.run(operands, barriers.ab, mProduct)
            if cutlass.const_expr(isinstance(load, LoadByGpc)):
                load.let_next_claim(warp - self.load_warps.first)
        else:
            self.take_registers()
            role, mma = prepare()
            out, sC, rows, passed = stored
            ops = self.config.bind(mProduct, passed)
            epilogue = self.epilogue(out, sC, rows, ops, barriers.held)
            k_tiles = operands.num_k_tiles
            role.run(RoleProduct(mma, barriers.ab, epilogue, k_tiles, mProduct))
            epilogue.drain()

    def from_first_row(self, a: cpasync.TmaInfo, out: Any) -> tuple[cpasync.TmaInfo, Any]:
        """A and out; with `spread`, offset to the first row of this CTA's tile."""
        scheduler = self.scheduler
        if not isinstance(scheduler, Spread):
            return a, out
        _, _, cta = cute.arch.block_idx()
        first = scheduler.first_row(cta, cute.size(out.tma_tensor, mode=[0]))
        return from_row(a, first), from_row(out, first)

    def give_registers(self) -> None:
        """Release registers. The load warpgroup calls it."""
        if registers := self.tiles.registers:
            cute.arch.setmaxregister_decrease(registers.load)

    def take_registers(self) -> None:
        """Take registers that the load warps release, when they have. MMA warps call it."""
        if registers := self.tiles.registers:
            cute.arch.setmaxregister_increase(registers.mma)

    def epilogue(
        self,
        out: Any,
        sC: cute.Tensor | None,
        rows: cute.Tensor | None,
        ops: BoundOps,
        held: Barrier | None,
    ) -> EpilogueStore:
        """The epilogue store of this thread's warpgroup, or of its warp."""
        c, config = self.tiles, self.config
        if sC is None:
            return ElementStore(out, config.epi_columns, ops)
        scheduler = self.scheduler
        few = c.one_tile and c.few_columns and c.split_k == 1
        if rows is not None and c.swap_ab and few:
            first_row = Int32(0)
            if isinstance(scheduler, Spread):
                _, _, cta = cute.arch.block_idx()
                first_row = scheduler.first_row(cta, cute.size(rows, mode=[0]))
            return warp_store(rows, sC, c.epi_stages, first_row)
        if rows is not None and not c.in_turns:
            return warpgroup_store(out, sC, c.epi_stages, transpose=c.swap_ab)
        ops = replace(ops, preloaded=self.preloaded)
        columns = config.columns_contiguous
        return fused_store(out, sC, c.epi_stages, columns, ops, held, c.storing_turns)


def from_row(x: cpasync.TmaInfo, row: Int32) -> cpasync.TmaInfo:
    """x, offset so that its row 0 is `row`."""
    tensor = cute.domain_offset((row, 0), x.tma_tensor)
    return cpasync.TmaInfo(x.atom, tensor, x.smem_layout)

"""The load roles of the general kernel: one warp fills the ring of A and B for its CTA's tiles."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from cutex.arch import Arch
from cutex.arch import arch as arch_named
from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing
from cutex.device.atoms.tma import AbLoads
from cutex.device.pipeline import PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import tile_counts
from cutex.kernels.gemm.sm90.config import FEW_COLUMNS, Sm90Config, placed_unevenly
from cutex.schedulers.announced import AnnouncedTiles
from cutex.schedulers.by_gpc import ByGpc
from cutex.schedulers.one_round import OneRound
from cutex.schedulers.persistent import StaticPersistent
from cutex.schedulers.spread import Spread
from cutex.schedulers.stream_k import StreamedTiles, StreamedWalk

Scheduler = StaticPersistent | OneRound | Spread

# bytes of A or B that each CTA prefetches before its kernel may begin: more delay the one before
BYTES_AHEAD = 32 * 1024


@cute.jit
def fill_ring(
    loads: AbLoads, ab: SharedRing, fill: PipelineState, first: Int32 | int, end: Int32
) -> PipelineState:
    """Load K tiles `first` to `end`, from slot `fill` on; return the state after."""
    for k_tile in cutlass.range(first, end, unroll=1):
        loads.load(k_tile, fill.slot, ab.acquire(fill))
        fill.advance()
    return fill


@dataclass(frozen=True)
class LoadTiles:
    """The load role of a CTA that loops over tiles, loading for each all of K or its share of a
    split."""

    tiles: Sm90Config
    cluster: Cluster
    scheduler: Scheduler

    @property
    def streams_a(self) -> bool:
        """Whether the kernel's time is that of loading A: there are few columns."""
        return self.tiles.swap_ab or (self.tiles.one_tile and not self.tiles.rows)

    @property
    def streams_b(self) -> bool:
        """Whether the kernel's time is that of loading B: there are few rows."""
        return self.tiles.rows > 0

    @cute.jit
    def start(self, operands: AbOperands, mC: cute.Tensor) -> None:
        """Prefetch the first bytes of this tile's streamed operand into L2, before the barriers are
        ready and the kernel before this one ends; and let the next kernel start its CTAs, unless
        `run` does.

        NOTE: should the kernel before still write A, it writes to L2, where the loads find it.
        """
        c = self.tiles
        cpasync.prefetch_descriptor(operands.a.atom)
        cpasync.prefetch_descriptor(operands.b.atom)
        if cutlass.const_expr(self.streams_a or self.streams_b):
            if cutlass.const_expr(not c.one_tile):
                cute.arch.griddepcontrol_launch_dependents()
            loads, first, count = self.begin(operands, mC)
            streamed, rows = loads.a, c.tile_m // c.cluster_n
            if cutlass.const_expr(self.streams_b):
                streamed, rows = loads.b, c.tile_n // c.cluster_m
            ahead = max(1, BYTES_AHEAD // (rows * c.k_bytes))
            for k_tile in cutlass.range(first, first + cutlass.min(count, ahead), unroll=1):
                streamed.prefetch(k_tile)

    @cute.jit
    def begin(self, operands: AbOperands, mC: cute.Tensor) -> tuple[AbLoads, Int32 | int, Int32]:
        """The loads of the first tile, its first K tile, and the number of K tiles."""
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        tile = walk.tile_at(walk.start)
        loads = operands.loads(tile, self.cluster)
        return loads, *self.share(self.number(tile), loads.num_k_tiles)

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not (self.streams_a or self.streams_b)):
            cute.arch.griddepcontrol_launch_dependents()
        fill = ab.producer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            tile = walk.tile_at(index)
            loads = operands.loads(tile, self.cluster)
            first, count = self.share(self.number(tile), loads.num_k_tiles)
            # NOTE: a share may extend past K, where TMA fills in zeros
            fill = fill_ring(loads, ab, fill, first, first + count)
        ab.drain(fill)

    def number(self, tile: WorkTile) -> Int32 | int:
        """The number of the share of K that `tile` is of."""
        return tile.split

    def share(self, split: Int32 | int, num_k_tiles: Int32) -> tuple[Int32 | int, Int32]:
        """The first K tile of share `split`, and the number of K tiles in it."""
        count = k_share(self.tiles, num_k_tiles)
        return split * count, count


@dataclass(frozen=True)
class LoadAnnounced(LoadTiles):
    """The load role of a CTA that loops over whole tiles, which another warp looks up."""

    announced: AnnouncedTiles

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not (self.streams_a or self.streams_b)):
            cute.arch.griddepcontrol_launch_dependents()
        fill, reader = ab.producer(), self.announced.reader()
        for _ in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            loads = operands.loads(self.announced.take(reader), self.cluster)
            reader.advance()
            fill = fill_ring(loads, ab, fill, 0, loads.num_k_tiles)
        ab.drain(fill)


@dataclass(frozen=True)
class LoadByGpc(LoadTiles):
    """The load role of a CTA whose cluster claims its place among the tiles.

    NOTE: it claims before the kernel before this one has ended, whose clusters have all claimed
    theirs by then; the next kernel's may begin to when these have, and all words are 0 again.
    """

    scheduler: ByGpc

    @cute.jit
    def start(self, operands: AbOperands, mC: cute.Tensor) -> None:
        cpasync.prefetch_descriptor(operands.a.atom)
        cpasync.prefetch_descriptor(operands.b.atom)
        self.scheduler.claim()

    @cute.jit
    def let_next_claim(self, warp: Int32) -> None:
        """Let the next kernel start its CTAs when this cluster's claim is counted: by the warp
        beside the one that loads. After the CTA's barrier."""
        if warp == 1:
            self.scheduler.arrive()
            cute.arch.sync_warp()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()
        fill = ab.producer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            loads = operands.loads(walk.tile_at(index), self.cluster)
            fill = fill_ring(loads, ab, fill, 0, loads.num_k_tiles)
        ab.drain(fill)


@dataclass(frozen=True)
class LoadSegments(LoadTiles):
    """The load role of a CTA that loops over segments of tiles (stream_k.py)."""

    scheduler: StreamedTiles

    def streamed_walk(self, operands: AbOperands, mC: cute.Tensor) -> StreamedWalk:
        counts = tile_counts(self.tiles, mC)
        return self.scheduler.streamed_walk(counts, operands.num_k_tiles)

    @cute.jit
    def begin(self, operands: AbOperands, mC: cute.Tensor) -> tuple[AbLoads, Int32, Int32]:
        walk = self.streamed_walk(operands, mC)
        segment = walk.segment(Int32(0))
        return operands.loads(walk.tile(segment), self.cluster), segment.first, segment.count

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.streamed_walk(operands, mC)
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not (self.streams_a or self.streams_b)):
            cute.arch.griddepcontrol_launch_dependents()
        fill = ab.producer()
        for turn in cutlass.range(walk.turns, unroll=1):
            segment = walk.segment(turn)
            loads = operands.loads(walk.tile(segment), self.cluster)
            fill = fill_ring(loads, ab, fill, segment.first, segment.first + segment.count)
        ab.drain(fill)


@dataclass(frozen=True)
class LoadOneTile(LoadTiles):
    """The load role of a CTA with one tile, where memory limits: it loads at a pace (Pace)."""

    pace: Pace

    @cute.jit
    def run(self, operands: AbOperands, ab: SharedRing, mC: cute.Tensor) -> None:
        walk = self.scheduler.walk(tile_counts(self.tiles, mC))
        cute.arch.griddepcontrol_wait()
        tile = walk.tile_at(walk.start)
        loads = operands.loads(tile, self.cluster)
        first, count = self.share(tile.split, loads.num_k_tiles)
        fill = self.load_at_pace(loads, ab, first, count, mC)
        self.let_next_start(loads.num_k_tiles)
        ab.drain(fill)

    @cute.jit
    def let_next_start(self, num_k_tiles: Int32) -> None:
        """Let the next kernel start its CTAs now that all loads are on their way: 1.01 times as
        fast as at the start.

        Clusters that start early are placed on the SMs that are idle, and so unevenly over the GPU.
        Where memory limits, a kernel like this one then takes up to 1.2 times as long: it is left
        to start when this one has ended, a microsecond later
        (docs/facts/gemm.md#next-kernel-allowed-start).
        """
        c = self.tiles
        if cutlass.const_expr(c.clusters_stream):
            num_sms = c.num_ctas or arch_named(c.arch).num_sms
            x, y, z = cute.arch.grid_dim()
            if not placed_unevenly(num_sms - x * y * z, num_sms, num_k_tiles * c.k_of(16)):
                cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_at_pace(
        self,
        loads: AbLoads,
        ab: SharedRing,
        first: Int32 | int,
        count: Int32,
        mC: cute.Tensor,
    ) -> PipelineState:
        """Load `count` K tiles, from `first` on: a ringful at once, the rest no sooner than memory
        can serve all CTAs alike. Return the state after."""
        c = self.tiles
        start = now()
        ring = cutlass.min(count, c.num_stages)
        fill = fill_ring(loads, ab, ab.producer(), first, first + ring)
        if cutlass.const_expr(c.cluster_columns <= FEW_COLUMNS and not c.rows):
            self.ask_for_b(loads)
        step = self.pace.step_ns(self.step_bytes(mC), count)
        due = start + self.pace.lead_ns(step, c.num_stages)
        for k_tile in cutlass.range(first + ring, first + count, unroll=1):
            full = ab.acquire(fill)
            if step > 0:
                wait_until(due)
                due += step
            loads.load(k_tile, fill.slot, full)
            fill.advance()
        return fill

    def step_bytes(self, mC: cute.Tensor) -> Int32:
        """The bytes of the streamed operand that all CTAs together read in a step."""
        c = self.tiles
        streamed = 1 if c.rows else 0  # the side of C that the streamed operand has
        return cute.size(mC, mode=[streamed]) * (c.split_k * c.k_bytes)

    @cute.jit
    def ask_for_b(self, loads: AbLoads) -> None:
        """Prefetch one K tile of B into L2, this cluster's share, before all clusters load it."""
        _, _, share = cute.arch.block_idx()
        if cutlass.const_expr(self.tiles.columns > 1):
            share = share // self.tiles.columns
        if share < loads.num_k_tiles:
            loads.b.prefetch(share)


def k_share(tiles: Sm90Config, num_k_tiles: Int32) -> Int32:
    """The number of K tiles of each of the split_k CTAs that share them."""
    return (num_k_tiles + (tiles.split_k - 1)) // tiles.split_k


# ---- pace
#
# The pace of loads where memory limits and each CTA has one tile: the time before which the next
# load may not start.
#
# SMs that get their answers sooner request more, and end up to 8 us of 30 before the others. That
# gains nothing, since memory is busy all the time, and it costs: requests for shared data that come
# at the same time are merged on their way to L2, later ones are not. If no SM is faster than memory
# could serve them all, they stay together: 1.01 to 1.03 times as fast
# (docs/facts/gemm.md#cta-loads-faster-memory).


FIRST_NS = 1000  # until the first load has arrived
LOOKS = 256  # most reads of the clock in one wait


@dataclass(frozen=True)
class Pace:
    """The rate of CTAs that read operands together, step by step.

    It never holds back loads on a memory slower than the one it is made for.
    """

    bytes_per_ns: int
    least_bytes: int  # in all: L2 may hold a good part of fewer, which then need no pace

    @staticmethod
    def of(arch: Arch, share: float) -> Pace:
        """The pace of CTAs that together get `share` of the memory's peak rate."""
        return Pace(int(arch.hbm_gbs * share), arch.l2_bytes * 3 // 2)

    def step_ns(self, step_bytes: Int32 | int, num_steps: Int32 | int) -> Int32 | int:
        """The nanoseconds from step to step, in which all CTAs together read `step_bytes`; 0 for no
        pace.

        Plain operators only: Python ints run it, and the same code traces in the DSL.
        """
        return step_bytes // self.bytes_per_ns * (num_steps > self.least_bytes // step_bytes)

    def lead_ns(self, step_ns: Int32 | int, ring: int) -> Int32 | int:
        """The nanoseconds from the first loads, a `ring` of them, to the one after."""
        return FIRST_NS + ring * step_ns // 4


@cute.jit
def wait_until(due: Int64) -> None:
    """Wait until `now` is `due`, but at most LOOKS reads of the clock, so that a stopped clock
    cannot hang the kernel."""
    looks = Int32(0)
    while looks < LOOKS and now() < due:
        looks += 1


def now() -> Int64:
    """The GPU's global timer in nanoseconds, the same for all SMs."""
    return Int64(cute.arch.globaltimer())

"""Barriers, rings of smem slots, and the state of a role in a ring.

A barrier is named for its event. The number of arrivals that complete a phase is computed from the
roles that arrive, and checked here, on the host, when the kernel is traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

MAX_COUNT = 2**20 - 1  # most pending arrivals, and most expected bytes (PTX ISA, mbarrier object)


@dataclass(frozen=True)
class Warps:
    """The warps of one role, consecutive from `first`."""

    first: int
    count: int

    @property
    def threads(self) -> int:
        return 32 * self.count

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Barrier:
    """The mbarriers of one event: one, or one for each slot of a ring."""

    event: str
    arrivals: int  # arrivals that complete a phase
    slots: int
    ptr: cute.Pointer

    @staticmethod
    def allocate(smem: SmemAllocator, event: str, arrivals: int, slots: int = 1) -> Barrier:
        if not 1 <= arrivals <= MAX_COUNT:
            raise ValueError(f"{event}: {arrivals} arrivals, an mbarrier counts 1 to {MAX_COUNT}")
        return Barrier(event, arrivals, slots, smem.allocate_array(Int64, slots))

    def __getitem__(self, slot: Int32 | int) -> cute.Pointer:
        return self.ptr + slot

    def init(self) -> None:
        """Initialise all slots. One thread calls it; a fence and a CTA barrier must follow before
        any other thread uses them."""
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self[slot], self.arrivals)

    def wait(self, phase: Int32 | int, slot: Int32 | int = 0) -> None:
        """Wait until the phase of parity `phase` is complete."""
        cute.arch.mbarrier_wait(self[slot], phase)

    def arrive(self, slot: Int32 | int = 0) -> None:
        """Arrive once for each calling thread."""
        cute.arch.mbarrier_arrive(self[slot])

    def arrive_at_leader(self, slot: Int32 | int = 0) -> None:
        """Arrive on the barrier of the pair's leader, once for each thread.

        NOTE: a release of CTA scope, as in CUTLASS. The arrival says that this warp's reads are
        complete, and publishes no data to the leader; cluster scope would wait for a fence of the
        whole GPU.
        """
        cute.arch.mbarrier_arrive(self[slot], leader_rank())

    def arrive_expecting_at(self, rank: Int32, num_bytes: int, slot: Int32 | int = 0) -> None:
        """Arrive on the barrier of CTA `rank` of the cluster, and expect `num_bytes`. One thread
        calls it."""
        cute.arch.mbarrier_arrive_and_expect_tx(self[slot], num_bytes, rank)

    def arrive_expecting(self, num_bytes: int, slot: Int32 | int = 0) -> None:
        """Arrive, and expect `num_bytes` of asynchronous copies still to come. One thread calls
        it."""
        if not 1 <= num_bytes <= MAX_COUNT:
            raise ValueError(f"{self.event}: {num_bytes} bytes, an mbarrier counts to {MAX_COUNT}")
        cute.arch.mbarrier_arrive_and_expect_tx(self[slot], num_bytes)


class PipelineState:
    """A role's position in a ring: the slot, and the parity of the phase to wait for."""

    def __init__(self, num_slots: int, slot: Int32, phase: Int32) -> None:
        self.num_slots = num_slots
        self.slot = slot
        self.phase = phase

    @cute.jit
    def advance(self) -> None:
        self.slot += 1
        if self.slot == self.num_slots:
            self.slot = Int32(0)
            self.phase ^= 1

    @cute.jit
    def advance_by(self, steps: cutlass.Constexpr[int]) -> None:
        """Advance `steps` times, at most once around the ring."""
        if cutlass.const_expr(steps == 1):
            self.advance()
        else:
            self.slot += steps
            if self.slot >= self.num_slots:
                self.slot -= self.num_slots
                self.phase ^= 1

    def skip(self, steps: Int32) -> None:
        """Advance `steps` times at once."""
        ahead = self.slot + steps
        self.slot = ahead % self.num_slots
        self.phase ^= (ahead // self.num_slots) & 1

    # NOTE: the two methods that let the DSL carry a PipelineState through a loop or a branch.
    def __extract_mlir_values__(self) -> list:
        return [self.slot.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: list) -> PipelineState:
        return PipelineState(self.num_slots, Int32(values[0]), Int32(values[1]))


@dataclass(frozen=True)
class Ring:
    """The barriers of a ring of slots that TMA fills and an MMA role empties.

    full[slot]:  1 arrival, of the thread that starts the loads, and `slot_bytes` from TMA.
    empty[slot]: `consumers` arrivals, when no read of the slot is outstanding.
    """

    num_slots: int
    slot_bytes: int
    full: Barrier
    empty: Barrier

    @classmethod
    def allocate(
        cls, smem: SmemAllocator, name: str, num_slots: int, slot_bytes: int, consumers: int
    ) -> Self:
        full = Barrier.allocate(smem, f"{name} full", arrivals=1, slots=num_slots)
        empty = Barrier.allocate(smem, f"{name} empty", arrivals=consumers, slots=num_slots)
        return cls(num_slots, slot_bytes, full, empty)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def producer(self) -> PipelineState:
        """The initial state of the role that fills the slots."""
        # NOTE: a wait for parity 1 on a fresh barrier returns at once: every slot starts empty.
        return PipelineState(self.num_slots, Int32(0), Int32(1))

    def consumer(self) -> PipelineState:
        """The initial state of a role that empties the slots."""
        return PipelineState(self.num_slots, Int32(0), Int32(0))

    def acquire(self, state: PipelineState) -> cute.Pointer:
        """Wait until the slot is empty, then arm its full barrier and return it. A whole warp calls
        it."""
        self.empty.wait(state.phase, state.slot)
        with cute.arch.elect_one():
            self.full.arrive_expecting(self.slot_bytes, state.slot)
        return self.full[state.slot]

    def wait_full(self, state: PipelineState) -> None:
        """Wait until the slot is full."""
        self.full.wait(state.phase, state.slot)

    def sees_full(self, state: PipelineState) -> Boolean:
        """Whether this lane sees the slot full, without waiting."""
        return cute.arch.mbarrier_test_wait(self.full[state.slot], state.phase)

    def is_full(self, state: PipelineState) -> Boolean:
        """Whether all lanes of this warp see the slot full, so that none has to wait. A whole warp
        calls it."""
        return cute.arch.vote_all_sync(self.sees_full(state))

    def release(self, state: PipelineState) -> None:
        """Arrive once for this warp: its reads of the slot are complete."""
        with cute.arch.elect_one():
            self.empty.arrive(state.slot)

    @cute.jit
    def drain(self, state: PipelineState) -> None:
        """Wait until every slot is empty; called by the load warp of a cluster's CTA, after its
        last load. No other CTA then has anything left to write here or to signal, so this one may
        exit."""
        for _ in cutlass.range(self.num_slots, unroll=1):
            self.empty.wait(state.phase, state.slot)
            state.advance()


@dataclass(frozen=True)
class PairRing(Ring):
    """The ring of a pair of CTAs: each fills its own slots, and one MMA reads both.

    full[slot]:  the leader's counts: 1 arrival, the leader's, and `slot_bytes`, of both CTAs.
    empty[slot]: each CTA has its own, and the commit of the MMA arrives on both.
    """

    @cute.jit
    def acquire(self, state: PipelineState) -> cute.Pointer:
        self.empty.wait(state.phase, state.slot)
        if is_leader():
            with cute.arch.elect_one():
                self.full.arrive_expecting(self.slot_bytes, state.slot)
        return self.full[
            state.slot
        ]  # NOTE: a pair's load arrives on the leader's barrier at this offset


@dataclass(frozen=True)
class AccRing(Ring):
    """The barriers of a ring of accumulators of a pair, which the MMA fills and the epilogue
    warps of both CTAs empty.

    full[slot]:  each CTA has its own, and the commit of the last MMA arrives on both.
    empty[slot]: the leader's counts: 1 arrival of each epilogue warp of the pair.
    """

    @staticmethod
    def of(smem: SmemAllocator, num_slots: int, readers: int) -> AccRing:
        return AccRing.allocate(smem, "acc", num_slots, slot_bytes=0, consumers=readers)

    def acquire(self, state: PipelineState) -> cute.Pointer:
        """Wait until the accumulator has been read; return the barrier to commit to."""
        self.empty.wait(state.phase, state.slot)
        return self.full[state.slot]

    def release(self, state: PipelineState) -> None:
        """Arrive once for this warp: its reads of the accumulator are complete."""
        with cute.arch.elect_one():
            self.empty.arrive_at_leader(state.slot)


def is_leader() -> Boolean:
    """Whether this CTA is the leader of its pair, the one that starts the MMAs."""
    return cute.arch.block_idx_in_cluster() == leader_rank()


def leader_rank() -> Int32:
    """The rank of the leader of this CTA's pair: ranks 0 and 1 are a pair, 2 and 3 the next."""
    return cute.arch.block_idx_in_cluster() // 2 * 2


@cute.jit
def sync_cluster() -> None:
    """A barrier of all threads of all CTAs of the cluster."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def publish_barriers(
    barriers: cutlass.Constexpr[tuple[Barrier | Ring, ...]],
    cluster: cutlass.Constexpr[bool] = False,
    with_data: cutlass.Constexpr[bool] = False,
    later: cutlass.Constexpr[bool] = False,
) -> None:
    """Initialise `barriers` by one thread, and publish them to all threads and to TMA.

    With `cluster`, to all threads of the cluster, whose CTAs then may signal each other; with
    `with_data`, everything else written to smem is published, too.
    """
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            for barrier in barriers:
                barrier.init()
        cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(cluster and with_data):
        sync_cluster()
    elif cutlass.const_expr(cluster):
        # NOTE: the fence has published the barriers; a release by every thread here would wait for
        # the memory of the whole GPU.
        cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(not later):
            cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@dataclass(frozen=True)
class OrderedBarrier:
    """The barrier by which two warpgroups enter a section in alternation: each waits for the
    other's signal.

    Each warpgroup has one named barrier, `first_barrier` + its number; a phase is complete when the
    128 threads that signal and the 128 that wait have arrived.
    """

    first_barrier: int

    def wait(self, warpgroup: Int32) -> None:
        """Wait for the other warpgroup's signal. All threads of `warpgroup` call it."""
        cute.arch.barrier(barrier_id=self.first_barrier + warpgroup, number_of_threads=256)

    def signal(self, warpgroup: Int32) -> None:
        """Let `warpgroup` enter. All threads of the other warpgroup call it."""
        cute.arch.barrier_arrive(barrier_id=self.first_barrier + warpgroup, number_of_threads=256)


@dsl_user_op
def threads_where(
    condition: Boolean, barrier_id: Int32, number_of_threads: int, *, loc=None, ip=None
) -> Int32:
    """How many of the `number_of_threads` threads that meet at a named barrier say `condition`
    (PTX ISA, barrier.red)."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (condition, barrier_id, number_of_threads)]
    ptx = "{ .reg .pred p; setp.ne.s32 p, $1, 0; barrier.cta.red.popc.aligned.u32 $0, $2, $3, p; }"
    return Int32(
        llvm.inline_asm(T.i32(), values, ptx, "=r,r,r,r", has_side_effects=True, loc=loc, ip=ip)
    )

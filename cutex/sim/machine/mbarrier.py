"""mbarrier objects (PTX ISA 9.7.13.15): arrival counts, transaction counts and phases.

The 64-bit object in shared memory is opaque, so the state is kept separately, by (cta, byte
offset). A phase completes when its pending arrivals and its tx-count are both zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import BarrierMisuse
from cutex.sim.hazards.lifetimes import RemoteUse
from cutex.sim.ptx.parse import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

MAX_COUNT = (1 << 20) - 1
_FEW_CTAS = 2  # CTAs of a cluster; larger ones hung (see `MBarriers._parked`)


@dataclass
class Made:
    """The initialisation of an mbarrier: its thread, and its time (see clocks)."""

    warp: int
    lane: int
    count: int
    instruction: Instruction
    fenced: int | None = None  # when its thread executed fence.mbarrier_init


@dataclass
class MBarrier:
    cta: int
    offset: int
    expected: int  # arrivals per phase
    pending: int
    made: Made
    slot: int  # its slot in the vector clocks, which count its phases
    known_to: set[int] = field(default_factory=set)  # warps ordered after its initialisation
    tx: int = 0
    phases: int = 0  # completed
    tx_expected: int = 0  # bytes announced, and bytes arrived, in this phase
    tx_arrived: int = 0
    last: tuple[str, Instruction] | None = None  # the last thread that used it, and how
    remote: bool = False  # the last arrival came from another CTA
    announced: Instruction | None = None  # the last instruction that announced bytes
    given: np.ndarray | None = None  # the clock that this phase's arrivals release (see clocks)
    released: np.ndarray | None = None  # the clock of the last completed phase


class MBarriers:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clear()

    def clear(self) -> None:
        self.barriers: dict[tuple[int, int], MBarrier] = {}

    def init(self, cta: int, offset: int, count: int, made: Made) -> None:
        ins, warp = made.instruction, made.warp
        if not 1 <= count <= MAX_COUNT:
            raise BarrierMisuse.at(
                ins, f"mbarrier.init with count {count}; it takes 1..{MAX_COUNT}"
            )
        old = self.barriers.get((cta, offset))
        if old is not None and (
            old.pending != old.expected or old.tx or (cta, offset) in self.machine.sleepers
        ):
            raise BarrierMisuse.at(
                ins,
                f"{self.machine.grid.name_warp(warp)} initialises {self.name(cta, offset)} again "
                "while it is in use",
            )
        if old is not None:
            self.machine.findings.add(
                "barrier misuse",
                f"{self.machine.grid.name_warp(warp)} initialises {self.name(cta, offset)} again, "
                "with no mbarrier.inval before: by the letter that is not defined",
                ins,
                advisory=True,
            )
        slot = self.machine.clocks.barrier_slot(cta, offset, old is not None)
        self.barriers[cta, offset] = MBarrier(cta, offset, count, count, made, slot)
        self.machine.progress += 1

    def fence_init(self, warp: int, lanes: np.ndarray) -> None:
        """A fence.mbarrier_init by ``lanes`` (32,) of a warp, for the barriers that these threads
        initialised.
        """
        now = self.machine.clocks.now(warp)
        for barrier in self.barriers.values():
            if barrier.made.warp == warp and lanes[barrier.made.lane]:
                barrier.made.fenced = barrier.made.fenced or now

    def use(self, cta: int, offset: int, warp: int, ins: Instruction) -> MBarrier:
        """The mbarrier that a warp uses. Reports a race unless its initialisation is ordered before
        (9.7.13.15.1), which needs a barrier in between; across CTAs, one that releases it to the
        cluster. No fence of the async proxy: copies and commits use their barriers through the
        generic one (9.7.9.25.4.1).
        """
        barrier = self.get(cta, offset, ins)
        if warp not in barrier.known_to:
            if not self.machine.clocks.knows(warp, barrier.made):
                self._unordered(cta, offset, barrier.made, warp, ins)
            barrier.known_to.add(warp)
        return barrier

    def _unordered(self, cta: int, offset: int, made: Made, warp: int, ins: Instruction) -> None:
        m = self.machine
        why = "no barrier orders the two"
        if m.clocks.follows[warp, m.clocks.slot[made.warp]] >= made.count:
            why = (
                "barrier.cluster.arrive.relaxed does not release it without a "
                "fence.mbarrier_init.release.cluster of that thread before it"
            )
        m.findings.add(
            "race",
            f"{m.grid.name_warp(warp)} uses {self.name(cta, offset)}, which "
            f"{m.grid.name_warp(made.warp)} lane {made.lane} initialised: {why}",
            ins,
            remedy="sync_threads() behind mbarrier_init, or a barrier of the cluster for its CTAs",
        )

    def give(self, barrier: MBarrier, given: np.ndarray) -> None:
        """Add the clock of an arrival to the clock that a wait for this phase acquires; called
        before it arrives.
        """
        barrier.given = self.machine.clocks.join(barrier.given, given)

    def acquire(self, barrier: MBarrier, warp: int) -> None:
        """Order ``warp``, whose wait has passed, after the phase's arrivals, and after the
        operations that the phases waited for.
        """
        clocks = self.machine.clocks
        clocks.take(warp, barrier.released)
        clocks.learn(warp, barrier.slot, barrier.phases)

    def reach(self, barrier: MBarrier, warp: int, what: str, ins: Instruction) -> None:
        """Record that a warp, perhaps of another CTA, is about to arrive or to change the
        tx-count."""
        m = self.machine
        barrier.remote = barrier.cta != m.grid.cta_of(warp)
        if barrier.remote:
            use = RemoteUse(m.clocks.now(warp), barrier.phases + 1, what, warp, ins)
            m.lifetimes.use(barrier.cta, int(m.clocks.slot[warp]), use, barrier)

    def invalidate(self, cta: int, offset: int, ins: Instruction) -> None:
        self.get(cta, offset, ins)
        del self.barriers[cta, offset]

    def get(self, cta: int, offset: int, ins: Instruction) -> MBarrier:
        barrier = self.barriers.get((cta, offset))
        if barrier is None:
            raise BarrierMisuse.at(
                ins,
                f"no mbarrier was initialised at shared 0x{offset:x} of "
                f"{self.machine.grid.name_cta(cta)}",
            )
        return barrier

    def arrive(
        self, barrier: MBarrier, count: int, who: str, ins: Instruction, drop: bool = False
    ) -> None:
        barrier.last = who, ins
        if count > barrier.pending:
            raise BarrierMisuse.at(
                ins,
                f"{who} arrives {count} time{'s' if count > 1 else ''} on "
                f"{self.name(barrier.cta, barrier.offset)}, which expects only "
                f"{barrier.pending} more of {barrier.expected} in phase {barrier.phases}",
            )
        barrier.pending -= count
        if drop:
            barrier.expected -= count
        self._advance(barrier)

    def expect_tx(self, barrier: MBarrier, size: int, who: str, ins: Instruction) -> None:
        barrier.tx += size
        barrier.tx_expected += size
        barrier.announced = ins
        barrier.last = who, ins
        if abs(barrier.tx) > MAX_COUNT:
            raise BarrierMisuse.at(
                ins,
                f"tx-count {barrier.tx} of {self.name(barrier.cta, barrier.offset)} leaves its "
                f"range of +-{MAX_COUNT}",
            )
        self._advance(barrier)

    def complete_tx(self, cta: int, offset: int, size: int, who: str, ins: Instruction) -> None:
        barrier = self.get(cta, offset, ins)
        barrier.tx -= size
        barrier.tx_arrived += size
        barrier.last = who, ins
        self._advance(barrier)

    def _advance(self, barrier: MBarrier) -> None:
        self.machine.progress += 1
        if barrier.pending == 0 and barrier.tx == 0:
            barrier.phases += 1
            barrier.pending = barrier.expected
            barrier.tx_expected = barrier.tx_arrived = 0
            barrier.released, barrier.given = barrier.given, None
            if barrier.remote and self.machine.grid.cluster_size > _FEW_CTAS:
                self._parked(barrier.cta, barrier.offset)
            self.machine.wake((barrier.cta, barrier.offset))

    def _parked(self, cta: int, offset: int) -> None:
        """Advise against a sleeping try_wait that another CTA of a large cluster ends."""
        for warp, wait in self.machine.sleepers.get((cta, offset), ()):
            self.machine.findings.add(
                "parked wait",
                f"{self.machine.grid.name_warp(warp)} sleeps in a try_wait on "
                f"{self.name(cta, offset)} until another CTA of its cluster of "
                f"{self.machine.grid.cluster_size} arrives: kernels that do so have hung within "
                "tens of launches where processes share a GPU by time slices; test_wait in a loop "
                "did not",
                wait.instruction,
                advisory=True,
            )

    def phases(self, cta: int, offset: int) -> int:
        barrier = self.barriers.get((cta, offset))
        return barrier.phases if barrier else 0

    def name(self, cta: int, offset: int) -> str:
        barrier = self.barriers.get((cta, offset))
        made = ""
        if barrier is not None:
            made = f" (initialised at {barrier.made.instruction.place()})"
        return f"mbarrier 0x{offset:x} of {self.machine.grid.name_cta(cta)}{made}"

    def describe(self, cta: int, offset: int) -> str:
        """The state for the deadlock report, with the error of the tx-count if there is one."""
        b = self.barriers[cta, offset]
        announced = b.announced.place() if b.announced else ""
        last = f"{b.last[0]} at {b.last[1].where()}" if b.last else "nobody"
        text = (
            f"{self.name(cta, offset)}: {b.phases} phase{'s' if b.phases != 1 else ''} complete, "
            f"{b.pending} of {b.expected} arrivals pending, tx-count {b.tx}"
        )
        if b.tx > 0 and not any((cta, offset) in op.signals for op in self.machine.flight):
            text += (
                f" (expect_tx announced {b.tx_expected} bytes, {b.tx_arrived} came and no copy is "
                f"in flight), announced at {announced}"
            )
        elif b.tx < 0:
            text += (
                f" ({b.tx_arrived} bytes came, expect_tx announced only {b.tx_expected}), "
                f"announced at {announced}"
            )
        return f"{text}, last touched by {last}"

    def leftovers(self) -> list[tuple[str, Instruction]]:
        """Barriers whose tx-count is not zero at the end of a run."""
        out = []
        for (cta, offset), b in self.barriers.items():
            # NOTE: bytes announced in a last phase without a copy or a wait, as some pipelines do
            # when they drain, are harmless
            if b.tx and b.tx_arrived:
                out.append((f"at the end {self.describe(cta, offset)}", b.made.instruction))
        return out

    def half_counted(self) -> list[tuple[str, Instruction]]:
        """Barriers with some but not all arrivals in their last phase, at the end of a run."""
        return [
            (f"at the end {self.describe(*key)}", b.made.instruction)
            for key, b in self.barriers.items()
            if b.pending != b.expected
        ]

"""mbarrier objects (PTX ISA 9.7.13.15): arrival counts, transaction counts and phases.

The 64-bit object in shared memory is opaque, so the state is kept separately, by (cta, byte
offset). A phase completes when its pending arrivals and its tx-count are both zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.errors import BarrierMisuse
from cutex.sim.machine.events import LateArrival
from cutex.sim.machine.phase import MBarrier
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.core import Core
    from cutex.sim.machine.flight import Flight

MAX_COUNT = (1 << 20) - 1
_FEW_CTAS = 2  # CTAs of a cluster; larger ones hung (see `MBarriers._parked`)


class MBarriers:
    def __init__(self, machine: Core, flight: Flight) -> None:
        self.machine, self.flight = machine, flight
        self.clear()

    def clear(self) -> None:
        self.barriers: dict[tuple[int, int], MBarrier] = {}

    def init(
        self, cta: int, offset: int, count: int, warp: int, lane: int, ins: Instruction
    ) -> None:
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
        barrier = self.barriers[cta, offset] = MBarrier(cta, offset, count, count, ins)
        self.machine.progress += 1
        self.machine.events.mbarrier_made(barrier, warp, lane, old is not None)

    def use(self, cta: int, offset: int, warp: int, ins: Instruction) -> MBarrier:
        """The mbarrier that a warp uses."""
        barrier = self.get(cta, offset, ins)
        self.machine.events.mbarrier_used(barrier, warp, ins)
        return barrier

    def reach(self, barrier: MBarrier, warp: int, what: str, ins: Instruction) -> None:
        """A warp, perhaps of another CTA, is about to arrive or to change the tx-count."""
        barrier.remote = barrier.cta != self.machine.grid.cta_of(warp)
        if barrier.remote:
            self.machine.events.mbarrier_reached(barrier, warp, what, ins)

    def arrive_late(
        self, cta: int, offset: int, count: int, who: str, arrival: LateArrival
    ) -> None:
        """An arrival that was bound to the end of operations."""
        ins = arrival.instruction
        barrier = self.get(cta, offset, ins)
        barrier.remote = cta != self.machine.grid.cta_of(arrival.warp)
        self.machine.events.mbarrier_arrives_late(barrier, arrival)
        self.arrive(barrier, count, who, ins)

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
        if not count:
            raise BarrierMisuse.at(
                ins,
                f"{who} arrives 0 times on {self.name(barrier.cta, barrier.offset)}; an arrival "
                f"counts 1..{MAX_COUNT}",
            )
        if count > barrier.pending:
            raise BarrierMisuse.at(
                ins,
                f"{who} arrives {count} time{'s' if count > 1 else ''} on "
                f"{self.name(barrier.cta, barrier.offset)}, which expects only "
                f"{barrier.pending} more of {barrier.expected} in phase {barrier.phases}: a wait "
                "for that phase's end is missing before it, or the mbarrier counts too few",
            )
        barrier.pending -= count
        if drop:
            barrier.expected -= count
        self._advance(barrier)

    def refuse_completion(self, barrier: MBarrier, who: str, ins: Instruction) -> None:
        """Raise BarrierMisuse: an arrival .noComplete has completed a phase (9.7.13.15.13)."""
        raise BarrierMisuse.at(
            ins,
            f"{who} arrives .noComplete on {self.name(barrier.cta, barrier.offset)} and is the "
            f"last of its phase {barrier.phases - 1}: it must not complete it",
        )

    def refuse_token(self, barrier: MBarrier, phase: int, warp: int, ins: Instruction) -> None:
        """Raise BarrierMisuse: a wait takes the state of an older phase than the one before the
        current (9.7.13.15.16).
        """
        raise BarrierMisuse.at(
            ins,
            f"{self.machine.grid.name_warp(warp)} waits by a state of phase {phase} of "
            f"{self.name(barrier.cta, barrier.offset)}, which is in its phase {barrier.phases}: a "
            "state is that of the current phase or of the one before",
        )

    def refuse_state(self, barrier: MBarrier, warp: int, ins: Instruction) -> None:
        """Raise BarrierMisuse: a wait takes a state that is none of this mbarrier's
        (9.7.13.15.16).
        """
        raise BarrierMisuse.at(
            ins,
            f"{self.machine.grid.name_warp(warp)} waits for "
            f"{self.name(barrier.cta, barrier.offset)} by a state that no arrival at it has "
            "returned",
        )

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
            self.machine.events.mbarrier_completed(barrier)
            barrier.tx_expected = barrier.tx_arrived = 0
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
            made = f" (initialised at {barrier.made.place()})"
        return f"mbarrier 0x{offset:x} of {self.machine.grid.name_cta(cta)}{made}"

    def describe(self, cta: int, offset: int) -> str:
        """The state for the deadlock report, with the error of the tx-count if there is one."""
        b = self.barriers[cta, offset]
        announced = f", announced at {b.announced.place()}" if b.announced else ""
        last = f"{b.last[0]} at {b.last[1].where()}" if b.last else "nobody"
        text = (
            f"{self.name(cta, offset)}: {b.phases} phase{'s' if b.phases != 1 else ''} complete, "
            f"{b.pending} of {b.expected} arrivals pending, tx-count {b.tx}"
        )
        if b.counted_up:
            text += (
                f" ({b.counted_up} times cp.async.mbarrier.arrive without .noinc: each has it "
                "expect an arrival more)"
            )
        if b.tx > 0 and not any((cta, offset) in op.signals for op in self.flight):
            text += (
                f" (expect_tx announced {b.tx_expected} bytes, {b.tx_arrived} came and no copy is "
                f"in flight){announced}"
            )
        elif b.tx < 0:
            text += (
                f" ({b.tx_arrived} bytes came, expect_tx announced only {b.tx_expected}){announced}"
            )
        return f"{text}, last touched by {last}"

    def uses(self) -> dict[str, tuple[int, int]]:
        """Of the mbarriers of each array, or of each place where several are initialised: how many
        a CTA has, and the most phases that one of them has completed.
        """
        names = self.machine.findings.names
        slots: dict[str, set[int]] = {}
        phases: dict[str, int] = {}
        for b in self.barriers.values():
            name = names.at(b.offset).partition("[")[0]
            name = name or f"the mbarriers initialised at {b.made.place()}"
            slots.setdefault(name, set()).add(b.offset)
            phases[name] = max(phases.get(name, 0), b.phases)
        return {name: (len(offsets), phases[name]) for name, offsets in slots.items()}

    def miscounted(self) -> list[tuple[str, Instruction]]:
        """The barriers that warps wait for in vain because of the bytes announced, with the
        instruction that announced them: if nothing is in flight, these will never fit.
        """
        found = []
        for key, b in self.barriers.items():
            if key in self.machine.sleepers and b.tx and b.announced and not b.pending:
                came = f"{b.tx_arrived} bytes came" if b.tx_arrived else "no bytes came"
                found.append(
                    (
                        f"phase {b.phases} of {self.name(*key)} never completes: expect_tx "
                        f"announced {b.tx_expected} bytes, and {came}",
                        b.announced,
                    )
                )
        return found[:1]

    def leftovers(self) -> list[tuple[str, Instruction]]:
        """Barriers whose tx-count is not zero at the end of a run."""
        out = []
        for (cta, offset), b in self.barriers.items():
            # NOTE: bytes announced in a last phase without a copy or a wait, as some pipelines do
            # when they drain, are harmless
            if b.tx and b.tx_arrived:
                out.append((f"at the end {self.describe(cta, offset)}", b.made))
        return out

    def half_counted(self) -> list[tuple[str, Instruction]]:
        """Barriers with some but not all arrivals in their last phase, at the end of a run."""
        return [
            (f"at the end {self.describe(*key)}", b.made)
            for key, b in self.barriers.items()
            if b.pending != b.expected
        ]

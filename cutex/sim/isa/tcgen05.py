"""Fifth-generation tensor cores of sm_100a (PTX ISA 9.7.16): the issue of mma and cp, and the
instructions that order them: wait, fence and commit.

Tensor memory is 128 lanes x 512 columns of 32 bits per CTA, addressed as lane << 16 | column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cutex.sim.errors import BadOperand, BarrierMisuse
from cutex.sim.isa.bulk_operands import targets
from cutex.sim.isa.sync import require_whole_warp
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.events import LateArrival
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.machine.operation import Engine, Footprint, Kind, Operation, Span
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.program import Instruction


@instruction("tcgen05.wait")
def wait(d: Decoder) -> Execute:
    """tcgen05.wait (9.7.16.8.3): ld and st take effect when they execute; observers
    are notified of the wait.
    """
    d.only("wait", "ld", "st", "sync", "aligned")
    kind = Kind.LOAD if "ld" in d.mods else Kind.STORE

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        d.m.events.tmem_waited(kind, b.idx[b.any_active()])

    return execute


@instruction("tcgen05.fence")
def fence(d: Decoder) -> Execute:
    """tcgen05.fence (9.7.16.11.1): observers are notified."""
    d.only("fence", "before_thread_sync", "after_thread_sync")
    if "before_thread_sync" in d.mods:
        return lambda b: d.m.events.tmem_fenced(True, b.idx[b.any_active()])
    return lambda b: d.m.events.tmem_fenced(False, b.idx[b.any_active()])


def cta_group(d: Decoder) -> int:
    at = d.parts.index("cta_group")
    return int(d.parts[at + 1])


@dataclass(frozen=True)
class Issuer:
    """The thread that issues an mma, cp or commit, and the CTAs that execute it (9.7.16.5): its
    own, or with cta_group::2 its pair, even CTA first. A thread of either CTA may issue for both.
    """

    m: Machine
    warp: int
    lane: int
    group: int
    ins: Instruction

    @property
    def ctas(self) -> list[int]:
        own = int(self.m.grid.warp_cta[self.warp])
        first = own if self.group == 1 else own - int(self.m.grid.cta_rank[own]) % 2
        return [first + r for r in range(self.group)]

    def require_peer(self) -> None:
        """Raise BadOperand unless the other CTA of the pair exists and has not exited
        (9.7.16.5)."""
        m = self.m
        if self.group == 1:
            return
        who, what = m.grid.name_warp(self.warp), f"executes {self.ins.op}"
        if m.grid.cluster_size % 2:
            raise BadOperand.at(
                self.ins, f"{who} {what}, but clusters of {m.grid.cluster_size} have no pairs"
            )
        peer = int(m.grid.warp_cta[self.warp]) ^ 1  # NOTE: resident clusters start at even CTAs
        if not m.live[peer :: m.grid.num_ctas].any():
            raise BarrierMisuse.at(
                self.ins, f"{who} {what}, but {m.grid.name_cta(peer)}, its peer, has exited"
            )

    @property
    def _thread(self) -> tuple[int, int, int]:
        return self.warp, self.lane, self.group

    def issue(
        self,
        engine: Engine,
        complete: Callable[[], None],
        reads: list[Footprint],
        writes: list[Footprint],
        flops: int = 0,
    ) -> None:
        """Issue an mma or cp: those of one CTA, or pair, are executed in order."""
        self.require_peer()
        what, queue = f"the {engine}", ("tcgen05", self.ctas[0])
        size = sum(place.size for place in reads if isinstance(place, Span))
        op = Operation(
            what, self.warp, self.ins, queue, complete, engine, size, flops, reads, writes,
            agents=[(self.warp, self.m.flight.issued + 1)],
        )  # fmt: skip
        self.m.flight.issue(op)
        self.m.flight.latest.setdefault(self._thread, []).append(op)

    def commit(self, barrier: tuple[int, int], arrive: Callable[[LateArrival], None]) -> None:
        """Call ``arrive`` when the operations that this thread issued before are complete; those of
        other threads do not count.
        """
        self.require_peer()
        tracked = self.m.flight.latest.get(self._thread)
        number = tracked[-1].number if tracked else 0
        self.m.flight.committed[self._thread] = number
        arrival = LateArrival(self.warp, Kind.TENSOR, number, self.ins)
        self.m.events.arrives_late(arrival)
        if not tracked or tracked[-1].done:
            arrive(arrival)
            return
        for op in tracked:
            op.signals = op.signals or [barrier]
        tracked[-1].then.append(lambda: arrive(arrival))
        self.m.flight.latest[self._thread] = tracked[-1:]


def check_lanes(d: Decoder, b: Batch, target: np.ndarray, does: str) -> None:
    """Report lanes of a warp that issue one mma or cp to one place: each issues an operation of its
    own (9.7.16.5), of which a commit tells only if it is of the same thread (9.7.16.12.1).
    """
    active = b.active()
    for row in np.nonzero(active.sum(1) > 1)[0].tolist():
        where = target[row][active[row]]
        if (where == where[0]).all():
            d.m.findings.add(
                "every lane",
                f"{len(where)} lanes of {d.m.grid.name_warp(int(b.idx[row]))} issue this "
                f"{d.parts[0]}.{d.parts[1]}, each for itself: {does} {len(where)} times to one "
                "place, and a commit tells of its own thread's only",
                d.ins,
                remedy="elect_one() around it, once, where the warp issues it",
            )
            return


@instruction("tcgen05.commit")
def commit(d: Decoder) -> Execute:
    """tcgen05.commit (9.7.16.12.1): arrives once on the mbarrier when all earlier mma and cp of
    this thread, with the same cta_group, are complete.
    """
    d.only(
        "commit",
        "cta_group",
        "1",
        "2",
        "mbarrier",
        "arrive",
        "one",
        "shared",
        "cluster",
        "multicast",
    )
    group = cta_group(d)
    address, m, ins = d.address(0), d.m, d.ins
    mask = d.src(1, "u16") if "multicast" in d.mods else None

    def execute(b: Batch) -> None:
        a = shared_addresses(address(b))
        masks = b.lanes(mask(b)) if mask else None
        rows, lanes = np.nonzero(b.active())
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            warp = int(b.idx[row])
            own = int(m.grid.warp_cta[warp])
            cta, offset = m.grid.shared_location(b.idx[row : row + 1], a[row, lane : lane + 1])
            m.check_shared(b.idx[row : row + 1], np.array([lane]), cta, offset, 8, ins)
            mask_here = int(masks[row, lane]) if masks is not None else None
            on = targets(d, int(cta[0]), mask_here)
            for target in on:
                m.mbarriers.use(target, int(offset[0]), warp, ins)
            barrier = own if own in on else min(on, default=own), int(offset[0])
            arrive = _arriver(m, on, int(offset[0]), warp)
            Issuer(m, warp, lane, group, ins).commit(barrier, arrive)

    return execute


def _arriver(
    m: Machine, targets: list[int], offset: int, warp: int
) -> Callable[[LateArrival], None]:
    def complete(arrival: LateArrival) -> None:
        for target in targets:
            who = f"tcgen05.commit of {m.grid.name_warp(warp)}"
            m.mbarriers.arrive_late(target, offset, 1, who, arrival)

    return complete

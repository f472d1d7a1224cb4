"""Who runs next: batches of warps, asynchronous operations, time-outs; and the deadlock report.

Order "fifo": warps run until they wait, the one at the lowest program position first, so that warps
at the same place run as one batch; operations in flight complete only when no warp can run, in
order of issue: all but bulk stores together, these one by one for each warp. That is late, so
whoever does not wait for an operation meets it still in flight.
Order "eager": the same, but an operation completes as soon as it may, before any warp runs on.
Order "starved": one warp of each CTA, picked by the seed, runs only when nothing else can.
Order "peer-late": likewise all CTAs of a cluster but one, which is picked by the seed.
Order "random": a seed decides which warps run, for how long, and which operation completes when.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from cutex.orders import ORDERS
from cutex.sim import definitions, wgmma  # noqa: F401 - the first registers instructions
from cutex.sim.decode import Execute, decode
from cutex.sim.errors import Deadlock, SimError, UnknownInstruction
from cutex.sim.machine import ARRIVED, BLOCKED, DONE, GO, RETRY, RUNNING, Batch
from cutex.sim.ptx import Program, Reg, Vector

if TYPE_CHECKING:
    from cutex.sim.machine import Machine

_TURN = 4096  # instructions a batch may run before others at higher positions get their turn


class Scheduler:
    """Runs the resident CTAs of a machine to completion."""

    def __init__(self, machine: Machine, order: str) -> None:
        if order not in ORDERS:
            raise ValueError(f"order {order!r}: takes one of {', '.join(ORDERS)}")
        self.m, self.random, self.eager = machine, order == "random", order == "eager"
        self.late = _late_warps(machine, order)
        self.code = machine.program.code
        self.decoded: list[Execute | None] = [None] * len(self.code)
        self.watched = _watched(machine.program)
        self.guards = [
            None if i.guard is None else machine.registers[1][i.guard.index] for i in self.code
        ]
        self.executed = np.zeros(len(self.code), np.int64)  # warp-instructions
        self.turn = np.zeros(machine.num_warps, np.int64)
        self.stalled_at = -1

    def run(self) -> None:
        m = self.m
        self.turn[:] = 0
        self.stalled_at = -1
        with np.errstate(all="ignore"):
            while True:
                ready = np.nonzero(m.state == RUNNING)[0]
                if self.random and m.flight.count and m.random.random() < 0.3:
                    m.flight.complete(m.random.choice(m.flight.heads()))
                    continue
                first = ready[~self.late[ready]]
                if len(first) or (len(ready) and not m.flight.count):
                    self._step(first if len(first) else ready)
                elif m.flight.count:
                    self._complete()
                elif (m.state == DONE).all():
                    break
                else:
                    self._time_out()

    def _complete(self) -> None:
        if self.random:
            self.m.flight.complete(self.m.random.choice(self.m.flight.heads()))
        else:
            self.m.flight.complete_late()

    def _time_out(self) -> None:
        """Nothing can run: sleeping try_waits return false once; if that leads to nothing new, it
        is a deadlock.
        """
        m = self.m
        sleepers = [w for w, wait in m.waits.items() if wait.kind == "mbarrier"]
        if not sleepers or self.stalled_at == m.progress:
            raise Deadlock(self._report())
        self.stalled_at = m.progress
        for w in sleepers:
            wait = m.waits.pop(w)
            m.sleepers[wait.key].discard(w)
            m.state[w] = RUNNING
            m.timed_out[w] = True

    # -- choosing ----------------------------------------------------------------------------------

    def _step(self, ready: np.ndarray) -> None:
        m = self.m
        turn = self.turn[ready]
        first = turn.min()
        mine = ready[turn == first]
        places = m.pc[mine]
        place = int(m.random.choice(places.tolist())) if self.random else int(places.min())
        idx = mine[places == place]
        limit = _TURN
        if self.random:
            limit = m.random.randint(1, 200)
            if len(idx) > 1 and m.random.random() < 0.5:
                idx = np.sort(
                    np.array(m.random.sample(idx.tolist(), m.random.randint(1, len(idx))))
                )
        others = places[places > place]
        stop = int(others.min()) if len(others) and not self.random else len(self.code) + 1
        mask = None
        apart = m.diverged[idx]
        live = m.live[idx]
        if apart.any() or not live.all():
            mask = live & ((m.lane_pc[idx] == place) | ~apart[:, None])
            above = m.lane_pc[idx][live & apart[:, None] & ~mask]
            if len(above):
                stop = min(stop, int(above.min()))
        self._run(Batch(idx, mask), place, stop, limit)

    # -- executing ---------------------------------------------------------------------------------

    def _run(self, batch: Batch, pc: int, stop: int, limit: int) -> None:
        """Executes from ``pc`` until the batch reaches ``stop`` (where others wait to join),
        splits, blocks or ends.
        """
        m, code, guards, decoded = self.m, self.code, self.guards, self.decoded
        base = batch.mask
        for _ in range(limit):
            ins = code[pc]
            name = ins.name
            batch.mask = base
            guard = guards[pc]
            self.executed[pc] += batch.n
            if name == "bra" or name in ("ret", "exit", "trap"):
                taken = self._guarded(batch, base, guard, ins.negated)
                if name == "trap":
                    raise SimError(
                        f"trap: {m.name_warp(int(batch.idx[0]))} executes trap\n    at "
                        f"{ins.where()}"
                    )
                if name != "bra":
                    self._exit(batch, base, taken, pc)
                    return
                here = batch.active()
                if taken is None or (taken == here).all():
                    pc = ins.target
                elif not taken.any():
                    pc += 1
                else:
                    self._branch(batch, here, taken, pc, ins.target)
                    return
                if pc >= stop or pc <= 0:
                    break
                continue
            if guard is not None:
                batch.mask = self._guarded(batch, base, guard, ins.negated)
                if batch.mask is not None and not batch.mask.any():
                    pc += 1
                    if pc >= stop:
                        break
                    continue
            execute = decoded[pc]
            if execute is None:
                execute = decoded[pc] = decode(ins, m)
            if pc in self.watched and m.warpgroups.warps:
                m.warpgroups.check_registers(batch, *self.watched[pc], ins)
            verdict = execute(batch)
            if self.eager and m.flight.count:
                m.flight.complete_all()
            if verdict is not None and verdict.any():
                batch.mask = base
                going = self._park(batch, verdict, pc)
                if going is None:
                    return
                batch = going
                base = batch.mask
            pc += 1
            if pc >= stop:
                break
        else:
            self.turn[batch.idx] += 1
        batch.mask = base
        self._settle(batch, np.full(batch.n, pc))

    def _guarded(
        self, batch: Batch, base: np.ndarray | None, guard: np.ndarray | None, negated: bool
    ) -> np.ndarray | None:
        """Lanes for which the instruction's predicate holds; None for all of a full batch."""
        if guard is None:
            return base
        holds = guard[batch.sel]
        holds = ~holds if negated else holds
        if base is not None:
            return holds & base
        return None if holds.all() else holds

    def _park(self, batch: Batch, verdict: np.ndarray, pc: int) -> Batch | None:
        """Puts blocked warps to sleep; the batch of those that go on."""
        m = self.m
        asleep = m.state[batch.idx] == BLOCKED
        retry = verdict == RETRY
        arrived = (verdict == ARRIVED) & asleep
        for which, place in ((retry, pc), (arrived, pc + 1)):
            if which.any():
                part = Batch(batch.idx[which], None if batch.mask is None else batch.mask[which])
                self._settle(part, np.full(part.n, place))
        on = ~retry & ~arrived
        if not on.any():
            return None
        return Batch(batch.idx[on], None if batch.mask is None else batch.mask[on])

    def _settle(self, batch: Batch, place: np.ndarray) -> None:
        """Stores where the batch's lanes stand; merges warps whose lanes stand together again."""
        m = self.m
        if batch.mask is None:
            m.pc[batch.idx] = place
            return
        apart = m.diverged[batch.idx]
        if not apart.any():
            m.pc[batch.idx] = place
            return
        m.pc[batch.idx[~apart]] = place[~apart]
        idx = batch.idx[apart]
        lanes = m.lane_pc[idx]
        lanes[batch.mask[apart]] = np.repeat(place[apart], batch.mask[apart].sum(1))
        m.lane_pc[idx] = lanes
        self._merge(idx)

    def _merge(self, idx: np.ndarray) -> None:
        """The lowest lanes of a warp run; when all live lanes stand together, it is whole again."""
        m = self.m
        far = len(self.code) + 1
        lanes = np.where(m.live[idx], m.lane_pc[idx], far)
        low = lanes.min(1)
        m.pc[idx] = low
        m.diverged[idx] = ((lanes != low[:, None]) & m.live[idx]).any(1)

    def _branch(
        self, batch: Batch, here: np.ndarray, taken: np.ndarray, pc: int, target: int
    ) -> None:
        """Warps, or lanes of a warp, part ways."""
        m = self.m
        some, every = taken.any(1), (taken == here).all(1)
        split = some & ~every
        place = np.where(every, target, pc + 1)
        whole = Batch(batch.idx[~split], None if batch.mask is None else batch.mask[~split])
        if whole.n:
            self._settle(whole, place[~split])
        idx = batch.idx[split]
        if len(idx):
            lanes = np.where(m.diverged[idx][:, None], m.lane_pc[idx], m.pc[idx][:, None])
            lanes[here[split]] = pc + 1
            lanes[taken[split]] = target
            m.lane_pc[idx] = lanes
            m.diverged[idx] = True
            self._merge(idx)

    def _exit(
        self, batch: Batch, base: np.ndarray | None, leaving: np.ndarray | None, pc: int
    ) -> None:
        m = self.m
        leaving = batch.active() if leaving is None else leaving
        batch.mask = base
        here = batch.active()
        staying = here & ~leaving
        lanes = np.where(m.diverged[batch.idx][:, None], m.lane_pc[batch.idx], pc)
        lanes[staying] = pc + 1
        m.lane_pc[batch.idx] = lanes
        m.live[batch.idx] &= ~leaving
        m.diverged[batch.idx] = True
        self._merge(batch.idx)
        gone = ~m.live[batch.idx].any(1)
        m.state[batch.idx[gone]] = DONE
        m.progress += 1
        for cta in np.unique(m.warp_cta[batch.idx[gone]]).tolist():
            m.named.warps_left(cta)
            m.clusters.warps_left(cta)

    # -- the report --------------------------------------------------------------------------------

    def _report(self) -> str:
        m = self.m
        lines = ["deadlock: no warp can run and nothing is in flight"]
        same: dict[tuple[int, str], list[int]] = {}
        for w in sorted(m.waits, key=lambda w: (int(m.warp_cta[w]), int(m.warp_in_cta[w]))):
            wait = m.waits[w]
            same.setdefault((wait.instruction.line, _without_place(wait.tell())), []).append(w)
        for _, warps in list(same.items())[:12]:
            wait = m.waits[warps[0]]
            more = f" (and {len(warps) - 1} more like it)" if len(warps) > 1 else ""
            lines.append(
                f"  {m.name_warp(warps[0])}{more} {wait.tell()}\n    at {wait.instruction.where()}"
            )
        done = int((m.state == DONE).sum()) - int((m.warp_cta >= m.present).sum())
        lines.append(f"  {len(m.waits)} warps are blocked, {done} have returned")
        if m.findings:
            lines.append("found before that:")
            lines += [f"  {f}" for f in m.findings.values()]
        return "\n".join(lines)

    def leftovers(self) -> None:
        """What must not remain when every warp has returned."""
        m = self.m
        for message, ins in m.mbarriers.leftovers():
            m.find("tx-count", message, ins)
        for message, line in m.tmem.leftovers():
            m.find("tensor memory", message, next(i for i in self.code if i.line == line))


def _late_warps(machine: Machine, order: str) -> np.ndarray:
    """(warps,) those that run only when nothing else can."""
    if order == "starved":
        return machine.warp_in_cta == machine.seed % machine.warps_per_cta
    rank = machine.warp_cta % machine.cluster_size
    if order == "peer-late" and machine.cluster_size > 1:
        return rank != machine.seed % machine.cluster_size
    return np.zeros(machine.num_warps, bool)


def _without_place(text: str) -> str:
    return re.sub(
        r"CTA \([\d,]+\)( \(rank \d+ of its cluster\))?( warp \d+)?( lane \d+)?", "CTA", text
    )


def _watched(program: Program) -> dict[int, tuple[set[int], set[int]]]:
    """Instructions, other than wgmma's own, that read or write registers which some wgmma uses."""
    used = wgmma.accumulator_registers(program.code)
    out: dict[int, tuple[set[int], set[int]]] = {}
    if not used:
        return out
    for pc, ins in enumerate(program.code):
        if ins.op.startswith("wgmma"):
            continue
        touched = [_indices(o) & used for o in ins.operands]
        if any(touched):
            stores = ins.name in ("st", "stmatrix", "red", "bar") or not ins.operands
            written = set() if stores else touched[0]
            read = set().union(*(touched if stores else touched[1:]))
            out[pc] = (read, written)
    return out


def _indices(operand: object) -> set[int]:
    if isinstance(operand, Reg):
        return {operand.index} if operand.bank == 32 else set()
    if isinstance(operand, Vector):
        return set().union(*map(_indices, operand.items)) if operand.items else set()
    base = getattr(operand, "base", None)
    return _indices(base) if base is not None else set()


def check_known(machine: Machine) -> None:
    """Decodes the whole program up front, so that an unknown instruction is reported before
    anything runs.
    """
    for ins in machine.program.code:
        if ins.name not in ("bra", "ret", "exit", "trap"):
            decode(ins, machine)


__all__ = ["GO", "ORDERS", "Scheduler", "UnknownInstruction", "check_known"]

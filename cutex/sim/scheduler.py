"""The scheduler: batches of warps, asynchronous operations, time-outs, and the deadlock report.

Choices that the hardware leaves open are made by the machine's policy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.errors import BadOperand, Deadlock, Endless, SimError
from cutex.sim.isa import definitions  # noqa: F401 - it registers instructions
from cutex.sim.machine.batch import ARRIVED, RETRY, Batch
from cutex.sim.machine.divergence import BLOCKED, DONE, RUNNING, YIELDED
from cutex.sim.ptx.decode import Execute, decode
from cutex.sim.ptx.flow import LEAVES
from cutex.sim.ptx.once import once
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.ptx.temporaries import used

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.operation import Operation
    from cutex.sim.machine.waits import Wait

# Rounds of a loop without any progress elsewhere, after which a warp yields: for a loop that reads
# memory that others may write, and for any other.
_SPINS, _LONG_LOOP = 16, 4096
# How often all waiting warps may poll in vain before it is a deadlock; and rounds of a loop that
# waits for nothing before it is endless.
_PATIENCE, _ROUNDS = 512, 1 << 24
_BRIEF = 4  # waits that the first line of a deadlock report names


class Scheduler:
    """Runs the resident CTAs of a machine to completion."""

    def __init__(self, machine: Machine, limit: int | None = None) -> None:
        self.m, self.policy = machine, machine.policy
        self.lanes = machine.lanes
        self.late = self.policy.late(machine.grid)
        self.code = machine.program.code
        self.decoded: list[Execute | None] = [None] * len(self.code)
        self.guards = [None if i.guard is None else machine.register(i.guard) for i in self.code]
        self.polls, self.whole = _polling(machine.program), _whole_warp(machine.program)
        self.executed = np.zeros(len(self.code), np.int64)  # warp-instructions
        self.turn = np.zeros(machine.grid.num_warps, np.int64)
        self.idle = np.zeros(machine.grid.num_warps, np.int64)  # loop rounds since any progress
        self.computes = np.zeros(machine.grid.num_warps, bool)  # yielded, but waits for nothing
        self.limit = limit

    def run(self) -> None:
        m = self.m
        self.turn[:] = self.idle[:] = 0
        self.seen = self.resumed = m.progress
        self.patience, self.waited = 1.0, 0
        self.before: bytes = b""
        with np.errstate(all="ignore"):
            while True:
                if m.progress != self.resumed:
                    self._resume()
                if self.limit is not None and int(self.executed.sum()) > self.limit:
                    raise Endless(self._places(f"more than {self.limit} warp-instructions"))
                ready = np.nonzero(self.lanes.state == RUNNING)[0]
                if m.flight.count and (early := self.policy.early(m.flight)):
                    self._complete(early)
                    continue
                first = ready[~self.late[ready]]
                if len(first) or (len(ready) and not m.flight.count):
                    self._step(first if len(first) else ready)
                elif m.flight.count:
                    self._complete(self.policy.due(m.flight))
                elif (self.lanes.state == DONE).all():
                    break
                elif not self.lanes.go_on_alone():
                    self._time_out()

    def _complete(self, operations: list[Operation]) -> None:
        for op in operations:
            self.m.flight.complete(op)

    def _resume(self) -> None:
        """Resume spinning warps, because something has happened."""
        self.resumed, self.patience, self.waited = self.m.progress, 1.0, 0
        self.lanes.state[self.lanes.state == YIELDED] = RUNNING

    def _time_out(self) -> None:
        """Nothing can run: sleeping try_waits return false once, and spinning warps poll again. If
        that leads to no progress however often, it is a deadlock.
        """
        m = self.m
        spinning = self.lanes.state == YIELDED
        sleepers = [(w, s) for w, all_ in m.waits.items() for s in all_ if s.kind == "mbarrier"]
        computes = bool((spinning & self.computes).any())
        self.patience -= _LONG_LOOP / _ROUNDS if computes else 1 / _PATIENCE
        now = self._registers(spinning | [w in m.waits for w in range(m.grid.num_warps)])
        if not (sleepers or spinning.any()) or now == self.before:
            raise Deadlock(self._report())
        if self.patience <= 0:
            if computes:
                raise Endless(self._places(f"{_ROUNDS} rounds of a loop without any effect"))
            raise Deadlock(self._report())
        self.waited += 1
        if self.waited & (self.waited - 1) == 0:  # NOTE: finds every period, by Brent's method
            self.before = now
        self.lanes.state[spinning] = RUNNING
        for warp, wait in sleepers:
            m.time_out(warp, wait)

    def _registers(self, which: np.ndarray) -> bytes:
        """The state that decides what these warps do next, as long as memory does not change, as
        bytes.
        """
        state = [self.m.progress.to_bytes(8, "little"), self.lanes.pc[which].tobytes()]
        state += [
            r[np.ix_(used(self.m.program)[bank], which)].tobytes()
            for bank, r in self.m.registers.items()
        ]
        state.append(self.m.local[which].tobytes())
        return b"".join(state)

    # -- choosing ----------------------------------------------------------------------------------

    def _step(self, ready: np.ndarray) -> None:
        turn = self.turn[ready]
        first = turn.min()
        mine = ready[turn == first]
        places = self.lanes.pc[mine]
        place, idx, limit = self.policy.turn(mine, places)
        others = places[places > place]
        gathers = self.policy.gathers and len(others)
        stop = int(others.min()) if gathers else len(self.code) + 1
        batch, waits = Batch(idx, self.lanes.running(idx, place)), frozenset[int]()
        if batch.mask is not None:
            above, waits = self.lanes.meeting_places(idx, batch.mask, place)
            stop = min(stop, above)
        self._run(batch, place, stop, waits, limit)

    # -- executing ---------------------------------------------------------------------------------

    def _run(self, batch: Batch, pc: int, stop: int, waits: frozenset[int], limit: int) -> None:
        """Execute from ``pc`` until the batch reaches ``stop`` (where others wait to join) or one
        of ``waits`` (where it waits for others), splits, blocks, spins or ends.
        """
        m, code, guards, decoded = self.m, self.code, self.guards, self.decoded
        base, at_once = batch.mask, self.policy.completes_at_once
        events, places = m.events, m.events.places
        steps = events.step
        polled = False
        for _ in range(limit):
            ins = code[pc]
            name = ins.name
            batch.mask = base
            guard = guards[pc]
            if steps:
                events.executing(batch, pc)
            if name == "bra" or name in LEAVES:
                where = self._jump(batch, pc, polled)
                if where is None:
                    return
                pc = where
                if pc >= stop or pc <= 0 or pc in waits:
                    break
                continue
            if base is not None and self.whole[pc]:
                staying = self.lanes.hold(batch)
                if staying is None:
                    return
                batch, base = staying, staying.mask
            self.executed[pc] += batch.n
            if guard is not None:
                if pc in places:
                    events.guarding(batch, pc)
                batch.mask = self._guarded(batch, base, guard, ins.negated)
                if batch.mask is not None and not batch.mask.any():
                    pc += 1
                    if pc >= stop or pc in waits:
                        break
                    continue
            execute = decoded[pc]
            if execute is None:
                execute = decoded[pc] = decode(ins, m)
            if pc in places:
                events.using_registers(batch, pc)
            try:
                verdict = execute(batch)
            except SimError:
                raise
            except Exception as error:
                raise BadOperand.at(ins, f"{type(error).__name__}: {error}") from error
            if steps:
                events.executed(batch, pc, verdict)
            polled = polled or self.polls[pc]
            if at_once and m.flight.count:
                m.flight.complete_all()
            if verdict is not None and verdict.any():
                batch.mask = base
                going = self._park(batch, verdict, pc)
                if going is None:
                    return
                batch = going
                base = batch.mask
            pc += 1
            if pc >= stop or pc in waits:
                break
        else:
            self.turn[batch.idx] += 1
        batch.mask = base
        self.lanes.settle(batch, np.full(batch.n, pc))

    def _jump(self, batch: Batch, pc: int, polled: bool) -> int | None:
        """Execute a branch, a trap or an end; return where the whole batch goes on, None if it has
        split, yielded or ended."""
        ins, base = self.code[pc], batch.mask
        self.executed[pc] += batch.n
        if pc in self.m.events.places:
            self.m.events.using_registers(batch, pc)
        taken = self._guarded(batch, base, self.guards[pc], ins.negated)
        if ins.name == "trap":
            self._trap(batch, batch.active() if taken is None else taken, ins)
            return pc + 1
        if ins.name != "bra":
            self._exit(batch, base, taken, pc)
            return None
        if taken is not None and not taken.any():
            return pc + 1
        back = ins.target <= pc
        if taken is not None and (taken != (here := batch.active())).any():
            if back:
                self._spins(batch, polled)
            self.lanes.branch(batch, here, taken, pc, ins.target)
            return None
        if back and self._spins(batch, polled):
            self.computes[batch.idx] = not polled
            self.lanes.settle(batch, np.full(batch.n, ins.target))
            self.lanes.give_way(batch)
            return None
        return ins.target

    def _trap(self, batch: Batch, trapped: np.ndarray, ins: Instruction) -> None:
        if trapped.any():
            row, lane = (int(v[0]) for v in np.nonzero(trapped))
            who = f"{self.m.grid.name_warp(int(batch.idx[row]))} lane {lane}"
            raise SimError(f"trap: {who} executes trap\n    at {ins.where()}")

    def _guarded(
        self, batch: Batch, base: np.ndarray | None, guard: np.ndarray | None, negated: bool
    ) -> np.ndarray | None:
        """The lanes for which the instruction's predicate holds; None for all of a full batch."""
        if guard is None:
            return base
        holds = guard[batch.sel]
        holds = ~holds if negated else holds
        if base is not None:
            return holds & base
        return None if holds.all() else holds

    def _spins(self, batch: Batch, polled: bool) -> bool:
        """Whether the loop that ends here has run many rounds while nothing happened elsewhere."""
        if self.m.progress != self.seen:
            self.seen = self.m.progress
            self.idle[:] = 0
        self.idle[batch.idx] += _LONG_LOOP // _SPINS if polled else 1
        if self.idle[batch.idx[0]] < _LONG_LOOP:
            return False
        self.idle[batch.idx] = 0
        return True

    def _park(self, batch: Batch, verdict: np.ndarray, pc: int) -> Batch | None:
        """Put blocked warps to sleep; return the batch of those that continue."""
        asleep = self.lanes.state[batch.idx] == BLOCKED
        retry = verdict == RETRY
        arrived = (verdict == ARRIVED) & asleep
        for which, place in ((retry, pc), (arrived, pc + 1)):
            if which.any():
                self._sleep(batch.pick(which), asleep[which], place)
        on = ~retry & ~arrived
        return batch.pick(on) if on.any() else None

    def _sleep(self, batch: Batch, asleep: np.ndarray, place: int) -> None:
        diverged = self.lanes.diverged[batch.idx] & asleep
        self.lanes.settle(batch, np.full(batch.n, place))
        for row in np.nonzero(diverged)[0].tolist():
            warp, mask = int(batch.idx[row]), batch.active()[row]
            self.m.waits[warp][-1].lanes = mask
            self.lanes.sleep(warp, mask)

    def _exit(
        self, batch: Batch, base: np.ndarray | None, leaving: np.ndarray | None, pc: int
    ) -> None:
        m = self.m
        leaving = batch.active() if leaving is None else leaving
        batch.mask = base
        gone = self.lanes.leave(batch, leaving, pc)
        m.progress += 1
        if len(gone):
            m.events.warps_left(gone)
        for cta in np.unique(m.grid.warp_cta[batch.idx]).tolist():
            m.named.threads_left(cta)
        for cta in np.unique(m.grid.warp_cta[gone]).tolist():
            m.clusters.warps_left(cta)

    def _places(self, why: str) -> str:
        """The places of the warps that would continue after ``why``."""
        lines = [f"endless: {why}, and warps would go on"]
        going = np.nonzero(self.lanes.state != DONE)[0]
        for pc in np.unique(self.lanes.pc[going])[:12].tolist():
            lines += self._at(pc, going[self.lanes.pc[going] == pc], "is")
        return "\n".join(lines)

    def _at(self, pc: int, warps: np.ndarray, what: str) -> list[str]:
        more = f" (and {len(warps) - 1} more like it)" if len(warps) > 1 else ""
        return [
            f"  {self.m.grid.name_warp(int(warps[0]))}{more} {what}",
            f"    at {self.code[pc].where()}",
        ]

    # -- the report --------------------------------------------------------------------------------

    def _report(self) -> str:
        m = self.m
        lines = ["deadlock: no warp can run and nothing is in flight"]
        brief: list[str] = []  # of each wait, for the first line
        same: dict[tuple[int, str], list[tuple[int, Wait]]] = {}
        for warp in sorted(
            m.waits, key=lambda w: (int(m.grid.warp_cta[w]), int(m.grid.warp_in_cta[w]))
        ):
            for wait in m.waits[warp]:
                like = same.setdefault((wait.instruction.line, _without_place(wait.tell())), [])
                like.append((warp, wait))
        # NOTE: whoever is absent from a cluster's barrier is blocked elsewhere, which is the cause
        each = sorted(same.values(), key=lambda waits: waits[0][1].kind == "cluster barrier")
        for waits in each[:12]:
            warp, wait = waits[0]
            more = f" (and {len(waits) - 1} more like it)" if len(waits) > 1 else ""
            brief.append(f"{m.grid.name_warp(warp)} {_in_brief(wait)}")
            lines.append(
                f"  {m.grid.name_warp(warp)}{_lanes(wait.lanes)}{more} {wait.tell()}\n"
                f"    at {wait.instruction.where()}"
            )
        lines += [
            f"  no tcgen05.commit of its thread comes behind {op.what} of "
            f"{m.grid.name_warp(op.warp)} at {op.instruction.where()}"
            for op in m.flight.uncommitted()[:4]
        ]
        spinning = np.nonzero(self.lanes.state == YIELDED)[0]
        for pc in np.unique(self.lanes.pc[spinning])[:12].tolist():
            what = "goes round a loop in which nothing changes"
            lines += self._at(pc, spinning[self.lanes.pc[spinning] == pc], what)
        done = int((self.lanes.state == DONE).sum()) - int(
            (m.grid.warp_cta >= m.grid.present).sum()
        )
        blocked = len(m.waits) + len(spinning)
        lines.append(f"  {blocked} warps are blocked, {done} have returned")
        if len(m.pending_clusters):
            lines.append(
                f"  {len(m.pending_clusters)} of the grid's clusters have not started: "
                f"{m.grid.num_ctas} CTAs run side by side, {m.residency.why}"
            )
        if brief:
            rest = f"; and {len(brief) - _BRIEF} more" if len(brief) > _BRIEF else ""
            lines[0] += f": {'; '.join(brief[:_BRIEF])}{rest}"
        return "\n".join(lines)

    def leftovers(self) -> None:
        """Report state that must not remain when every warp has returned."""
        m = self.m
        for message, ins in m.mbarriers.leftovers():
            m.findings.add("tx-count", message, ins)
        for message, ins in m.mbarriers.half_counted():
            m.findings.add("half-counted", message, ins, advisory=True)
        for message, line in m.tmem.leftovers():
            m.findings.add("tensor memory", message, next(i for i in self.code if i.line == line))


def _in_brief(wait: Wait) -> str:
    """The place and the object of a warp's wait; of its barrier's state the arrivals that are
    missing and errors in it."""
    what, _, state = wait.tell().partition(": ")
    what = re.sub(r" \(that is [^)]*\)", "", what)
    wrong = re.search(r" \([^(]*expect_tx announced.*(?=, last touched)", state)
    verb = "" if what.startswith("waits") else "waits for "
    missing = re.search(r"(\d+) of (\d+) arrivals pending", state)
    came = ""
    if missing and int(missing[1]):
        number = int(missing[2]) - int(missing[1])
        more = " besides those of cp.async without .noinc" if "without .noinc" in state else ""
        came = f" ({number or 'none'} of {missing[2]} arrivals came{more})"
    return f"{verb}{what}, at {wait.instruction.place()}{wrong[0] if wrong else came}"


def _lanes(lanes: np.ndarray | None) -> str:
    if lanes is None:
        return ""
    numbers = np.nonzero(lanes)[0].tolist()
    return f" lane{'s' if len(numbers) > 1 else ''} {','.join(map(str, numbers))}"


@once
def _whole_warp(program: Program) -> list[bool]:
    """Return, by instruction, whether it needs its whole warp."""
    return [
        "aligned" in ins.parts or (ins.name == "bar" and ins.parts[1:2] != ("warp",))
        for ins in program.code
    ]


@once
def _polling(program: Program) -> list[bool]:
    return [_polls(ins) for ins in program.code]


def _polls(ins: Instruction) -> bool:
    """Whether an instruction reads memory that other threads may write at any time."""
    if ins.name in ("atom", "mbarrier"):
        return True
    return ins.name == "ld" and bool({"volatile", "relaxed", "acquire", "cv"} & set(ins.parts))


def _without_place(text: str) -> str:
    return re.sub(
        r"CTA \([\d,]+\)( \(rank \d+ of its cluster\))?( warp \d+)?( lane \d+)?", "CTA", text
    )

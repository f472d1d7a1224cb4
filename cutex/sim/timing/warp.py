"""A warp that replays its recorded program, event by event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import hypot
from typing import Any

from cutex.sim.timing.events import (
    Arrive,
    Cluster,
    Columns,
    Commit,
    Copy,
    Event,
    Fetch,
    Group,
    Landed,
    Load,
    Mma,
    Named,
    Need,
    Peer,
    Reply,
    Send,
    Settled,
    Store,
    Touch,
    Wait,
    Work,
    settles,
)
from cutex.sim.timing.timeline import RunningCluster
from cutex.sim.timing.units import Interval, Missed

_ALL = Missed()
QUANTUM = 64.0  # cycles for which one warp may hold a sub-core before another's turn


class Warp:
    """A warp that replays its program."""

    def __init__(self, cluster: RunningCluster, number: int, program: list[Event]) -> None:
        self.running, self.timeline, self.gpu = cluster, cluster.timeline, cluster.gpu
        self.memory = self.timeline.memory
        record = self.timeline.record
        self.number, self.program, self.at = number, program, 0
        self.cta, self.place = record.cta[number], record.place[number]
        self.sm = self.timeline.sms[self.cta % record.cluster_size]
        # NOTE: CTAs side by side have numbers of warps that follow one another
        self.core = self.sm.cores[(cluster.slot * record.warps_per_cta + self.place) % 4]
        self.role = record.roles.get(number, "") or f"warp {self.place}"
        self.track = f"{self.role} {self.place}"
        self.warpgroup = (self.cta, self.place // 4)
        self.open: list[float] = []  # for each bulk store of the open group, when smem is read
        self.open_done: list[float] = []
        self.bulk: list[tuple[float, float]] = []  # for each group, when smem is read; its end
        self.fetched: list[float] = []  # when each load into registers, and all before it, are done
        self.copying = 0.0  # the end of all cp.async of the warp
        self.copied: list[float] = []  # and at each commit of them
        self.mmas = 0  # wgmmas issued
        self.committed: list[int] = []  # ``mmas`` at each commit
        self.cluster_arrived = 0
        self.remaining: Work | None = None
        self.pending_tmem = 0.0
        self.settles = settles(program)
        self.issued_mma: float = 0.0  # end of the last tcgen05.mma of this warp

    # -- running -----------------------------------------------------------------------------------

    def go(self, now: float) -> None:
        """Replay events until one takes time."""
        while True:
            if self.remaining is not None:
                work = self.remaining
            elif self.at == len(self.program):
                self.running.warp_ended(now)
                return
            else:
                event = self.program[self.at]
                if not isinstance(event, Work):
                    self.at += 1
                    then = _DO[type(event)](self, event, now)
                    if then is None:
                        continue
                    if then >= 0:
                        self.timeline.at(then, self.go)
                    return
                self.at += 1
                work = event
            share = min(1.0, QUANTUM / work.cycles) if work.cycles > QUANTUM else 1.0
            part, self.remaining = work, None
            if share < 1.0:
                part, self.remaining = work.part(share), work.part(1.0 - share)
            pipes = part.pipes
            cycles = part.cycles
            if self.gpu.shared_registers and self.sm.tensor.free > now:
                pipes, cycles = self._slowed(part)
            end = max(self.core.serve(now, part.slots, pipes), now + cycles)
            if part.port:
                end = max(end, self.sm.port.serve(now, part.port))
            self.timeline.worked[self.role] += cycles
            if self.timeline.log:
                self._log("work", "", now, end)
            self.timeline.at(end, self.go)
            return

    def _slowed(self, work: Work) -> tuple[tuple[float, ...], float]:
        """Return the cycles of the pipes and of the warp while a wgmma runs, whose accumulators
        pass through the same register ports; and delay the wgmma by the FMAs.
        """
        g = self.gpu
        lost = g.mufu_lost_beside_mma * (work.fma + work.alu / 2)
        pipes = (
            work.fma * g.fma_beside_mma, work.alu * g.alu_beside_mma,
            work.mufu * g.mufu_beside_mma + lost, work.lsu, work.uniform, work.fp64, work.mma,
        )  # fmt: skip
        if 2 * work.fma > work.cycles:  # the wgmma loses to FMAs that come one after the other
            self.sm.tensor.free += work.fma * g.mma_beside_fma
        return pipes, work.cycles + work.beside

    def _log(
        self,
        kind: str,
        name: str,
        start: float,
        end: float,
        by: tuple[str, float] | None = None,
    ) -> None:
        # NOTE: only the first of the CTAs of an SM is logged, so that tracks do not overlap
        if end > start and not self.running.slot:
            self.timeline.intervals.append(
                Interval(self.track, name, start, end, kind, self.cta, by)
            )

    def _waiter(self, whom: str | Callable[[], str], now: float) -> Callable[[float], None]:
        """The function to call when the wait of this warp ends, which ``whom`` ends."""

        def wake(then: float) -> None:
            what = whom if isinstance(whom, str) else whom()
            self.timeline.waits[self.role][what] += then - now
            if self.timeline.log:
                self._log("wait", what, now, then, self.timeline.ended_by)
            self.go(then)

        return wake

    def _until(self, what: str, now: float, then: float) -> float | None:
        """Wait for ``then``, a time that is known; None where it has passed."""
        if then <= now:
            return None
        self.timeline.waits[self.role][what] += then - now
        if self.timeline.log:
            self._log("wait", what, now, then)
        return then

    # -- events: each returns the time to go on; None: at once, -1: another event wakes the warp --

    def wait(self, e: Wait, now: float) -> float | None:
        b = self.running.barriers[e.barrier]
        if b.phases >= e.phases:
            if self.timeline.log:
                self._log("work", "", now, now + self.gpu.try_wait)
            return now + self.gpu.try_wait
        b.waiting.append((e.phases, self._waiter(lambda: b.by, now)))
        return -1.0

    def arrive(self, e: Arrive, now: float) -> float | None:
        if e.remote:
            self.timeline.at(
                now + self.gpu.remote_arrive,
                partial(
                    self.running.arrive, e.barrier, e.arrivals, e.expect, self.role, self.track
                ),
            )
        else:
            self.running.arrive(e.barrier, e.arrivals, e.expect, self.role, self.track, now)
        return None

    def load(self, e: Load, now: float) -> float | None:
        g, m, sm = self.gpu, self.memory, self.sm
        issued = sm.issue.serve(now, g.tma_issue)
        share = m.sms
        at = issued
        ends = []
        copies = 1.0 + g.l2_copies * (len(e.signals) - 1)
        read = e.size * copies * (1.0 - g.l2_merged * m.shared)
        # NOTE: each row of a box is a request of its own, even if short or shared
        l2 = sm.l2.serve(at, max(read / g.l2_bytes, e.rows / g.l2_requests) * share) - m.ahead
        miss, rate = m.miss, g.hbm_bytes / share
        if touch := m.touches.get(e.source[0]):
            miss = touch.miss(self.running.loaded[e.source[0]])
            self.running.loaded[e.source[0]] += e.size
            rate *= g.hbm_burst
        hbm = sm.hbm.serve(at, e.size * miss / min(rate, m.stream)) if miss else at
        latency = g.l2_latency + (g.hbm_latency * m.waits if miss else 0.0)
        if miss and e.source[0] not in sm.missed:
            sm.missed.add(e.source[0])
            latency += g.first_miss * m.waits
        if g.latency_spread:
            latency *= 1.0 + g.latency_spread * self.timeline.drawn()
        for signal, cta in zip(e.signals, e.ctas, strict=True):
            target = self.running.sm[cta]
            into = target.ingest.serve(at, max(e.size / g.tma_bytes, e.rows * g.tma_row))
            end = max(into, l2, hbm) + latency
            if e.outside:  # the engine works on one such row at a time
                rate = g.tma_outside if e.outside < e.size else g.tma_zeros
                end = max(end, target.outside.serve(at, e.outside / rate))
            ends.append(end)
            self.timeline.at(end, partial(self.running.bytes, signal, e.size, "TMA"))
            if self.timeline.log:
                self.timeline.intervals.append(
                    Interval("TMA in", f"{e.size} bytes", at, end, "unit", cta, (self.track, now))
                )
        return now + g.tma_gap

    def store(self, e: Store, now: float) -> float | None:
        g, sm = self.gpu, self.sm
        issued = sm.issue.serve(now, g.tma_issue)
        rate = min(g.tma_store_bytes, g.store_bytes / self.memory.sms)
        out = sm.out.serve(issued, e.size / rate)
        if g.l2_store:  # loads wait for stores, and stores for loads
            share = e.size * g.l2_store * self.memory.sms / g.l2_bytes
            out = max(out, sm.l2.serve(issued, share) - self.memory.ahead)
        # NOTE: sums stay in L2, where others add to them
        if self.memory.write_back and not e.adds:
            out = max(
                out,
                sm.hbm.serve(
                    issued, e.size * self.memory.write_back * self.memory.sms / g.hbm_bytes
                )
                - g.write_buffer * self.memory.sms / g.hbm_bytes,
            )
        self.open.append(out + g.store_read)
        self.open_done.append(out + g.store_latency)
        self.timeline.stores_end = max(self.timeline.stores_end, out + g.store_latency)
        self.timeline.stores.append(out + g.store_latency)
        if self.timeline.log:
            self.timeline.intervals.append(
                Interval(
                    "TMA out", f"{e.size} bytes", issued, out, "unit", self.cta, (self.track, now)
                )
            )
        return now + g.tma_gap

    def commit(self, e: Commit, now: float) -> float | None:
        if e.what == "bulk":
            self.bulk.append((max(self.open, default=now), max(self.open_done, default=now)))
            self.open, self.open_done = [], []
        elif e.what == "cp.async":
            self.copied.append(self.copying)
        elif e.what == "wgmma":
            self.committed.append(self.mmas)
        else:
            end = max(now, self.issued_mma) + self.gpu.mma_commit
            for place in e.barriers:
                self.timeline.at(
                    end, partial(self.running.arrive, place, 1, 0, "MMA", "tensor core")
                )
        return None

    def group(self, e: Group, now: float) -> float | None:
        if e.what == "bulk":
            older = self.bulk[: max(0, len(self.bulk) - e.pending)]
            then = max((g[0] if e.read else g[1] for g in older), default=now)
            return self._until("TMA store", now, then)
        if e.what == "cp.async":
            ends = [*self.copied, self.copying]  # NOTE: -1 pending is of wait_all
            at = len(ends) - e.pending - 2
            return self._until("global memory", now, ends[at]) if at >= 0 else None
        at = len(self.committed) - e.pending - 1
        if at < 0 or not self.committed[at]:
            return None
        done = self.running.done_mma[self.warpgroup]
        need = self.committed[at]
        if len(done) >= need:
            then = done[need - 1] + self.gpu.wgmma_latency
            return self._until("MMA", now, then)
        # others of the warpgroup have not issued it yet
        self.timeline.at(now + 8.0, lambda t: self._again(e, now, t))
        return -1.0

    def _again(self, e: Group, since: float, now: float) -> None:
        at = len(self.committed) - e.pending - 1
        done, need = self.running.done_mma[self.warpgroup], self.committed[at]
        if len(done) < need:
            self.timeline.at(now + 8.0, lambda t: self._again(e, since, t))
            return
        then = max(now, done[need - 1] + self.gpu.wgmma_latency)
        self.timeline.at(then, self._waiter("MMA", since))

    def mma(self, e: Mma, now: float) -> float | None:
        g = self.gpu
        if e.n == 0:
            return self._tcgen05(e, now)
        self.mmas += 1
        key = (*self.warpgroup, self.mmas)
        came = self.running.meeting[key]
        came.append(now)
        if len(came) == 4:
            del self.running.meeting[key]
            cycles = max(e.flops / (g.mma_flops * e.rate), e.smem / g.smem_bytes)
            self.sm.port.serve(now, e.smem / g.smem_bytes)
            end = self.sm.tensor.serve(now, cycles)
            self.running.done_mma[self.warpgroup].append(end)
            self.timeline.flops += e.flops
            self.timeline.mma.append((end, self.timeline.flops))
            if self.timeline.log:
                self.timeline.intervals.append(
                    Interval(
                        "tensor core",
                        f"group {self.warpgroup[1]}",
                        end - cycles,
                        end,
                        "unit",
                        self.cta,
                        (self.track, now),
                    )
                )
        done = self.running.done_mma[self.warpgroup]
        behind = self.mmas - g.wgmma_queue
        if behind > 0 and len(done) >= behind and done[behind - 1] > now:
            return self._until("MMA queue", now, done[behind - 1])
        return now + g.wgmma_issue

    def _tcgen05(self, e: Mma, now: float) -> float | None:
        g = self.gpu
        cycles = max(e.flops / (len(e.ctas) * g.mma_flops * e.rate), e.smem / g.smem_bytes)
        end = now
        for cta in e.ctas:
            sm = self.running.sm[cta]
            sm.port.serve(now, e.smem / g.smem_bytes)
            end = max(end, sm.tensor.serve(max(now, end - cycles), cycles))
        self.issued_mma = end
        self.timeline.flops += e.flops
        self.timeline.mma.append((end, self.timeline.flops))
        if self.timeline.log:
            for cta in e.ctas:
                self.timeline.intervals.append(
                    Interval(
                        "tensor core",
                        "tcgen05.mma",
                        end - cycles,
                        end,
                        "unit",
                        cta,
                        (self.track, now),
                    )
                )
        return now + g.wgmma_issue

    def name_barrier(self, e: Named, now: float) -> float | None:
        key = (self.cta, e.number)
        state = self.running.named[key]
        needed = e.threads // 32 or self.timeline.record.warps_per_cta
        state[0] += 1
        if state[0] >= needed:
            state[0] = 0
            waiting, state[1] = state[1], []
            for wake in waiting:
                self.timeline.at(now + self.gpu.bar, wake)
            return now + self.gpu.bar if e.waits else None
        if e.waits:
            state[1].append(self._waiter(f"barrier {e.number}", now))
            return -1.0
        return None

    def cluster(self, e: Cluster, now: float) -> float | None:
        i = self.running
        if not e.waits:
            self.cluster_arrived = i.cluster_phase + 1
            i.cluster_count += 1
            i.check_cluster(now)
            return None
        if i.cluster_phase >= self.cluster_arrived:
            return now + self.gpu.cluster_barrier
        i.cluster_waiting.append((self.cluster_arrived, self._waiter("cluster", now)))
        return -1.0

    def touch(self, e: Touch, now: float) -> float | None:
        g, m = self.gpu, self.timeline.memory
        size = 32 * e.sectors
        whole = (size - 32 * e.partial) * m.sms / g.store_bytes
        parts = max(whole + e.partial * g.partial_sector, e.packets * g.part_of_line)
        sent = self.sm.out.serve(now, max(parts, e.queued * g.same_word))
        end = max(self.sm.passes.serve(now, e.lines * g.line_cycles), sent)
        if e.sums and g.sum_sector:  # one alone is done at once: only those before it take time
            cycles = e.sums * g.sum_sector * m.sms / m.slices
            end = max(end, self.sm.sums.serve(now, cycles) - cycles)
        if e.waits:
            return self._until("global memory", now, end + g.global_latency)
        if not e.adds:
            written = (size - 32 * e.again) * m.write_back * g.hbm_written * m.sms / g.hbm_bytes
            self.sm.crowd.add(now, written)
            self.sm.hbm.serve(now, written)
        self.timeline.stores_end = max(self.timeline.stores_end, end + g.store_latency)
        # the warp need not wait for its first few stores
        return self._until("stores", now, end - g.store_queue * g.line_cycles)

    def fetch(self, e: Fetch, now: float) -> float | None:
        """Start a load, after which the warp goes on until it needs the data."""
        g, m = self.gpu, self.timeline.memory
        missed = m.fetched.get(e.tensor, _ALL)
        if missed.in_l1 and e.cached:
            e = e._replace(sectors=0, lines=0, held=e.held + e.lines)
        if e.lines:  # what is loaded waits behind what the SM adds
            now = max(now, self.sm.sums.free)
        size, miss = 32 * e.sectors, missed.of(e.new)
        taken = self.sm.lines.serve(now, e.lines * g.load_line + e.held_alone(g.l1_line_cycles))
        if e.banks:  # NOTE: so do probes of rows of 64 to 1024 bytes fit, within a sixth
            taken = max(taken, self.sm.banks.serve(now, hypot(e.banks, e.held * g.l1_line_cycles)))
        if e.apart:
            taken = max(taken, self.sm.fills.serve(now, e.apart * g.sector_apart))
        if e.lines and g.missed_line:  # what misses L1 goes the way of stores
            taken = max(taken, self.sm.out.serve(now, e.lines * g.missed_line))
        end = max(taken, self.sm.l2.serve(now, size * m.sms / g.l2_bytes))
        if miss and size:
            rate = min(g.hbm_bytes / m.sms, m.stream)
            brought = missed.brought(size, e.new, e.alone, g.scattered_sector)
            crowd = self.sm.crowd.add(now, brought / rate)
            hbm = self.sm.hbm.serve(now, brought / rate)
            end = max(end, hbm - g.hbm_ahead)
            late = g.hbm_tail and g.hbm_tail * self.timeline.latest(e.sectors)
            late += g.hbm_crowd * crowd
            if self.sm.misses(missed.waits(miss, e.alone)):
                end += g.global_latency - g.l2_latency + late
        if size:
            end += g.l2_latency
        else:
            end = taken + g.l1_latency
        if e.registers:
            self.fetched.append(max(end, self.fetched[-1] if self.fetched else 0.0))
        else:
            self.copying = max(self.copying, end)
        return None

    def peer(self, e: Peer, now: float) -> float | None:
        """Start a load from the smem of another CTA, after which the warp goes on as in `fetch`."""
        end = self.sm.peers.serve(now, e.size / self.gpu.peer_bytes) + self.gpu.peer_latency
        self.fetched.append(max(end, self.fetched[-1] if self.fetched else 0.0))
        return None

    def send(self, e: Send, now: float) -> float | None:
        """Send bytes to the smem of a CTA, which takes them from one after the other."""
        sm, target = self.sm, self.running.sm[e.signal[0]]
        cycles = e.size / self.gpu.sent_bytes
        end = max(sm.sent.serve(now, cycles), target.received.serve(now, cycles))
        arrive = partial(self.running.bytes, e.signal, e.size, "another CTA")
        self.timeline.at(end + self.gpu.peer_latency, arrive)
        return None

    def need(self, e: Need, now: float) -> float | None:
        return self._until("global memory", now, self.fetched[e.loads - 1])

    def landed(self, e: Landed, now: float) -> float | None:
        end = max(now, self.copying)
        arrive = partial(self.running.arrive, e.barrier, e.arrivals, 0, self.role, self.track)
        self.timeline.at(end, arrive)
        return None

    def columns(self, e: Columns, now: float) -> float | None:
        cycles = e.columns * 32 * 4 / self.gpu.tmem_bytes
        self.pending_tmem = self.sm.tmem.serve(now, cycles) + self.gpu.tmem_latency
        # NOTE: without a tcgen05.wait in the PTX the machine code waits by a scoreboard
        if self.at in self.settles:
            return None
        return self._until("tensor memory", now, self.pending_tmem)

    def copy(self, e: Copy, now: float) -> float | None:
        cycles = e.columns * 128 * 4 / self.gpu.tmem_copy_bytes
        for cta in e.ctas:
            self.running.sm[cta].tensor.serve(now, cycles)
        return now + self.gpu.wgmma_issue

    def settled(self, e: Settled, now: float) -> float | None:
        return self._until("tensor memory", now, self.pending_tmem)

    def reply(self, e: Reply, now: float) -> float | None:
        for place in e.barriers:
            self.timeline.at(
                now + self.gpu.launch_control,
                partial(self.running.bytes, place, 16, "launch control"),
            )
        return None


_DO: dict[type, Callable[[Warp, Any, float], float | None]] = {
    Wait: Warp.wait, Arrive: Warp.arrive, Load: Warp.load, Store: Warp.store,
    Commit: Warp.commit, Group: Warp.group, Mma: Warp.mma, Named: Warp.name_barrier,
    Cluster: Warp.cluster, Touch: Warp.touch, Columns: Warp.columns, Settled: Warp.settled,
    Reply: Warp.reply, Copy: Warp.copy, Fetch: Warp.fetch, Peer: Warp.peer, Send: Warp.send,
    Need: Warp.need, Landed: Warp.landed,
}  # fmt: skip

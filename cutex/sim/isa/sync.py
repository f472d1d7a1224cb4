"""Synchronisation (PTX ISA 9.7.13): bar, barrier.cluster, fences, mbarrier, mapa, setmaxnreg,
griddepcontrol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from cutex.sim.errors import BarrierMisuse
from cutex.sim.machine.batch import ARRIVED, RETRY, Batch
from cutex.sim.machine.machine import Machine, RegisterPool
from cutex.sim.machine.mbarrier import Made
from cutex.sim.machine.memory import SHARED_WINDOW, shared_addresses
from cutex.sim.machine.waits import PassedWait, Wait
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.parse import Address


def require_whole_warp(d: Decoder, b: Batch) -> None:
    """Instructions marked .aligned: all live lanes of the warp, or BarrierMisuse."""
    if b.mask is None:
        return
    live = d.m.live[b.idx]
    partial = (live & ~b.mask).any(1) & b.mask.any(1)
    if partial.any():
        row = int(np.nonzero(partial)[0][0])
        here = ",".join(map(str, np.nonzero(b.mask[row])[0]))
        raise BarrierMisuse.at(
            d.ins,
            f"{d.m.grid.name_warp(int(b.idx[row]))} executes {d.ins.op} with lanes {here} only, "
            "but it is .aligned: all lanes must",
        )


# -- named barriers --------------------------------------------------------------------------------


@instruction("bar", "barrier.sync", "barrier.arrive", "barrier.red", "barrier.cta")
def bar(d: Decoder) -> Execute:
    """9.7.13.1: barrier ``id`` completes when ``count`` threads (all that live, if not given) have
    arrived.
    """
    if d.parts[1] == "warp":
        return _warp_sync(d)
    d.only("sync", "arrive", "red", "popc", "and", "or", "cta", "aligned")
    arrive_only, reduces = "arrive" in d.mods, "red" in d.mods
    aligned = d.ins.name == "bar" or "aligned" in d.mods
    first = 1 if reduces else 0
    number = d.src(first, "u32")
    count = d.src(first + 1, "u32") if len(d) > first + 1 + reduces else None
    vote = d.src(len(d) - 1, "pred") if reduces else None
    tell_all = _reduction(d) if reduces else None
    m, ins = d.m, d.ins

    def execute(b: Batch) -> np.ndarray | None:
        if aligned:
            require_whole_warp(d, b)
        here = b.active() & m.live[b.idx]
        threads = here.sum(1)
        votes = (b.lanes(vote(b)) & here).sum(1) if vote else 0 * threads
        ids = b.one(number(b))
        counts = b.one(count(b)) if count else np.zeros(b.n, int)
        out = np.zeros(b.n, np.int8)
        m.progress += 1
        for row in np.nonzero(b.any_active())[0].tolist():
            warp, which = int(b.idx[row]), int(ids[row])
            key = (int(m.grid.warp_cta[warp]), which)
            arriving = int(threads[row]), int(votes[row])
            done = m.named.arrive(warp, which, *arriving, int(counts[row]), ins)
            if arrive_only:
                continue
            one = Batch(b.idx[row : row + 1], here[row : row + 1])
            on_wake = (lambda one=one, key=key: tell_all(one, key)) if tell_all else None
            if done:
                m.clocks.take(warp, m.named.barriers[key].released)
                if on_wake:
                    on_wake()
            else:
                out[row] = ARRIVED
                tell = lambda key=key: m.named.describe(*key)
                m.sleep(warp, Wait("barrier", ("bar", *key), ins, tell, on_wake=on_wake))
        return out

    return execute


def _reduction(d: Decoder) -> Callable[[Batch, tuple[int, int]], None]:
    """bar.red: writes what all threads voted, once they have."""
    kind = next((k for k in ("popc", "and", "or") if k in d.mods), "")
    if not kind:
        raise d.unknown("reduction")
    write = d.dst(0, "u32" if kind == "popc" else "pred")

    def tell_all(one: Batch, key: tuple[int, int]) -> None:
        votes, voters = d.m.named.barriers[key].result
        write(one, {"popc": np.uint32(votes), "and": votes == voters, "or": votes > 0}[kind])

    return tell_all


def _warp_sync(d: Decoder) -> Execute:
    """9.7.13.2: the lanes that the mask names wait for each other."""
    d.only("warp", "sync")
    mask, m, ins = d.src(0, "b32"), d.m, d.ins

    def execute(b: Batch) -> np.ndarray | None:
        if b.mask is None:
            m.clocks.lanes_meet(b.idx)
            return None
        masks, out = b.one(mask(b)), np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp, named = int(b.idx[row]), int(masks[row])
            key = ("warp", warp, named)
            wanted = (named >> np.arange(32) & 1).astype(bool) & m.live[warp]
            waiting = [s.lanes for _, s in m.sleepers.get(key, ()) if s.lanes is not None]
            here = b.mask[row] | np.any([*waiting, np.zeros(32, bool)], axis=0)
            if (wanted & ~here).any():
                out[row] = ARRIVED
                tell = lambda named=named: f"waits for the lanes of its warp that 0x{named:x} names"
                m.sleep(warp, Wait("warp", key, ins, tell))
            else:
                m.progress += 1
                m.wake(key)
                if not (m.live[warp] & ~wanted).any():
                    m.clocks.lanes_meet(b.idx[row : row + 1])
        return out if out.any() else None

    return execute


# -- clusters --------------------------------------------------------------------------------------


@instruction("barrier.cluster")
def barrier_cluster(d: Decoder) -> Execute:
    """9.7.13.4: all threads of the cluster arrive; each warp waits for the phase in which it
    arrived.
    """
    d.only("cluster", "arrive", "wait", "release", "relaxed", "acquire", "aligned")
    m, ins = d.m, d.ins
    arrive = "arrive" in d.mods

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            if arrive:
                m.clusters.arrive(warp, "relaxed" in d.mods, ins)
            elif not m.clusters.passed(warp, ins):
                out[row] = RETRY
                which = m.clusters.of(warp)
                tell = lambda which=which: m.clusters.describe(which)
                m.sleep(warp, Wait("cluster barrier", ("cluster", which), ins, tell))
        return out

    return execute


@instruction("mapa")
def mapa(d: Decoder) -> Execute:
    """9.7.9.23: the same offset in CTA ``rank`` of the cluster."""
    a, rank, write = d.src(1), d.src(2, "u32"), d.dst()
    wide = d.type == "u64"

    def execute(b: Batch) -> None:
        x = np.asarray(a(b)).astype(np.uint64) & np.uint64(0xFFFFFF)
        out = x | np.asarray(rank(b)).astype(np.uint64) << np.uint64(24)
        write(b, (out | np.uint64(SHARED_WINDOW)) if wide and "shared" not in d.mods else out)

    return execute


@instruction("getctarank")
def getctarank(d: Decoder) -> Execute:
    """9.7.9.24"""
    a, write = d.src(1), d.dst(0, "u32")
    return lambda b: write(b, np.asarray(a(b)).astype(np.uint64) >> np.uint64(24) & np.uint64(0xF))


@instruction("fence", "membar")
def fence(d: Decoder) -> Execute:
    """9.7.13.4: memory is sequentially consistent here, so fences change no value; what they order
    is remembered (see clocks).
    """
    m = d.m
    if "mbarrier_init" in d.mods:
        return lambda b: _fence_init(m, b)
    if "proxy" in d.mods:
        if {"tensormap", "acquire"} <= d.mods:
            return _fence_map(d)
        if "async" in d.mods and "global" not in d.mods:
            return lambda b: m.clocks.fence_proxy(b.idx[b.any_active()])
        return lambda b: None
    if "acquire" in d.mods or not {"cluster", "gpu", "sys", "gl"} & d.mods:
        return lambda b: None
    return lambda b: m.clocks.fence_release(b.idx[b.any_active()])


def _fence_map(d: Decoder) -> Execute:
    """Makes changes of one tensor map known to the TMA operations of this CTA that follow."""
    m, address = d.m, d.address(0)
    if d.immediate(1) != 128:
        raise d.unknown(f"{d.immediate(1)} bytes")

    def execute(b: Batch) -> None:
        addresses = b.lanes(address(b))
        for row, lane in np.argwhere(b.active()).tolist():
            m.tensor_maps.acquire(int(b.idx[row]), int(addresses[row, lane]))

    return execute


def _fence_init(m: Machine, b: Batch) -> None:
    active = b.active()
    for row in np.nonzero(active.any(1))[0].tolist():
        m.mbarriers.fence_init(int(b.idx[row]), active[row])


@instruction("griddepcontrol")
def griddepcontrol(d: Decoder) -> Execute:
    """9.7.13.13: launches run one after another, so the grids before are complete; who has waited
    for them is remembered (see GridOrder).
    """
    if "wait" in d.mods:
        return lambda b: d.m.grid_order.wait(b.idx[b.any_active()])
    return lambda b: None


@instruction("nanosleep", "pmevent")
def nanosleep(d: Decoder) -> Execute:
    """9.7.19"""
    d.src(0, "u32")
    return lambda b: None


@instruction("setmaxnreg")
def setmaxnreg(d: Decoder) -> Execute:
    """9.7.19.5: .inc waits until the CTA's pool has the registers that .dec gave back.

    A CTA starts with 65536 / threads registers per thread, rounded down to 8, as ptxas allots with
    one CTA per SM. What the rounding leaves is not in its pool: on an H200 four warpgroups that ask
    for 120 hang where one gave back all but 24 of its 96, though 65536 would do.
    """
    d.only("inc", "dec", "sync", "aligned")
    wanted, m, ins = d.immediate(0), d.m, d.ins
    if wanted % 8 or not 24 <= wanted <= 256:
        raise BarrierMisuse.at(ins, f"setmaxnreg {wanted}: takes 24..256 in steps of 8")
    start = min(65536 // (m.grid.warps_per_cta * 32) // 8 * 8, 248)

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0]:
            warp = int(b.idx[row])
            cta = int(m.grid.warp_cta[warp])
            pool = m.register_pools.setdefault(cta, RegisterPool())
            need = 32 * (wanted - pool.held.get(warp, start))
            if need > pool.free:
                out[row] = RETRY
                tell = lambda p=pool, n=need: (
                    f"setmaxnreg.inc: {n} registers wanted, {p.free} free in the CTA's pool"
                )
                m.sleep(warp, Wait("registers", ("registers", cta), ins, tell))
                continue
            pool.free -= need
            pool.held[warp] = wanted
            if need < 0:
                m.progress += 1
                m.wake(("registers", cta))
        return out

    return execute


# -- mbarrier --------------------------------------------------------------------------------------


class BarrierOperand:
    """The mbarrier operand: per active lane of each warp, (row, lane, cta, offset)."""

    def __init__(self, d: Decoder, operand: int) -> None:
        self.d, self.address = d, d.address(operand)

    def by_warp(
        self, b: Batch, values: np.ndarray
    ) -> Iterator[tuple[int, list[tuple[np.ndarray, int, int]]]]:
        """For each warp, its row and groups of lanes that name the same barrier and value: (lanes,
        cta, offset).
        """
        addresses = shared_addresses(b.lanes(self.address(b)))
        active, first, row = b.active(), b.first_lane(), np.arange(b.n)
        lead, value = addresses[row, first], values[row, first]
        same = ((addresses == lead[:, None]) & (values == value[:, None])) | ~active
        rows = np.nonzero(active.any(1))[0]
        for r in rows.tolist():
            groups = [np.nonzero(active[r])[0]]
            if not same[r].all():
                keys = {(int(addresses[r, i]), int(values[r, i])) for i in groups[0]}
                named = [
                    (addresses[r] == a) & (values[r] == v) & active[r] for a, v in sorted(keys)
                ]
                groups = [np.nonzero(g)[0] for g in named]
            found = []
            for lanes in groups:
                warp, one = b.idx[r : r + 1], lanes[:1]
                cta, offset = self.d.m.grid.shared_location(warp, addresses[r, one])
                self.d.m.check_shared(warp, one, cta, offset, 8, self.d.ins)
                found.append((lanes, int(cta[0]), int(offset[0])))
            yield r, found

    def each(self, b: Batch) -> Iterator[tuple[int, int, int, int]]:
        addresses = shared_addresses(b.lanes(self.address(b)))
        rows, lanes = np.nonzero(b.active())
        if not len(rows):
            return
        warps = b.idx[rows]
        flat = addresses[rows, lanes]
        cta, offset = self.d.m.grid.shared_location(warps, flat)
        self.d.m.check_shared(warps, lanes, cta, offset, 8, self.d.ins)
        yield from zip(rows.tolist(), lanes.tolist(), cta.tolist(), offset.tolist(), strict=True)


_MBARRIER_MODS = (
    "shared", "cta", "cluster", "release", "acquire", "relaxed", "parity", "expect_tx",
    "noComplete", "init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "complete_tx",
    "bytes", "gpu",
)  # fmt: skip


@instruction("mbarrier.init")
def mbarrier_init(d: Decoder) -> Execute:
    """9.7.13.15.9"""
    barrier, count = BarrierOperand(d, 0), d.src(1, "u32")

    def execute(b: Batch) -> None:
        counts = b.lanes(count(b))
        for row, lane, cta, offset in barrier.each(b):
            warp = int(b.idx[row])
            made = Made(warp, lane, d.m.clocks.now(warp), d.ins)
            d.m.mbarriers.init(cta, offset, int(counts[row, lane]), made)

    return execute


@instruction("mbarrier.inval")
def mbarrier_inval(d: Decoder) -> Execute:
    """9.7.13.15.10"""
    barrier = BarrierOperand(d, 0)

    def execute(b: Batch) -> None:
        for row, _, cta, offset in barrier.each(b):
            d.m.mbarriers.use(cta, offset, int(b.idx[row]), d.ins)
            d.m.mbarriers.invalidate(cta, offset, d.ins)

    return execute


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(d: Decoder) -> Execute:
    """9.7.13.15.13, 9.7.13.15.14: .expect_tx raises the tx-count first, then arrives once."""
    d.only(*_MBARRIER_MODS)
    operands = d.ins.operands
    at = next((i for i, o in enumerate(operands) if isinstance(o, Address)), 0)
    barrier = BarrierOperand(d, at)
    amount = d.src(at + 1, "u32") if len(operands) > at + 1 else None
    state = d.dst(0, "b64") if at == 1 else None
    expect, drop = "expect_tx" in d.mods, "arrive_drop" in d.mods
    to_cluster = re.search(r"\.(release|relaxed)\.(cluster|gpu|sys)", d.ins.op) is not None

    def execute(b: Batch) -> None:
        amounts = b.lanes(amount(b)) if amount else None
        tokens = np.zeros((b.n, 32), np.uint64)
        places = list(barrier.each(b))
        for row, _, cta, offset in places:
            d.m.mbarriers.use(cta, offset, int(b.idx[row]), d.ins)
            d.m.mbarriers.reach(cta, offset, int(b.idx[row]), "an arrival", d.ins)
        whole = np.ones(b.n, bool) if b.mask is None else ~(d.m.live[b.idx] & ~b.mask).any(1)
        given = {
            int(b.idx[row]): d.m.clocks.give(int(b.idx[row]), whole=bool(whole[row]))
            for row in np.nonzero(b.any_active())[0]
        }
        for row, lane, cta, offset in places:
            mine = given[int(b.idx[row])]
            if not to_cluster and cta != d.m.grid.warp_cta[b.idx[row]]:
                mine = mine.copy()
                mine[3, : d.m.clocks.warps] = 0
            d.m.mbarriers.give(cta, offset, mine, d.ins)
            who = f"{d.m.grid.name_warp(int(b.idx[row]))} lane {lane}"
            n = int(amounts[row, lane]) if amounts is not None else 1
            tokens[row, lane] = d.m.mbarriers.phases(cta, offset)
            if expect:
                # NOTE: tx first, or a phase whose bytes have come could complete on the arrival
                # alone
                d.m.mbarriers.expect_tx(cta, offset, n, who, d.ins)
                n = 1
            d.m.mbarriers.arrive(cta, offset, n, who, d.ins, drop)
        if state:
            state(b, tokens)

    return execute


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(d: Decoder) -> Execute:
    """9.7.13.15.11, 9.7.13.15.12"""
    d.only(*_MBARRIER_MODS)
    barrier, size = BarrierOperand(d, 0), d.src(1, "u32")
    change = d.m.mbarriers.expect_tx if d.parts[1] == "expect_tx" else d.m.mbarriers.complete_tx

    def execute(b: Batch) -> None:
        sizes = b.lanes(size(b))
        for row, lane, cta, offset in barrier.each(b):
            warp = int(b.idx[row])
            d.m.mbarriers.use(cta, offset, warp, d.ins)
            d.m.mbarriers.reach(cta, offset, warp, f"a {d.parts[1]}", d.ins)
            change(cta, offset, int(sizes[row, lane]), d.m.grid.name_warp(warp), d.ins)

    return execute


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(d: Decoder) -> Execute:
    """9.7.13.15.16: true if the phase of that parity (or token) has completed; try_wait may sleep
    until then.
    """
    d.only(*_MBARRIER_MODS)
    barrier, write = BarrierOperand(d, 1), d.dst(0, "pred")
    by_parity = "parity" in d.mods
    expected = d.src(2, "u32" if by_parity else "b64")
    may_sleep = d.parts[1] == "try_wait"
    if may_sleep and len(d) == 4:
        d.src(3, "u32")  # how long it may sleep, in nanoseconds
    m, ins = d.m, d.ins

    def passed(phases: int, value: int) -> bool:
        # NOTE: on a fresh barrier, the wait for parity 1 passes
        return (phases & 1) != value & 1 if by_parity else phases > value

    def execute(b: Batch) -> np.ndarray | None:
        values = b.lanes(expected(b))
        result = np.zeros((b.n, 32), bool)
        out = np.zeros(b.n, np.int8)
        failed = False
        for row, groups in barrier.by_warp(b, values):
            warp = int(b.idx[row])
            for lanes, cta, offset in groups:
                value = int(values[row, lanes[0]])
                waited = m.mbarriers.use(cta, offset, warp, ins)
                if not passed(waited.phases, value):
                    continue
                m.mbarriers.acquire(waited, warp)
                result[row, lanes] = True
                if by_parity:
                    m.last_wait[warp][cta, offset] = PassedWait(value & 1, waited.phases, ins)
            # NOTE: where lanes wait for several barriers, those that have to get false at once
            if result[row].any() or len(groups) > 1:
                continue
            lanes, cta, offset = groups[0]
            if may_sleep and not m.timed_out[warp, lanes].all():
                out[row] = RETRY
                failed = True
                tell = _mbarrier_teller(m, cta, offset, int(values[row, lanes[0]]), by_parity)
                m.sleep(warp, Wait("mbarrier", (cta, offset), ins, tell))
            m.timed_out[warp, lanes] = False
        if failed:
            keep = out == 0
            write(Batch(b.idx[keep], None if b.mask is None else b.mask[keep]), result[keep])
            return out
        write(b, result)
        return None

    return execute


def _mbarrier_teller(
    m: Machine, cta: int, offset: int, value: int, by_parity: bool
) -> Callable[[], str]:
    def tell() -> str:
        done = m.mbarriers.phases(cta, offset)
        if by_parity:
            what = (
                f"parity {value & 1} (that is for phase {done}; a wait for parity "
                f"{1 - (value & 1)} would pass)"
            )
        else:
            what = f"phase {value}"
        return f"waits for {what} of {m.mbarriers.describe(cta, offset)}"

    return tell


@instruction("mbarrier.pending_count")
def mbarrier_pending(d: Decoder) -> Execute:
    """9.7.13.15.17"""
    raise d.unknown()

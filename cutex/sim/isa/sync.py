"""Synchronisation (PTX ISA 9.7.13): bar, barrier.cluster, fences, mapa, setmaxnreg,
griddepcontrol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand, BarrierMisuse
from cutex.sim.isa.warp import by_mask
from cutex.sim.machine.batch import ARRIVED, RETRY, Batch
from cutex.sim.machine.machine import Machine, RegisterPool, registers_at_start
from cutex.sim.machine.memory import SHARED_WINDOW
from cutex.sim.machine.waits import Wait
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Imm
from cutex.sim.ptx.strength import is_fence, scope_of


def require_whole_warp(d: Decoder, b: Batch) -> None:
    """Raise BarrierMisuse unless all live lanes of the warp execute the instruction, which is
    .aligned.
    """
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
    """bar, barrier (9.7.13.1): barrier ``id`` completes when ``count`` threads (all live ones if
    not given) have arrived.
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
        ids = same_in_warp(d, b, number(b), "barriers")
        counts = same_in_warp(d, b, count(b), "counts") if count else np.zeros(b.n, int)
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
                m.events.named_passed(key, warp)
                if on_wake:
                    on_wake()
            else:
                out[row] = ARRIVED
                tell = lambda key=key: m.named.describe(*key)
                m.sleep(warp, Wait("barrier", ("bar", *key), ins, tell, on_wake=on_wake))
        return out

    return execute


def same_in_warp(d: Decoder, b: Batch, values: Any, what: str) -> np.ndarray:
    """The value of each warp, (n,); raises BadOperand if its lanes have several."""
    one = b.one(values)
    if getattr(values, "ndim", 0) == 2 and (values != one[:, None]).any():
        other = b.active() & d.m.live[b.idx] & (b.lanes(values) != one[:, None])
        if other.any():
            row, lane = (int(v[0]) for v in np.nonzero(other))
            raise BadOperand.at(
                d.ins,
                f"lanes of {d.m.grid.name_warp(int(b.idx[row]))} name different {what}: "
                f"{one[row]}, and lane {lane} {b.lanes(values)[row, lane]}",
            )
    return one


def _reduction(d: Decoder) -> Callable[[Batch, tuple[int, int]], None]:
    """bar.red: a function that writes the result of all threads' votes."""
    kind = next((k for k in ("popc", "and", "or") if k in d.mods), "")
    if not kind:
        raise d.unknown("reduction")
    write = d.dst(0, "u32" if kind == "popc" else "pred")

    def tell_all(one: Batch, key: tuple[int, int]) -> None:
        votes, voters = d.m.named.barriers[key].result
        write(one, {"popc": np.uint32(votes), "and": votes == voters, "or": votes > 0}[kind])

    return tell_all


def _warp_sync(d: Decoder) -> Execute:
    """bar.warp.sync (9.7.13.2): the lanes in the mask wait for each other."""
    d.only("warp", "sync")
    mask, m, ins = d.src(0, "b32"), d.m, d.ins
    every = isinstance(d.ins.operands[0], Imm) and d.immediate(0) & 0xFFFFFFFF == 0xFFFFFFFF

    def execute(b: Batch) -> np.ndarray | None:
        parts = [b]
        if not every:
            _require_members(d, b, b.lanes(mask(b)))
            parts = by_mask(d, b, mask(b))
        if len(parts) > 1:
            # NOTE: of lanes that come with several masks each group is taken to be whole
            m.progress += 1
            for part in parts:
                for warp, named in zip(
                    part.idx.tolist(), part.one(mask(part)).tolist(), strict=True
                ):
                    m.events.some_lanes_met(warp, named)
            return None
        if b.mask is None:
            m.events.lanes_met(b.idx)
            return None
        return meet(b, b.one(mask(b)), b.mask)

    def meet(b: Batch, masks: np.ndarray, lanes: np.ndarray) -> np.ndarray | None:
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp, named = int(b.idx[row]), int(masks[row])
            key = ("warp", warp, named)
            wanted = (named >> np.arange(32) & 1).astype(bool) & m.live[warp]
            waiting = [s.lanes for _, s in m.sleepers.get(key, ()) if s.lanes is not None]
            here = lanes[row] | np.any([*waiting, np.zeros(32, bool)], axis=0)
            if (wanted & ~here).any():
                out[row] = ARRIVED
                tell = lambda named=named: f"waits for the lanes of its warp that 0x{named:x} names"
                m.sleep(warp, Wait("warp", key, ins, tell))
            else:
                m.progress += 1
                m.wake(key)
                if not (m.live[warp] & ~wanted).any():
                    m.events.lanes_met(b.idx[row : row + 1])
                else:
                    m.events.some_lanes_met(warp, named)
        return out if out.any() else None

    return execute


def _require_members(d: Decoder, b: Batch, masks: np.ndarray) -> None:
    """Raise BadOperand if a lane executes the instruction that its membermask, (n, 32), does not
    name.
    """
    named = (masks >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(bool)
    strangers = b.active() & d.m.live[b.idx] & ~named
    if strangers.any():
        row, lane = (int(v[0]) for v in np.nonzero(strangers))
        raise BadOperand.at(
            d.ins,
            f"the membermask of {d.ins.op} does not name lane {lane} of "
            f"{d.m.grid.name_warp(int(b.idx[row]))}, which executes it",
        )


# -- clusters --------------------------------------------------------------------------------------


@instruction("barrier.cluster")
def barrier_cluster(d: Decoder) -> Execute:
    """barrier.cluster (9.7.13.4): all threads of the cluster arrive; each warp waits for the phase
    in which it arrived.
    """
    d.only("cluster", "arrive", "wait", "release", "relaxed", "acquire", "aligned")
    m, ins = d.m, d.ins
    arrive, aligned = "arrive" in d.mods, "aligned" in d.mods

    def execute(b: Batch) -> np.ndarray | None:
        if not aligned and b.mask is not None and (m.live[b.idx] & ~b.mask).any():
            raise d.unknown("by some lanes of a warp: only whole warps arrive and wait here")
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
    """mapa (9.7.9.23): the same offset in CTA ``rank`` of the cluster."""
    a, rank, write = d.src(1), d.src(2, "u32"), d.dst()
    wide = d.type == "u64"

    def execute(b: Batch) -> None:
        x = np.asarray(a(b)).astype(np.uint64) & np.uint64(0xFFFFFF)
        out = x | np.asarray(rank(b)).astype(np.uint64) << np.uint64(24)
        write(b, (out | np.uint64(SHARED_WINDOW)) if wide and "shared" not in d.mods else out)

    return execute


@instruction("getctarank")
def getctarank(d: Decoder) -> Execute:
    """getctarank (9.7.9.24): the rank of the CTA that a shared address belongs to."""
    a, write = d.src(1), d.dst(0, "u32")
    return lambda b: write(b, np.asarray(a(b)).astype(np.uint64) >> np.uint64(24) & np.uint64(0xF))


@instruction("fence", "membar")
def fence(d: Decoder) -> Execute:
    """fence, membar (9.7.13.4): memory is sequentially consistent here, so fences change no value;
    observers are notified.
    """
    m = d.m
    if "mbarrier_init" in d.mods:
        return lambda b: _fence_init(m, b)
    if "proxy" in d.mods:
        if {"tensormap", "acquire"} <= d.mods:
            return _fence_map(d)
        if {"tensormap", "release"} <= d.mods:
            return lambda b: m.events.maps_released(b.idx[b.any_active()], scope_of(d.ins.op))
        if "async" in d.mods:
            return lambda b: _fence_async(d, b)
        return lambda b: None
    if not {"cta", "cluster", "gpu", "sys", "gl"} & d.mods:
        return lambda b: None
    releases, scope = "acquire" not in d.mods, "cluster" if "cluster" in d.mods else "cta"
    if is_fence(d.ins.op):
        scope = "gpu"

    def execute(b: Batch) -> None:
        some = b.any_active()
        m.events.fenced(b.idx[some], b.active()[some], releases, scope)

    return execute


def _fence_async(d: Decoder, b: Batch) -> None:
    """fence.proxy.async (9.7.13.4), of global or shared memory or of both."""
    warps = b.idx[b.any_active()]
    if "shared" not in d.mods:
        d.m.events.global_proxy_fenced(warps)
    if "global" not in d.mods:
        d.m.events.proxy_fenced(warps)


def _fence_map(d: Decoder) -> Execute:
    """fence.proxy.tensormap: makes changes of one tensor map visible to later TMA operations of
    this CTA.
    """
    m, address, scope = d.m, d.address(0), scope_of(d.ins.op)
    if d.immediate(1) != 128:
        raise d.unknown(f"{d.immediate(1)} bytes")

    def execute(b: Batch) -> None:
        addresses = b.lanes(address(b))
        for row, lane in np.argwhere(b.active()).tolist():
            m.events.map_fenced(int(b.idx[row]), int(addresses[row, lane]), scope)

    return execute


def _fence_init(m: Machine, b: Batch) -> None:
    active = b.active()
    for row in np.nonzero(active.any(1))[0].tolist():
        m.events.mbarrier_init_fenced(int(b.idx[row]), active[row])


@instruction("griddepcontrol")
def griddepcontrol(d: Decoder) -> Execute:
    """griddepcontrol (9.7.13.13): launches run one after another, so the grids before are complete;
    observers are notified which warps have waited for them.
    """
    if "wait" in d.mods:
        return lambda b: d.m.events.grids_waited(b.idx[b.any_active()], b.active()[b.any_active()])
    return lambda b: d.m.events.dependents_let_start(b.idx[b.any_active()])


@instruction("nanosleep", "pmevent")
def nanosleep(d: Decoder) -> Execute:
    """nanosleep, pmevent (9.7.19): no effect here."""
    d.src(0, "u32")
    return lambda b: None


@instruction("setmaxnreg")
def setmaxnreg(d: Decoder) -> Execute:
    """setmaxnreg (9.7.19.5): .inc waits until the CTA's pool has the registers that .dec released.

    The remainder of `registers_at_start` is not in a CTA's pool: on an H200 four warpgroups that
    request 120 hang where one released all but 24 of its 96, though 65536 would suffice.
    """
    d.only("inc", "dec", "sync", "aligned")
    wanted, m, ins = d.immediate(0), d.m, d.ins
    if wanted % 8 or not 24 <= wanted <= 256:
        raise BarrierMisuse.at(ins, f"setmaxnreg {wanted}: takes 24..256 in steps of 8")
    start = registers_at_start(m.grid.warps_per_cta, m.program.ctas_per_sm)

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
            m.events.registers_set(warp, wanted, ins)
            if need < 0:
                m.progress += 1
                m.wake(("registers", cta))
        return out

    return execute

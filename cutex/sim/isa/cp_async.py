"""Non-bulk asynchronous copies, global to shared memory (PTX ISA 9.7.9.25.3, 9.7.13.15.15).

They belong to the generic proxy, so the ISA requires a fence.proxy.async before an MMA or a TMA
store reads their result. NVIDIA's own mainloops (CUTLASS's sm100 collectives with cp.async) have
none: a missing fence is an advisory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.access import Access
from cutex.sim.isa.mbarrier import BarrierOperand
from cutex.sim.machine.async_copies import Part
from cutex.sim.machine.batch import RETRY, Batch, Lanes
from cutex.sim.machine.events import LateArrival, SharedBytes
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.machine.waits import Wait
from cutex.sim.ptx.decode import Decoder, Execute
from cutex.sim.ptx.operands import Reg

_MODS = (
    "async", "ca", "cg", "shared", "cta", "global", "L2", "cache_hint", "64B", "128B", "256B",
)  # fmt: skip


def copy_async(d: Decoder) -> Execute:
    """cp.async (9.7.9.25.3): dispatches to the form of ``d``."""
    if "commit_group" in d.mods:
        return lambda b: _commit(d.m, b)
    if "wait_group" in d.mods or "wait_all" in d.mods:
        return _wait(d)
    if "mbarrier" in d.mods:
        return _arrive(d)
    return _Copy(d).execute


class _Copy:
    """The copy itself (9.7.9.25.3.1): 4, 8 or 16 bytes per thread, of which src-size are read and
    the rest are zeros.
    """

    def __init__(self, d: Decoder) -> None:
        d.only(*_MODS)
        self.m, self.ins = d.m, d.ins
        self.size = d.immediate(2)
        if self.size not in ((16,) if "cg" in d.mods else (4, 8, 16)):
            raise BadOperand.at(d.ins, f"{d.ins.op} of {self.size} bytes")
        self.to, self.source = Access(d, 0, self.size), Access(d, 1, self.size)
        self.to.space, self.source.space = "shared", "global"
        more = len(d) - 3 - ("cache_hint" in d.mods)
        operand = d.ins.operands[3] if more else None
        self.ignores = isinstance(operand, Reg) and operand.bank == 1
        self.read = d.read(operand, "pred" if self.ignores else "u32") if operand else None

    def execute(self, b: Batch) -> None:
        m, to, source = self.m, self.to.lanes(b), self.source.lanes(b)
        if not len(to.addresses):
            return
        cta, offset = m.grid.shared_location(to.warps, shared_addresses(to.addresses))
        m.check_shared(to.warps, to.lanes, cta, offset, self.size, self.ins)
        sizes = self._sizes(b)
        for n in np.unique(sizes[sizes > 0]).tolist():
            m.events.global_loaded(source.pick(sizes == n), n, self.ins)
        for warp in np.unique(to.warps).tolist():
            mine = to.warps == warp
            where = Lanes(to.warps[mine], to.lanes[mine], offset[mine])
            copy = partial(self._complete, where, source.addresses[mine], sizes[mine])
            at = SharedBytes(where.warps, where.lanes, cta[mine], offset[mine], self.size)
            m.async_copies.issue(warp, Part(where, copy), at, self.ins)

    def _sizes(self, b: Batch) -> np.ndarray:
        """The number of bytes that each active lane reads."""
        if self.read is None:
            return np.full(int(b.active().sum()), self.size)
        given = b.lanes(self.read(b))[b.active()]
        if self.ignores:
            return np.where(given, 0, self.size)
        if (given > self.size).any():
            raise BadOperand.at(self.ins, f"src-size {given.max()} of a copy of {self.size} bytes")
        return given.astype(int)

    def _complete(self, to: Lanes, source: np.ndarray, sizes: np.ndarray) -> None:
        m, size = self.m, self.size
        data = np.zeros((len(sizes), size), np.uint8)
        for n in np.unique(sizes[sizes > 0]).tolist():
            which = np.nonzero(sizes == n)[0]
            unit = n if n == size else 1  # part of a copy may end anywhere
            at = (source[which, None] + np.arange(0, n, unit, dtype=np.uint64)).reshape(-1)
            lanes = np.repeat(which, n // unit)
            who = Lanes(to.warps[lanes], to.lanes[lanes], at)
            got = m.memory.load(at, unit, self.source.refuse(who, "loads"))
            data[which, :n] = got.reshape(len(which), n)
        cta = m.grid.warp_cta[to.warps]
        m.events.shared_stores(to, cta * m.smem_bytes + to.addresses, data, self.ins)
        m.smem[cta[:, None], to.addresses[:, None] + np.arange(size)] = data
        m.box_swizzle[cta, to.addresses >> 4] = 0


def _commit(m: Machine, b: Batch) -> None:
    """cp.async.commit_group (9.7.9.25.3.2): the thread's copies since the last one form a group."""
    active = b.active()
    for row, warp in enumerate(b.idx.tolist()):
        m.async_copies.groups(warp)[active[row]] += 1


def _wait(d: Decoder) -> Execute:
    """cp.async.wait_group (9.7.9.25.3.3): waits until at most N of each thread's groups are
    pending; wait_all commits first.
    """
    m, ins = d.m, d.ins
    everything = "wait_all" in d.mods
    allowed = 0 if everything else d.immediate(0)

    def execute(b: Batch) -> np.ndarray | None:
        out, active = np.zeros(b.n, np.int8), b.active()
        if everything:
            _commit(m, b)
        for row in np.nonzero(active.any(1))[0].tolist():
            warp = int(b.idx[row])
            if (left := m.async_copies.left_out(warp, active[row], allowed)) is not None:
                m.findings.add(
                    "race",
                    f"lane {left[1]} of {m.grid.name_warp(warp)} waits for its cp.async groups, "
                    f"and its copy by the cp.async at PTX line {left[0].instruction.line} is in "
                    "none: other lanes have committed theirs",
                    ins,
                    remedy="cp.async.commit_group by each lane that copies",
                )
            if m.async_copies.overdue(warp, active[row], allowed):
                out[row] = RETRY
                tell = lambda: "waits for its cp.async groups"
                m.sleep(warp, Wait("cp.async group", ("cp.async", warp), ins, tell))
        return out if out.any() else None

    return execute


def _arrive(d: Decoder) -> Execute:
    """cp.async.mbarrier.arrive (9.7.13.15.15): arrives, once per thread, when all its copies are
    complete; without .noinc the phase expects so many arrivals more.
    """
    d.only("async", "mbarrier", "arrive", "noinc", "shared", "cta")
    barrier, m, ins = BarrierOperand(d, 0), d.m, d.ins
    more = "noinc" not in d.mods

    def execute(b: Batch) -> None:
        for row, groups in barrier.by_warp(b, np.zeros((b.n, 32))):
            warp = int(b.idx[row])
            for numbers, cta, offset in groups:
                object_ = m.mbarriers.use(cta, offset, warp, ins)
                if more:
                    object_.pending += len(numbers)
                    object_.counted_up += len(numbers)
                lanes = np.zeros(32, bool)
                lanes[numbers] = True
                arrive = _arriver(m, warp, (cta, offset), len(numbers))
                m.async_copies.after(warp, lanes, arrive, ins)

    return execute


def _arriver(
    m: Machine, warp: int, barrier: tuple[int, int], count: int
) -> Callable[[LateArrival], None]:
    who = f"cp.async of {m.grid.name_warp(warp)}"
    return lambda arrival: m.mbarriers.arrive_late(*barrier, count, who, arrival)

"""Allocation of tensor memory (PTX ISA 9.7.16.7): alloc, dealloc, relinquish_alloc_permit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cutex.sim.errors import BadOperand, BarrierMisuse
from cutex.sim.isa.sync import require_whole_warp, same_in_warp
from cutex.sim.isa.tcgen05 import cta_group
from cutex.sim.machine.batch import RETRY, Batch
from cutex.sim.machine.events import SharedBytes
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import as_bytes, shared_addresses
from cutex.sim.machine.operation import Rectangle
from cutex.sim.machine.tmem import COLUMNS
from cutex.sim.machine.waits import Wait
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.program import Instruction


@instruction("tcgen05.alloc")
def alloc(d: Decoder) -> Execute:
    """tcgen05.alloc (9.7.16.7.1): a power of two of columns, at least 32; waits until they are
    free, and writes their address to shared memory. With cta_group::2 the pair allocates together,
    so each CTA waits for the other.
    """
    d.only("alloc", "cta_group", "1", "2", "sync", "aligned", "shared", "cta")
    address, columns, m, ins = d.address(0), d.src(1, "u32"), d.m, d.ins
    pair = cta_group(d) == 2

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        counts = same_in_warp(d, b, columns(b), "counts")
        where = shared_addresses(same_in_warp(d, b, address(b), "addresses"))
        for row in np.nonzero(b.any_active())[0].tolist():
            warp, n = int(b.idx[row]), int(counts[row])
            cta = int(m.grid.warp_cta[warp])
            if n < 32 or n > COLUMNS or n & (n - 1):
                raise BadOperand.at(
                    ins, f"tcgen05.alloc of {n} columns: takes 32, 64, 128, 256 or 512"
                )
            if cta in m.tmem.relinquished:
                raise BarrierMisuse.at(ins, "tcgen05.alloc after relinquish_alloc_permit")
            first = m.tmem.request(cta, pair, n, ins)
            if first is None:
                out[row] = RETRY
                tell = lambda n=n, cta=cta: f"tcgen05.alloc: {m.tmem.why_not(cta, n)}"
                m.sleep(warp, Wait("tensor memory", ("tmem", cta), ins, tell))
                continue
            target, offset = m.grid.shared_location(b.idx[row : row + 1], where[row : row + 1])
            m.check_shared(b.idx[row : row + 1], np.zeros(1, int), target, offset, 4, ins)
            lane = np.zeros(1, int)
            at = SharedBytes(b.idx[row : row + 1], lane, target, offset, 4)
            m.events.shared(at, True, True, ins)
            m.box_swizzle[target, offset >> 4] = 0
            m.events.tmem_allocated(warp, cta, pair, ins)
            m.smem[target[0], offset[0] : offset[0] + 4] = as_bytes(np.array([first], np.uint32))[0]
            m.progress += 1
        return out if out.any() else None

    return execute


@instruction("tcgen05.dealloc")
def dealloc(d: Decoder) -> Execute:
    """tcgen05.dealloc (9.7.16.7.1, 9.7.16.5): must follow all accesses to these columns, with
    cta_group::2 also the peer's; it may wait until the peer deallocates, too, and does here.
    """
    address, columns, m, ins = d.src(0, "u32"), d.src(1, "u32"), d.m, d.ins
    pair = cta_group(d) == 2

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        firsts = same_in_warp(d, b, address(b), "addresses")
        counts = same_in_warp(d, b, columns(b), "counts")
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            cta, first, n = (
                int(m.grid.warp_cta[warp]),
                int(firsts[row]) & 0xFFFF,
                int(counts[row]),
            )
            both = [cta, cta ^ 1] if pair else [cta]
            if m.tmem.together("dealloc", cta, pair):
                continue  # the peer, the second of both to arrive, has freed both
            places = [Rectangle(c, 0, 128, first, first + n) for c in both]
            by = f"{m.grid.name_warp(warp)} at {ins.where()}"
            if cta not in m.tmem.came["dealloc"]:
                m.tmem.check(cta, first, n, m.grid.name_warp(warp), ins)
                for place in places:
                    m.events.tmem_freeing(warp, place, place.cta == cta, ins)
            if not m.tmem.meet("dealloc", cta, pair):
                m.tmem.freeing[cta] = first, first + n, by
                out[row] = RETRY
                m.sleep(warp, Wait("tensor memory", ("tmem", cta), ins, _peer_teller(m, cta, ins)))
                continue
            for place in places:
                m.events.tmem_freed(place)
                m.tmem.free(place.cta, first, n, by)
                m.wake(("tmem", place.cta))
            m.progress += 1
        return out if out.any() else None

    return execute


def _peer_teller(m: Machine, cta: int, ins: Instruction) -> Callable[[], str]:
    return lambda: f"{ins.op}: the other CTA of the pair, {m.grid.name_cta(cta ^ 1)}, has not come"


@instruction("tcgen05.relinquish_alloc_permit")
def relinquish(d: Decoder) -> Execute:
    """tcgen05.relinquish_alloc_permit (9.7.16.7.1, 9.7.16.5): this CTA allocates no more; with
    cta_group::2, neither does its peer, for which it may wait.
    """
    m, ins, pair = d.m, d.ins, cta_group(d) == 2

    def execute(b: Batch) -> np.ndarray | None:
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            cta = int(m.grid.warp_cta[warp])
            m.tmem.relinquished.add(cta)
            if m.tmem.together("relinquish", cta, pair):
                continue
            if m.tmem.meet("relinquish", cta, pair):
                m.progress += 1
                m.wake(("tmem", cta ^ 1 if pair else cta))
                continue
            out[row] = RETRY
            m.sleep(warp, Wait("tensor memory", ("tmem", cta), ins, _peer_teller(m, cta, ins)))
        return out if out.any() else None

    return execute

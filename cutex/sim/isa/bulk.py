"""Bulk copies of contiguous bytes and their groups (PTX ISA 9.7.9.25.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa import atomics
from cutex.sim.isa.bulk_operands import (
    MODS,
    Value,
    active_lanes,
    check_one_cta,
    check_reduced,
    check_source,
    multicast_mask,
    shared_place,
    targets,
    tell_of_lanes,
)
from cutex.sim.isa.cp_async import copy_async
from cutex.sim.isa.tma import tensor_load, tensor_store
from cutex.sim.machine.batch import RETRY, Batch
from cutex.sim.machine.bulk_groups import BulkGroup
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.operation import Engine, Operation, Span
from cutex.sim.machine.waits import Wait
from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import Decoder, Execute, instruction


@instruction("cp.async")
def bulk_copy(d: Decoder) -> Execute:
    """cp.async and cp.async.bulk (9.7.9.25.4, 9.7.9.27): dispatches to the form of ``d``."""
    if "bulk" not in d.mods:
        return copy_async(d)
    if "commit_group" in d.mods:
        return _commit_group(d)
    if "wait_group" in d.mods:
        return _wait_group(d)
    if "prefetch" in d.mods:
        d.only(*MODS, "prefetch", "im2col")
        d.address(0, "tensor" in d.mods)
        if "tensor" not in d.mods:
            d.src(1, "u32")
        return lambda b: None
    to_shared = d.ins.op.split("global")[0].find("shared") >= 0
    plain_store = not to_shared and "tensor" not in d.mods
    d.only(*MODS, *(["im2col"] if to_shared else []), *(["cp_mask"] if plain_store else []))
    if "tensor" in d.mods:
        return tensor_load(d) if to_shared else tensor_store(d, None)
    if "global" not in d.mods:
        return _shared_copy(d, None)
    return _plain_load(d) if to_shared else _plain_store(d, None)


_REDUCTIONS, _COUNTERS = ("add", "min", "max", "and", "or", "xor"), ("inc", "dec")


@instruction("cp.reduce")
def bulk_reduce(d: Decoder) -> Execute:
    """cp.reduce.async.bulk (9.7.9.25.4.2, 9.7.9.27.3): a store that combines element by element."""
    d.only(*MODS, "reduce", "noftz", *_COUNTERS)
    plain = (*_REDUCTIONS, *_COUNTERS)
    name = next((p for p in d.parts if p in (_REDUCTIONS if "tensor" in d.mods else plain)), None)
    if name is None:
        raise d.unknown("reduction")
    if "tensor" in d.mods:
        return tensor_store(d, name)
    return _plain_store(d, name) if "global" in d.mods else _shared_copy(d, name)


def _plain_load(d: Decoder) -> Execute:
    """Contiguous bytes, a multiple of 16, from global to shared memory (9.7.9.25.4.1)."""
    m, ins = d.m, d.ins
    to, frm, size, barrier = (
        Value(d.address(0)),
        Value(d.address(1)),
        Value(d.src(2, "u32")),
        Value(d.address(3)),
    )
    multicast = multicast_mask(d)

    def execute(b: Batch) -> None:
        t, f, s, bars = to(b), frm(b), size(b), barrier(b)
        masks = multicast(b) if multicast else None
        for row, lane in active_lanes(b):
            n, source = int(s[row, lane]), int(f[row, lane])
            _check_plain(d, n, source)
            cta, offset = shared_place(d, b, row, lane, int(t[row, lane]), n, 16)
            bar_cta, bar = shared_place(d, b, row, lane, int(bars[row, lane]), 8, 8)
            mask = int(masks[row, lane]) if masks is not None else None
            if mask is None:
                check_one_cta(d, cta, bar_cta)
            m.events.bulk_issued(int(b.idx[row]), source, n, False, ins)
            for target in targets(d, cta, mask):
                signal = (bar_cta if mask is None else target, bar)
                m.mbarriers.use(*signal, int(b.idx[row]), ins)

                op = Operation(
                    "the bulk copy", int(b.idx[row]), ins, ("tma", m.flight.issued, target),
                    _bulk_loader(m, source, target, offset, n, signal, ins),
                    Engine.TMA_LOAD, n,
                    writes=[Span(target, offset, offset + n)], signals=[signal],
                    source=("global", source, n, offset),
                )  # fmt: skip
                m.flight.issue(op)

    return execute


def _bulk_loader(
    m: Machine, source: int, cta: int, offset: int, n: int, signal: tuple[int, int], ins: Any
) -> Callable[[], None]:
    def complete() -> None:
        m.smem[cta, offset : offset + n] = m.memory.view(
            source, n, f"the bulk copy at {ins.where()}"
        )
        m.box_swizzle[cta, offset >> 4 : offset + n >> 4] = 0
        m.mbarriers.complete_tx(*signal, n, "a bulk copy", ins)

    return complete


def _shared_copy(d: Decoder, reduction: str | None) -> Execute:
    """Bytes from own shared memory to that of a CTA of the cluster, whose mbarrier completes
    (9.7.9.25.4.1).
    """
    m, ins = d.m, d.ins
    to, frm, barrier = Value(d.address(0)), Value(d.address(1)), Value(d.address(3))
    size = Value(d.src(2, "u32"))

    def execute(b: Batch) -> None:
        t, f, s, bars = to(b), frm(b), size(b), barrier(b)
        for row, lane in active_lanes(b):
            n = int(s[row, lane])
            _check_plain(d, n, 0)
            cta, offset = shared_place(d, b, row, lane, int(t[row, lane]), n, 16)
            source = shared_place(d, b, row, lane, int(f[row, lane]), n, 16)
            signal = shared_place(d, b, row, lane, int(bars[row, lane]), 8, 8)
            check_one_cta(d, cta, signal[0])
            m.mbarriers.use(*signal, int(b.idx[row]), ins)
            op = Operation(
                "the bulk copy", int(b.idx[row]), ins, ("tma", m.flight.issued, cta),
                _mover(d, reduction, source, (cta, offset), n, signal), Engine.DSMEM, 2 * n,
                reads=[Span(source[0], source[1], source[1] + n)],
                writes=[Span(cta, offset, offset + n)], signals=[signal],
                source=None if reduction else ("shared", source, n, offset),
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _mover(
    d: Decoder,
    reduction: str | None,
    source: tuple[int, int],
    target: tuple[int, int],
    n: int,
    signal: tuple[int, int],
) -> Callable[[], None]:
    m = d.m

    def complete() -> None:
        modes = m.box_swizzle[source[0], source[1] >> 4 : source[1] + n >> 4]
        check_source(m, "the bulk copy", source[0], modes, None, d.ins)
        if reduction:
            check_reduced(m, "the bulk reduction", target[0], target[1], target[1] + n, d.ins)
        old = m.smem[target[0], target[1] : target[1] + n]
        old[:] = _combined(d, reduction, old, m.smem[source[0], source[1] : source[1] + n])
        m.box_swizzle[target[0], target[1] >> 4 : target[1] + n >> 4] = modes * (reduction is None)
        m.mbarriers.complete_tx(*signal, n, "a bulk copy", d.ins)

    return complete


def _combined(d: Decoder, reduction: str | None, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The bytes ``old`` and ``new`` combined in the instruction's type."""
    if reduction is None:
        return new
    word = np.dtype(f"u{WIDTH[d.type] // 8}")
    old, new = (np.ascontiguousarray(x).view(word) for x in (old, new))
    return atomics.combine(reduction, d.type, old, new).view(np.uint8)


def _plain_store(d: Decoder, reduction: str | None) -> Execute:
    """Contiguous bytes, a multiple of 16, from shared to global memory (9.7.9.25.4.1): all, or with
    .cp_mask those of each 16 that the last operand has a bit for.
    """
    m, ins = d.m, d.ins
    to, frm, size = Value(d.address(0)), Value(d.address(1)), Value(d.src(2, "u32"))
    byte_mask = Value(d.src(len(d) - 1, "u16") if "cp_mask" in d.mods else lambda b: 0xFFFF)

    def execute(b: Batch) -> None:
        t, f, s, masks = to(b), frm(b), size(b), byte_mask(b)
        if reduction:
            asked = Counter((r, int(t[r, i]), int(f[r, i])) for r, i in active_lanes(b))
            for (row, *_), lanes in asked.items():
                tell_of_lanes(d, int(b.idx[row]), lanes)
        for row, lane in active_lanes(b):
            n, target = int(s[row, lane]), int(t[row, lane])
            _check_plain(d, n, target)
            cta, offset = shared_place(d, b, row, lane, int(f[row, lane]), n, 16)
            thread = (int(b.idx[row]), lane)
            group = m.bulk_groups.joined(thread)
            m.events.bulk_issued(thread[0], target, n, True, ins)
            op = Operation(
                "the bulk store", thread[0], ins, ("store", m.flight.issued),
                _bulk_storer(
                    d, reduction, target, (cta, offset), n, int(masks[row, lane]), group
                ),
                Engine.TMA_STORE, n, reads=[Span(cta, offset, offset + n)],
                agents=[(thread[0], group.last)],
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _bulk_storer(
    d: Decoder,
    reduction: str | None,
    target: int,
    source: tuple[int, int],
    n: int,
    byte_mask: int,
    group: BulkGroup,
) -> Callable[[], None]:
    m, by = d.m, group.storing
    copied = np.flatnonzero(byte_mask >> np.arange(n) % 16 & 1) if byte_mask != 0xFFFF else None

    def complete() -> None:
        modes = m.box_swizzle[source[0], source[1] >> 4 : source[1] + n >> 4]
        check_source(m, "the bulk store", source[0], modes, None, d.ins)
        why = f"the bulk store at {d.ins.where()}"
        old = m.memory.view(target, n, why, write=True, only=copied)
        new = _combined(d, reduction, old, m.smem[source[0], source[1] : source[1] + n])
        region = m.memory.find(target)
        values = new[None] if copied is None else new[copied, None]
        if region is not None:
            place = target - region.base + (np.array([0]) if copied is None else copied)
            if reduction is None:
                m.events.bulk_writes(region, place, values, by, d.ins)
            else:
                m.events.bulk_reduced(region, place, n, by, d.ins)
        old[slice(None) if copied is None else copied] = values.reshape(-1)
        group.finished()

    return complete


def _check_plain(d: Decoder, size: int, address: int) -> None:
    if size % 16 or address % 16:
        raise BadOperand.at(
            d.ins,
            f"a bulk copy of {size} bytes at global 0x{address:x}: size and address must be "
            "multiples of 16",
        )


# -- bulk groups -----------------------------------------------------------------------------------


def _commit_group(d: Decoder) -> Execute:
    """cp.async.bulk.commit_group (9.7.9.25.4.5): the thread's operations since the last one form a
    group.
    """

    def execute(b: Batch) -> None:
        for row, lane in active_lanes(b):
            d.m.bulk_groups.commit((int(b.idx[row]), lane))

    return execute


def _wait_group(d: Decoder) -> Execute:
    """cp.async.bulk.wait_group (9.7.9.25.4.6): waits until at most N of this thread's groups are
    pending. Reads and full completion coincide here, but after .read the writes are not visible to
    other clusters.
    """
    m, ins = d.m, d.ins
    allowed, written = d.immediate(0), "read" not in d.mods

    def execute(b: Batch) -> np.ndarray | None:
        out, warps = np.zeros(b.n, np.int8), b.idx.tolist()
        busy = m.bulk_groups.busy()
        lanes: dict[int, list[int]] = {}
        for row, lane in active_lanes(b) if busy else ():
            if (warps[row], lane) in busy:
                lanes.setdefault(row, []).append(lane)
        for row, of in lanes.items():
            late = m.bulk_groups.overdue(warps[row], of, allowed, written)
            if late is None:
                m.events.lanes_waited(warps[row], np.flatnonzero(b.active()[row]), ins)
            else:
                out[row] = RETRY
                key = "bulk", warps[row], late
                m.sleep(
                    warps[row], Wait("bulk group", key, ins, lambda: "waits for its bulk stores")
                )
        return out if out.any() else None

    return execute

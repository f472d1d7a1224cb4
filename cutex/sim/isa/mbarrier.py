"""mbarrier instructions (PTX ISA 9.7.13.15): init, inval, arrive, tx-count and the two waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from cutex.sim.machine.batch import RETRY, Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.machine.waits import PassedWait, Wait
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Address
from cutex.sim.ptx.program import Instruction

_LANES = np.arange(32)


class BarrierOperand:
    """The mbarrier operand of an instruction: the barrier that each active lane names."""

    def __init__(self, d: Decoder, operand: int) -> None:
        self.d, self.address = d, d.address(operand)

    def by_warp(
        self, b: Batch, values: np.ndarray
    ) -> Iterator[tuple[int, list[tuple[np.ndarray, int, int]]]]:
        """For each warp, its row and the groups of lanes that name the same barrier and value:
        (lanes, cta, offset).
        """
        addresses = shared_addresses(b.lanes(self.address(b)))
        active, first, row = b.active(), b.first_lane(), np.arange(b.n)
        lead, value = addresses[row, first], values[row, first]
        same = ((addresses == lead[:, None]) & (values == value[:, None])) | ~active
        alike, leads = same.all(1).tolist(), lead.tolist()
        warps, shared_at = b.idx.tolist(), self.d.m.shared_at
        for r in np.nonzero(active.any(1))[0].tolist():
            groups = [_LANES if b.mask is None else np.nonzero(active[r])[0]]
            if not alike[r]:
                keys = {(int(addresses[r, i]), int(values[r, i])) for i in groups[0]}
                named = [
                    (addresses[r] == a) & (values[r] == v) & active[r] for a, v in sorted(keys)
                ]
                groups = [np.nonzero(g)[0] for g in named]
            found = []
            for lanes in groups:
                one = int(lanes[0])
                at = leads[r] if alike[r] else int(addresses[r, one])
                found.append((lanes, *shared_at(warps[r], one, at, 8, self.d.ins)))
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


_PHASE = 32  # bits of the phase in a state; above these the mbarrier that it is of


def _name_of(cta: int, offset: int) -> int:
    return cta << 18 | offset >> 3


_MBARRIER_MODS = (
    "shared", "cta", "cluster", "release", "acquire", "relaxed", "parity", "expect_tx",
    "noComplete", "init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "complete_tx",
    "bytes", "gpu",
)  # fmt: skip


@instruction("mbarrier.init")
def mbarrier_init(d: Decoder) -> Execute:
    """mbarrier.init (9.7.13.15.9): a new barrier that expects ``count`` arrivals per phase."""
    barrier, count = BarrierOperand(d, 0), d.src(1, "u32")

    def execute(b: Batch) -> None:
        counts = b.lanes(count(b))
        for row, lane, cta, offset in barrier.each(b):
            warp, expected = int(b.idx[row]), int(counts[row, lane])
            d.m.mbarriers.init(cta, offset, expected, warp, lane, d.ins)

    return execute


@instruction("mbarrier.inval")
def mbarrier_inval(d: Decoder) -> Execute:
    """mbarrier.inval (9.7.13.15.10): the memory is no barrier any more."""
    barrier = BarrierOperand(d, 0)

    def execute(b: Batch) -> None:
        for row, _, cta, offset in barrier.each(b):
            d.m.mbarriers.use(cta, offset, int(b.idx[row]), d.ins)
            d.m.mbarriers.invalidate(cta, offset, d.ins)

    return execute


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(d: Decoder) -> Execute:
    """mbarrier.arrive, arrive_drop (9.7.13.15.13, 9.7.13.15.14): .expect_tx raises the tx-count
    first, then arrives once.
    """
    d.only(*_MBARRIER_MODS)
    operands = d.ins.operands
    at = next((i for i, o in enumerate(operands) if isinstance(o, Address)), 0)
    barrier = BarrierOperand(d, at)
    amount = d.src(at + 1, "u32") if len(operands) > at + 1 else None
    state = d.dst(0, "b64") if at == 1 else None
    expect, drop = "expect_tx" in d.mods, "arrive_drop" in d.mods
    stays = "noComplete" in d.mods
    to_cluster = re.search(r"\.(release|relaxed)\.(cluster|gpu|sys)", d.ins.op) is not None

    def execute(b: Batch) -> None:
        amounts = b.lanes(amount(b)) if amount else None
        tokens = np.zeros((b.n, 32), np.uint64)
        places = list(barrier.each(b))
        warps, mbarriers, events, found = b.idx.tolist(), d.m.mbarriers, d.m.events, []
        for row, _, cta, offset in places:
            found.append(mbarriers.use(cta, offset, warps[row], d.ins))
            mbarriers.reach(found[-1], warps[row], "an arrival", d.ins)
        whole = np.ones(b.n, bool) if b.mask is None else ~(d.m.live[b.idx] & ~b.mask).any(1)
        active = b.any_active()
        events.arriving(b.idx[active], whole[active])
        for (row, lane, _, _), at in zip(places, found, strict=True):
            events.mbarrier_arrives(at, warps[row], to_cluster, d.ins)
            who = f"{d.m.grid.name_warp(warps[row])} lane {lane}"
            n = int(amounts[row, lane]) if amounts is not None else 1
            phases = at.phases
            if state:
                tokens[row, lane] = at.phases | _name_of(at.cta, at.offset) << _PHASE
            if expect:
                # NOTE: tx first, or a phase whose bytes have arrived could complete on the arrival
                # alone
                mbarriers.expect_tx(at, n, who, d.ins)
                n = 1
            mbarriers.arrive(at, n, who, d.ins, drop)
            if stays and at.phases != phases:
                mbarriers.refuse_completion(at, who, d.ins)
        if state:
            state(b, tokens)

    return execute


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(d: Decoder) -> Execute:
    """mbarrier.expect_tx, complete_tx (9.7.13.15.11, 9.7.13.15.12): raises or lowers the
    tx-count."""
    d.only(*_MBARRIER_MODS)
    barrier, size = BarrierOperand(d, 0), d.src(1, "u32")
    expects = d.parts[1] == "expect_tx"

    def execute(b: Batch) -> None:
        sizes = b.lanes(size(b))
        for row, lane, cta, offset in barrier.each(b):
            warp, n = int(b.idx[row]), int(sizes[row, lane])
            at = d.m.mbarriers.use(cta, offset, warp, d.ins)
            d.m.mbarriers.reach(at, warp, f"a {d.parts[1]}", d.ins)
            who = d.m.grid.name_warp(warp)
            if expects:
                d.m.mbarriers.expect_tx(at, n, who, d.ins)
            else:
                d.m.mbarriers.complete_tx(cta, offset, n, who, d.ins)

    return execute


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def mbarrier_wait(d: Decoder) -> Execute:
    """mbarrier.test_wait, try_wait (9.7.13.15.16): true if the phase of that parity (or token) is
    complete; try_wait may sleep until then, and returns false a few times at first, so that who
    does not look at its result goes on as it would after a time-out of the hardware's.
    """
    d.only(*_MBARRIER_MODS)
    barrier, write = BarrierOperand(d, 1), d.dst(0, "pred")
    by_parity = "parity" in d.mods
    expected = d.src(2, "u32" if by_parity else "b64")
    may_sleep = d.parts[1] == "try_wait"
    if may_sleep and len(d) == 4:
        d.src(3, "u32")  # how long it may sleep, in nanoseconds
    m, ins = d.m, d.ins
    time_outs = 0

    def passed(phases: int, value: int) -> bool:
        # NOTE: on a fresh barrier, the wait for parity 1 passes
        return (phases & 1) != value & 1 if by_parity else phases > value

    def execute(b: Batch) -> np.ndarray | None:
        nonlocal time_outs
        values = b.lanes(expected(b))
        result = np.zeros((b.n, 32), bool)
        out = np.zeros(b.n, np.int8)
        failed, returned, sleeps = False, False, may_sleep and time_outs >= m.early_time_outs
        warps = b.idx.tolist()
        for row, groups in barrier.by_warp(b, values):
            warp, some = warps[row], len(groups) > 1
            for lanes, cta, offset in groups:
                value = int(values[row, lanes[0]])
                waited = m.mbarriers.use(cta, offset, warp, ins)
                if by_parity and value > 1:
                    _tell_parity(m, warp, value, ins)
                if not by_parity:
                    if value >> _PHASE != _name_of(cta, offset):
                        m.mbarriers.refuse_state(waited, warp, ins)
                    value &= (1 << _PHASE) - 1
                    if waited.phases > value + 1:
                        m.mbarriers.refuse_token(waited, value, warp, ins)
                if not passed(waited.phases, value):
                    continue
                m.events.mbarrier_passed(waited, warp, lanes, ins)
                some = True
                result[row, _all_or(lanes)] = True
                m.failed_wait[warp].pop((cta, offset), None)
                if by_parity:
                    m.last_wait[warp][cta, offset] = PassedWait(value & 1, waited.phases, ins)
            # NOTE: where lanes wait for several barriers, those that have to get false at once
            if some:
                continue
            which = _all_or(lanes)
            if may_sleep and not sleeps:
                returned = True
                m.failed_wait[warp][cta, offset] = ins
            elif sleeps and np.count_nonzero(m.timed_out[warp, which]) < len(lanes):
                out[row] = RETRY
                failed = True
                tell = _mbarrier_teller(m, cta, offset, value, by_parity)
                m.sleep(warp, Wait("mbarrier", (cta, offset), ins, tell))
            m.timed_out[warp, which] = False
        time_outs += returned
        if failed:
            keep = out == 0
            write(Batch(b.idx[keep], None if b.mask is None else b.mask[keep]), result[keep])
            return out
        write(b, result)
        return None

    return execute


def _tell_parity(m: Machine, warp: int, value: int, ins: Instruction) -> None:
    m.findings.add(
        "barrier misuse",
        f"{m.grid.name_warp(warp)} waits for parity {value}: by the letter it is 0 or 1, of which "
        "hardware takes the lowest bit",
        ins,
        advisory=True,
    )


def _all_or(lanes: np.ndarray) -> slice | np.ndarray:
    """An index of these lanes; a slice, which is cheaper, if they are all 32."""
    return slice(None) if lanes is _LANES else lanes


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
    """mbarrier.pending_count (9.7.13.15.17): not defined here."""
    raise d.unknown()

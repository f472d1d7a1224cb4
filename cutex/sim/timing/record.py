"""The events of each warp of a run, in its own order: the input of the clock.

A `Recorder` observes a machine and is notified of every instruction, before and after it executes.
Ordinary instructions add up to a piece of work; one that is asynchronous, signals or waits becomes
an event of the warp's program. Waits are recorded with their values in the run: the phase of a
barrier that a warp needed, the number of groups that it left in flight.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.errors import CutexError
from cutex.sim.isa.mbarrier import BarrierOperand
from cutex.sim.isa.tensormap import MAP_BYTES, TensorMap, decode_map
from cutex.sim.machine.batch import RETRY, Batch
from cutex.sim.machine.events import Observer, SharedBytes
from cutex.sim.machine.memory import PARAM_WINDOW
from cutex.sim.machine.operation import Engine, Operation, Rectangle, Span
from cutex.sim.ptx.decode import Decoder
from cutex.sim.ptx.operands import Address, Imm, Vector
from cutex.sim.ptx.program import Instruction
from cutex.sim.timing.counters import SharedCounters
from cutex.sim.timing.events import (
    Added,
    Arrive,
    BarrierId,
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
    Record,
    Reply,
    Send,
    Settled,
    Store,
    Wait,
    Work,
)  # fmt: skip
from cutex.sim.timing.fetches import LINE, Fetches, into_registers, width
from cutex.sim.timing.machine_code import Cost
from cutex.sim.timing.order import FIELDS, by_instruction
from cutex.sim.timing.touches import Together, touched
from cutex.sim.timing.wavefronts import port_cycles

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

PORT = Work._fields.index("port")
PIECE = 64.0  # cycles of ordinary instructions that become one `Work`
_RATES = (
    ("mxf4", 4.0), ("f8f6f4", 2.0), ("kind::i8", 2.0), ("kind::tf32", 0.5),
    (".e4m3.", 2.0), (".e5m2.", 2.0), (".s8.", 2.0), (".u8.", 2.0), (".tf32.", 0.5),
)  # fmt: skip


def entries(code: Sequence[Instruction], counts: np.ndarray) -> dict[str, int]:
    """How often warps ran each function of the source, from the `counts` (warps, instructions) of
    its instructions: for each of its inlined copies the most frequent one's. Of a function with a
    loop of its own it is the number of that loop's turns."""
    copies: dict[tuple[Any, ...], np.ndarray] = {}
    for pc in np.flatnonzero(counts.any(axis=0)):
        source = code[int(pc)].source
        stack = source.stack if source else ()
        for i, call in enumerate(stack):
            copy = (call.function, *((at.file, at.line, at.column) for at in stack[i + 1 :]))
            most = copies.get(copy)
            copies[copy] = counts[:, pc] if most is None else np.maximum(most, counts[:, pc])
    found: dict[str, int] = defaultdict(int)
    for (function, *_), of_warps in copies.items():
        found[function] += int(of_warps.sum())
    return dict(found)


class Enough(CutexError):
    """Ends a run whose recorder has all that it needs."""


class Recorder(Observer):
    """Records the resident warps of a machine, until ``limit`` MMA FLOPs have been issued."""

    def __init__(
        self,
        machine: Machine,
        costs: dict[int, Cost],
        limit: float = 0.0,
        enough_loads: int = 0,
        counters: SharedCounters | None = None,
        l1: float = 0.0,
    ) -> None:
        """``l1``: bytes of L1 that a CTA has."""
        self.m, self.limit, self.enough_loads = machine, limit, enough_loads
        code = machine.program.code
        self.code = code
        self.before = [counters.before(i) if counters else None for i in code]
        self.programs: dict[int, list[Event]] = defaultdict(list)
        self.fetches = Fetches(machine, code, self._add, costs, self.programs, l1)
        self.kinds: list[Callable[[Batch, Any], None] | None] = [
            self._kind(pc, ins) for pc, ins in enumerate(code)
        ]
        events = [kind is not None for kind in self.kinds]
        own = by_instruction(code, events, costs)
        port = [1.0 if costs and ins.name == "shfl" else 0.0 for ins in code]
        self.costs = bool(costs)
        own_of = dict(zip(FIELDS, own.T, strict=True))
        self.cost = np.column_stack([{**own_of, "port": port}[name] for name in Work._fields])
        self.work = np.zeros((machine.grid.num_warps, len(Work._fields)))
        self.maps: dict[int, TensorMap] = {}  # by address
        self.flops, self.steps, self.together = 0.0, 0, Together()
        self.added: set[int] = set()  # lines of global memory
        self.columns = 0  # columns of tensor memory of a CTA's largest allocation
        self.counts = np.zeros((machine.grid.num_warps, len(code)), np.int64)
        self.loads = np.zeros(machine.grid.num_ctas, int)

    # -- events ------------------------------------------------------------------------------------

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        """Add to the work of warps the cycles of the smem port for what their lanes access."""
        # NOTE: an atomic is read and written in one pass
        if self.costs and len(at.offset) and not (write and ins.name in ("atom", "red")):
            warps, cycles = port_cycles(at)
            self.work[warps, PORT] += cycles

    def issued(self, ops: Sequence[Operation]) -> None:
        for op in ops:
            self._operation(op)

    def executing(self, batch: Batch, pc: int) -> None:
        if (before := self.before[pc]) is not None:
            before(batch)
        self.fetches.step(batch, pc)
        self.work[batch.idx] += self.cost[pc]
        for warp in batch.idx[self.work[batch.idx, 0] >= PIECE].tolist():
            self._flush(warp)
        self.counts[batch.idx, pc] += 1
        self.steps += batch.n

    def executed(self, batch: Batch, pc: int, verdict: np.ndarray | None) -> None:
        kind = self.kinds[pc]
        if kind is not None:
            kind(batch, verdict)
        if self.limit and self.flops >= self.limit:
            raise Enough
        if self.enough_loads and self.loads.min() >= self.enough_loads:
            raise Enough

    def record(self, complete: bool) -> Record:
        g = self.m.grid
        from cutex.sim.timing.roles import distinct, role

        roles = {}
        for warp in range(g.num_warps):
            self.fetches.flush(warp)
            self._flush(warp)
            counts = [
                (self.code[pc], int(self.counts[warp, pc]))
                for pc in np.nonzero(self.counts[warp])[0]
            ]
            roles[warp] = role(counts, self.programs[warp])
        return Record(
            dict(self.programs),
            {at: b.expected for at, b in self.m.mbarriers.barriers.items()},
            {w: int(g.warp_cta[w]) for w in range(g.num_warps)},
            {w: int(g.warp_in_cta[w]) for w in range(g.num_warps)},
            g.cluster_size, g.num_ctas, g.warps_per_cta, complete, self.flops, self.steps,
            distinct(roles, self.programs), self.fetches.fetched(), self._added(),
            entries(self.code, self.counts),
        )  # fmt: skip

    def _added(self) -> Added:
        if not self.added:
            return Added()
        first, end = min(self.added), max(self.added) + 1
        return Added(float(len(self.added)), first, end, float(end - first))

    # -- events ------------------------------------------------------------------------------------

    def _flush(self, warp: int) -> None:
        work = Work(*(round(x, 2) for x in self.work[warp].tolist()))
        if work.cycles:
            self.programs[warp].append(work)
            self.work[warp] = 0.0

    def _add(self, warp: int, event: Event) -> None:
        if not isinstance(event, (Fetch, Need)):
            self.fetches.flush(warp)
        self._flush(warp)
        self.programs[warp].append(event)

    def _operation(self, op: Operation) -> None:
        """Record an asynchronous operation when it is put in flight."""
        if op.engine is Engine.DSMEM:
            size = sum(s.high - s.low for s in op.writes if isinstance(s, Span))
            self._add(op.warp, Send(op.signals[0], size))
        elif op.engine is Engine.TMA_LOAD:
            source = (op.what, 0)
            loads = self.programs[op.warp]
            last = loads[-1] if loads and not self.work[op.warp].any() else None
            size = op.bytes
            if isinstance(last, Load) and last.source[-1] == -self._turn and last.size == size:
                loads[-1] = last._replace(
                    signals=(*last.signals, *op.signals), ctas=(*last.ctas, op.writes[0].cta)
                )
                return
            rows = -(-size // 128)
            into = (op.writes[0].cta,)
            where = (*source, -self._turn)
            self._add(op.warp, Load(tuple(op.signals), size, where, rows, into))
        elif op.engine is Engine.TMA_STORE:
            self._add(op.warp, Store(op.bytes, "reduce" in op.instruction.op))
        elif op.engine is Engine.WGMMA:
            self.flops += op.flops
        elif op.engine is Engine.TCGEN05_MMA:
            self.flops += op.flops
            ctas = tuple(sorted({p.cta for p in op.reads if isinstance(p, Span)}))
            # NOTE: one CTA's MMA of 64 rows takes as long as one of 128 (docs/time.md)
            half = len(ctas) == 1 and len(op.writes) > 1
            rate = _rate(op.instruction.op) * (0.5 if half else 1.0)
            self._add(op.warp, Mma(0, 0, op.flops, op.bytes // len(ctas), ctas, rate))
        elif op.engine is Engine.TCGEN05_CP:
            filled = [p for p in op.writes if isinstance(p, Rectangle)]
            columns = filled[0].high - filled[0].low
            self._add(op.warp, Copy(columns, tuple(p.cta for p in filled)))
        elif op.engine is Engine.LAUNCH_CONTROL:
            self._add(op.warp, Reply(tuple(op.signals)))

    _turn = 1

    def _kind(self, pc: int, ins: Instruction) -> Callable[[Batch, Any], None] | None:
        op = ins.op
        if op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            return self._wait(ins)
        if op.startswith("mbarrier.arrive"):
            return self._arrive(ins)
        if op.startswith("mbarrier.expect_tx"):
            return self._arrive(ins)
        if op.startswith("cp.async.bulk.commit_group"):
            return self._each(lambda b, r: Commit("bulk"))
        if op.startswith("cp.async.bulk.wait_group"):
            n = int(ins.operands[0].value) if isinstance(ins.operands[0], Imm) else 0
            return self._each(lambda b, r: Group("bulk", n, "read" in ins.parts), passed=True)
        if op.startswith("cp.async.bulk.tensor") and "bulk_group" not in op:
            return self._source(ins)
        if op.startswith("cp.async.bulk"):
            return self._next_turn
        if op.startswith("cp.async.mbarrier"):
            return self._landed(ins)
        if op.startswith("cp.async.commit_group"):
            return self._each(lambda b, r: Commit("cp.async"))
        if op.startswith("cp.async.wait"):
            left = int(ins.operands[0].value) if ins.operands else -1  # type: ignore[union-attr]
            return self._each(lambda b, r: Group("cp.async", left), passed=True)
        if op.startswith("cp.async") or into_registers(ins):
            return self.fetches.kind(pc, ins)
        if op.startswith("wgmma.mma"):
            mma = _wgmma(ins)
            return self._each(lambda b, r: mma)
        if op.startswith("wgmma.commit"):
            return self._each(lambda b, r: Commit("wgmma"))
        if op.startswith("wgmma.wait"):
            left = int(ins.operands[0].value)  # type: ignore[union-attr]
            return self._each(lambda b, r: Group("wgmma", left), passed=True)
        if op.startswith("barrier.cluster"):
            waits = "wait" in ins.parts
            return self._each(lambda b, r: Cluster(waits), passed=waits)
        if ins.name in ("bar", "barrier") and ins.parts[1] != "warp":
            return self._bar(ins)
        if op.startswith("tcgen05.commit"):
            return self._tcgen05_commit(ins)
        if op.startswith(("tcgen05.ld", "tcgen05.st")):
            columns = len(next(o for o in ins.operands if isinstance(o, Vector)).items)
            return self._each(lambda b, r: Columns(columns))
        if op.startswith("tcgen05.alloc"):
            return self._allocation(ins)
        if op.startswith("tcgen05.wait"):
            return self._each(lambda b, r: Settled())
        if ins.name in ("st", "red") and "global" in ins.parts:
            return self._global(ins, False, ins.name == "red")
        if ins.name == "atom" and "global" in ins.parts:
            return self._global(ins, True)
        return None

    def _allocation(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        count = Decoder(ins, self.m).src(1, "u32")

        def add(b: Batch, verdict: Any) -> None:
            self.columns = max(self.columns, int(b.one(count(b)).max()))

        return add

    def _next_turn(self, b: Batch, verdict: Any) -> None:
        self._turn += 1

    def _source(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        """Record with a load its box: the tensor map's address and the coordinates."""
        d = Decoder(ins, self.m)
        tmap, coordinates = d.address(1, coordinates=True), d.coordinates(1)

        def add(b: Batch, verdict: Any) -> None:
            self._turn += 1
            maps = b.lanes(tmap(b))
            places = [b.lanes(c(b)) for c in coordinates]
            lane = b.first_lane()
            for row in np.nonzero(b.any_active())[0].tolist():
                warp, at = int(b.idx[row]), int(lane[row])
                source = (int(maps[row, at]), *(int(p[row, at]) for p in places))
                program = self.programs[warp]
                if box := self._map(source[0]):
                    rows = max(1, program[-1].size // int(box.box[0] * box.itemsize))
                    corner = box.place(source[1:]) or source[1:]
                    spans = zip(corner[1:], box.box[1:], box.dims[1:], strict=False)
                    inside = math.prod(max(0, min(x + n, size) - max(x, 0)) for x, n, size in spans)
                    outside = max(0, rows - inside) * int(box.box[0] * box.itemsize)
                    program[-1] = program[-1]._replace(source=source, rows=rows, outside=outside)
                else:
                    program[-1] = program[-1]._replace(source=source, rows=1)
                self.loads[int(self.m.grid.warp_cta[warp])] += 1

        return add

    def _each(
        self, make: Callable[[Batch, int], Event], passed: bool = False
    ) -> Callable[[Batch, Any], None]:
        """Record an event for every warp with an active lane; with ``passed``, only for those that
        need not try again.
        """

        def add(b: Batch, verdict: Any) -> None:
            for row in np.nonzero(b.any_active())[0].tolist():
                if not (passed and verdict is not None and verdict[row] == RETRY):
                    self._add(int(b.idx[row]), make(b, row))

        return add

    def _map(self, address: int) -> TensorMap | None:
        """The tensor map at ``address``, a parameter of the kernel; None at other addresses."""
        if not address & PARAM_WINDOW:
            return None
        if address not in self.maps:
            at = address & (PARAM_WINDOW - 1)
            self.maps[address] = decode_map(self.m.params[at : at + MAP_BYTES].tobytes())
        return self.maps[address]

    def _wait(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        d = Decoder(ins, self.m)
        barrier = BarrierOperand(d, 1)
        by_parity = "parity" in ins.parts
        expected = d.src(2, "u32" if by_parity else "b64")

        def add(b: Batch, verdict: Any) -> None:
            values = b.lanes(expected(b))
            for row, groups in barrier.by_warp(b, values):
                warp = int(b.idx[row])
                for lanes, cta, offset in groups:
                    phases = self.m.mbarriers.phases(cta, offset)
                    value = int(values[row, lanes[0]])
                    ok = (phases & 1) != value & 1 if by_parity else phases > value
                    if ok and phases:
                        self._add(warp, Wait((cta, offset), phases, ins.line))

        return add

    def _arrive(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        at = next(i for i, o in enumerate(ins.operands) if isinstance(o, Address))
        d = Decoder(ins, self.m)
        barrier = BarrierOperand(d, at)
        amount = d.src(at + 1, "u32") if len(ins.operands) > at + 1 else None
        expect, alone = "expect_tx" in ins.parts, ins.parts[1] == "expect_tx"

        def add(b: Batch, verdict: Any) -> None:
            amounts = b.lanes(amount(b)) if amount else None
            found: dict[tuple[int, BarrierId], list[int]] = {}
            for row, lane, cta, offset in barrier.each(b):
                n = int(amounts[row, lane]) if amounts is not None else 1
                sums = found.setdefault((row, (cta, offset)), [0, 0])
                sums[0] += 0 if alone else (1 if expect else n)
                sums[1] += n if expect else 0
            for (row, place), (count, size) in found.items():
                warp = int(b.idx[row])
                remote = place[0] != int(self.m.grid.warp_cta[warp])
                self._add(warp, Arrive(place, count, size, remote))

        return add

    def _landed(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        barrier = BarrierOperand(Decoder(ins, self.m), 0)
        counts = "noinc" in ins.parts  # or what it adds to the phase's arrivals it takes

        def add(b: Batch, verdict: Any) -> None:
            found: dict[tuple[int, BarrierId], int] = defaultdict(int)
            for row, _, cta, offset in barrier.each(b):
                found[row, (cta, offset)] += 1
            for (row, place), n in found.items():
                self._add(int(b.idx[row]), Landed(place, n if counts else 0))

        return add

    def _bar(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        d = Decoder(ins, self.m)
        reduces = "red" in ins.parts  # its result comes first, and its predicate last
        number = d.src(int(reduces), "u32")
        counted = len(ins.operands) > 1 + 2 * reduces
        count = d.src(1 + reduces, "u32") if counted else None
        waits = "arrive" not in ins.parts

        def add(b: Batch, verdict: Any) -> None:
            ids = b.one(number(b))
            counts = b.one(count(b)) if count else np.zeros(b.n, int)
            for row in np.nonzero(b.any_active())[0].tolist():
                self._add(int(b.idx[row]), Named(int(ids[row]), int(counts[row]), waits))

        return add

    def _tcgen05_commit(self, ins: Instruction) -> Callable[[Batch, Any], None]:
        d = Decoder(ins, self.m)
        address = d.address(0)
        mask = d.src(1, "u16") if "multicast" in ins.parts else None

        def add(b: Batch, verdict: Any) -> None:
            addresses = b.lanes(address(b))
            masks = b.lanes(mask(b)) if mask else None
            first = b.first_lane()
            for row in np.nonzero(b.any_active())[0].tolist():
                warp = b.idx[row : row + 1]
                at = addresses[row, first[row] : first[row] + 1].astype(np.uint64)
                cta, offset = self.m.grid.shared_location(warp, at & np.uint64(0xFFFFFFF))
                places = [(int(cta[0]), int(offset[0]))]
                if masks is not None:
                    bits = int(masks[row, first[row]])
                    base = int(cta[0]) - int(self.m.grid.cta_rank[int(cta[0])])
                    places = [
                        (base + r, int(offset[0]))
                        for r in range(self.m.grid.cluster_size)
                        if bits >> r & 1
                    ]
                self._add(int(warp[0]), Commit("tcgen05", tuple(places)))

        return add

    def _global(
        self, ins: Instruction, waits: bool, adds: bool = False
    ) -> Callable[[Batch, Any], None]:
        d = Decoder(ins, self.m)
        address = d.address(next(i for i, o in enumerate(ins.operands) if isinstance(o, Address)))
        size, cta_of = width(ins), self.m.grid.warp_cta.tolist()

        def add(b: Batch, verdict: Any) -> None:
            addresses, active = b.lanes(address(b)).astype(np.int64), b.active()
            for row in np.nonzero(b.any_active())[0].tolist():
                at = addresses[row][active[row]]
                warp, touch = int(b.idx[row]), touched(at, size, waits, adds)
                if waits or adds:
                    self.added.update((at // LINE).tolist())
                if not (waits or adds):
                    touch = self.together.store(warp, cta_of[warp], at, size, self.programs[warp])
                    self.fetches.store(warp, at)
                self._add(warp, touch)

        return add


def _wgmma(ins: Instruction) -> Mma:
    shape = re.search(r"m64n(\d+)k(\d+)", ins.op)
    assert shape
    n, k = int(shape[1]), int(shape[2])
    a = 0 if isinstance(ins.operands[1], Vector) else 64 * 32
    return Mma(64, n, 2 * 64 * n * k, a + n * 32, (), _rate(ins.op))


def _rate(op: str) -> float:
    """FLOPs per cycle of an MMA, by the type of its operands, relative to 16-bit operands."""
    for part, rate in _RATES:
        if part in op:
            return rate
    return 1.0

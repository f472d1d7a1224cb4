"""Values that come from memory or registers which nothing has written.

An ordinary load of such memory is no fault: kernels load whole vectors and drop what lies behind
the end, and compilers leave registers undefined. A fault is what depends on the value: an address,
or what a store puts into global memory. So the values are followed through the registers, lane by
lane, from the first such load on, from lane to lane by `shfl`, `redux`, `ldmatrix` and `mma.sync`,
and through shared and local memory; a kernel that has none pays for a look at the words with each
load. What may choose between values ends the way, except where the choice is known, as that of
`selp` or of `max`: what is reported is sure, but it is not all. A branch is reported as an
advisory, as both ways may lead to the same. In global memory these are a script's empty tensors; a
copy of them there may be of rows that nobody reads, and is no fault.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cutex.sim.hazards.lane_values import (
    deciding,
    loaded_matrices,
    permuted,
    products,
    reduced,
    shuffled,
)
from cutex.sim.hazards.tmem_loads import effects
from cutex.sim.hazards.unwritten_shared import UnwrittenShared
from cutex.sim.hazards.value_steps import Step, steps_of, unassigned_of, uses_of
from cutex.sim.machine.events import Observer, SharedBytes, Storing
from cutex.sim.machine.memory import BLANK32, POISON32, Region
from cutex.sim.machine.operation import Operation, Span
from cutex.sim.ptx.operands import Imm, Reg, RegisterId, registers_of
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch, Lanes
    from cutex.sim.machine.findings import Findings
    from cutex.sim.machine.machine import Machine

# what is found: by place in the PTX and kind, the message and whether it is an advisory
Kept = dict[tuple[int, str], tuple[str, Instruction, bool]]

# A result of one of these depends on each of its sources,
_DEPENDS = frozenset(
    [
        *("abs", "add", "bfe", "brev", "clz", "copysign", "cos", "cvt", "div", "dp2a", "dp4a"),
        *("ex2", "fma", "lg2", "mad", "mul", "neg", "not", "popc", "rcp", "rem", "rsqrt", "sad"),
        *("setp", "shl", "shr", "sin", "sqrt", "sub", "tanh", "xor"),
    ]
)
# and of one of these perhaps on one of them only.
_MERGES = frozenset(("and", "max", "min", "mov", "or"))
_BLANK = np.frombuffer(BLANK32.tobytes(), np.uint8)
_MOST = 256  # registers that are followed


class _Origin(NamedTuple):
    """Where a value comes from: what nothing has written, and the place of its load, if any."""

    what: str
    load: str
    blank: bool = False  # global memory


@lru_cache(maxsize=256)
def _no_origins(warps: int) -> np.ndarray:
    """What lanes hold that hold no unwritten value, (warps, 32); read-only."""
    found = np.zeros((warps, 32), np.int16)
    found.setflags(write=False)
    return found


class UnwrittenValues(Observer):
    """The registers of all resident warps that hold such values. What is found is kept in ``kept``
    until the grid has ended: see `tell`.
    """

    def __init__(self, machine: Machine, kept: Kept) -> None:
        self.m, self.kept = machine, kept
        # by register: of each lane, (warps, 32), the number of its value's origin, or 0
        self.holds: dict[RegisterId, np.ndarray] = {}
        self.origins: list[_Origin] = []
        # of the origins in tensor memory that no use has been told of, by number: for each warp,
        # what is told, and the load
        self.tmem: dict[int, tuple[dict[int, str], Instruction]] = {}
        self.added: set[int] = set()  # the places that only this watches
        self.in_shared = UnwrittenShared(machine)
        self.in_local: np.ndarray | None = None  # by warp, lane and word: as in `holds`
        for register, name in unassigned_of(machine.program).items():
            origin = self._origin(f"register {name}", "")
            self.holds[register] = np.full((machine.grid.num_warps, 32), origin, np.int16)

    def watched_places(self) -> set[int]:
        uses = uses_of(self.m.program)
        return {pc for register in self.holds for pc in uses[register]}

    def shared(self, at: SharedBytes, write: bool, ordinary: bool, ins: Instruction) -> None:
        if write or not ordinary or ins.name not in ("ld", "ldmatrix"):
            return
        if at.width < 4:
            unwritten = np.all(self.in_shared.unwritten(at), axis=1)
            if unwritten.any():
                mine = at.warps[unwritten], at.lanes[unwritten]
                self._load(self._place(at, unwritten), *mine, ins)
            return
        cta, words = at.cta[:, None], at.offset[:, None] // 4 + np.arange(at.width // 4)
        numbers = self.in_shared.origins_of(cta, words)
        poison = self.in_shared.words[cta, words] == POISON32
        if numbers is None and not poison.any():
            return
        poison &= self.in_shared.unwritten(at).reshape(*poison.shape, 4).all(2)
        if numbers is None:
            numbers = np.zeros(poison.shape, np.int16)
        if poison.any():
            place = self._place(at, np.any(poison, axis=1))
            numbers[poison] = self._origin(place, ins.where())
        if ins.name == "ldmatrix":
            self._load_matrices(numbers, at, ins)
        else:
            self._follow_words(numbers, at.warps, at.lanes, at.width, ins)

    def shared_stores(
        self, where: Lanes, places: np.ndarray, values: np.ndarray, ins: Instruction
    ) -> None:
        """Note what is unwritten behind a store, and keep the origins of its values."""
        held = any(register in self.holds for register in effects(ins)[1])
        self.in_shared.note(places, values, held)
        if held and ins.name == "st" and (numbers := self._stored(where, values.shape[1], ins)):
            words = np.ascontiguousarray(values).view(np.uint32)
            for w, of in enumerate(numbers):
                self.in_shared.keep(places // 4 + w, words[:, w], of)

    def _stored(self, where: Lanes, width: int, ins: Instruction) -> list[np.ndarray]:
        """The origins of each word of ``width`` bytes that lanes store; none of parts of words."""
        stored = list(ins.operands)[-1]
        each = list(getattr(stored, "items", (stored,)))
        numbers = list[np.ndarray]()
        for register in each if width >= 4 * len(each) else ():
            of = np.zeros(len(where.warps), np.int16)
            if isinstance(register, Reg) and (register.bank, register.index) in self.holds:
                of = self.holds[register.bank, register.index][where.warps, where.lanes]
            numbers += [of] * (width // len(each) // 4)
        return numbers

    def local_accessed(self, where: Lanes, at: np.ndarray, write: bool, ins: Instruction) -> None:
        """Keep the origins of what is stored to local memory, and follow them from there."""
        if at.shape[1] < 4 or (self.in_local is None and not (write and self.holds)):
            return
        if self.in_local is None:
            self.in_local = np.zeros(
                (*self.m.local.shape[:2], -(-self.m.local_bytes // 4)), np.int16
            )
        words = where.warps[:, None], where.lanes[:, None], at[:, ::4] // 4
        if not write:
            numbers = self.in_local[words]
            if numbers.any():
                self._follow_words(numbers, where.warps, where.lanes, at.shape[1], ins)
        elif numbers := self._stored(where, at.shape[1], ins):
            self.in_local[words] = np.stack(numbers, 1)

    def completing(self, op: Operation) -> None:
        """Note what copies bring, and report what bulk stores take."""
        self.in_shared.brought(op)
        parts = op.instruction.parts
        if not op.is_store or {"tensor", "cp_mask"} & set(parts):
            return
        for place in op.reads:
            found = self.in_shared.in_span(place) if isinstance(place, Span) else None
            if found is not None:
                at, number = found
                what = f"shared memory 0x{at:x}"
                if number:
                    origin = self.origins[number - 1]
                    what += f", a value that comes from {origin.what}"
                who = self.m.grid.name_warp(op.warp)
                # NOTE: a word beside others in 16 bytes, the unit of bulk copies, may be padding
                self._keep(who, "stores in bulk", what, op.instruction, advisory=not number)

    def _load_matrices(self, numbers: np.ndarray, at: SharedBytes, ins: Instruction) -> None:
        """Follow what ldmatrix takes from rows whose words have these origins, (n, 4)."""
        registers = list(registers_of(next(iter(ins.operands))))
        if not {"m8n8", "b16"} <= set(ins.parts) or len(self.holds) + len(registers) > _MOST:
            return
        rows = numbers.reshape(-1, len(registers), 8, 4)
        each = loaded_matrices(rows, "trans" in ins.parts)
        warps = at.warps[:: 8 * len(registers)]
        for k, register in enumerate(registers):
            if each[:, k].any():
                self._follow(register)[warps] = each[:, k]

    @staticmethod
    def _place(at: SharedBytes, which: np.ndarray) -> str:
        return f"shared memory 0x{int(at.offset[int(which.argmax())]):x}"

    def global_loaded(self, where: Lanes, size: int, ins: Instruction) -> None:
        """Follow what a load takes of empty tensors; report what an atomic changes there."""
        if size < 4 or ins.name not in ("ld", "atom", "red"):
            return
        for region in self.m.memory.regions:
            if region.blank:
                inside = (where.addresses >= np.uint64(region.base)) & (
                    where.addresses + np.uint64(size) <= np.uint64(region.end)
                )
                mine = where if inside.all() else where.pick(inside)
                offsets = (mine.addresses - np.uint64(region.base)).astype(np.int64)
                blank = self._blank(region, offsets, size)
                if not blank.any():
                    continue
                if ins.name != "ld":
                    self._changes(region, mine, offsets, blank, ins)
                    continue
                what = region.element(int(offsets[int(blank.any(1).argmax())]))
                number = np.int16(self._origin(what, ins.where(), blank=True))
                numbers = blank.astype(np.int16) * number
                self._follow_words(numbers, mine.warps, mine.lanes, size, ins)

    def bulk_reduced(
        self, region: Region, offsets: np.ndarray, size: int, by: Storing, ins: Instruction
    ) -> None:
        if region.blank and size >= 4 and (blank := self._blank(region, offsets, size)).any():
            at = region.element(int(offsets[int(blank.any(1).argmax())]))
            self._keep(self.m.grid.name_warp(by.warp), "adds in bulk to", at, ins)

    @staticmethod
    def _blank(region: Region, offsets: np.ndarray, size: int) -> np.ndarray:
        """Which words at these offsets nothing has written, (n, size / 4)."""
        at = offsets[:, None] + np.arange(size)
        same = region.data[at] == _BLANK[(region.base + at) & 3]
        return np.asarray(same.reshape(len(offsets), size // 4, 4).all(2))

    def _changes(
        self, region: Region, where: Lanes, offsets: np.ndarray, blank: np.ndarray, ins: Instruction
    ) -> None:
        k = int(blank.any(1).argmax())
        who = f"{self.m.grid.name_warp(int(where.warps[k]))} lane {int(where.lanes[k])}"
        self._keep(who, "changes by an atomic", region.element(int(offsets[k])), ins)

    def _keep(
        self, who: str, does: str, what: str, ins: Instruction, advisory: bool = False
    ) -> None:
        told = f"{who} {does} {what}, which nothing has written"
        self.kept.setdefault((ins.line, does), (told, ins, advisory))

    def _follow_words(
        self,
        numbers: np.ndarray,
        warps: np.ndarray,
        lanes: np.ndarray,
        size: int,
        ins: Instruction,
    ) -> None:
        """Follow the registers that a load of ``size`` bytes fills from words of these origins,
        (n, w).
        """
        registers = list(registers_of(next(iter(ins.operands))))
        per = size // len(registers)  # bytes
        for k, register in enumerate(registers):
            first = k * per // 4
            of = numbers[:, first : max((k + 1) * per // 4, first + 1)].min(1)
            filled = of != 0
            if filled.any() and (register in self.holds or len(self.holds) < _MOST):
                self._follow(register)[warps[filled], lanes[filled]] = of[filled]

    def local_unwritten(self, where: Lanes, offset: np.ndarray, ins: Instruction) -> None:
        if len(offset):
            self._load(f"local memory at {offset[0]}", where.warps, where.lanes, ins)

    def tmem_unwritten(self, warps: np.ndarray, tells: list[str], ins: Instruction) -> None:
        """NOTE: kernels load sums that they have not begun, and add to none of them."""
        registers = effects(ins)[0]
        if len(self.holds) + len(registers) > _MOST:
            self.m.findings.add("uninitialised", tells[0], ins)
            return
        number = self._origin("tensor memory", ins.where())
        told, _ = self.tmem.setdefault(number, ({}, ins))
        told.update(zip(warps.tolist(), tells, strict=True))
        for register in registers:
            self._follow(register)[warps] = number

    def _check_tmem(self, b: Batch, ins: Instruction, step: Step) -> None:
        """Report an instruction that uses what a tcgen05.ld has loaded so."""
        read = {r for source in step.sources for r in source} | step.addresses
        for register in read & self.holds.keys() if ins.name not in ("mov", "selp") else ():
            numbers = self.holds[register][b.sel]
            which = np.isin(numbers, list(self.tmem)) & b.active() & self.m.live[b.idx]
            for row in np.flatnonzero(which.any(1))[:1].tolist():
                number = int(numbers[row][which[row]][0])
                told, load = self.tmem.pop(number)
                self.m.findings.add("uninitialised", told[int(b.idx[row])], load)

    def _load(self, what: str, warps: np.ndarray, lanes: np.ndarray, ins: Instruction) -> None:
        """Follow what these lanes, (n,), have loaded."""
        number = self._origin(what, ins.where())
        for register in effects(ins)[0]:
            if register in self.holds or len(self.holds) < _MOST:
                self._follow(register)[warps, lanes] = number

    def guarding(self, b: Batch, pc: int) -> None:
        """Tell of a store, an atomic or a copy that such a predicate guards."""
        ins = self.m.program.code[pc]
        if ins.guard is not None and ins.name in ("st", "red", "atom", "cp"):
            guard = self._of(b, ((ins.guard.bank, ins.guard.index),), True)
            self._tell(b, guard, "writes memory or leaves it by", ins, advisory=True)

    def using_registers(self, b: Batch, pc: int) -> None:
        """Follow the values through an instruction, or report it."""
        if not self.holds:
            return
        ins, step = self.m.program.code[pc], steps_of(self.m.program)[pc]
        if self.tmem:
            self._check_tmem(b, ins, step)
        self._check(b, ins, step)
        results = self._results(b, ins, step)
        for register, result in results.items():
            if register in self.holds or (result.any() and len(self.holds) < _MOST):
                holds, active = self._follow(register), b.active()
                holds[b.sel] = np.where(active, result, holds[b.sel])
                if not holds.any():
                    self._forget(register)

    def _forget(self, register: RegisterId) -> None:
        """Follow a register no more; with the last one, what was watched for them costs nothing."""
        del self.holds[register]
        if not self.holds:
            self.m.events.places -= self.added
            self.added.clear()

    def _follow(self, register: RegisterId) -> np.ndarray:
        """What the lanes hold in a register, which is watched from now on."""
        if register not in self.holds:
            self.holds[register] = np.zeros((self.m.grid.num_warps, 32), np.int16)
            more = uses_of(self.m.program)[register] - self.m.events.places
            self.added |= more
            self.m.events.places |= more
        return self.holds[register]

    def _origin(self, what: str, load: str, blank: bool = False) -> int:
        """The number of an origin."""
        known = [n for n, origin in enumerate(self.origins) if origin.load == load and load]
        if known:
            return known[0] + 1
        self.origins.append(_Origin(what, load, blank))
        return len(self.origins)

    def _of(self, b: Batch, registers: tuple[RegisterId, ...], all_: bool) -> np.ndarray:
        """The origin of the value of an operand, (n, 32); ``all_``: of one of several registers
        only if each has one.
        """
        each = [self.holds[r][b.sel] for r in registers if r in self.holds]
        if not each or (all_ and len(each) < len(registers)):
            return _no_origins(b.n)
        return reduce(np.minimum if all_ else np.maximum, each)

    def _results(self, b: Batch, ins: Instruction, step: Step) -> dict[RegisterId, np.ndarray]:
        """The origin of each of an instruction's results, (n, 32)."""
        if ins.name == "mma" and "m16n8" in ins.op:
            vectors = [[self._of(b, (r,), True) for r in source] for source in step.sources[:3]]
            results = registers_of(next(iter(ins.operands)))
            return dict(zip(results, products(*vectors), strict=True))
        of_first = self._result(b, ins, step)
        if ins.name == "shfl":  # NOTE: its predicate depends on no lane's value
            return {next(registers_of(next(iter(ins.operands)))): of_first}
        return dict.fromkeys(step.written, of_first)

    def _result(self, b: Batch, ins: Instruction, step: Step) -> np.ndarray:
        if ins.name == "shfl":
            mode = next(m for m in ("idx", "up", "down", "bfly") if m in ins.parts)
            values = self._of(b, step.sources[0], True)
            found = shuffled(mode, values, *(self._value(b, o) for o in list(ins.operands)[2:4]))
            return np.maximum(found, self._of(b, step.sources[1], True))
        if ins.name == "selp":
            yes, no, choice = step.sources
            first, second, register = list(ins.operands)[1:4]
            assert isinstance(register, Reg)
            chosen = self.m.register(register)[b.sel]
            found = np.where(chosen, self._of(b, yes, True), self._of(b, no, True))
            if choice[0] in self.holds and isinstance(first, Reg | Imm) and not found.any():
                differ = self._value(b, first) != self._value(b, second)
                found = np.where(differ, self._of(b, choice, True), 0)
            return found
        if ins.name == "redux":
            return reduced(ins.parts[2], self._of(b, step.sources[0], True), b.active())
        if ins.name == "prmt" and len(step.sources) == 3:
            which = self._value(b, list(ins.operands)[3])
            both = [self._of(b, s, True) for s in step.sources[:2]]
            return permuted(both, which, ins.parts[2:])
        if ins.op in ("and.pred", "or.pred") and all(isinstance(o, Reg) for o in ins.operands):
            return self._decided(b, ins, step)
        if ins.name not in _DEPENDS | _MERGES or not step.sources:
            return _no_origins(b.n)
        if ins.name in ("and", "max", "min", "or") and len(step.sources) == 2:
            return self._chosen(b, ins, step)
        several = len(step.sources) > (2 if ins.name == "setp" else 1)
        packs = ins.name in ("setp", "cvt") and several
        merges = ins.name in _MERGES or packs
        numbers = (self._of(b, s, True) for s in step.sources)
        return reduce(np.minimum if merges else np.maximum, numbers)

    def _chosen(self, b: Batch, ins: Instruction, step: Step) -> np.ndarray:
        """The origin of the larger or smaller of two values, or of their bits together, of which
        the other one does not decide alone.
        """
        first, second = (self._of(b, s, True) for s in step.sources)
        if not (first.any() or second.any()):
            return first
        by = [self._decides(b, o, ins) for o in list(ins.operands)[1:3]]
        both = np.minimum(first, second)
        return np.maximum(both, np.maximum(first * ~by[1], second * ~by[0]))

    def _decides(self, b: Batch, operand: object, ins: Instruction) -> np.ndarray:
        """Where the value of an operand may decide alone, (n, 32)."""
        value: np.ndarray | None = None
        if isinstance(operand, Reg):
            value = b.lanes(self.m.register(operand)[b.sel])
        elif isinstance(operand, Imm):
            value = np.full((b.n, 32), operand.value)
        return deciding(ins.name, ins.parts[-1], value, (b.n, 32))

    def _decided(self, b: Batch, ins: Instruction, step: Step) -> np.ndarray:
        """The origin of the conjunction or disjunction of two predicates, of which the other one
        does not decide alone.
        """
        origins = [self._of(b, s, True) for s in step.sources]
        decides = ins.name == "or"  # this value of one of them
        free = [self._value(b, o) != decides for o in list(ins.operands)[1:3]]
        free = [f | (o != 0) for f, o in zip(free, origins, strict=True)]
        return np.maximum(origins[0] * free[1], origins[1] * free[0])

    def _value(self, b: Batch, operand: object) -> np.ndarray:
        """An integer operand of each lane, (n, 32)."""
        if isinstance(operand, Reg):
            return b.lanes(self.m.register(operand)[b.sel])
        assert isinstance(operand, Imm)
        return b.lanes(np.int64(operand.value))

    def _check(self, b: Batch, ins: Instruction, step: Step) -> None:
        if ins.guard is not None:
            guard = self._of(b, ((ins.guard.bank, ins.guard.index),), True)
            if ins.name == "bra":
                self._tell(b, guard, "takes or leaves a branch by", ins, advisory=True)
        if ins.name in ("bar", "barrier") and step.sources and step.sources[0]:
            barriers = self._of(b, step.sources[0], False)
            self._tell(b, barriers, "names a barrier by", ins)
        if "prefetch" in ins.parts:
            return
        if step.addresses:
            addresses = self._of(b, tuple(step.addresses), False)
            if self._tell(b, addresses, "accesses memory at an address that comes from", ins):
                return
        if "global" in ins.parts and ins.name in ("st", "red", "atom"):
            values = [self._of(b, s, True) for s in step.sources if s]
            if values:
                numbers = reduce(np.maximum, values)
                blank = [n for n, origin in enumerate(self.origins, 1) if origin.blank]
                numbers = np.where(np.isin(numbers, blank), 0, numbers) if blank else numbers
                self._tell(b, numbers, "stores into global memory a value that comes from", ins)

    def _tell(
        self, b: Batch, numbers: np.ndarray, does: str, ins: Instruction, advisory: bool = False
    ) -> bool:
        wrong = (numbers != 0) & b.active() & self.m.live[b.idx]
        if not wrong.any():
            return False
        if (ins.line, does) in self.kept:
            return True
        row, lane = (int(v[0]) for v in np.nonzero(wrong))
        origin = self.origins[int(numbers[row, lane]) - 1]
        by = f", by the load at {origin.load}" if origin.load else ""
        message = (
            f"{self.m.grid.name_warp(int(b.idx[row]))} lane {lane} {does} {origin.what}, which "
            f"nothing has written{by}"
        )
        self.kept[ins.line, does] = message, ins, advisory
        return True


def tell(findings: Findings, kept: Kept) -> None:
    """Report what was kept, unless something else was found: a race's reader comes before the
    writer, too.
    """
    if all(found.advisory for found in findings):
        for message, ins, advisory in kept.values():
            findings.add("uninitialised", message, ins, advisory)
    kept.clear()

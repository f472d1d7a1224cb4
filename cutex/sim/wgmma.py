"""Warpgroup matrix multiply-accumulate of sm_90a (PTX ISA 9.7.15)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.decode import Decoder, Execute, instruction
from cutex.sim.errors import BadOperand
from cutex.sim.flight import Operation
from cutex.sim.matrices import ELEMENTS, ITEMSIZE, SharedOperand, read_descriptor
from cutex.sim.memory import POISON32
from cutex.sim.ptx import Imm, Instruction, Reg, Vector
from cutex.sim.sync import require_whole_warp

if TYPE_CHECKING:
    from cutex.sim.machine import Batch, Machine


@dataclass
class Accumulator:
    """The D registers of a warpgroup while wgmma works on them; warps load and leave one by one."""

    registers: tuple[int, ...]  # indices in the 32-bit bank, in fragment order
    values: np.ndarray  # (4 warps, 16 rows, N) float32
    by: Instruction
    in_flight: np.ndarray = field(
        default_factory=lambda: np.zeros(4, np.int64)
    )  # operations, per warp
    loaded: np.ndarray = field(default_factory=lambda: np.zeros(4, bool))


@dataclass
class _Group:
    in_flight: int = 0


@dataclass
class _WarpState:
    open: _Group = field(default_factory=_Group)
    committed: list[_Group] = field(default_factory=list)
    issued: int = 0
    sources: list[tuple[set[int], _Group, Instruction]] = field(
        default_factory=list
    )  # A registers in flight


@dataclass
class _Rendezvous:
    """One wgmma of a warpgroup: it is issued when its four warps have come."""

    ins: Instruction
    a: int | None  # descriptors
    b: int
    keep: bool
    acc: Accumulator
    groups: list[tuple[int, _Group]] = field(default_factory=list)
    fragments: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # A in registers: warp of the group -> (16, K)


def fragment_coordinates(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row (of 16) and column of register i in lane t of an m64nNk16 D fragment: two (N/2, 32) arrays (9.7.15.5.2)."""
    i, t = np.arange(n // 2)[:, None], np.arange(32)[None, :]
    return t // 4 + 8 * (i // 2 % 2) + 0 * i, 8 * (i // 4) + 2 * (t % 4) + i % 2


class WarpgroupMma:
    """wgmma groups and accumulators of the resident warps."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.warps: dict[int, _WarpState] = {}
        self.accumulators: dict[tuple[int, int], list[Accumulator]] = {}  # by (cta, warpgroup)
        self.meeting: dict[tuple[int, int, int], _Rendezvous] = {}  # by (cta, warpgroup, number)

    def state(self, warp: int) -> _WarpState:
        return self.warps.setdefault(warp, _WarpState())

    def warp(self, key: tuple[int, int], inside: int) -> int:
        """Number of warp ``inside`` (0..3) of a warpgroup."""
        return (key[1] * 4 + inside) * self.m.num_ctas + key[0]

    def take(
        self,
        key: tuple[int, int],
        inside: list[int],
        registers: tuple[int, ...],
        n: int,
        ins: Instruction,
    ) -> Accumulator:
        """The accumulator in these registers: the one in flight, or a new one, loaded for the warps ``inside``.

        While it is in flight, the registers hold poison: what reads them before wgmma.wait_group reads NaN.
        """
        accumulators = self.accumulators.setdefault(key, [])
        acc = None
        for other in accumulators:
            if other.registers == registers:
                acc = other
            elif set(other.registers) & set(registers):
                who = self.m.name_warp(self.warp(key, inside[0]))
                self.m.find(
                    "race",
                    f"wgmma of {who} accumulates in registers that {other.by.where()} still writes",
                    ins,
                )
        if acc is None:
            acc = Accumulator(registers, np.empty((4, 16, n), np.float32), ins)
            accumulators.append(acc)
        fresh = [i for i in inside if not acc.loaded[i]]
        if fresh:
            bank, row, column = self.m.registers[32], *fragment_coordinates(n)
            warps = [self.warp(key, i) for i in fresh]
            fragments = bank[np.ix_(registers, warps)].view(np.float32)  # (N/2, warps, 32)
            for j, i in enumerate(fresh):
                acc.values[i][row, column] = fragments[:, j]
            bank[np.ix_(registers, warps)] = POISON32
            acc.loaded[fresh] = True
        acc.in_flight[inside] += 1
        return acc

    def release(self, key: tuple[int, int], acc: Accumulator) -> None:
        """One operation of all four warps is complete: registers come back where it was the last."""
        acc.in_flight -= 1
        done = np.nonzero(acc.loaded & (acc.in_flight == 0))[0]
        if not len(done):
            return
        row, column = fragment_coordinates(acc.values.shape[2])
        fragments = np.stack([acc.values[i][row, column] for i in done], 1)
        warps = [self.warp(key, int(i)) for i in done]
        self.m.registers[32][np.ix_(acc.registers, warps)] = fragments.view(np.uint32)
        acc.loaded[done] = False
        if not acc.loaded.any():
            self.accumulators[key].remove(acc)

    def check_registers(
        self, b: Batch, read: set[int], written: set[int], ins: Instruction
    ) -> None:
        """Finds an instruction that touches registers of a wgmma in flight (9.7.15.7.1: undefined)."""
        for warp in map(int, b.idx):
            state = self.warps.get(warp)
            if state is None:
                continue
            inside = int(self.m.warp_in_cta[warp])
            for acc in self.accumulators.get((int(self.m.warp_cta[warp]), inside // 4), ()):
                if acc.in_flight[inside % 4] and (read | written) & set(acc.registers):
                    verb = "reads" if read & set(acc.registers) else "writes"
                    self.m.find(
                        "race",
                        f"{self.m.name_warp(warp)} {verb} an accumulator register before wgmma.wait_group; it is in flight since {acc.by.where()}",
                        ins,
                    )
            for registers, group, by in state.sources:
                if group.in_flight and written & registers:
                    self.m.find(
                        "race",
                        f"{self.m.name_warp(warp)} writes an A register that the wgmma issued at {by.where()} may still read",
                        ins,
                    )


def accumulator_registers(code: list[Instruction]) -> set[int]:
    """32-bit registers that any wgmma of the program uses: only these need `check_registers`."""
    found: set[int] = set()
    for ins in code:
        if ins.op.startswith("wgmma.mma_async"):
            for operand in ins.operands[:2]:
                if isinstance(operand, Vector):
                    found |= {r.index for r in operand.items if isinstance(r, Reg)}
    return found


@instruction("wgmma")
def wgmma(d: Decoder) -> Execute:
    """9.7.15: routes to fence, mma_async, commit_group and wait_group."""
    what = d.parts[1]
    if what == "fence":
        return lambda b: None  # NOTE: registers are written in program order here
    if what == "mma_async":
        return _mma_async(d)
    if what == "commit_group":
        return _commit(d)
    if what == "wait_group":
        return _wait(d)
    raise d.unknown()


def _commit(d: Decoder) -> Execute:
    """9.7.15.7.2"""

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        for warp in b.idx[b.any_active()].tolist():
            state = d.m.warpgroups.state(warp)
            state.committed.append(state.open)
            state.open = _Group()

    return execute


def _wait(d: Decoder) -> Execute:
    """9.7.15.7.3: until at most N groups of this warp are pending."""
    from cutex.sim.machine import RETRY, Wait

    allowed = d.ins.operands[0]
    assert isinstance(allowed, Imm)
    n, m, ins = int(allowed.value), d.m, d.ins

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            state = m.warpgroups.state(warp)
            groups = state.committed
            while groups and not groups[0].in_flight:
                groups.pop(0)
            state.sources = [s for s in state.sources if s[1].in_flight]
            if any(g.in_flight for g in groups[: max(0, len(groups) - n)]):
                out[row] = RETRY
                m.sleep(
                    warp,
                    Wait("wgmma group", ("wgmma", warp), ins, lambda: "waits for its wgmma groups"),
                )
        return out if out.any() else None

    return execute


_KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")


def _mma_async(d: Decoder) -> Execute:
    """9.7.15.5: D (64 x N, registers) = A (shared memory or registers) * B (shared memory) + D * scale-d."""
    shape = re.search(r"m64n(\d+)k(\d+)", d.ins.op)
    assert shape
    n = int(shape.group(1))
    kinds = [p for p in d.parts if p in (*_KINDS, "f32", "s32", "s8", "u8")]
    if kinds[0] != "f32" or any(k not in _KINDS for k in kinds[1:]):
        raise d.unknown("accumulator or operand type")
    a_kind, b_kind = kinds[1], kinds[2]
    ops = d.ins.operands
    assert isinstance(ops[0], Vector)
    registers = tuple(r.index for r in ops[0].items if isinstance(r, Reg))
    if len(registers) != n // 2:
        raise d.unknown("size of D")
    a_registers = (
        tuple(r.index for r in ops[1].items if isinstance(r, Reg))
        if isinstance(ops[1], Vector)
        else None
    )
    a_desc = None if a_registers else d.src(1, "b64")
    b_desc = d.src(2, "b64")
    scale = d.src(3, "pred") if not isinstance(ops[3], Imm) else (lambda b, v=bool(ops[3].value): v)
    immediates = [int(o.value) for o in ops[4:] if isinstance(o, Imm)]
    negate_a, negate_b = (v == -1 for v in immediates[:2])
    majors = [*immediates[2:], 0, 0]
    a_mn, b_mn = (
        (bool(majors[0]), bool(majors[1])) if a_registers is None else (False, bool(majors[0]))
    )
    m, ins = d.m, d.ins

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        use_d = b.one(np.broadcast_to(scale(b), (b.n, 32)))
        bs = b.one(b_desc(b))
        a_s = b.one(a_desc(b)) if a_desc else None
        parts: dict[tuple[int, int, int], list[int]] = {}
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            state = m.warpgroups.state(warp)
            parts.setdefault(
                (int(m.warp_cta[warp]), int(m.warp_in_cta[warp]) // 4, state.issued), []
            ).append(row)
            state.issued += 1
        for where, rows in parts.items():
            key = where[:2]
            inside = [int(m.warp_in_cta[b.idx[r]]) % 4 for r in rows]
            acc = m.warpgroups.take(key, inside, registers, n, ins)
            a = None if a_s is None else int(a_s[rows[0]])
            meeting = m.warpgroups.meeting.setdefault(
                where, _Rendezvous(ins, a, int(bs[rows[0]]), bool(use_d[rows[0]]), acc)
            )
            for row, i in zip(rows, inside, strict=True):
                warp = int(b.idx[row])
                same = (None if a_s is None else int(a_s[row]), int(bs[row]), ins) == (
                    meeting.a,
                    meeting.b,
                    meeting.ins,
                )
                if not same:
                    raise BadOperand(
                        f"bad operand: {m.name_warp(warp)} executes another wgmma, or other descriptors, than its warpgroup\n    at {ins.where()}"
                    )
                state = m.warpgroups.state(warp)
                state.open.in_flight += 1
                meeting.groups.append((warp, state.open))
                if a_registers is not None:
                    state.sources.append((set(a_registers), state.open, ins))
            if a_registers is not None:
                held = _a_fragment(
                    m.registers[32][np.ix_(a_registers, [int(b.idx[r]) for r in rows])], a_kind
                )
                meeting.fragments.update(zip(inside, held, strict=True))
            if len(meeting.groups) == 4:
                del m.warpgroups.meeting[where]
                issue(key, meeting)

    def issue(key: tuple[int, int], meeting: _Rendezvous) -> None:
        cta = key[0]
        b_op = SharedOperand(
            m,
            cta,
            read_descriptor(meeting.b, False, ins),
            n,
            b_kind,
            b_mn,
            "operand B of wgmma",
            ins,
        )
        reads: list[Any] = [b_op.span()]
        if meeting.a is not None:
            a_op = SharedOperand(
                m,
                cta,
                read_descriptor(meeting.a, False, ins),
                64,
                a_kind,
                a_mn,
                "operand A of wgmma",
                ins,
            )
            reads.append(a_op.span())
            a_values: Callable[[], np.ndarray] = a_op.values
        else:
            a_values = lambda: np.concatenate([meeting.fragments[i] for i in range(4)])

        def complete() -> None:
            product = a_values() @ b_op.values().T  # (64, N)
            if negate_a != negate_b:
                product = -product
            product = product.reshape(4, 16, n)
            if meeting.keep:
                meeting.acc.values += product
            else:
                meeting.acc.values[...] = product
            m.warpgroups.release(key, meeting.acc)
            for warp, group in meeting.groups:
                group.in_flight -= 1
                if not group.in_flight:
                    m.wake(("wgmma", warp))

        warp = m.warpgroups.warp(key, 0)
        m.flight.issue(Operation("the wgmma", warp, ins, ("wgmma", *key), complete, reads=reads))

    return execute


def _a_fragment(words: np.ndarray, kind: str) -> np.ndarray:
    """A in registers: (4, warps, 32) words -> (warps, 16, K) float32 (9.7.15.5.1.1)."""
    size = ITEMSIZE[kind]
    per = 4 // size
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    values = ELEMENTS[kind](raw).reshape(4, words.shape[1], 32, per)
    out = np.empty((words.shape[1], 16, 32 // size), np.float32)
    t = np.arange(32)
    for i in range(4):
        for e in range(per):
            out[:, t // 4 + 8 * (i % 2), per * (t % 4) + e + per * 4 * (i // 2)] = values[
                i, :, :, e
            ]
    return out

"""Warpgroup matrix multiply-accumulate of sm_90a (PTX ISA 9.7.15)."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.matrices import (
    ELEMENTS,
    ITEMSIZE,
    Form,
    SharedOperand,
    accumulate,
    read_descriptor,
)
from cutex.sim.isa.sync import require_whole_warp, same_in_warp
from cutex.sim.machine.batch import RETRY, Batch
from cutex.sim.machine.events import RegisterUse
from cutex.sim.machine.operation import Engine, Footprint, Kind, Operation, Span
from cutex.sim.machine.registers import Registers
from cutex.sim.machine.waits import Wait
from cutex.sim.machine.warpgroup import Descriptors, Group, Rendezvous
from cutex.sim.numerics.fp8_sum import add_products
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Imm, Operand, Reg, Vector


@instruction("wgmma.fence")
def fence(d: Decoder) -> Execute:
    """wgmma.fence (9.7.15.7.1): registers are written in program order here; observers are
    notified of the fence.
    """

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        d.m.events.wgmma_fenced(b.idx[b.any_active()])

    return execute


@instruction("wgmma.commit_group")
def commit(d: Decoder) -> Execute:
    """wgmma.commit_group (9.7.15.7.2): the warp's wgmmas since the last one form a group."""

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        for warp in b.idx[b.any_active()].tolist():
            state = d.m.warpgroups.state(warp)
            state.committed.append(state.open)
            state.commits += 1
            state.open = Group()

    return execute


@instruction("wgmma.wait_group")
def wait(d: Decoder) -> Execute:
    """wgmma.wait_group (9.7.15.7.3): waits until at most N groups of this warp are pending."""
    n, m, ins = d.immediate(0), d.m, d.ins

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        warps = b.idx.tolist()
        passed: list[int] = []
        counts: list[int] = []
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = warps[row]
            state = m.warpgroups.state(warp)
            groups = state.committed
            while groups and not groups[0].in_flight:
                groups.pop(0)
            if len(groups) > n and any(g.in_flight for g in groups[: len(groups) - n]):
                out[row] = RETRY
                m.sleep(
                    warp,
                    Wait("wgmma group", ("wgmma", warp), ins, lambda: "waits for its wgmma groups"),
                )
            else:
                passed.append(warp)
                counts.append(state.commits - n)
        if passed:
            m.events.waited(passed, Kind.TENSOR, counts)
        return out if out.any() else None

    return execute


_OPERANDS = {  # types of A and B that go with a type of D
    "f32": ("f16", "bf16", "tf32", "e4m3", "e5m2"), "f16": ("f16", "e4m3", "e5m2"),
    "s32": ("s8", "u8"),
}  # fmt: skip
_KINDS = (*_OPERANDS, "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")


@instruction("wgmma.mma_async")
def mma_async(d: Decoder) -> Execute:
    """wgmma.mma_async (9.7.15.5): D (64 x N, registers) = A (shared memory or registers) * B
    (shared memory) + D * scale-d.
    """
    return Wgmma(d).execute


class _Operands(NamedTuple):
    """The shared memory operands of a warpgroup's wgmma."""

    a: SharedOperand | None  # None: A is in registers
    b: SharedOperand
    reads: list[Footprint]
    bytes: int


class Wgmma:
    """One wgmma instruction of the program, which the warps of a warpgroup execute together."""

    def __init__(self, d: Decoder) -> None:
        self.d, self.m, self.ins = d, d.m, d.ins
        shape = re.search(r"m64n(\d+)k(\d+)", d.ins.op)
        assert shape
        d.only("mma_async", "sync", "aligned", "satfinite", shape.group(), *_KINDS)
        self.n, self.k = int(shape.group(1)), int(shape.group(2))
        self.d_kind, a_kind, b_kind = self._kinds()
        if self.k * ITEMSIZE[a_kind] != 32:
            raise d.unknown(f"k{self.k} of {a_kind}")
        self.saturate = "satfinite" in d.mods
        ops = d.ins.operands
        self.registers = _indices(ops[0])
        if len(self.registers) != self.n // (4 if self.d_kind == "f16" else 2):
            raise d.unknown("size of D")
        self.a_registers = _indices(ops[1])  # none where A is in shared memory
        self.touches = np.array(self.registers + self.a_registers)
        self.results = Registers.of(self.registers)
        self.sources = Registers.of(self.a_registers) if self.a_registers else None
        self.operands: dict[Hashable, _Operands] = {}
        self.a_desc = None if self.a_registers else d.src(1, "b64")
        self.b_desc = d.src(2, "b64")
        keep = ops[3]
        self.keep = d.src(3, "pred") if not isinstance(keep, Imm) else (lambda b: bool(keep.value))
        immediates = [int(o.value) for o in ops[4:] if isinstance(o, Imm)]
        signs, majors = [*immediates[:2], 1, 1], [*immediates[2:], 0, 0]
        self.negate = (signs[0] == -1) != (signs[1] == -1)
        if self.a_registers:
            majors.insert(0, 0)  # registers have no major mode
        self.a_form = Form("operand A of wgmma", a_kind, 64, bool(majors[0]))
        self.b_form = Form("operand B of wgmma", b_kind, self.n, bool(majors[1]))

    def _kinds(self) -> list[str]:
        """The types of D, A and B."""
        kinds = [p for p in self.d.parts if p in _KINDS]
        if len(kinds) != 3 or any(kind not in _OPERANDS.get(kinds[0], ()) for kind in kinds[1:]):
            raise self.d.unknown("accumulator or operand type")
        return kinds

    def execute(self, b: Batch) -> None:
        require_whole_warp(self.d, b)
        keep = same_in_warp(self.d, b, self.keep(b), "values of scale-d")
        bs = same_in_warp(self.d, b, self.b_desc(b), "descriptors")
        a_s = same_in_warp(self.d, b, self.a_desc(b), "descriptors") if self.a_desc else None
        m = self.m
        parts: dict[tuple[int, int, int], dict[int, Descriptors]] = {}
        rows = np.nonzero(b.any_active())[0]
        ctas, groups = m.grid.warp_cta[b.idx].tolist(), (m.grid.warp_in_cta[b.idx] // 4).tolist()
        all_b, all_keep = bs.tolist(), keep.tolist()
        all_a = [None] * b.n if a_s is None else a_s.tolist()
        warps = b.idx.tolist()
        states = m.warpgroups.warps
        numbers = [states[warps[row]].commits + 1 for row in rows.tolist()]
        use = RegisterUse(self.results, self.sources, self.touches, numbers)
        m.events.wgmma_executes(b.idx[rows], use, self.ins)
        for row in rows.tolist():
            warp = warps[row]
            state = states[warp]
            where = ctas[row], groups[row], state.issued
            descriptors = Descriptors(all_a[row], all_b[row], all_keep[row])
            parts.setdefault(where, {})[warp] = descriptors
            state.issued += 1
        alike: dict[Hashable, list[Operation]] = {}
        for where, by_warp in parts.items():
            meeting = self._join(where, by_warp)
            if len(meeting.groups) == 4:
                del m.warpgroups.meeting[where]
                self._issue(where[:2], meeting, alike)
        for ops in alike.values():
            m.flight.issue(*ops)

    def _join(self, where: tuple[int, int, int], by_warp: dict[int, Descriptors]) -> Rendezvous:
        """Let warps of a warpgroup, perhaps all of it, arrive at their wgmma."""
        m, key = self.m, where[:2]
        inside = [warp // m.grid.num_ctas % 4 for warp in by_warp]
        first = next(iter(by_warp.values()))
        acc = m.warpgroups.take(
            key, inside, self.results, self.n, self.d_kind, self.ins, first.keep
        )
        meeting = m.warpgroups.meeting.setdefault(where, Rendezvous(self.ins, first, acc))
        for warp, descriptors in by_warp.items():
            if descriptors != meeting.descriptors or self.ins is not meeting.ins:
                raise BadOperand.at(
                    self.ins,
                    f"{m.grid.name_warp(warp)} executes another wgmma, or other descriptors, than "
                    "its warpgroup",
                )
            state = m.warpgroups.warps[warp]
            state.open.in_flight += 1
            meeting.groups.append((warp, state.open))
            meeting.agents.append((warp, state.commits + 1))
        if self.a_registers:
            words = m.registers[32][np.ix_(self.a_registers, list(by_warp))]
            fragments = _a_fragment(words, self.a_form.kind)
            meeting.fragments.update(zip(inside, fragments, strict=True))
        return meeting

    def _issue(
        self,
        key: tuple[int, int],
        meeting: Rendezvous,
        alike: dict[Hashable, list[Operation]],
    ) -> None:
        """Add the operation to those that read the same places in other CTAs."""
        descriptors = meeting.descriptors
        inside = tuple(warp // self.m.grid.num_ctas % 4 for warp, _ in meeting.groups)
        place = key[0], descriptors.a, descriptors.b, inside
        operands = self.operands.get(place)
        if operands is None:
            operands = self.operands[place] = self._operands(key[0], descriptors, inside)
        warp, queue = self.m.warpgroups.warp(key, 0), ("wgmma", *key)
        op = Operation(
            "the wgmma", warp, self.ins, queue, lambda: self._complete(key, meeting, operands),
            Engine.WGMMA, operands.bytes, 2 * 64 * self.n * self.k, operands.reads,
            agents=meeting.agents, issuers=[w for w, _ in meeting.groups],
        )  # fmt: skip
        rank = int(self.m.grid.cta_rank[key[0]])
        alike.setdefault((descriptors, inside, rank, key[1]), []).append(op)

    def _operands(self, cta: int, descriptors: Descriptors, inside: tuple[int, ...]) -> _Operands:
        """The operands of one CTA's wgmma; ``inside``: for each issuing warp, its number in the
        warpgroup.
        """
        a, b = None, self._shared(cta, descriptors.b, self.b_form)
        reads: list[Footprint] = [b.span()]
        if descriptors.a is not None:
            a = self._shared(cta, descriptors.a, self.a_form)
            # NOTE: each warp multiplies its own 16 rows of A, and NVIDIA's kernels rely on it; the
            # PTX ISA does not define whether other warps may write them during the wgmma
            reads += [a.quarter(which, part) for part, which in enumerate(inside)]
        return _Operands(a, b, reads, sum(s.size for s in reads if isinstance(s, Span)))

    def _shared(self, cta: int, descriptor: int, form: Form) -> SharedOperand:
        desc = read_descriptor(descriptor, False, self.ins)
        return SharedOperand(self.m, cta, desc, form, self.ins)

    def _complete(self, key: tuple[int, int], meeting: Rendezvous, operands: _Operands) -> None:
        m, values = self.m, meeting.acc.values.reshape(64, self.n)
        if operands.a is None:
            a = np.concatenate([meeting.fragments[i] for i in range(4)])
        else:
            a = operands.a.values()  # (64, K)
        a = -a if self.negate else a
        b = operands.b.values()  # (N, K)
        old = values if meeting.descriptors.keep else None
        if self.a_form.kind in ("e4m3", "e5m2") and self.d_kind == "f32":
            values[...] = add_products(np.zeros_like(values) if old is None else old, a, b)
        elif self.d_kind == "f32" and old is not None:
            old += a @ b.T
        else:
            values[...] = accumulate(old, a @ b.T, self.d_kind, self.saturate)
        m.warpgroups.release(key, meeting.acc)
        for warp, group in meeting.groups:
            group.in_flight -= 1
            if not group.in_flight:
                m.wake(("wgmma", warp))


def _indices(operand: Operand) -> tuple[int, ...]:
    """The indices of the registers in a vector; none for another operand."""
    items = operand.items if isinstance(operand, Vector) else ()
    return tuple(r.index for r in items if isinstance(r, Reg))


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

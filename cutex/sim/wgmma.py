"""Warpgroup matrix multiply-accumulate of sm_90a (PTX ISA 9.7.15)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.decode import Decoder, Execute, instruction
from cutex.sim.errors import BadOperand
from cutex.sim.flight import Operation
from cutex.sim.machine import RETRY, Batch, Wait
from cutex.sim.matrices import ELEMENTS, ITEMSIZE, Form, SharedOperand, accumulate, read_descriptor
from cutex.sim.ptx import Imm, Instruction, Reg, Vector
from cutex.sim.sync import require_whole_warp
from cutex.sim.warpgroup import Group, Rendezvous


def accumulator_registers(code: list[Instruction]) -> set[int]:
    """32-bit registers that any wgmma of the program uses: only these need `check_registers`."""
    found: set[int] = set()
    for ins in code:
        if ins.op.startswith("wgmma.mma_async"):
            for operand in ins.operands[:2]:
                if isinstance(operand, Vector):
                    found |= {r.index for r in operand.items if isinstance(r, Reg)}
    return found


@instruction("wgmma.fence")
def fence(d: Decoder) -> Execute:
    """9.7.15.7.1: registers are written in program order here, so it has nothing to order."""
    return lambda b: None


@instruction("wgmma.commit_group")
def commit(d: Decoder) -> Execute:
    """9.7.15.7.2"""

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        for warp in b.idx[b.any_active()].tolist():
            state = d.m.warpgroups.state(warp)
            state.committed.append(state.open)
            state.open = Group()

    return execute


@instruction("wgmma.wait_group")
def wait(d: Decoder) -> Execute:
    """9.7.15.7.3: until at most N groups of this warp are pending."""
    n, m, ins = d.immediate(0), d.m, d.ins

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


_OPERANDS = {  # types of A and B that go with a type of D
    "f32": ("f16", "bf16", "tf32", "e4m3", "e5m2"), "f16": ("f16", "e4m3", "e5m2"),
    "s32": ("s8", "u8"),
}  # fmt: skip
_KINDS = (*_OPERANDS, "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")


@instruction("wgmma.mma_async")
def mma_async(d: Decoder) -> Execute:
    """9.7.15.5: D (64 x N, registers) = A (shared memory or registers) * B (shared memory) + D *
    scale-d.
    """
    shape = re.search(r"m64n(\d+)k(\d+)", d.ins.op)
    assert shape
    d.only("mma_async", "sync", "aligned", "satfinite", shape.group(), *_KINDS)
    n, k = int(shape.group(1)), int(shape.group(2))
    kinds = [p for p in d.parts if p in _KINDS]
    if len(kinds) != 3 or any(kind not in _OPERANDS.get(kinds[0], ()) for kind in kinds[1:]):
        raise d.unknown("accumulator or operand type")
    d_kind, a_kind, b_kind = kinds
    if k * ITEMSIZE[a_kind] != 32:
        raise d.unknown(f"k{k} of {a_kind}")
    saturate = "satfinite" in d.mods
    ops = d.ins.operands
    assert isinstance(ops[0], Vector)
    registers = tuple(r.index for r in ops[0].items if isinstance(r, Reg))
    if len(registers) != n // (4 if d_kind == "f16" else 2):
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
    negate_a, negate_b = (v == -1 for v in [*immediates, 1, 1][:2])
    majors = [*immediates[2:], 0, 0]
    a_mn, b_mn = (
        (bool(majors[0]), bool(majors[1])) if a_registers is None else (False, bool(majors[0]))
    )
    a_form = Form("operand A of wgmma", a_kind, 64, a_mn)
    b_form = Form("operand B of wgmma", b_kind, n, b_mn)
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
            acc = m.warpgroups.take(key, inside, registers, n, d_kind, ins)
            a = None if a_s is None else int(a_s[rows[0]])
            meeting = m.warpgroups.meeting.setdefault(
                where, Rendezvous(ins, a, int(bs[rows[0]]), bool(use_d[rows[0]]), acc)
            )
            for row in rows:
                warp = int(b.idx[row])
                same = (None if a_s is None else int(a_s[row]), int(bs[row]), ins) == (
                    meeting.a,
                    meeting.b,
                    meeting.ins,
                )
                if not same:
                    raise BadOperand.at(
                        ins,
                        f"{m.name_warp(warp)} executes another wgmma, or other descriptors, than "
                        "its warpgroup",
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

    def shared(cta: int, descriptor: int, form: Form) -> SharedOperand:
        return SharedOperand(m, cta, read_descriptor(descriptor, False, ins), form, ins)

    def issue(key: tuple[int, int], meeting: Rendezvous) -> None:
        cta = key[0]
        b_op = shared(cta, meeting.b, b_form)
        reads: list[Any] = [b_op.span()]
        if meeting.a is not None:
            a_op = shared(cta, meeting.a, a_form)
            reads.append(a_op.span())
            a_values: Callable[[], np.ndarray] = a_op.values
        else:
            a_values = lambda: np.concatenate([meeting.fragments[i] for i in range(4)])

        def complete() -> None:
            product = a_values() @ b_op.values().T  # (64, N)
            if negate_a != negate_b:
                product = -product
            product = product.reshape(4, 16, n)
            old = meeting.acc.values if meeting.keep else None
            meeting.acc.values[...] = accumulate(old, product, d_kind, saturate)
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

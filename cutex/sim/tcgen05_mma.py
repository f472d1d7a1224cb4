"""Matrix multiply-accumulate of the fifth-generation tensor cores (PTX ISA 9.7.16.10)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from cutex.sim.decode import Decoder, Execute, instruction
from cutex.sim.errors import BadOperand
from cutex.sim.flight import Operation, Rectangle
from cutex.sim.machine import Batch, Machine
from cutex.sim.matrices import ELEMENTS, ITEMSIZE, SharedOperand, read_descriptor
from cutex.sim.ptx import Address, Instruction, Vector
from cutex.sim.tcgen05 import cta_group

_TYPES: dict[str, dict[int, str]] = {  # of A and B, by kind and code
    "f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"},
}  # fmt: skip


class InstructionDescriptor:
    """The 32-bit instruction descriptor (9.7.16.4.2) of kinds f16, tf32 and f8f6f4, dense."""

    def __init__(self, bits: int, kind: str, ins: Instruction) -> None:
        names = _TYPES[kind]
        a, b, out = bits >> 7 & 7, bits >> 10 & 7, bits >> 4 & 3
        if a not in names or b not in names or out != 1 or bits & 0b1111 or bits >> 30:
            raise BadOperand.at(
                ins,
                f"instruction descriptor 0x{bits:08x} asks for a sparse form, a type or an "
                f"accumulator that the simulator does not define for kind::{kind}",
            )
        self.a, self.b = names[a], names[b]
        self.negate = bool(bits >> 13 & 1) != bool(bits >> 14 & 1)
        self.a_mn, self.b_mn = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
        self.n, self.m = (bits >> 17 & 63) << 3, (bits >> 24 & 31) << 4


def _check_shape(desc: InstructionDescriptor, group: int, ins: Instruction) -> None:
    """Table 39: M 64 or 128 (one CTA), 128 or 256 (pair); N in steps of 8 or 16."""
    ms, step = (
        ((64, 128), 8 if desc.m == 64 else 16)
        if group == 1
        else ((128, 256), 32 if desc.m == 256 else 16)
    )
    step = min(step, 16)
    if desc.m not in ms or desc.n % step or not step <= desc.n <= 256:
        raise BadOperand.at(
            ins,
            f"tcgen05.mma of M={desc.m}, N={desc.n} with cta_group::{group}: takes M in {ms}, N in "
            f"steps of {step} up to 256",
        )


@lru_cache(maxsize=64)
def accumulator_lanes(m: int, group: int, base_lane: int) -> np.ndarray:
    """Lane of each of a CTA's accumulator rows (data paths A, B (first half of N), D, F of
    CUTLASS).
    """
    rows = np.arange(m // group)
    if m // group == 128:
        return rows
    if group == 2:
        return rows  # layout B: the second half of N lies 64 lanes up
    return base_lane + rows % 16 + 32 * (rows // 16)


@instruction("tcgen05.mma")
def mma(d: Decoder) -> Execute:
    """9.7.16.10.9.1: D (tensor memory) = A (shared or tensor memory) * B (shared memory) + D if
    enabled.
    """
    d.only(
        "mma", "cta_group", "1", "2", "kind", "f16", "tf32", "f8f6f4", "collector", "a", "discard",
        "fill", "use", "lastuse", "buffer", "b0",
    )  # fmt: skip
    group = cta_group(d)
    kind = d.parts[d.parts.index("kind") + 1]
    ops = d.ins.operands
    from_tmem = isinstance(ops[1], Address)
    target = d.address(0)
    a_read = d.address(1) if from_tmem else d.src(1, "b64")
    b_read, idesc = d.src(2, "b64"), d.src(3, "b32")
    disable = ops[4].items if isinstance(ops[4], Vector) else ()
    enable = d.read(ops[5] if disable else ops[4], "pred")
    disable_reads = [d.read(o, "b32") for o in disable]
    m, ins = d.m, d.ins

    def execute(b: Batch) -> None:
        t, a_s, b_s, i_s = (
            target(b),
            np.broadcast_to(a_read(b), (b.n, 32)),
            np.broadcast_to(b_read(b), (b.n, 32)),
            np.broadcast_to(idesc(b), (b.n, 32)),
        )
        enabled = np.broadcast_to(enable(b), (b.n, 32))
        masks = [np.broadcast_to(r(b), (b.n, 32)) for r in disable_reads]
        rows, lanes = np.nonzero(b.active())
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            warp = int(b.idx[row])
            own = int(m.warp_cta[warp])
            if any(int(x[row, lane]) for x in masks):
                raise d.unknown("disable-output-lane")
            desc = InstructionDescriptor(int(i_s[row, lane]), kind, ins)
            _check_shape(desc, group, ins)
            leader = own if group == 1 else own - int(m.cta_rank[own]) % 2
            ctas = [leader + r for r in range(group)]
            _issue_mma(
                m,
                ins,
                warp,
                ctas,
                int(t[row, lane]),
                int(a_s[row, lane]),
                int(b_s[row, lane]),
                desc,
                bool(enabled[row, lane]),
                from_tmem,
            )

    return execute


def _issue_mma(
    m: Machine,
    ins: Instruction,
    warp: int,
    ctas: list[int],
    to: int,
    a: int,
    b: int,
    desc: InstructionDescriptor,
    keep: bool,
    from_tmem: bool,
) -> None:
    group = len(ctas)
    base_lane, column = to >> 16, to & 0xFFFF
    half = group == 2 and desc.m == 128  # layout B: N in two halves, the second 64 lanes up
    width = desc.n // 2 if half else desc.n
    for cta in ctas:
        m.tmem.check(cta, column, width, m.name_warp(warp), ins)
    bs = [
        SharedOperand(
            m,
            c,
            read_descriptor(b, True, ins),
            desc.n // group,
            desc.b,
            desc.b_mn,
            "operand B of tcgen05.mma",
            ins,
        )
        for c in ctas
    ]
    reads: list[Any] = [x.span() for x in bs]
    rows = desc.m // group
    a_values: list[Callable[[], np.ndarray]] = []
    for cta in ctas:
        if from_tmem:
            k_columns = 8
            m.tmem.check(cta, a & 0xFFFF, k_columns, m.name_warp(warp), ins)
            reads.append(Rectangle(cta, 0, 128, a & 0xFFFF, (a & 0xFFFF) + k_columns))
            a_values.append(_a_in_tmem(m, cta, a, rows, desc, group))
        else:
            operand = SharedOperand(
                m,
                cta,
                read_descriptor(a, True, ins),
                rows,
                desc.a,
                desc.a_mn,
                "operand A of tcgen05.mma",
                ins,
            )
            reads.append(operand.span())
            a_values.append(operand.values)
    writes: list[Any] = [Rectangle(c, 0, 128, column, column + width) for c in ctas]
    lanes = accumulator_lanes(desc.m, group, base_lane & 31)

    def complete() -> None:
        b_all = np.concatenate([x.values() for x in bs], 0)
        for cta, a_of in zip(ctas, a_values, strict=True):
            product = a_of() @ b_all.T
            if desc.negate:
                product = -product
            tmem = m.tmem.cells[cta].view(np.float32)
            pieces = (
                [(lanes, product)]
                if not half
                else [(lanes, product[:, :width]), (lanes + 64, product[:, width:])]
            )
            for where, value in pieces:
                if len(where) == 128:
                    window = tmem[:, column : column + width]
                    np.add(window, value, out=window) if keep else np.copyto(window, value)
                else:
                    now = tmem[where, column : column + width]
                    tmem[where, column : column + width] = now + value if keep else value

    m.flight.issue(
        Operation(
            "the tcgen05.mma", warp, ins, ("tcgen05", ctas[0]), complete, reads=reads, writes=writes
        )
    )


def _a_in_tmem(
    m: Machine, cta: int, address: int, rows: int, desc: InstructionDescriptor, group: int
) -> Callable[[], np.ndarray]:
    """A from tensor memory: row per lane, packed elements along 8 columns (9.7.16.10.5)."""
    lanes = accumulator_lanes(desc.m, group, address >> 16 & 31)
    column = address & 0xFFFF

    def values() -> np.ndarray:
        raw = np.ascontiguousarray(m.tmem.cells[cta][lanes, column : column + 8])
        return ELEMENTS[desc.a](raw.view(np.uint8).reshape(rows, -1)).reshape(
            rows, 32 // ITEMSIZE[desc.a]
        )

    return values

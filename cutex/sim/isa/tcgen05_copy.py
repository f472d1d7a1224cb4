"""Copies from shared to tensor memory (PTX ISA 9.7.16.9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cutex.sim.isa.matrices import PADDED, Form, SharedOperand, read_descriptor, spread
from cutex.sim.isa.tcgen05 import Issuer, check_lanes, cta_group
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.operation import Engine, Rectangle
from cutex.sim.ptx.decode import Decoder, Execute, instruction

# the lanes that row r of the source is copied to, by form: CUTLASS's atoms (figures in the PTX ISA)
_LANES: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "": lambda r: [r],
    "02_13": lambda r: [r, r + 64],  # 64 rows to warps 0 and 1, and again to 2 and 3
    "01_23": lambda r: [r % 32 + 64 * (r // 32) + 32 * i for i in range(2)],
    "warpx4": lambda r: [r + 32 * i for i in range(4)],
}
_FORMS = {"128x256b": ("",), "128x128b": ("",), "64x128b": ("02_13", "01_23"),
          "32x128b": ("warpx4",)}  # fmt: skip


@instruction("tcgen05.cp")
def copy(d: Decoder) -> Execute:
    """tcgen05.cp (9.7.16.9.1): rows of 128 or 256 bits of K-major core matrices, each to one lane
    or repeated, in order with later MMAs. With cta_group::2 each CTA of the pair copies its own.
    Elements of 4 or 6 bits, 16 of them padded to 16 bytes, may be unpacked to a byte each.
    """
    d.only("cp", "cta_group", "1", "2", "warpx2", "warpx4", "02_13", "01_23", *_FORMS, *PADDED,
           "b8x16")  # fmt: skip
    padded = next((PADDED[p] for p in PADDED if p in d.mods), None)
    shape = next(s for s in _FORMS if s in d.mods)
    spread = next((f for f in _FORMS[shape] if f in d.mods or not f), None)
    if spread is None:
        raise d.unknown("rows to lanes")
    count, bits = (int(x) for x in shape.removesuffix("b").split("x"))
    lanes = _LANES[spread](np.arange(count))
    form = Form("the source of tcgen05.cp", "u8", count, k_bytes=bits // 8)
    group, m, ins = cta_group(d), d.m, d.ins
    target, source = d.address(0), d.src(1, "b64")

    def execute(b: Batch) -> None:
        to, descriptors = target(b), b.lanes(source(b))
        check_lanes(d, b, to, "it is copied")
        rows, active = np.nonzero(b.active())
        for row, lane in zip(rows.tolist(), active.tolist(), strict=True):
            warp, column = int(b.idx[row]), int(to[row, lane]) & 0xFFFF
            issuer = Issuer(m, warp, lane, group, ins)
            ctas = issuer.ctas
            desc = read_descriptor(int(descriptors[row, lane]), True, ins)
            for cta in ctas:
                m.tmem.check(cta, column, bits // 32, m.grid.name_warp(warp), ins)
            operands = [SharedOperand(m, cta, desc, form, ins) for cta in ctas]
            issuer.issue(
                Engine.TCGEN05_CP,
                _copier(m, operands, lanes, column, padded),
                reads=[o.span() for o in operands],
                writes=[Rectangle(c, 0, 128, column, column + bits // 32) for c in ctas],
            )

    return execute


def _copier(
    m: Machine,
    operands: list[SharedOperand],
    lanes: list[np.ndarray],
    column: int,
    padded: tuple[int, int] | None,
) -> Callable[[], None]:
    def complete() -> None:
        for operand in operands:
            raw = operand.raw()
            if padded is not None:
                raw = spread(raw.reshape(len(raw), -1), padded[0]) << padded[1]
            words = raw.reshape(len(raw), -1).view(np.uint32)
            for where in lanes:
                m.tmem.cells[operand.cta][where, column : column + words.shape[1]] = words

    return complete

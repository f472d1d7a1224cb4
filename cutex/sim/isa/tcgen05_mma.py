"""Matrix multiply-accumulate of the fifth-generation tensor cores (PTX ISA 9.7.16.10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.matrices import (
    ELEMENTS,
    Descriptor,
    Form,
    SharedOperand,
    accumulate,
    read_descriptor,
)
from cutex.sim.isa.tcgen05 import Issuer, check_lanes, cta_group
from cutex.sim.isa.tcgen05_descriptor import (
    TYPES,
    InstructionDescriptor,
    check_shape,
    read_instruction,
)
from cutex.sim.isa.tcgen05_scale import SIZES, BlockScales, factors_per_row
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import POISON32
from cutex.sim.machine.operation import Engine, Footprint, Rectangle
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Address, Vector

# bits of columns above a 16-bit accumulator: a NaN, and beside a NaN not what nothing has written
_UPPER_POISON = np.uint32(0x7FFF0000)


@lru_cache(maxsize=64)
def accumulator_lanes(m: int, group: int, base_lane: int) -> np.ndarray:
    """The lane of each of a CTA's accumulator rows (data paths A, B (first half of N), D, F of
    CUTLASS).
    """
    rows = np.arange(m // group)
    if m // group == 128:
        return rows
    if group == 2:
        return rows  # layout B: the second half of N is 64 lanes up
    return base_lane + rows % 16 + 32 * (rows // 16)


@instruction("tcgen05.mma")
def mma(d: Decoder) -> Execute:
    """tcgen05.mma (9.7.16.10.9.1): D (tensor memory) = A (shared or tensor memory) * B (shared
    memory), plus D if enabled; and .ws (9.7.16.10.9.3), which lays fewer rows out in all lanes.
    """
    d.only(
        "mma", "ws", "cta_group", "1", "2", "kind", *TYPES, "collector", "a", "discard",
        "fill", "use", "lastuse", "buffer", "b0", "b1", "b2", "b3", "block_scale", *SIZES,
    )  # fmt: skip
    group, ws = cta_group(d), "ws" in d.mods
    kind = d.parts[d.parts.index("kind") + 1]
    if kind.startswith("mx") != ("block_scale" in d.mods) or (ws and kind.startswith("mx")):
        raise d.unknown("block scaling")
    ops = d.ins.operands
    from_tmem = isinstance(ops[1], Address)
    target = d.address(0)
    a_read = d.address(1) if from_tmem else d.src(1, "b64")
    b_read, idesc = d.src(2, "b64"), d.src(3, "b32")
    disable = ops[4].items if isinstance(ops[4], Vector) else ()
    factors = factors_per_row(d, kind) if "block_scale" in d.mods else 0
    factors_at = [d.address(4), d.address(5)] if factors else []
    after = 6 if factors else 5 if disable else 4
    enable = d.read(ops[after], "pred")
    last = after + 1 if len(ops) > after + 1 else None
    columns = d.src(last, "b64") if ws and last else None  # of B that are taken to be zero
    scale = 0.5 ** d.immediate(last) if last and not ws else 1.0  # of D
    disable_reads = [d.read(o, "b32") for o in disable]
    known: dict[tuple[int, int, Form], SharedOperand] = {}
    m, ins = d.m, d.ins

    def execute(b: Batch) -> None:
        t, enabled = target(b), b.lanes(enable(b))
        a_s, b_s, i_s = (b.lanes(r(b)) for r in (a_read, b_read, idesc))
        masks = [b.lanes(r(b)) for r in disable_reads]
        if masks and len(masks) != 4 * group:
            raise d.unknown(f"{len(masks)} words of disabled lanes")
        rows, lanes = np.nonzero(b.active())
        adds = b.active() & enabled
        check_lanes(d, b, t, "the product is added" if adds.any() else "the product is written")
        for at in zip(rows.tolist(), lanes.tolist(), strict=True):
            desc = read_instruction(int(i_s[at]), kind, ins, m.program.target)
            check_shape(desc, group, ins, ws)
            if columns is not None and b.lanes(columns(b))[at]:
                raise d.unknown("columns of B that are zero")
            off = [int(x[at]) for x in masks]
            issuer = Issuer(m, int(b.idx[at[0]]), at[1], group, ins)
            scale_at = [int(b.lanes(r(b))[at]) for r in factors_at]
            Mma(
                issuer,
                desc,
                int(t[at]),
                int(a_s[at]),
                int(b_s[at]),
                from_tmem,
                scale if enabled[at] else None,
                _enabled_lanes(off, group),
                known,
                BlockScales(issuer, desc, factors, *scale_at) if factors else None,
                ws,
            ).issue()

    return execute


def _enabled_lanes(off: list[int], group: int) -> np.ndarray:
    """Whether D is written to each lane, (group, 128); bit i of word w is lane 32 w + i."""
    if not any(off):
        return np.ones((group, 128), bool)
    bits = np.array(off, np.uint32).reshape(group, 4, 1) >> np.arange(32, dtype=np.uint32) & 1
    return (bits == 0).reshape(group, 128)


@dataclass
class Mma:
    """One multiplication: D = A * B + D * scale, by one CTA or by a pair, each CTA with its own
    rows of A and D, and its share of B's columns.
    """

    issuer: Issuer
    desc: InstructionDescriptor
    d: int  # address in tensor memory
    a: int  # descriptor of shared memory, or address in tensor memory
    b: int  # descriptor of shared memory
    a_in_tmem: bool
    scale: float | None  # None: D is not read
    enabled: np.ndarray  # (ctas, 128) lanes that are written
    # operands in shared memory that this instruction has had, by CTA and descriptor
    known: dict[tuple[int, int, Form], SharedOperand]
    scales: BlockScales | None = None
    ws: bool = False

    def __post_init__(self) -> None:
        self.m, self.ins, self.ctas = self.issuer.m, self.issuer.ins, self.issuer.ctas
        self.rows = self.desc.m // len(self.ctas)
        # layouts B, E and G: N in shares, each in lanes of its own above the last one's
        self.shares = 128 // self.rows if self.ws or len(self.ctas) == 2 else 1
        self.width = self.desc.n // self.shares
        self.base_lane, self.column = self.d >> 16, self.d & 0xFFFF
        self.a_columns = self.desc.k_bytes // 4  # of tensor memory

    def issue(self) -> None:
        desc, ins = self.desc, self.ins
        self._check_columns(self.column, self.width)
        for lane in (self.base_lane, self.a >> 16 if self.a_in_tmem else 0):
            if lane and (lane != 16 or desc.m != 64 or self.ws):
                raise BadOperand.at(
                    ins, f"tcgen05.mma of M={desc.m} in tensor memory from lane {lane}"
                )
        b_form = Form(
            "operand B of tcgen05.mma", desc.b, desc.n // len(self.ctas), desc.b_mn, desc.k_bytes
        )
        self.bs = self._shared(self.b, b_form)
        reads: list[Footprint] = [x.span() for x in self.bs]
        if self.a_in_tmem:
            self._check_columns(self.a & 0xFFFF, self.a_columns)
            self.a_values = [self._a_in_tmem(cta) for cta in self.ctas]
            reads += [r for c in self.ctas for r in self._rectangles(c, self.a, self.a_columns)]
        else:
            a_form = Form("operand A of tcgen05.mma", desc.a, self.rows, desc.a_mn, desc.k_bytes)
            operands = self._shared(self.a, a_form)
            self.a_values = [x.values for x in operands]
            reads += [x.span() for x in operands]
        reads += self.scales.places() if self.scales else []
        writes: list[Footprint] = [
            r for c in self.ctas for r in self._rectangles(c, self.d, self.width)
        ]
        self._check_overlap(reads, writes)
        self.lanes = self._lanes(self.base_lane)
        flops = 2 * desc.m * desc.n * desc.k
        self.issuer.issue(Engine.TCGEN05_MMA, self.complete, reads, writes, flops)

    def _check_overlap(self, reads: list[Footprint], writes: list[Footprint]) -> None:
        """Report an MMA that writes its D over columns of its A or of its scale factors."""
        places = (r for r in reads if isinstance(r, Rectangle))
        place = next((r for r in places if any(r.meets(w) for w in writes)), None)
        if place is not None:
            self.m.findings.add(
                "race",
                f"tcgen05.mma of {self.m.grid.name_warp(self.issuer.warp)} writes {writes[0]} and "
                f"reads {place} itself: what it writes first may come before what it reads last",
                self.ins,
            )

    def complete(self) -> None:
        b_all = np.concatenate([x.values() for x in self.bs], 0)
        for cta, a_of, on in zip(self.ctas, self.a_values, self.enabled, strict=True):
            a, b = a_of(), b_all
            if self.scales:
                a, b = self.scales.of_a(cta, a), self.scales.of_b(cta, b)
            for where, value in self._products(a, b):
                value = -value if self.desc.negate else value
                rows = slice(None) if len(where) == 128 and on.all() else where[on[where]]
                value = value if isinstance(rows, slice) else value[on[where]]
                cells = self.m.tmem.cells[cta][:, self.column : self.column + self.width]
                if self.scale is not None:
                    self._check_written("adds to", cells, where, self.column)
                _add(cells, rows, value, self.desc, self.scale)

    def _check_written(self, does: str, cells: np.ndarray, lanes: np.ndarray, column: int) -> None:
        """Report columns (``cells``, from ``column`` on) of which nothing was written in the first
        of the lanes, nor in any the first column.
        """
        if cells[lanes[0], 0] != POISON32:
            return
        if (cells[lanes[0]] == POISON32).all() and (cells[lanes, 0] == POISON32).all():
            self.m.findings.add(
                "uninitialised",
                f"tcgen05.mma of {self.m.grid.name_warp(self.issuer.warp)} {does} tensor memory "
                f"columns {column}..{column + cells.shape[1] - 1}, which nothing has written since "
                "they were allocated",
                self.ins,
            )

    def _products(
        self, a_rows: np.ndarray, b_all: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The products, each with the lanes that they are added to."""
        if self.shares == 1:
            return [(self.lanes, a_rows @ b_all.T)]
        n, last = len(self.lanes), len(a_rows) - len(self.lanes)
        # NOTE: the upper lanes of A in tensor memory hold the rows for their own share of N
        return [
            (
                self.lanes + n * i,
                a_rows[min(n * i, last) :][:n] @ b_all[self.width * i : self.width * (i + 1)].T,
            )
            for i in range(self.shares)
        ]

    def _lanes(self, base: int) -> np.ndarray:
        """The lanes of the rows, of the first share of N."""
        if self.ws:
            return np.arange(self.rows)
        return accumulator_lanes(self.desc.m, len(self.ctas), base)

    def _rectangles(self, cta: int, address: int, width: int) -> list[Rectangle]:
        """The lanes that an accumulator, or A, occupies: with M = 64, half of each quarter."""
        lane, low = address >> 16, address & 0xFFFF
        if self.desc.m == 64 and not self.ws:
            halves = [(32 * q + lane, 32 * q + lane + 16) for q in range(4)]
        else:
            halves = [(0, 128)]
        return [Rectangle(cta, first, last, low, low + width) for first, last in halves]

    def _check_columns(self, first: int, count: int) -> None:
        for cta in self.ctas:
            self.m.tmem.check(cta, first, count, self.m.grid.name_warp(self.issuer.warp), self.ins)

    def _shared(self, descriptor: int, form: Form) -> list[SharedOperand]:
        desc = read_descriptor(descriptor, True, self.ins)
        if desc.next is not None and (self.desc.k_bytes != 48 or desc.bits != 3):
            raise BadOperand.at(
                self.ins,
                f"{form.what} ({desc}) goes on at an address of its own: takes K = 96 of sm_103a "
                "and a 128-byte swizzle",
            )
        return [self._operand(cta, descriptor, desc, form) for cta in self.ctas]

    def _operand(self, cta: int, word: int, desc: Descriptor, form: Form) -> SharedOperand:
        """The operand at a descriptor, which is `word`."""
        found = self.known.get((cta, word, form))
        if found is None:
            found = SharedOperand(self.m, cta, desc, form, self.ins)
            self.known[cta, word, form] = found
        return found

    def _a_in_tmem(self, cta: int) -> Callable[[], np.ndarray]:
        """A function that reads A from tensor memory: one row per lane, packed elements along 8
        columns (9.7.16.10.5); those of 4 and 6 bits in a byte each.
        """
        kind, column = self.desc.a.replace("padded", "byte"), self.a & 0xFFFF
        lanes = self._lanes(self.a >> 16)
        if self.shares > 1:
            lanes = np.arange(128)  # the rows again for each share of N, which reads its own

        def values() -> np.ndarray:
            all_lanes = self.m.tmem.cells[cta][:, column : column + self.a_columns]
            self._check_written("reads operand A from", all_lanes, lanes, column)
            cells = all_lanes[lanes]
            raw = np.ascontiguousarray(cells).view(np.uint8).reshape(len(lanes), -1)
            return ELEMENTS[kind](raw).reshape(len(lanes), -1)

        return values


def _add(
    cells: np.ndarray, rows: Any, value: np.ndarray, desc: InstructionDescriptor, scale: Any
) -> None:
    """Add ``value`` to D in ``rows`` of ``cells``; a 16-bit accumulator is the low half of a
    column.
    """
    if desc.out == "f32" and scale == 1.0 and isinstance(rows, slice):
        total = cells.view(np.float32)[rows]  # in place
        total += value
    elif desc.out == "f32":
        old = cells.view(np.float32)[rows] if scale is not None else None
        cells.view(np.float32)[rows] = _sum(old, value, desc, scale)
    elif desc.out == "s32":
        old = cells.view(np.int32)[rows] if scale is not None else None
        cells.view(np.int32)[rows] = _sum(old, value, desc, scale)
    else:
        half = (cells[rows] & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
        old = half.astype(np.float32) if scale is not None else None
        bits = _sum(old, value, desc, scale).astype(np.float16).view(np.uint16)
        cells[rows] = bits.astype(np.uint32) | _UPPER_POISON


def _sum(old: Any, value: np.ndarray, desc: InstructionDescriptor, scale: float | None) -> Any:
    if scale not in (None, 1.0):
        old = old * np.float32(scale)
    return accumulate(old, value, desc.out, desc.saturate)

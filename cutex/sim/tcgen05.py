"""Fifth-generation tensor cores of sm_100a and tensor memory (PTX ISA 9.7.16).

Tensor memory is 128 lanes x 512 columns of 32 bits per CTA, addressed as lane << 16 | column. The data-path layouts
and the register fragments of ld/st are given by the PTX ISA as figures; the functions here are those of CUTLASS's
atoms, which the kernels use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.decode import Decoder, Execute, instruction
from cutex.sim.errors import BadAddress, BadOperand, BarrierMisuse
from cutex.sim.flight import Operation, Rectangle
from cutex.sim.machine import RETRY, TMEM_COLUMNS, Batch, Wait
from cutex.sim.matrices import ELEMENTS, ITEMSIZE, SharedOperand, read_descriptor
from cutex.sim.memory import SHARED_WINDOW, as_bytes
from cutex.sim.ptx import Address, Imm, Instruction, Vector
from cutex.sim.sync import require_whole_warp

if TYPE_CHECKING:
    from cutex.sim.machine import Machine


@instruction("tcgen05")
def tcgen05(d: Decoder) -> Execute:
    """9.7.16: routes by the second part of the opcode."""
    define = {
        "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "mma": _mma, "commit": _commit,
        "ld": _ld, "st": _st, "wait": _nothing, "fence": _nothing,
    }.get(d.parts[1])  # fmt: skip
    if define is None:
        raise d.unknown()
    return define(d)


def _nothing(d: Decoder) -> Execute:
    """wait::ld, wait::st and fence: ld and st take effect when they execute, so there is nothing to wait for."""
    return lambda b: None


def _cta_group(d: Decoder) -> int:
    at = d.parts.index("cta_group")
    return int(d.parts[at + 1])


# -- allocation -------------------------------------------------------------------------------------------------------


def _alloc(d: Decoder) -> Execute:
    """9.7.16.7.1: a power of two of columns, at least 32; waits until they are free, writes their address to shared memory."""
    d.only("alloc", "cta_group", "1", "2", "sync", "aligned", "shared", "cta")
    address, columns, m, ins = d.address(0), d.src(1, "u32"), d.m, d.ins

    def execute(b: Batch) -> np.ndarray | None:
        require_whole_warp(d, b)
        out = np.zeros(b.n, np.int8)
        counts, where = b.one(columns(b)), b.one(address(b)) & np.uint64(SHARED_WINDOW - 1)
        for row in np.nonzero(b.any_active())[0].tolist():
            warp, n = int(b.idx[row]), int(counts[row])
            cta = int(m.warp_cta[warp])
            if n < 32 or n > TMEM_COLUMNS or n & (n - 1):
                raise BadOperand(
                    f"bad operand: tcgen05.alloc of {n} columns: takes 32, 64, 128, 256 or 512\n    at {ins.where()}"
                )
            if m.tmem_permit.get(cta) is False:
                raise BarrierMisuse(
                    f"barrier misuse: tcgen05.alloc after relinquish_alloc_permit\n    at {ins.where()}"
                )
            owner = m.tmem_owner.setdefault(cta, np.zeros(TMEM_COLUMNS, np.int32))
            free = [c for c in range(0, TMEM_COLUMNS, n) if not owner[c : c + n].any()]
            if not free:
                out[row] = RETRY
                m.sleep(
                    warp,
                    Wait(
                        "tensor memory",
                        ("tmem", cta),
                        ins,
                        lambda n=n, o=owner: (
                            f"tcgen05.alloc: {n} columns wanted, {int((o == 0).sum())} free"
                        ),
                    ),
                )
                continue
            owner[free[0] : free[0] + n] = ins.line
            target, offset = m.shared_location(b.idx[row : row + 1], where[row : row + 1])
            m.check_shared(b.idx[row : row + 1], np.zeros(1, int), target, offset, 4, ins)
            m.smem[int(target[0]), int(offset[0]) : int(offset[0]) + 4] = as_bytes(
                np.array([free[0]], np.uint32)
            )[0]
            m.tensor_memory()
            m.progress += 1
        return out if out.any() else None

    return execute


def _dealloc(d: Decoder) -> Execute:
    """9.7.16.7.1"""
    address, columns, m, ins = d.src(0, "u32"), d.src(1, "u32"), d.m, d.ins

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        firsts, counts = b.one(address(b)), b.one(columns(b))
        for row in np.nonzero(b.any_active())[0].tolist():
            warp = int(b.idx[row])
            cta, first, n = int(m.warp_cta[warp]), int(firsts[row]) & 0xFFFF, int(counts[row])
            m.check_tmem_columns(cta, first, n, m.name_warp(warp), ins)
            m.flight.touch(
                Rectangle(cta, 0, 128, first, first + n), True, "tcgen05.dealloc", warp, ins
            )
            m.tmem_owner[cta][first : first + n] = 0
            m.progress += 1
            m.wake(("tmem", cta))

    return execute


def _relinquish(d: Decoder) -> Execute:
    """9.7.16.7.1: this CTA allocates no more."""

    def execute(b: Batch) -> None:
        for cta in d.m.warp_cta[b.idx[b.any_active()]].tolist():
            d.m.tmem_permit[cta] = False

    return execute


# -- ld and st --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def fragment(shape: str, repeats: int, half_split: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of register i in thread t, relative to the address: two (registers, 32) arrays."""
    t = np.arange(32)[None, :]
    if shape == "32x32b":
        i = np.arange(repeats)[:, None]
        return t + 0 * i, i + 0 * t
    if shape == "16x64b":
        i = np.arange(repeats)[:, None]
        return t // 4 + 8 * (t % 2) + 0 * i, t // 2 % 2 + 2 * i
    if shape == "16x128b":
        i = np.arange(2 * repeats)[:, None]
        return t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)
    if shape == "16x256b":
        i = np.arange(4 * repeats)[:, None]
        return t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)
    i = np.arange(repeats)[:, None]  # 16x32bx2
    return t % 16 + 0 * i, i + half_split * (t // 16)


_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")


class _TmemAccess:
    """The address operand and fragment of one ld or st."""

    def __init__(self, d: Decoder, address: int) -> None:
        d.only(
            "ld",
            "st",
            "sync",
            "aligned",
            *_SHAPES,
            *(f"x{1 << i}" for i in range(8)),
            "pack",
            "unpack",
            "16b",
        )
        self.d, self.m = d, d.m
        self.shape = next(s for s in _SHAPES if s in d.mods)
        repeats = next(int(p[1:]) for p in d.parts if p[0] == "x" and p[1:].isdigit())
        self.packed = "16b" in d.mods
        split = next((int(o.value) for o in d.ins.operands if isinstance(o, Imm)), 0)
        lanes, columns = fragment(self.shape, repeats * (2 if self.packed else 1), split)
        self.lanes, self.columns = lanes, columns
        operand = d.ins.operands[address]
        self.address = (
            d.address(address) if isinstance(operand, Address) else d.read(operand, "u32")
        )

    def places(self, b: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the batch that take part, and cta, lane, column of every register: (rows, registers, 32)."""
        require_whole_warp(self.d, b)
        rows = np.nonzero(b.any_active())[0]
        base = b.one(self.address(b))[rows].astype(np.int64)
        lane, column = base >> 16, base & 0xFFFF
        quarter = self.m.warp_in_cta[b.idx[rows]] % 4 * 32
        high = int(self.lanes.max())
        bad = (lane < quarter) | (lane + high >= quarter + 32)
        if bad.any():
            k = int(np.nonzero(bad)[0][0])
            raise BadAddress(
                f"bad address: {self.m.name_warp(int(b.idx[rows[k]]))} accesses tensor memory lanes {lane[k]}..{lane[k] + high}, "
                f"a warp may touch only lanes {quarter[k]}..{quarter[k] + 31} (its number modulo 4)\n    at {self.d.ins.where()}"
            )
        cta = self.m.warp_cta[b.idx[rows]]
        width = int(self.columns.max()) + 1
        for k, row in enumerate(rows.tolist()):
            self.m.check_tmem_columns(
                int(cta[k]), int(column[k]), width, self.m.name_warp(int(b.idx[row])), self.d.ins
            )
        return (
            rows,
            cta[:, None, None],
            lane[:, None, None] + self.lanes,
            column[:, None, None] + self.columns,
        )

    def conflicts(
        self,
        b: Batch,
        rows: np.ndarray,
        cta: np.ndarray,
        lane: np.ndarray,
        column: np.ndarray,
        write: bool,
    ) -> None:
        if not self.m.flight.count:
            return
        for k, row in enumerate(rows.tolist()):
            place = Rectangle(
                int(cta[k, 0, 0]),
                int(lane[k].min()),
                int(lane[k].max()) + 1,
                int(column[k].min()),
                int(column[k].max()) + 1,
            )
            name = "tcgen05.st" if write else "tcgen05.ld"
            self.m.flight.touch(place, write, name, int(b.idx[row]), self.d.ins)


def _ld(d: Decoder) -> Execute:
    """9.7.16.8.1: each warp reads its quarter of the lanes."""
    access = _TmemAccess(d, 1)
    operand = d.ins.operands[0]
    targets = operand.items if isinstance(operand, Vector) else (operand,)
    writes = [d.write(t, "b32") for t in targets]

    def execute(b: Batch) -> None:
        rows, cta, lane, column = access.places(b)
        access.conflicts(b, rows, cta, lane, column, False)
        got = d.m.tensor_memory()[cta, lane, column]  # (rows, registers, 32)
        if access.packed:
            got = got[:, ::2] & np.uint32(0xFFFF) | got[:, 1::2] << np.uint32(16)
        part = (
            b if len(rows) == b.n else Batch(b.idx[rows], None if b.mask is None else b.mask[rows])
        )
        for i, write in enumerate(writes):
            write(part, got[:, i])

    return execute


def _st(d: Decoder) -> Execute:
    """9.7.16.8.2"""
    access = _TmemAccess(d, 0)
    operand = d.ins.operands[-1]
    sources = operand.items if isinstance(operand, Vector) else (operand,)
    reads = [d.read(s, "b32") for s in sources]

    def execute(b: Batch) -> None:
        rows, cta, lane, column = access.places(b)
        access.conflicts(b, rows, cta, lane, column, True)
        values = np.stack([np.broadcast_to(r(b), (b.n, 32)) for r in reads], 1)[rows]
        if access.packed:
            values = np.stack([values & np.uint32(0xFFFF), values >> np.uint32(16)], 2).reshape(
                len(rows), -1, 32
            )
        d.m.tensor_memory()[cta, lane, column] = values
        d.m.progress += 1

    return execute


# -- mma --------------------------------------------------------------------------------------------------------------


class InstructionDescriptor:
    """The 32-bit instruction descriptor (9.7.16.4.2) of kinds f16, tf32 and f8f6f4, dense."""

    _A: dict[str, dict[int, str]] = {
        "f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"},
    }  # fmt: skip

    def __init__(self, bits: int, kind: str, ins: Instruction) -> None:
        names = self._A[kind]
        a, b, out = bits >> 7 & 7, bits >> 10 & 7, bits >> 4 & 3
        if a not in names or b not in names or out != 1 or bits & 0b1111 or bits >> 30:
            raise BadOperand(
                f"bad operand: instruction descriptor 0x{bits:08x} asks for a sparse form, a type or an accumulator that the simulator "
                f"does not define for kind::{kind}\n    at {ins.where()}"
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
        raise BadOperand(
            f"bad operand: tcgen05.mma of M={desc.m}, N={desc.n} with cta_group::{group}: takes M in {ms}, N in steps of {step} up to 256\n"
            f"    at {ins.where()}"
        )


@lru_cache(maxsize=64)
def accumulator_lanes(m: int, group: int, base_lane: int) -> np.ndarray:
    """Lane of each of a CTA's accumulator rows (data paths A, B (first half of N), D, F of CUTLASS)."""
    rows = np.arange(m // group)
    if m // group == 128:
        return rows
    if group == 2:
        return rows  # layout B: the second half of N lies 64 lanes up
    return base_lane + rows % 16 + 32 * (rows // 16)


def _mma(d: Decoder) -> Execute:
    """9.7.16.10.9.1: D (tensor memory) = A (shared or tensor memory) * B (shared memory) + D if enabled."""
    d.only(
        "mma", "cta_group", "1", "2", "kind", "f16", "tf32", "f8f6f4", "collector", "a", "discard", "fill", "use", "lastuse",
        "buffer", "b0",
    )  # fmt: skip
    group = _cta_group(d)
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
        m.check_tmem_columns(cta, column, width, m.name_warp(warp), ins)
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
            m.check_tmem_columns(cta, a & 0xFFFF, k_columns, m.name_warp(warp), ins)
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
            tmem = m.tensor_memory()[cta].view(np.float32)
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
        raw = np.ascontiguousarray(m.tensor_memory()[cta][lanes, column : column + 8])
        return ELEMENTS[desc.a](raw.view(np.uint8).reshape(rows, -1)).reshape(
            rows, 32 // ITEMSIZE[desc.a]
        )

    return values


def _commit(d: Decoder) -> Execute:
    """9.7.16.10.11.1: arrives once on the mbarrier when all earlier mma and cp of this thread are complete."""
    d.only(
        "commit",
        "cta_group",
        "1",
        "2",
        "mbarrier",
        "arrive",
        "one",
        "shared",
        "cluster",
        "multicast",
    )
    group = _cta_group(d)
    address, m, ins = d.address(0), d.m, d.ins
    mask = d.src(1, "u16") if "multicast" in d.mods else None

    def execute(b: Batch) -> None:
        a = address(b) & np.uint64(SHARED_WINDOW - 1)
        masks = np.broadcast_to(mask(b), (b.n, 32)) if mask else None
        rows, lanes = np.nonzero(b.active())
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            warp = int(b.idx[row])
            own = int(m.warp_cta[warp])
            cta, offset = m.shared_location(b.idx[row : row + 1], a[row, lane : lane + 1])
            m.check_shared(b.idx[row : row + 1], np.array([lane]), cta, offset, 8, ins)
            first = own - int(m.cta_rank[own])
            targets = (
                [int(cta[0])]
                if masks is None
                else [first + r for r in range(m.cluster_size) if int(masks[row, lane]) >> r & 1]
            )
            leader = own if group == 1 else own - int(m.cta_rank[own]) % 2
            for target in targets:
                m.mbarriers.get(target, int(offset[0]), ins)
            m.flight.issue(
                Operation(
                    "the tcgen05.commit",
                    warp,
                    ins,
                    ("tcgen05", leader),
                    _arriver(m, targets, int(offset[0]), warp, ins),
                )
            )

    return execute


def _arriver(
    m: Machine, targets: list[int], offset: int, warp: int, ins: Instruction
) -> Callable[[], None]:
    def complete() -> None:
        for target in targets:
            m.mbarriers.arrive(target, offset, 1, f"tcgen05.commit of {m.name_warp(warp)}", ins)

    return complete

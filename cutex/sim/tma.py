"""The tensor memory accelerator (PTX ISA 9.7.9.25-27): bulk and bulk-tensor copies, bulk groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim import atomics
from cutex.sim.bulk_groups import BulkGroup
from cutex.sim.decode import Decoder, Execute, instruction
from cutex.sim.errors import BadOperand
from cutex.sim.flight import Operation, Span
from cutex.sim.machine import RETRY, Batch, Machine, Wait
from cutex.sim.memory import PARAM_WINDOW, SHARED_WINDOW
from cutex.sim.ptx import WIDTH
from cutex.sim.tensormap import MAP_BYTES, Overlap, TensorMap, decode_map, overlap, swizzle_chunks

_MODS = (
    "async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "shared", "cta", "cluster", "global",
    "tile", "mbarrier", "complete_tx", "bytes", "L2", "cache_hint", "bulk_group", "multicast",
    "cta_group", "1", "2",
    "reduce", "add", "min", "max", "and", "or", "xor",
)  # fmt: skip


def read_map(d: Decoder, address: int) -> TensorMap:
    m = d.m
    if address & (63):
        raise BadOperand.at(d.ins, f"tensor map at 0x{address:x} is not 64-byte aligned")
    if address & PARAM_WINDOW:
        at = address & (PARAM_WINDOW - 1)
        raw = m.params[at : at + MAP_BYTES].tobytes()
    else:
        raw = m.memory.view(address, MAP_BYTES, f"the tensor map of {d.ins.op}").tobytes()
    tmap = decode_map(raw)
    why = tmap.why_not()
    if why:
        raise BadOperand.at(d.ins, f"tensor map at 0x{address:x}: {why}")
    return tmap


def _lanes(b: Batch) -> list[tuple[int, int]]:
    rows, lanes = np.nonzero(b.active())
    return list(zip(rows.tolist(), lanes.tolist(), strict=True))


class _Value:
    """One operand, read per lane."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __call__(self, b: Batch) -> np.ndarray:
        return np.broadcast_to(self.read(b), (b.n, 32))


@instruction("cp.async")
def bulk_copy(d: Decoder) -> Execute:
    """9.7.9.25.4, 9.7.9.27: routes to the form at hand."""
    if "bulk" not in d.mods:
        raise d.unknown("non-bulk cp.async")
    if "commit_group" in d.mods:
        return _commit_group(d)
    if "wait_group" in d.mods:
        return _wait_group(d)
    if "prefetch" in d.mods:
        return lambda b: None
    d.only(*_MODS)
    to_shared = d.ins.op.split("global")[0].find("shared") >= 0
    if "tensor" in d.mods:
        return _tensor_load(d) if to_shared else _tensor_store(d, None)
    if "global" not in d.mods:
        return _shared_copy(d, None)
    return _plain_load(d) if to_shared else _plain_store(d, None)


_REDUCTIONS, _COUNTERS = ("add", "min", "max", "and", "or", "xor"), ("inc", "dec")


@instruction("cp.reduce")
def bulk_reduce(d: Decoder) -> Execute:
    """9.7.9.25.4.2, 9.7.9.27.3: a store that combines element by element."""
    d.only(*_MODS, "reduce", "noftz", *_COUNTERS)
    plain = (*_REDUCTIONS, *_COUNTERS)
    name = next((p for p in d.parts if p in (_REDUCTIONS if "tensor" in d.mods else plain)), None)
    if name is None:
        raise d.unknown("reduction")
    if "tensor" in d.mods:
        return _tensor_store(d, name)
    return _plain_store(d, name) if "global" in d.mods else _shared_copy(d, name)


def _shared(
    d: Decoder, b: Batch, row: int, lane: int, address: int, size: int, align: int
) -> tuple[int, int]:
    """(cta, offset) of ``size`` bytes; raises BadAddress outside shared memory and BadOperand where
    misaligned.
    """
    warp = np.array([b.idx[row]])
    cta, offset = d.m.shared_location(warp, np.array([address & (SHARED_WINDOW - 1)], np.uint64))
    d.m.check_shared(warp, np.array([lane]), cta, offset, 1, d.ins)
    if size:
        d.m.check_shared(warp, np.array([lane]), cta, offset + size - 1, 1, d.ins)
    if int(offset[0]) % align:
        raise BadOperand.at(
            d.ins,
            f"{d.m.name_warp(int(warp[0]))} copies to shared 0x{int(offset[0]):x}, which is not "
            f"{align}-byte aligned",
        )
    return int(cta[0]), int(offset[0])


def _targets(d: Decoder, cta: int, mask: int | None) -> list[int]:
    """CTAs that a (multicast) copy writes."""
    if mask is None:
        return [cta]
    first = cta - int(d.m.cta_rank[cta])
    return [first + r for r in range(d.m.cluster_size) if mask >> r & 1]


def _signalled(m: Machine, target: int, barrier_cta: int, pair: bool) -> int:
    """The CTA whose mbarrier a multicast copy into ``target`` completes on.

    Its own; with cta_group::2, that of its pair with the same parity of rank as the barrier's.
    """
    if not pair:
        return target
    rank = int(m.cta_rank[target])
    return target - rank + (rank & ~1 | int(m.cta_rank[barrier_cta]) & 1)


def _multicast(d: Decoder) -> Callable[[Batch], np.ndarray] | None:
    if "multicast" not in d.mods:
        return None
    last = len(d) - (2 if "cache_hint" in d.mods else 1)  # the mask stands before the cache policy
    return _Value(d.src(last, "u16"))


def _tensor_load(d: Decoder) -> Execute:
    """Global to shared, completing on an mbarrier with the bytes of the whole box."""
    m, ins = d.m, d.ins
    to, tmap_at, barrier = _Value(d.address(0)), _Value(d.address(1)), _Value(d.address(2))
    coordinates = [_Value(c) for c in d.coordinates(1)]
    multicast = _multicast(d)
    pair = "cta_group::2" in ins.op

    def execute(b: Batch) -> None:
        t, maps, bars, cs = to(b), tmap_at(b), barrier(b), [c(b) for c in coordinates]
        masks = multicast(b) if multicast else None
        for row, lane in _lanes(b):
            tmap = read_map(d, int(maps[row, lane]))
            at = tuple(int(c[row, lane]) for c in cs)
            _check_coordinates(d, tmap, at)
            align = 128 if tmap.swizzle else 16
            cta, offset = _shared(d, b, row, lane, int(t[row, lane]), tmap.bytes, 16)
            if offset % align and tmap.swizzle:
                m.find(
                    "bad operand",
                    f"a swizzled box starts at shared 0x{offset:x}, which is not 128-byte aligned",
                    ins,
                )
            bar_cta, bar = _shared(d, b, row, lane, int(bars[row, lane]), 8, 8)
            mask = int(masks[row, lane]) if masks is not None else None
            for target in _targets(d, cta, mask):
                signal = (bar_cta if mask is None else _signalled(m, target, bar_cta, pair), bar)
                m.mbarriers.get(*signal, ins)
                op = Operation(
                    f"the TMA load of a {tmap}", int(b.idx[row]), ins,
                    ("tma", m.flight.issued, target),
                    _loader(m, tmap, at, target, offset, signal, ins),
                    writes=[Span(target, offset, offset + tmap.bytes)], signals=signal,
                )  # fmt: skip
                m.flight.issue(op)

    return execute


def _check_coordinates(d: Decoder, tmap: TensorMap, at: tuple[int, ...]) -> None:
    if len(at) != tmap.rank:
        raise BadOperand.at(d.ins, f"{len(at)} coordinates for a tensor map of rank {tmap.rank}")
    # Seen on an H200: an inner coordinate that is not a multiple of 16 bytes traps.
    if at[0] * tmap.itemsize % 16:
        raise BadOperand.at(
            d.ins,
            f"inner coordinate {at[0]} of a {tmap} is not a multiple of 16 bytes: the hardware "
            "traps",
        )


def _window(m: Machine, tmap: TensorMap, part: Overlap, why: str) -> np.ndarray:
    """The tensor's elements under the box, a strided view (outermost first) of unsigned words."""
    counts = [s.stop - s.start for s in part.slices]
    step = [1, *tmap.steps[1:]]
    strides = [st * s for st, s in zip(tmap.strides, step, strict=True)]
    extent = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + tmap.itemsize
    raw = m.memory.view(tmap.address + part.offset, extent, why)
    kind = np.dtype(f"u{tmap.itemsize}")
    return np.lib.stride_tricks.as_strided(
        raw[: tmap.itemsize].view(kind), counts[::-1], strides[::-1]
    )


def _loader(
    m: Machine,
    tmap: TensorMap,
    at: tuple[int, ...],
    cta: int,
    offset: int,
    signal: tuple[int, int],
    ins: Any,
) -> Callable[[], None]:
    def complete() -> None:
        kind = np.dtype(f"u{tmap.itemsize}")
        box = np.full(tmap.traversed[::-1], tmap.fill, kind)
        part = overlap(tmap, at)
        if not part.empty:
            box[part.slices[::-1]] = _window(m, tmap, part, f"the TMA load at {ins.where()}")
        if tmap.tf32:
            # NOTE: to nearest, as seen on an H200; that a tie goes away from zero is a guess
            finite = (box & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
            box += np.where(finite, np.uint32(0x1000), np.uint32(0))
            box &= np.uint32(0xFFFFE000)
        chunks = box.reshape(-1).view(np.uint64).reshape(-1, 2)
        where = swizzle_chunks((offset >> 4) + np.arange(len(chunks)), tmap.swizzle)
        m.smem[cta].view(np.uint64).reshape(-1, 2)[where] = chunks
        m.box_swizzle[cta, where] = tmap.swizzle + 1
        m.box_line[cta, where] = ins.line
        m.mbarriers.complete_tx(*signal, tmap.bytes, "a TMA load", ins)

    return complete


_KINDS = {  # of a tensor map's elements, for reductions
    0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f32",
    9: "f64", 10: "bf16",
}  # fmt: skip


def _tensor_store(d: Decoder, combine: str | None) -> Execute:
    """Shared to global; elements outside the tensor are not written."""
    m, ins = d.m, d.ins
    tmap_at, frm = _Value(d.address(0)), _Value(d.address(1))
    coordinates = [_Value(c) for c in d.coordinates(0)]

    def execute(b: Batch) -> None:
        maps, f, cs = tmap_at(b), frm(b), [c(b) for c in coordinates]
        same: dict[tuple[int, ...], list[int]] = {}
        for row, lane in _lanes(b):
            key = (row, int(maps[row, lane]), int(f[row, lane]), *(int(c[row, lane]) for c in cs))
            # NOTE: lanes of a warp that ask for the same store cause it once, as the hardware's
            # uniform instruction does
            same.setdefault(key, []).append(lane)
        for (row, address, source, *at), lanes in same.items():
            tmap = read_map(d, address)
            _check_coordinates(d, tmap, tuple(at))
            _check_stored_rows(d, tmap, tuple(at))
            cta, offset = _shared(d, b, row, lanes[0], source, tmap.bytes, 16)
            warp = int(b.idx[row])
            groups = [m.bulk_groups.joined((warp, lane)) for lane in lanes]
            op = Operation(
                f"the TMA store of a {tmap}", warp, ins, ("store", m.flight.issued),
                _storer(m, tmap, tuple(at), cta, offset, combine, groups, ins),
                reads=[Span(cta, offset, offset + tmap.bytes)], is_store=True,
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _check_stored_rows(d: Decoder, tmap: TensorMap, at: tuple[int, ...]) -> None:
    """What a store does otherwise than a load, seen on an H200: it traps on a negative coordinate,
    and bounds a row in whole units of 16 bytes.
    """
    if min(at) < 0:
        raise BadOperand.at(
            d.ins,
            f"a TMA store of a {tmap} starts at coordinates {at}: the hardware traps on negative "
            "ones (a load would fill with zeros)",
        )
    row = tmap.dims[0] * tmap.itemsize
    if row % 16 and at[0] < tmap.dims[0] < at[0] + tmap.box[0]:
        d.m.find(
            "overwrite",
            f"a TMA store of a {tmap} writes whole units of 16 bytes: it overwrites the "
            f"{16 - row % 16} bytes behind the end of each row, of {row} bytes",
            d.ins,
        )


def _storer(
    m: Machine,
    tmap: TensorMap,
    at: tuple[int, ...],
    cta: int,
    offset: int,
    combine: str | None,
    groups: list[BulkGroup],
    ins: Any,
) -> Callable[[], None]:
    def complete() -> None:
        kind = np.dtype(f"u{tmap.itemsize}")
        n = tmap.bytes // 16
        where = swizzle_chunks((offset >> 4) + np.arange(n), tmap.swizzle)
        chunks = m.smem[cta].view(np.uint64).reshape(-1, 2)[where]
        box = np.ascontiguousarray(chunks).reshape(-1).view(kind).reshape(tmap.traversed[::-1])
        part = overlap(tmap, at)
        if not part.empty:
            target = _window(m, tmap, part, f"the TMA store at {ins.where()}")
            new = box[part.slices[::-1]]
            if combine is not None:
                old, new = np.ascontiguousarray(target), np.ascontiguousarray(new)
                new = atomics.combine(combine, _KINDS[tmap.kind], old, new)
            target[...] = new
        for group in groups:
            group.finished()

    return complete


def _plain_load(d: Decoder) -> Execute:
    """9.7.9.25.4.1: contiguous bytes, a multiple of 16, global to shared."""
    m, ins = d.m, d.ins
    to, frm, size, barrier = (
        _Value(d.address(0)),
        _Value(d.address(1)),
        _Value(d.src(2, "u32")),
        _Value(d.address(3)),
    )
    multicast = _multicast(d)

    def execute(b: Batch) -> None:
        t, f, s, bars = to(b), frm(b), size(b), barrier(b)
        masks = multicast(b) if multicast else None
        for row, lane in _lanes(b):
            n, source = int(s[row, lane]), int(f[row, lane])
            _check_plain(d, n, source)
            cta, offset = _shared(d, b, row, lane, int(t[row, lane]), n, 16)
            bar_cta, bar = _shared(d, b, row, lane, int(bars[row, lane]), 8, 8)
            mask = int(masks[row, lane]) if masks is not None else None
            for target in _targets(d, cta, mask):
                signal = (bar_cta if mask is None else target, bar)
                m.mbarriers.get(*signal, ins)

                op = Operation(
                    "the bulk copy", int(b.idx[row]), ins, ("tma", m.flight.issued, target),
                    _bulk_loader(m, source, target, offset, n, signal, ins),
                    writes=[Span(target, offset, offset + n)], signals=signal,
                )  # fmt: skip
                m.flight.issue(op)

    return execute


def _bulk_loader(
    m: Machine, source: int, cta: int, offset: int, n: int, signal: tuple[int, int], ins: Any
) -> Callable[[], None]:
    def complete() -> None:
        m.smem[cta, offset : offset + n] = m.memory.view(
            source, n, f"the bulk copy at {ins.where()}"
        )
        m.box_swizzle[cta, offset >> 4 : offset + n >> 4] = 0
        m.mbarriers.complete_tx(*signal, n, "a bulk copy", ins)

    return complete


def _shared_copy(d: Decoder, reduction: str | None) -> Execute:
    """9.7.9.25.4.1: own shared memory to that of a CTA of the cluster, whose mbarrier completes."""
    m, ins = d.m, d.ins
    to, frm, barrier = _Value(d.address(0)), _Value(d.address(1)), _Value(d.address(3))
    size = _Value(d.src(2, "u32"))

    def execute(b: Batch) -> None:
        t, f, s, bars = to(b), frm(b), size(b), barrier(b)
        for row, lane in _lanes(b):
            n = int(s[row, lane])
            _check_plain(d, n, 0)
            cta, offset = _shared(d, b, row, lane, int(t[row, lane]), n, 16)
            source = _shared(d, b, row, lane, int(f[row, lane]), n, 16)
            signal = _shared(d, b, row, lane, int(bars[row, lane]), 8, 8)
            if signal[0] != cta:
                raise BadOperand.at(
                    ins,
                    f"a copy to {m.name_cta(cta)} completes on an mbarrier of "
                    f"{m.name_cta(signal[0])}: they must lie in the same CTA",
                )
            m.mbarriers.get(*signal, ins)
            op = Operation(
                "the bulk copy", int(b.idx[row]), ins, ("tma", m.flight.issued, cta),
                _mover(d, reduction, source, (cta, offset), n, signal),
                reads=[Span(source[0], source[1], source[1] + n)],
                writes=[Span(cta, offset, offset + n)], signals=signal,
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _mover(
    d: Decoder,
    reduction: str | None,
    source: tuple[int, int],
    target: tuple[int, int],
    n: int,
    signal: tuple[int, int],
) -> Callable[[], None]:
    m = d.m

    def complete() -> None:
        old = m.smem[target[0], target[1] : target[1] + n]
        old[:] = _combined(d, reduction, old, m.smem[source[0], source[1] : source[1] + n])
        m.box_swizzle[target[0], target[1] >> 4 : target[1] + n >> 4] = 0
        m.mbarriers.complete_tx(*signal, n, "a bulk copy", d.ins)

    return complete


def _combined(d: Decoder, reduction: str | None, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Bytes, combined in the instruction's type."""
    if reduction is None:
        return new
    word = np.dtype(f"u{WIDTH[d.type] // 8}")
    old, new = (np.ascontiguousarray(x).view(word) for x in (old, new))
    return atomics.combine(reduction, d.type, old, new).view(np.uint8)


def _plain_store(d: Decoder, reduction: str | None) -> Execute:
    m, ins = d.m, d.ins
    to, frm, size = _Value(d.address(0)), _Value(d.address(1)), _Value(d.src(2, "u32"))

    def execute(b: Batch) -> None:
        t, f, s = to(b), frm(b), size(b)
        for row, lane in _lanes(b):
            n, target = int(s[row, lane]), int(t[row, lane])
            _check_plain(d, n, target)
            cta, offset = _shared(d, b, row, lane, int(f[row, lane]), n, 16)
            thread = (int(b.idx[row]), lane)
            op = Operation(
                "the bulk store", thread[0], ins, ("store", m.flight.issued),
                _bulk_storer(
                    d, reduction, target, (cta, offset), n, m.bulk_groups.joined(thread)
                ),
                reads=[Span(cta, offset, offset + n)], is_store=True,
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _bulk_storer(
    d: Decoder,
    reduction: str | None,
    target: int,
    source: tuple[int, int],
    n: int,
    group: BulkGroup,
) -> Callable[[], None]:
    m = d.m

    def complete() -> None:
        old = m.memory.view(target, n, f"the bulk store at {d.ins.where()}")
        old[:] = _combined(d, reduction, old, m.smem[source[0], source[1] : source[1] + n])
        group.finished()

    return complete


def _check_plain(d: Decoder, size: int, address: int) -> None:
    if size % 16 or address % 16:
        raise BadOperand.at(
            d.ins,
            f"a bulk copy of {size} bytes at global 0x{address:x}: size and address must be "
            "multiples of 16",
        )


# -- bulk groups -----------------------------------------------------------------------------------


def _commit_group(d: Decoder) -> Execute:
    """9.7.9.25.4.5"""

    def execute(b: Batch) -> None:
        for row, lane in _lanes(b):
            d.m.bulk_groups.commit((int(b.idx[row]), lane))

    return execute


def _wait_group(d: Decoder) -> Execute:
    """9.7.9.25.4.6: until at most N of this thread's groups are pending; .read and full completion
    coincide here.
    """
    m, ins = d.m, d.ins
    allowed = d.immediate(0)

    def execute(b: Batch) -> np.ndarray | None:
        out = np.zeros(b.n, np.int8)
        for row, lane in _lanes(b):
            thread = (int(b.idx[row]), lane)
            if not out[row] and m.bulk_groups.overdue(thread, allowed):
                out[row] = RETRY
                m.sleep(
                    thread[0],
                    Wait("bulk group", ("bulk", *thread), ins, lambda: "waits for its bulk stores"),
                )
        return out if out.any() else None

    return execute

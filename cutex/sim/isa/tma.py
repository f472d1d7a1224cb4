"""The tensor memory accelerator: bulk-tensor copies (PTX ISA 9.7.9.27)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa import atomics, im2col
from cutex.sim.isa.boxes import places_under, window, word_of
from cutex.sim.isa.bulk_operands import (
    Value,
    active_lanes,
    check_one_cta,
    check_source,
    multicast_mask,
    shared_place,
    signalled,
    targets,
    tell_of_lanes,
)
from cutex.sim.isa.im2col import PixelBox
from cutex.sim.isa.tensormap import (
    MAP_BYTES,
    TensorMap,
    decode_map,
    overlap,
    swizzle_chunks,
)
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.bulk_groups import BulkGroup
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import PARAM_WINDOW
from cutex.sim.machine.operation import Engine, Operation, Span
from cutex.sim.ptx.decode import Decoder, Execute
from cutex.sim.ptx.operands import Vector

BOX_ALIGN = 128  # bytes, of a box in shared memory, swizzled or not; an H100 traps on less


class MapOperand:
    """The tensor map operand of an instruction."""

    def __init__(self, d: Decoder) -> None:
        self.d, self.m = d, d.m
        self.parameters: dict[int, TensorMap] = {}  # by address: these do not change

    def read(self, warp: int, address: int) -> TensorMap:
        """The map that an operation of ``warp`` uses."""
        tmap = self.parameters.get(address)
        if tmap is not None:
            return tmap
        m, ins = self.m, self.d.ins
        if address & (63):
            raise BadOperand.at(ins, f"tensor map at 0x{address:x} is not 64-byte aligned")
        if address & PARAM_WINDOW:
            at = address & (PARAM_WINDOW - 1)
            raw = m.params[at : at + MAP_BYTES].tobytes()
        else:
            m.events.map_used(warp, address, ins)
            raw = m.memory.view(address, MAP_BYTES, f"the tensor map of {ins.op}").tobytes()
        tmap = decode_map(raw)
        why = tmap.why_not()
        if why:
            raise BadOperand.at(ins, f"tensor map at 0x{address:x}: {why}")
        if address & PARAM_WINDOW:
            self.parameters[address] = tmap
        return tmap


def tensor_load(d: Decoder) -> Execute:
    """Bulk-tensor load, global to shared, completing on an mbarrier with the bytes of the whole
    box.
    """
    m, ins = d.m, d.ins
    to, tmap_at, barrier = Value(d.address(0)), Value(d.address(1, True)), Value(d.address(2))
    map_of, boxes = MapOperand(d), Boxes(d)
    coordinates = [Value(c) for c in (*d.coordinates(1), *_offsets(d))]
    multicast, places_of = multicast_mask(d), _places_of(d)
    pair = "cta_group::2" in ins.op

    def execute(b: Batch) -> None:
        t, maps, bars, cs = to(b), tmap_at(b), barrier(b), [c(b) for c in coordinates]
        masks = multicast(b) if multicast else None
        alike: dict[Hashable, list[Operation]] = {}
        for row, lane in active_lanes(b):
            tmap = map_of.read(int(b.idx[row]), int(maps[row, lane]))
            places = places_of(tmap, tuple(int(c[row, lane]) for c in cs))
            found = [boxes.loaded(tmap, at) for at in places]
            size = tmap.bytes * len(found)
            cta, offset = shared_place(d, b, row, lane, int(t[row, lane]), size, BOX_ALIGN)
            bar_cta, bar = shared_place(d, b, row, lane, int(bars[row, lane]), 8, 8)
            mask = int(masks[row, lane]) if masks is not None else None
            if mask is None and not pair:
                check_one_cta(d, cta, bar_cta)
            for at in places:
                m.events.box_issued(int(b.idx[row]), tmap, at, False, ins)
            for target in targets(d, cta, mask):
                signal = (bar_cta if mask is None else signalled(m, target, bar_cta, pair), bar)
                m.mbarriers.use(*signal, int(b.idx[row]), ins)
                op = Operation(
                    f"the TMA load of {_named(found)}", int(b.idx[row]), ins, None,
                    _loader(m, found, target, offset, signal, ins), Engine.TMA_LOAD, size,
                    writes=[Span(target, offset, offset + size)], signals=[signal],
                    source=(tmap, places),
                )  # fmt: skip
                ranks = int(m.grid.cta_rank[cta]), int(m.grid.cta_rank[target])
                who = int(m.grid.warp_in_cta[b.idx[row]]), lane
                alike.setdefault((who, ranks, offset, size), []).append(op)
        for ops in alike.values():
            m.flight.issue(*ops)

    return execute


class Box:
    """A box of a tensor, which many CTAs may load: the state that is the same for all of them."""

    def __init__(self, d: Decoder, tmap: TensorMap, at: tuple[int, ...]) -> None:
        self.m, self.ins, self.tmap, self.at = d.m, d.ins, tmap, at
        self.part = overlap(tmap, at)

    @cached_property
    def name(self) -> str:
        """'mB[0, 64] (bf16 tensor 256x256, box 256x64)': the tensor by the name of its memory."""
        region = self.m.memory.find(self.tmap.address)
        if region is None or region.base != self.tmap.address:
            return f"a {self.tmap}"
        return f"{region.name}{list(reversed(self.at))} ({self.tmap})"

    @cached_property
    def window(self) -> np.ndarray:
        """The tensor's elements under the box, of which there must be some, as `_window`."""
        what = "load" if "mbarrier" in self.ins.parts else "store"
        why = f"the TMA {what} at {self.ins.where()}"
        return window(self.m.memory, self.tmap, self.part, why, write=what == "store")

    def chunks(self) -> np.ndarray:
        """The data that a load writes to shared memory, in chunks of 16 bytes before the swizzle,
        (bytes / 16,).
        """
        tmap, part = self.tmap, self.part
        if not (part.whole(tmap) and tmap.plain):
            return _filled(self).reshape(-1).view(np.complex128)
        return np.ascontiguousarray(self.window).reshape(-1).view(np.complex128)


class Boxes:
    """The boxes that an instruction has accessed."""

    def __init__(self, d: Decoder) -> None:
        self.d = d
        self.met: dict[tuple[int, tuple[int, ...]], Box] = {}
        self.pixels: dict[tuple[int, tuple[int, ...]], PixelBox] = {}

    def of(self, tmap: TensorMap, at: tuple[int, ...]) -> Box:
        key = id(tmap), at  # NOTE: each box keeps its map, so that its number stays its own
        box = self.met.get(key)
        if box is None:
            box = self.met[key] = Box(self.d, tmap, at)
        return box

    def loaded(self, tmap: TensorMap, at: tuple[int, ...]) -> Box | PixelBox:
        """The Box at ``at``, or the PixelBox of a map in im2col mode."""
        if tmap.pixels is None:
            return self.of(tmap, at)
        key = id(tmap), at
        if key not in self.pixels:
            self.pixels[key] = PixelBox(self.d.m.memory, tmap, at)
        return self.pixels[key]


def _places_of(
    d: Decoder,
) -> Callable[[TensorMap, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
    """A function that gives the starts of an instruction's boxes in the map's elements: one, or
    with gather4 and scatter4 (PTX ISA 5.5.3) one row each of four, which are adjacent in shared
    memory.
    """
    if "im2col" in d.mods:
        rank = len(d.coordinates(1))
        return lambda tmap, at: (im2col.start(tmap, at[:rank], at[rank:], d.ins),)
    if not {"gather4", "scatter4"} & set(d.mods):
        return lambda tmap, at: (_place(d, tmap, at),)
    if "2d" not in d.mods or d.m.program.target.startswith("sm_90"):
        raise d.unknown(f"four rows of other than 2d, or on {d.m.program.target}")

    def four(tmap: TensorMap, at: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if len(at) != 5 or tmap.rank != 2 or tmap.traversed[1] != 1:
            raise BadOperand.at(
                d.ins,
                f"{len(at)} coordinates and a {tmap}: four rows are a column and four rows, of a "
                "tensor map of rank 2 whose box is one row",
            )
        return tuple(_place(d, tmap, (at[0], row)) for row in at[1:])

    return four


def _offsets(d: Decoder) -> list[Any]:
    """The offsets of im2col mode, 16 bits each; none in tiled mode."""
    operand = d.ins.operands[3] if "im2col" in d.mods else None
    return [d.read(o, "u16") for o in operand.items] if isinstance(operand, Vector) else []


def _named(boxes: Sequence[Box | PixelBox]) -> str:
    return ", ".join(dict.fromkeys(box.name for box in boxes))


def _place(d: Decoder, tmap: TensorMap, at: tuple[int, ...]) -> tuple[int, ...]:
    """The instruction's coordinates in the map's elements."""
    if tmap.pixels is not None:
        raise BadOperand.at(d.ins, f"a {tmap} is of im2col mode, this copy of tiled mode")
    if len(at) != tmap.rank:
        raise BadOperand.at(d.ins, f"{len(at)} coordinates for a tensor map of rank {tmap.rank}")
    # Seen on an H200: an inner coordinate that is not a multiple of 16 bytes traps.
    place = tmap.place(at)
    if place is None or place[0] * tmap.itemsize % 16:
        unit = "128 elements" if tmap.padded else "16 bytes"
        raise BadOperand.at(
            d.ins,
            f"inner coordinate {at[0]} of a {tmap} is not a multiple of {unit}: the hardware traps",
        )
    return place


def _padded(box: np.ndarray) -> np.ndarray:
    """Each element padded to 16 bytes; the padding is not specified, and here fp8 NaNs."""
    packed = np.ascontiguousarray(box).view(np.uint8).reshape(-1, box.dtype.itemsize)
    out = np.full((len(packed), 16), 0x7F, np.uint8)
    out[:, : packed.shape[1]] = packed
    return out


def _filled(of: Box) -> np.ndarray:
    """The elements of a box that is not simply a part of its tensor."""
    tmap, part = of.tmap, of.part
    box = np.zeros(tmap.traversed[::-1], word_of(tmap))
    if tmap.nan_fill:
        box[...] = tmap.fill
    if not part.empty:
        box[part.slices[::-1]] = of.window
    if tmap.tf32:
        # NOTE: to nearest, as seen on an H200; that a tie goes away from zero is a guess
        finite = (box & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        box += np.where(finite, np.uint32(0x1000), np.uint32(0))
        box &= np.uint32(0xFFFFE000)
    return _padded(box) if tmap.padded else box


@lru_cache(maxsize=4096)
def _swizzled(first: int, count: int, swizzle: int) -> np.ndarray:
    """The swizzled places of ``count`` chunks of 16 bytes from number ``first`` on; read-only."""
    return swizzle_chunks(first + np.arange(count), swizzle)


def _loader(
    m: Machine,
    boxes: Sequence[Box | PixelBox],
    cta: int,
    offset: int,
    signal: tuple[int, int],
    ins: Any,
) -> Callable[[], None]:
    tmap = boxes[0].tmap

    def complete() -> None:
        each = [box.chunks() for box in boxes]
        chunks = each[0] if len(each) == 1 else np.concatenate(each)
        where = _swizzled(offset >> 4, len(chunks), tmap.swizzle)
        m.smem_chunks[cta][where] = chunks
        row = m.box_swizzle[cta], m.box_line[cta]
        # NOTE: a swizzle stays within rows of 128 bytes
        span = where if offset % 128 else slice(offset >> 4, (offset >> 4) + len(chunks))
        row[0][span], row[1][span] = tmap.swizzle + 1, ins.line
        m.mbarriers.complete_tx(*signal, tmap.tx_bytes * len(boxes), "a TMA load", ins)

    return complete


_KINDS = {  # of a tensor map's elements, for reductions
    0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f32",
    9: "f64", 10: "bf16",
}  # fmt: skip


def tensor_store(d: Decoder, combine: str | None) -> Execute:
    """Bulk-tensor store, shared to global; elements outside the tensor are not written."""
    m, ins = d.m, d.ins
    tmap_at, frm = Value(d.address(0, True)), Value(d.address(1))
    map_of, boxes = MapOperand(d), Boxes(d)
    coordinates, places_of = [Value(c) for c in d.coordinates(0)], _places_of(d)

    def execute(b: Batch) -> None:
        maps, f, cs = tmap_at(b), frm(b), [c(b) for c in coordinates]
        same: dict[tuple[int, ...], list[int]] = {}
        rows, lanes_of = np.nonzero(b.active())
        values = (x[rows, lanes_of].tolist() for x in (maps, f, *cs))
        for lane, *key in zip(lanes_of.tolist(), rows.tolist(), *values, strict=True):
            # NOTE: lanes of a warp with the same store cause it once, as the hardware's uniform
            # instruction does
            same.setdefault(tuple(key), []).append(lane)
        for (row, address, source, *at), lanes in same.items():
            tmap = map_of.read(int(b.idx[row]), address)
            if tmap.padded:
                raise BadOperand.at(ins, f"a store of a {tmap} is not defined")
            if combine and tmap.kind not in _KINDS:
                raise BadOperand.at(ins, f"a reduction into a {tmap} is not defined")
            places, warp = places_of(tmap, tuple(at)), int(b.idx[row])
            if combine:
                tell_of_lanes(d, warp, len(lanes))
            found, size = [boxes.of(tmap, where) for where in places], tmap.bytes * len(places)
            for where in places:
                _check_stored_rows(d, tmap, where)
                m.events.box_issued(warp, tmap, where, True, ins)
            cta, offset = shared_place(d, b, row, lanes[0], source, size, BOX_ALIGN)
            groups = [m.bulk_groups.joined((warp, lane)) for lane in lanes]
            op = Operation(
                f"the TMA store of {_named(found)}", warp, ins, None,
                _storer(m, found, cta, offset, combine, groups, ins),
                Engine.TMA_STORE, size, reads=[Span(cta, offset, offset + size)],
                agents=[(warp, groups[0].last)],
            )  # fmt: skip
            m.flight.issue(op)

    return execute


def _check_stored_rows(d: Decoder, tmap: TensorMap, at: tuple[int, ...]) -> None:
    """Raise BadOperand where a store differs from a load, as seen on an H200: it traps on a
    negative coordinate, and bounds a row in whole units of 16 bytes.
    """
    if min(at) < 0:
        raise BadOperand.at(
            d.ins,
            f"a TMA store of a {tmap} starts at coordinates {at}: the hardware traps on negative "
            "ones (a load would fill with zeros)",
        )
    row = tmap.dims[0] * tmap.itemsize
    if row % 16 and at[0] < tmap.dims[0] < at[0] + tmap.box[0]:
        d.m.findings.add(
            "overwrite",
            f"a TMA store of a {tmap} writes whole units of 16 bytes: it overwrites the "
            f"{16 - row % 16} bytes behind the end of each row, of {row} bytes",
            d.ins,
        )


def _chunks_inside(box: Box) -> np.ndarray:
    """Whether each 16 bytes of a box hold an element of the tensor, (bytes / 16,)."""
    inside = np.zeros(box.tmap.traversed[::-1], bool)
    inside[box.part.slices[::-1]] = True
    return np.asarray(inside.reshape(-1, 16 // box.tmap.itemsize).any(1))


def _storer(
    m: Machine,
    boxes: Sequence[Box],
    cta: int,
    offset: int,
    combine: str | None,
    groups: list[BulkGroup],
    ins: Any,
) -> Callable[[], None]:
    tmap, by = boxes[0].tmap, groups[0].storing

    def store(of: Box, box: np.ndarray) -> None:
        part, target = of.part, of.window
        new = np.ascontiguousarray(box[part.slices[::-1]])
        if combine is not None:
            old = np.ascontiguousarray(target)
            new = atomics.combine(combine, _KINDS[tmap.kind], old, new)
        region, places = places_under(m.memory, tmap, part, target)
        if combine is None:
            words = new.reshape(-1, 1).view(np.uint8)
            m.events.bulk_writes(region, places, words, by, ins)
        else:
            m.events.bulk_reduced(region, places, tmap.itemsize, by, ins)
        target[...] = new

    def complete() -> None:
        where = _swizzled(offset >> 4, tmap.bytes * len(boxes) // 16, tmap.swizzle)
        modes = m.box_swizzle[cta].take(where)
        if modes.min() < 0 or modes.max() > 0:
            inside = np.concatenate([_chunks_inside(of) for of in boxes])
            name = f"the TMA store of {_named(boxes)}"
            check_source(m, name, cta, modes[inside], tmap.swizzle, ins)
        stored = m.smem_chunks[cta].take(where).view(word_of(tmap))
        for of, box in zip(boxes, np.split(stored, len(boxes)), strict=True):
            if not of.part.empty:
                store(of, box.reshape(tmap.traversed[::-1]))
        for group in groups:
            group.finished()

    return complete

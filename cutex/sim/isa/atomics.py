"""Atomic operations on memory (PTX ISA 9.7.13.6, 9.7.13.7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.isa.access import SPACES, Access
from cutex.sim.isa.data import HINTS, elements, vector_length, words_128
from cutex.sim.machine.batch import Batch, Lanes
from cutex.sim.numerics.rounding import narrow, widen
from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import TYPES, Decoder, Execute, instruction

_COMBINE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, x: x,
    "inc": lambda old, x: np.where(old >= x, 0, old + np.uint32(1)),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - np.uint32(1)),
}  # fmt: skip
_HALVES = {"f16": "f16", "f16x2": "f16", "bf16": "bf16", "bf16x2": "bf16"}


def combine(name: str, kind: str, old: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The operation ``name`` on arrays of type ``kind``; halves as 16-bit words, or two in a 32-bit
    one.
    """
    if kind in _HALVES:
        half = _HALVES[kind]
        values = (widen(np.ascontiguousarray(v).view(np.uint16), half) for v in (old, x))
        return narrow(_COMBINE[name](*values), half).view(old.dtype)
    return np.asarray(_COMBINE[name](old.view(TYPES[kind]), x.view(TYPES[kind]))).view(old.dtype)


@instruction("atom", "red")
def atomic(d: Decoder) -> Execute:
    """atom, red (9.7.13.6, 9.7.13.7): in the order of lanes, each element atomically. Lanes of a
    warp that name different places, or add up in one, are computed together.
    """
    d.only(*SPACES, *_COMBINE, "cas", *HINTS, "acq_rel", "noftz", "v2", "v4", "v8")
    at = 1 if d.ins.name == "atom" else 0
    count, word = vector_length(d), f"b{WIDTH[d.type]}"
    size = WIDTH[d.type] // 8
    access = Access(d, at, size * count)
    name = next((p for p in d.parts if p in _COMBINE), "")
    swaps = "cas" in d.mods
    if d.type == "b128":
        count, word = 2, "b64"
        xs = [read for read, _ in words_128(d, d.ins.operands[2])]
        ys = [read for read, _ in words_128(d, d.ins.operands[3])] if swaps else []
        writes = [write for _, write in words_128(d, d.ins.operands[0])]
    else:
        xs = [d.read(o, word) for o in elements(d, at + 1, count)]
        ys = [d.read(o, word) for o in elements(d, at + 2, count)] if swaps else []
        writes = [d.write(o, word) for o in elements(d, 0, count)] if at else []
    dtype = TYPES[word]

    def updated(old: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if swaps:
            return np.where((old == x).all(1, keepdims=True), y, old)
        return combine(name, d.type, old, x)

    def together(where: Lanes, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The old values of lanes of different places."""
        old = access.fetch(where).view(dtype)  # (lanes, count)
        new = np.ascontiguousarray(updated(old, x, y))
        changed = (new != old).any(1)  # NOTE: a lane that changes nothing may spin
        if changed.any():
            access.put(where.pick(changed), new[changed].view(np.uint8))
        return old

    def in_turn(where: Lanes, x: np.ndarray, first: np.ndarray, place: np.ndarray) -> np.ndarray:
        """The old values of lanes that share places, numbered by ``place``; ``first``: a lane of
        each.
        """
        before = access.fetch(where).view(TYPES[d.type])[:, 0]
        old, last, new = np.empty_like(before), first.copy(), before[first].copy()
        values = np.ascontiguousarray(x).view(TYPES[d.type])[:, 0]
        for number, lane in enumerate(first.tolist()):
            mine = np.flatnonzero(place == number)
            steps = np.append(before[lane], values[mine])
            steps = _COMBINE[name].accumulate(steps, dtype=steps.dtype)
            old[mine], new[number], last[number] = steps[:-1], steps[-1], mine[-1]
        changed = new != before[first]
        if changed.any():
            access.put(where.pick(last[changed]), new[changed, None].view(np.uint8))
        return old.view(dtype)[:, None]

    adds_up = isinstance(_COMBINE.get(name), np.ufunc) and count == 1 and d.type not in _HALVES

    def of_warp(where: Lanes, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The old values of the lanes of one warp, (lanes, count), which come in lane order."""
        places, first, place = np.unique(where.addresses, return_index=True, return_inverse=True)
        if len(places) == len(place):
            return together(where, x, y)
        if adds_up:
            return in_turn(where, x, first, place)
        old = np.empty_like(x)
        left = np.ones(len(place), bool)
        while left.any():
            lanes = np.flatnonzero(left)
            lanes = lanes[np.unique(place[lanes], return_index=True)[1]]
            old[lanes] = together(where.pick(lanes), x[lanes], y[lanes])
            left[lanes] = False
        return old

    def execute(b: Batch) -> None:
        where = access.lanes(b)
        row = np.searchsorted(b.idx, where.warps)
        x, y = (_by_lane(b, reads, dtype)[row, where.lanes] for reads in (xs, ys or xs))
        olds = np.zeros((b.n, 32, count), dtype)
        for warp in np.unique(row).tolist():
            mine = row == warp
            olds[warp, where.lanes[mine]] = of_warp(where.pick(mine), x[mine], y[mine])
        for i, write in enumerate(writes):
            write(b, olds[:, :, i])

    return execute


def _by_lane(b: Batch, reads: list[Any], dtype: Any) -> np.ndarray:
    """The values that ``reads`` give, (n, 32, elements)."""
    return np.stack([b.lanes(r(b)) for r in reads], 2).astype(dtype, copy=False)

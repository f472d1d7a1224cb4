"""Atomic operations on memory (PTX ISA 9.7.13.6, 9.7.13.7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.isa.access import SPACES, Access
from cutex.sim.isa.data import HINTS, elements, vector_length, words_128
from cutex.sim.machine.batch import Batch
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
    """atom, red (9.7.13.6, 9.7.13.7): lane by lane, in lane order, each element atomically."""
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

    def execute(b: Batch) -> None:
        where = access.lanes(b)
        row = np.searchsorted(b.idx, where.warps)
        x, y = (_by_lane(b, reads, dtype)[row, where.lanes] for reads in (xs, ys or xs))
        olds = np.zeros((b.n, 32, count), dtype)
        for k in range(len(row)):
            one = where.pick(slice(k, k + 1))
            old = access.fetch(one).view(dtype)  # (1, count)
            new = np.ascontiguousarray(updated(old, x[k : k + 1], y[k : k + 1]))
            if not (new == old).all():  # NOTE: a lane that changes nothing may spin
                access.put(one, new.view(np.uint8))
            olds[row[k], where.lanes[k]] = old[0]
        for i, write in enumerate(writes):
            write(b, olds[:, :, i])

    return execute


def _by_lane(b: Batch, reads: list[Any], dtype: Any) -> np.ndarray:
    """The values that ``reads`` give, (n, 32, elements)."""
    return np.stack([b.lanes(r(b)) for r in reads], 2).astype(dtype, copy=False)

"""mma.sync of 8-, 6- and 4-bit floats with scale factors of blocks, or none (PTX ISA 9.7.14.3,
9.7.14.5): kind::f8f6f4, mxf8f6f4, mxf4 and mxf4nvf4 of sm_120a.

Operands lie in registers as those of other mma.sync. Of mxf4 and mxf4nvf4 a register holds 8
elements of K; of the others 4, each in a byte: 6 bits in its lower ones, 4 bits in the middle. The
factors of row t / 4 of A are in the lanes of its quad that thread-id names (a pair: the second has
row t / 4 + 8), those of column t / 4 of B in the one lane; byte-id is the first of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from cutex.sim.isa.sync import require_whole_warp
from cutex.sim.machine.batch import Batch
from cutex.sim.ptx.decode import Decoder, Execute, Read
from cutex.sim.ptx.operands import Vector

_TYPES = {  # numpy's type, and where its bits are in a byte
    "e4m3": (ml_dtypes.float8_e4m3fn, 0xFF, 0), "e5m2": (ml_dtypes.float8_e5m2, 0xFF, 0),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0x3F, 0), "e2m3": (ml_dtypes.float6_e2m3fn, 0x3F, 0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0xF, 2),
}  # fmt: skip
_FACTORS = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}
_VECTORS = {  # factors of a row, by kind; the first is meant where none is named
    "mxf8f6f4": {"1X": 1}, "mxf4": {"2X": 2}, "mxf4nvf4": {"2X": 2, "4X": 4}, "f8f6f4": {},
}  # fmt: skip
_G, _Q = np.arange(32) // 4, np.arange(32) % 4


def scaled_mma(d: Decoder) -> Execute:
    """D = (A * factors) (B * factors) + C, with sums in float32."""
    kind = d.parts[d.parts.index("kind") + 1]
    packed = kind in ("mxf4", "mxf4nvf4")
    k = 64 if packed else 32
    vectors = _VECTORS.get(kind)
    if vectors is None or f"m16n8k{k}" not in d.mods or ("block_scale" in d.mods) != bool(vectors):
        raise d.unknown("kind or shape")
    types = [p for p in d.parts if p in _TYPES]
    out = [p for p in d.parts if p in ("f32", "f16")]
    if len(types) != 2 or out != ["f32", "f32"] or (packed and types != ["e2m1", "e2m1"]):
        raise d.unknown("types")
    size = next((s for s in vectors if s in d.mods), next(iter(vectors), ""))
    factor = next((p for p in d.parts if p in _FACTORS), "")
    if bool(factor) != bool(vectors) or (factor == "ue4m3") != (size == "4X"):
        raise d.unknown("type of the scale factors")
    d.only("mma", "sync", "aligned", f"m16n8k{k}", "row", "col", "kind", kind, "block_scale",
           "scale_vec", size, factor, *types)  # fmt: skip
    operands = [o.items for o in d.ins.operands[:4] if isinstance(o, Vector)]
    if [len(o) for o in operands] != [4, 4, 2, 4]:
        raise d.unknown("the registers of its operands")
    reads = [[d.read(o, "b32") for o in items] for items in operands[1:3]]
    old = [d.read(o, "f32") for o in operands[3]]
    writes = [d.write(o, "f32") for o in operands[0]]
    scales = [_Scale(d, 4 + 2 * i, vectors[size], factor) for i in range(2)] if vectors else []
    count = 8 if packed else 4  # elements of a register
    register = np.arange(4)
    row = (_G + 8 * (register % 2)[:, None])[:, :, None]  # (4, 32, 1)
    of_a = count * _Q[:, None] + np.arange(count) + 4 * count * (register // 2)[:, None, None]
    of_b = count * _Q[:, None] + np.arange(count) + 4 * count * np.arange(2)[:, None, None]

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        b = b if b.mask is None else Batch(b.idx[b.any_active()], None)
        if not b.n:
            return
        a, right = np.zeros((b.n, 16, k)), np.zeros((b.n, k, 8))
        a[:, row, of_a] = _numbers(_words(b, reads[0]), types[0], packed)
        right[:, of_b, _G[:, None]] = _numbers(_words(b, reads[1]), types[1], packed)
        if scales:
            a *= scales[0].of_rows(b, k)
            right *= scales[1].of_columns(b, k).swapaxes(1, 2)
        product = a @ right  # (n, 16, 8)
        for i, (write, c) in enumerate(zip(writes, old, strict=True)):
            term = product[:, _G + 8 * (i // 2), 2 * _Q + i % 2]
            write(b, (term + b.lanes(c(b))).astype(np.float32))

    return execute


def _words(b: Batch, reads: list[Read]) -> np.ndarray:
    return np.ascontiguousarray(np.stack([b.lanes(r(b)) for r in reads], 1))


def _numbers(words: np.ndarray, kind: str, packed: bool) -> np.ndarray:
    """The elements of (n, registers, 32) words, (n, registers, 32, elements)."""
    dtype, mask, shift = _TYPES[kind]
    raw: np.ndarray = words.view(np.uint8).reshape(*words.shape, 4)
    if packed:
        raw = np.stack([raw & 0xF, raw >> 4], -1).reshape(*words.shape, 8)
    else:
        raw = raw >> shift & mask
    return np.ascontiguousarray(raw).view(dtype).astype(np.float64)


class _Scale:
    """The scale factors of A or of B."""

    def __init__(self, d: Decoder, at: int, count: int, kind: str) -> None:
        """``at``: the operand that holds them; behind it {byte-id, thread-id}."""
        self.count, self.kind = count, _FACTORS[kind]
        holder, ids = d.ins.operands[at], d.ins.operands[at + 1]
        if isinstance(holder, Vector) and len(holder.items) == 1:
            holder = holder.items[0]
        if not isinstance(ids, Vector) or len(ids.items) != 2:
            raise d.unknown("the ids of the scale factors")
        self.read = d.read(holder, "b32")
        self.byte, self.thread = (d.read(o, "u16") for o in ids.items)

    def of_rows(self, b: Batch, k: int) -> np.ndarray:
        """(n, 16, k): the second lane of a quad's pair has the rows from 8 on."""
        row = np.arange(16)
        return self._spread(b, k, lambda thread: 4 * (row % 8) + 2 * (thread % 2) + row // 8)

    def of_columns(self, b: Batch, k: int) -> np.ndarray:
        return self._spread(b, k, lambda thread: 4 * np.arange(8) + thread % 4)

    def _spread(self, b: Batch, k: int, lane: Callable[[int], np.ndarray]) -> np.ndarray:
        words = np.ascontiguousarray(b.lanes(self.read(b)))
        raw = words.view(np.uint8).reshape(b.n, 32, 4)
        byte, thread = (b.lanes(read(b))[:, 0].astype(int) for read in (self.byte, self.thread))
        each = [raw[i, lane(thread[i])][:, byte[i] : byte[i] + self.count] for i in range(b.n)]
        factors = np.ascontiguousarray(np.stack(each)).view(self.kind).astype(np.float64)
        return np.repeat(factors, k // self.count, 2)

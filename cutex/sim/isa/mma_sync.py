"""Matrix products of one warp, from and to registers: mma.sync (PTX ISA 9.7.14.5), m16n8 only.

Lane t holds, of A (16 x K) and of C and D (16 x 8), row t / 4 and the one 8 below; of B (K x 8)
column t / 4. Along K its registers hold the elements at (t % 4), in units of a register, and of
every fourth register from there.
"""

from __future__ import annotations

import re

import numpy as np

from cutex.sim.isa.matrices import ELEMENTS, ITEMSIZE, accumulate
from cutex.sim.isa.mma_scaled import scaled_mma
from cutex.sim.isa.sync import require_whole_warp
from cutex.sim.machine.batch import Batch
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Vector

_K = {2: (8, 16), 4: (4, 8), 1: (16, 32)}  # K of one instruction, by bytes of an element
_G, _Q = np.arange(32) // 4, np.arange(32) % 4


def _along_k(registers: int, per: int) -> np.ndarray:
    """The index along K of each element of each register, (registers, 32, per)."""
    r, i = np.arange(registers)[:, None, None], np.arange(per)
    return 4 * per * r + per * _Q[:, None] + i


def _values(words: list[np.ndarray], kind: str) -> np.ndarray:
    """The numbers in the words of each lane, (n, registers, 32, per)."""
    raw = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)  # (n, registers, 32 * 4)
    shape = (*raw.shape[:2], 32, 4 // ITEMSIZE[kind])
    return ELEMENTS[kind](raw.reshape(-1, 4)).reshape(shape)


@instruction("mma")
def mma(d: Decoder) -> Execute:
    """mma.sync (9.7.14.5): D = A B + C, with sums in float32, as for wgmma."""
    if "kind" in d.mods:
        return scaled_mma(d)
    shape = next((m for p in d.parts if (m := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", p))), None)
    kinds = [p for p in d.parts if p in ELEMENTS or p in ("f32", "s32")]
    if shape is None or shape.groups()[:2] != ("16", "8") or len(kinds) != 4:
        raise d.unknown()
    d.only("mma", "sync", "aligned", shape[0], "row", "col", "satfinite", *kinds)
    out, a_kind, b_kind, _ = kinds
    k, size = int(shape[3]), ITEMSIZE[a_kind]
    if k not in _K[size] or ITEMSIZE[b_kind] != size or kinds[3] != out:
        raise d.unknown("types or K")
    per, saturate = 4 // size, "satfinite" in d.mods
    vectors = [v.items for v in d.ins.operands[:4] if isinstance(v, Vector)]
    count = 2 if out == "f16" else 4  # registers of C and D
    if [len(v) for v in vectors] != [count, k // (2 * per), k // (4 * per), count]:
        raise d.unknown("the registers of its operands")
    a_reads, b_reads, c_reads = ([d.read(o, "b32") for o in items] for items in vectors[1:])
    writes = [d.write(o, "b32") for o in vectors[0]]

    pairs = k // (4 * per)  # registers along K
    a_k = _along_k(pairs, per).repeat(2, 0)  # rows g and g + 8 take turns
    a_row = np.broadcast_to((_G + 8 * (np.arange(2 * pairs) % 2)[:, None])[:, :, None], a_k.shape)
    b_k = _along_k(pairs, per)
    b_column = np.broadcast_to(_G[:, None], b_k.shape)
    row, column = _G + 8 * np.arange(2)[:, None], 2 * _Q[:, None] + np.arange(2)  # of C and D
    row, column = np.broadcast_arrays(row[:, :, None], column)  # (2, 32, 2)

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        b = b if b.mask is None else Batch(b.idx[b.any_active()], None)
        if not b.n:
            return
        words = lambda reads: [b.lanes(r(b)) for r in reads]
        a, right = np.zeros((b.n, 16, k), np.float32), np.zeros((b.n, k, 8), np.float32)
        a[:, a_row, a_k] = _values(words(a_reads), a_kind)
        right[:, b_k, b_column] = _values(words(b_reads), b_kind)
        product = (a @ right)[:, row, column]  # (n, 2, 32, 2)
        total = accumulate(_old(words(c_reads), out), product, out, saturate)
        for write, word in zip(writes, _words(total, out), strict=True):
            write(b, word)

    return execute


def _old(words: list[np.ndarray], kind: str) -> np.ndarray:
    """C as (n, rows 2, 32, columns 2), from one register per element, or one for both columns of
    f16.
    """
    stacked = np.ascontiguousarray(np.stack(words, 1))  # (n, registers, 32)
    n = len(stacked)
    if kind == "f16":
        return stacked.view(np.float16).reshape(n, 2, 32, 2).astype(np.float32)
    numbers = stacked.view(np.float32 if kind == "f32" else np.int32)
    return numbers.reshape(n, 2, 2, 32).swapaxes(2, 3)


def _words(total: np.ndarray, kind: str) -> list[np.ndarray]:
    n = len(total)
    if kind == "f16":
        packed = np.ascontiguousarray(total.astype(np.float16)).view(np.uint32)
        return list(packed.reshape(n, 2, 32).swapaxes(0, 1))
    each = np.ascontiguousarray(total.swapaxes(2, 3)).view(np.uint32)  # (n, 2, 2, 32)
    return list(each.reshape(n, 4, 32).swapaxes(0, 1))

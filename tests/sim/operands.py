"""Matrices as the operands of tensor cores: element formats, and their offsets in shared memory.

The offsets are PTX's canonical layouts, written per byte, independent of the simulator's code.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tensor_maps import ATOMS_OF_32, swizzled

FORMATS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
    "e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}  # fmt: skip
PADDED = {"e2m1": 4, "e2m3": 6, "e3m2": 6}  # bits; 16 elements at the start of 16 bytes
MODES = {
    "sm_90a": {0: 0, 128: 1, 64: 2, 32: 3},
    "sm_100a": {0: 0, ATOMS_OF_32: 1, 128: 2, 64: 4, 32: 6},
}


def size_of(kind: str) -> int:
    return np.dtype(FORMATS[kind]).itemsize


def k_of(kind: str) -> int:
    """The elements along K of one instruction: 32 bytes."""
    return 32 // size_of(kind)


def atom_rows(swizzle: int) -> int:
    """The rows of a swizzle atom, after which the swizzle repeats."""
    return 4 if swizzle == ATOMS_OF_32 else 8


def small_integers(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values that the format holds exactly, with sums that every accumulator holds
    exactly."""
    low, high = {
        "e5m2": (-4, 5), "u8": (0, 256), "s8": (-128, 128), "e2m1": (-4, 5), "e2m3": (-7, 8),
        "e3m2": (-8, 9),
    }.get(kind, (-8, 9))  # fmt: skip
    return np.random.default_rng(seed).integers(low, high, shape)


@dataclass(frozen=True)
class Layout:
    """An operand's layout in shared memory; strides, offset and swizzle in bytes.

    ``lbo`` and ``sbo`` are fields of the descriptor; 0 where the layout does not use them.
    """

    kind: str
    swizzle: int = 0
    mn_major: bool = False
    lbo: int = 0
    sbo: int = 0
    start: int = 0

    def places(self, rows: int, k: int) -> np.ndarray:
        """Byte offsets (rows, k) of elements, before the swizzle and without the start."""
        row, col = np.arange(rows)[:, None], np.arange(k)[None, :]
        size, width = size_of(self.kind), abs(self.swizzle) or 16  # bytes of an atom's row
        if not self.mn_major:
            byte = col * size
            at = row % 8 * width + row // 8 * self.sbo
            if self.swizzle:
                assert k * size <= width
                return at + byte
            return at + byte % 16 + byte // 16 * self.lbo
        byte = row * size
        if self.swizzle:
            at = byte % width + byte // width * self.lbo
            steps = atom_rows(self.swizzle)
            return at + col % steps * width + col // steps * self.sbo
        return byte % 16 + byte // 16 * self.sbo + col % 8 * 16 + col // 8 * self.lbo

    def put(self, smem: np.ndarray, values: np.ndarray) -> None:
        """Write ``values`` (rows, K) into an image of shared memory whose byte 0 is at a multiple
        of 1024.
        """
        raw = np.ascontiguousarray(values.astype(FORMATS[self.kind])).view(np.uint8)
        if self.kind in PADDED:
            raw = padded(raw, PADDED[self.kind])
        raw = raw.reshape(*values.shape, -1)
        at = self.start + self.places(*values.shape)
        for i in range(raw.shape[2]):
            smem[swizzled(at + i, self.swizzle)] = raw[..., i]

    def descriptor(self, arch: str) -> int:
        """The descriptor without the address."""
        mode = MODES[arch][self.swizzle]
        value = (self.lbo >> 4) << 16 | (self.sbo >> 4) << 32
        return value | (mode << 62 if arch == "sm_90a" else mode << 61 | 1 << 46)


def padded(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (..., 16 n), a byte each, as as many bytes: each 16 codes packed, then a filling."""
    units = codes.reshape(-1, 16)
    out = np.full_like(units, 0x7E)
    for row, unit in zip(out, units.tolist(), strict=True):
        whole = sum(code << bits * i for i, code in enumerate(unit))
        row[: 2 * bits] = np.frombuffer(whole.to_bytes(2 * bits, "little"), np.uint8)
    return out.reshape(codes.shape)


def packed(kind: str, swizzle: int = 0, mn_major: bool = False, start: int = 0, rows: int = 256,
           gap: int = 0, k_atoms: int = 4) -> Layout:  # fmt: skip
    """A layout without overlap, with ``gap`` bytes between its pieces (a multiple of 1024 where
    swizzled).
    """
    width = abs(swizzle) or 16
    atom = atom_rows(swizzle) * width + gap
    if not mn_major:
        lbo, sbo = (0, atom) if swizzle else (atom * (rows // 8), atom)
    elif swizzle:  # atoms of 8 k by `width` bytes of MN
        lbo, sbo = atom * k_atoms, atom
    else:
        lbo, sbo = atom, atom * k_atoms
    return Layout(kind, swizzle, mn_major, lbo, sbo, start)

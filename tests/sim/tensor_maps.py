"""Tensor maps, encoded by hand from the table of their bits, and the tensors that they describe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KINDS = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f32.ftz": 8,
    "f64": 9, "bf16": 10,
}  # fmt: skip
SIZES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u64": 8, "s64": 8, "f64": 8}  # others: 4 bytes
ATOMS_OF_32 = -128  # a swizzle of 128 bytes which leaves 32 of them together
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3, ATOMS_OF_32: 3}  # by bytes


def size_of(kind: str) -> int:
    return SIZES.get(kind, 4)


def encode(
    address: int,
    kind: str | int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int] | None = None,
    *,
    swizzle: int = 0,
    nan: bool = False,
    tf32: bool = False,
    interleave: int = 0,
    atomicity: int = 0,
    flags: int = 0,
    rest: bytes = bytes(64),
) -> bytes:
    """The 128 bytes of a map. Dimensions innermost first; ``strides`` in bytes, without the
    innermost; ``flags`` are or-ed into word 2, ``rest`` are the 64 bytes that hardware ignores.
    """
    words = [0] * 16
    rank = len(dims)
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = (rank - 1) << 4 | (KINDS[kind] if isinstance(kind, str) else kind) << 7
    words[2] |= interleave << 11 | SWIZZLES[swizzle] << 13 | nan << 15 | tf32 << 16
    words[2] |= (1 if swizzle == ATOMS_OF_32 else atomicity) << 19 | flags
    for i, stride in enumerate(strides):
        assert stride % 16 == 0 and stride < 1 << 40
        words[3 + i] = stride >> 4 & 0xFFFFFFFF
        words[7] |= (stride >> 36) << 4 * i
    for i, dim in enumerate(dims):
        words[8 + i] = dim - 1
    for i, step in enumerate(steps or [1] * rank):
        words[13] |= (step - 1) << 3 * i
    words[13] |= (box[0] - 1) << 24
    for i, b in enumerate(box[1:]):
        words[14] |= (b - 1) << 8 * i
    return np.array(words, "<u4").tobytes() + rest


def aligned(array: np.ndarray, to: int = 128) -> np.ndarray:
    """A contiguous copy that starts at a multiple of ``to`` bytes."""
    raw = np.zeros(array.nbytes + to, np.uint8)
    start = -raw.ctypes.data % to
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """The address at which the hardware puts the byte of ``address`` in shared memory: bits 4.. are
    XORed with bits 7.., one, two or three of them for 32, 64 and 128 bytes; with atoms of 32 bytes,
    bits 5 and 6 with 7 and 8.
    """
    if swizzle == ATOMS_OF_32:
        return address ^ ((address >> 7) & 3) << 5
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return address ^ ((address >> 7) & ((1 << bits) - 1)) << 4

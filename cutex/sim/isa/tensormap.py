"""The 128-byte CUtensorMap, decoded, and the addresses of a box.

NVIDIA documents the tensor map as opaque. The layout here was established from descriptors made by
the DSL and the driver, from the immediates of ``tensormap.replace``, and by loading hand-made
descriptors on an H200; only the first 64 bytes are used in tiled mode. That of im2col mode is from
the DSL's encoding of corners, strides and columns in 3 to 5 dimensions; it has not been tested on a
GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from cutex.sim.errors import BadOperand

MAP_BYTES = 128
ATOMS_OF_32 = 4  # a swizzle of 128 bytes in units of 32 bytes, not 16
SWIZZLES = {0: "no", 1: "32-byte", 2: "64-byte", 3: "128-byte", 4: "128-byte (atoms of 32)"}
_B4X16 = 11  # packed 4-bit elements: copied as bytes
_PADDED = {12: 8, 13: 12}  # 16 elements of 4 or 6 bits: bytes in global memory; 16 in shared
_TYPE_BYTES = {
    0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, _B4X16: 1, **_PADDED,
}  # fmt: skip
_F32_FTZ = 8
_IM2COL = 1  # a bit of the flags
_NAN_FILL = {6: 0x7FF7, 10: 0x7FF7, 7: 0x7FF77FF7}  # f16, bf16, f32
_TYPE_NAMES = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    8: "f32.ftz",
    9: "f64",
    10: "bf16",
    _B4X16: "b4x16",
    12: "b4x16_p64",
    13: "b6x16_p32",
}


@dataclass(frozen=True)
class Pixels:
    """The further fields of a map in im2col mode (PTX ISA 5.5.4): corners of the bounding box, by
    W, H and D, as far as the tensor has them; and pixels of a column.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    count: int

    def bounds(self, tmap: TensorMap) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first and the last position of the filter's base."""
        sizes = zip(tmap.dims[1:-1], self.upper, strict=True)
        return self.lower, tuple(size - 1 + corner for size, corner in sizes)


@dataclass(frozen=True)
class TensorMap:
    """Dimensions, strides and box, innermost first; strides in bytes, ``strides[0]`` the element's
    size. Two packed 4-bit elements are one element here, a byte; so are 16 padded 4- or 6-bit ones,
    which take 16 bytes in shared memory.
    """

    address: int
    kind: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]  # element strides
    swizzle: int  # 0 none, 1 32 B, 2 64 B, 3 128 B, 4 128 B of 32-byte atoms
    nan_fill: bool
    tf32: bool
    pixels: Pixels | None = None  # in im2col mode, in which a box has channels only

    @property
    def itemsize(self) -> int:
        return self.strides[0]

    @property
    def shared_itemsize(self) -> int:
        return 16 if self.padded else self.itemsize

    @property
    def padded(self) -> bool:
        return self.kind in _PADDED

    @property
    def rank(self) -> int:
        return len(self.dims)

    def place(self, at: tuple[int, ...]) -> tuple[int, ...] | None:
        """The coordinates of an instruction in this map's elements; None if they fall inside
        one."""
        if self.padded:  # in whole boxes of 128 elements
            return None if at[0] % 128 else (at[0] // 16, *at[1:])
        if self.kind != _B4X16:
            return at
        return None if at[0] % 2 else (at[0] // 2, *at[1:])

    def address_of(self, part: Overlap) -> int:
        """The address of the part's first element, modulo 2^57, the bits that a map's base has: the
        strides of ragged maps wrap around, and their base may lie before the memory's beginning.
        """
        return (self.address + part.offset) % 2**57

    @cached_property
    def traversed(self) -> tuple[int, ...]:
        """The elements that a copy moves along each dimension; hardware ignores the innermost
        element stride.
        """
        return (
            self.box[0],
            *(-(-b // s) for b, s in zip(self.box[1:], self.steps[1:], strict=True)),
        )

    @cached_property
    def bytes(self) -> int:
        """The bytes of one box in shared memory, out-of-bounds elements included."""
        return self.shared_itemsize * prod(self.traversed) * self._columns

    @cached_property
    def tx_bytes(self) -> int:
        """The bytes that complete_tx counts for a load: without padding, as CUTLASS's examples
        expect.
        """
        return self.itemsize * prod(self.traversed) * self._columns

    @property
    def _columns(self) -> int:
        return 1 if self.pixels is None else self.pixels.count

    def why_not(self) -> str | None:
        """The reason why no copy can use this map, a trap or a mode not defined here; None if one
        can.
        """
        row, span = self.box[0] * self.shared_itemsize, 16 << min(self.swizzle, 3)
        align = 32 if self.padded else 16
        if self.address % align:
            return f"its tensor at 0x{self.address:x} is not {align}-byte aligned"
        if self.padded and (self.swizzle not in (0, 3) or row != 128):
            return f"a box of {self.box[0] * 16} padded elements, with swizzle {self.swizzle}"
        if row % 16:
            return f"box rows of {row} bytes are not a multiple of 16"
        if self.swizzle and row > span:
            return f"box rows of {row} bytes are wider than the {span}-byte swizzle"
        if self.swizzle and row < span:
            # NOTE: CUDA requires room for whole swizzle rows and does not define their layout
            return f"box rows of {row} bytes are narrower than the {span}-byte swizzle: not defined"
        if self.pixels is not None and not (self.plain and self.rank > 2):
            return "the simulator does not define im2col mode of padded or tf32 elements"
        if self.kind == _F32_FTZ:
            return "the simulator does not define copies of f32.ftz"
        if self.nan_fill and self.kind not in _NAN_FILL:
            # NOTE: seen on an H200: NaN fill of integers traps
            return f"NaN fill of a {_TYPE_NAMES[self.kind]} tensor is not defined"
        return None

    @property
    def plain(self) -> bool:
        """Whether elements are copied to shared memory unchanged."""
        return not (self.tf32 or self.padded)

    @property
    def fill(self) -> int:
        """The bits that elements outside the tensor read as; the NaN was read from an H200."""
        return _NAN_FILL[self.kind] if self.nan_fill else 0

    def __str__(self) -> str:
        return (
            f"{_TYPE_NAMES[self.kind]} tensor {'x'.join(map(str, reversed(self.dims)))}, box "
            f"{'x'.join(map(str, reversed(self.box)))}"
        )


@lru_cache(maxsize=4096)
def decode_map(raw: bytes) -> TensorMap:
    """Decode a tensor map of tiled or im2col mode. Raises BadOperand if it is invalid."""
    w = np.frombuffer(raw[:64], np.uint32).astype(np.int64)
    flags = int(w[2])
    rank, kind = (flags >> 4 & 7) + 1, flags >> 7 & 15
    if flags >> 11 & 3:
        raise BadOperand(
            "bad operand: tensor map with interleave, which the simulator does not define"
        )
    if kind not in _TYPE_BYTES or rank > 5 or flags >> 22 & 1:
        raise BadOperand(
            f"bad operand: not a tensor map that the simulator knows (type {kind}, rank {rank})"
        )
    swizzle, atom = flags >> 13 & 3, flags >> 19 & 3
    if swizzle == 3 and atom:
        if atom != 1:
            raise BadOperand(
                "bad operand: tensor map with a 128-byte swizzle of 64-byte atoms, or of 32-byte "
                "ones in exchanged halves, which the simulator does not define"
            )
        swizzle = ATOMS_OF_32
    itemsize = _TYPE_BYTES[kind]
    strides = [itemsize]
    for i in range(rank - 1):
        strides.append((int(w[3 + i]) | (int(w[7]) >> (4 * i) & 15) << 32) << 4)
    box = [(int(w[13]) >> 24 & 255) + 1] + [
        (int(w[14]) >> 8 * i & 255) + 1 for i in range(rank - 1)
    ]
    dims = [int(w[8 + i]) + 1 for i in range(rank)]
    pixels = None
    if flags & _IM2COL:
        if not 3 <= rank <= 5:
            raise BadOperand(f"bad operand: tensor map of im2col mode with rank {rank}")
        box[1:] = [1] * (rank - 1)
        corners = _corners(int(w[14]), rank), _corners(int(w[14]) >> 16, rank)
        pixels = Pixels(*corners, (int(w[15]) & 1023) + 1)
    if kind == _B4X16 or kind in _PADDED:
        count = 2 if kind == _B4X16 else 16
        if dims[0] % count or box[0] % count:
            raise BadOperand(
                f"bad operand: tensor map of {dims[0]} {_TYPE_NAMES[kind]} elements, box {box[0]}"
            )
        dims[0], box[0] = dims[0] // count, box[0] // count
    return TensorMap(
        address=int(w[0]) | int(w[1]) << 32,
        kind=kind,
        dims=tuple(dims),
        strides=tuple(strides),
        box=tuple(box),
        steps=tuple((int(w[13]) >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=swizzle,
        nan_fill=bool(flags >> 15 & 1),
        tf32=bool(flags >> 16 & 1),
        pixels=pixels,
    )


def _corners(word: int, rank: int) -> tuple[int, ...]:
    """The corner by W, H and D, signed: of 16, 8 or 5 bits for one, two or three of them."""
    bits = {3: 16, 4: 8, 5: 5}[rank]
    values = [word >> bits * i & (1 << bits) - 1 for i in range(rank - 2)]
    return tuple(v - (v >> bits - 1 << bits) for v in values)


def swizzle_chunks(chunks: np.ndarray, bits: int) -> np.ndarray:
    """The swizzled chunk numbers (16-byte chunks, byte address / 16), by XOR: 3 bits for 128 B, 2
    for 64 B, 1 for 32 B; for ATOMS_OF_32 2 bits, in pairs of chunks.
    """
    if bits == 0:
        return chunks
    if bits == ATOMS_OF_32:
        return chunks ^ (chunks >> 3 & 3) << 1
    return chunks ^ (chunks >> 3 & ((1 << bits) - 1))


@dataclass(frozen=True)
class Overlap:
    """The part of a box that is inside the tensor: slices of the box, innermost first, and its
    start.
    """

    slices: tuple[slice, ...]
    offset: int  # bytes from the tensor's address, to which it is added as in `address_of`

    @cached_property
    def empty(self) -> bool:
        return any(s.start >= s.stop for s in self.slices)

    def whole(self, tmap: TensorMap) -> bool:
        """Whether it is the whole box of ``tmap``."""
        return all(s == slice(0, n) for s, n in zip(self.slices, tmap.traversed, strict=True))


def overlap(tmap: TensorMap, at: tuple[int, ...]) -> Overlap:
    slices, offset = [], 0
    for i in range(tmap.rank):
        step = tmap.steps[i] if i else 1
        count = tmap.traversed[i]
        first = max(0, -(at[i] // step)) if at[i] < 0 else 0
        last = min(count, max(0, -(-(tmap.dims[i] - at[i]) // step)))
        slices.append(slice(first, last))
        offset += (at[i] + first * step) * tmap.strides[i]
    return Overlap(tuple(slices), offset)

"""The 128-byte CUtensorMap, decoded, and the addresses of a box.

NVIDIA documents the tensor map as opaque. The layout here was established from descriptors made by
the DSL and the driver, from the immediates of ``tensormap.replace``, and by loading hand-made
descriptors on an H200; only the first 64 bytes are used in tiled mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from cutex.sim.errors import BadOperand

MAP_BYTES = 128
ATOMS_OF_32 = 4  # a swizzle of 128 bytes that leaves 32 bytes together, not 16
_B4X16 = 11  # packed 4-bit elements: copied as bytes
_PADDED = {12: 8, 13: 12}  # 16 elements of 4 or 6 bits: bytes in global memory; 16 in shared
_TYPE_BYTES = {
    0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, _B4X16: 1, **_PADDED,
}  # fmt: skip
_F32_FTZ = 8
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
class TensorMap:
    """Dimensions, strides and box, innermost first; strides in bytes, ``strides[0]`` the element's
    size. Of packed 4-bit elements, two are one element here: a byte; of padded 4- or 6-bit ones 16,
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
        """Coordinates of an instruction in this map's elements; None if they lie within one."""
        if self.padded:  # in whole boxes of 128 elements
            return None if at[0] % 128 else (at[0] // 16, *at[1:])
        if self.kind != _B4X16:
            return at
        return None if at[0] % 2 else (at[0] // 2, *at[1:])

    def address_of(self, part: Overlap) -> int:
        """Its first element's address: strides of ragged rows' maps take it around 2^64."""
        return (self.address + part.offset) % 2**64

    @cached_property
    def traversed(self) -> tuple[int, ...]:
        """Elements that a copy moves along each dimension; the innermost element stride is ignored
        by hardware.
        """
        return (
            self.box[0],
            *(-(-b // s) for b, s in zip(self.box[1:], self.steps[1:], strict=True)),
        )

    @cached_property
    def bytes(self) -> int:
        """Bytes of one box in shared memory, out-of-bounds elements included."""
        return self.shared_itemsize * prod(self.traversed)

    @cached_property
    def tx_bytes(self) -> int:
        """What complete_tx counts of a load: without padding, as CUTLASS's examples announce."""
        return self.itemsize * prod(self.traversed)

    def why_not(self) -> str | None:
        """Why no copy takes this map: what traps, or what the simulator does not define."""
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
            # NOTE: CUDA asks for room for whole swizzle rows there, without saying what is where
            return f"box rows of {row} bytes are narrower than the {span}-byte swizzle: not defined"
        if self.kind == _F32_FTZ:
            return "the simulator does not define copies of f32.ftz"
        if self.nan_fill and self.kind not in _NAN_FILL:
            # NOTE: seen on an H200: NaN fill of integers traps
            return f"NaN fill of a {_TYPE_NAMES[self.kind]} tensor is not defined"
        return None

    @property
    def plain(self) -> bool:
        """Elements come to shared memory as they are."""
        return not (self.tf32 or self.padded)

    @property
    def fill(self) -> int:
        """What elements outside the tensor read as; the NaN was read from an H200."""
        return _NAN_FILL[self.kind] if self.nan_fill else 0

    def __str__(self) -> str:
        return (
            f"{_TYPE_NAMES[self.kind]} tensor {'x'.join(map(str, reversed(self.dims)))}, box "
            f"{'x'.join(map(str, reversed(self.box)))}"
        )


@lru_cache(maxsize=4096)
def decode_map(raw: bytes) -> TensorMap:
    """Decodes a tiled-mode tensor map. Raises BadOperand for what is not one."""
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
    )


def swizzle_chunks(chunks: np.ndarray, bits: int) -> np.ndarray:
    """XOR of the swizzle on 16-byte chunk numbers (byte address / 16): 3 bits for 128 B, 2 for 64
    B, 1 for 32 B; for ATOMS_OF_32 2 bits, of pairs of chunks.
    """
    if bits == 0:
        return chunks
    if bits == ATOMS_OF_32:
        return chunks ^ (chunks >> 3 & 3) << 1
    return chunks ^ (chunks >> 3 & ((1 << bits) - 1))


@dataclass(frozen=True)
class Overlap:
    """The part of a box that is inside the tensor: slices of the box, innermost first, and where
    it starts.
    """

    slices: tuple[slice, ...]
    offset: int  # bytes from the tensor's address; added to it modulo 2^64, as hardware does

    @cached_property
    def empty(self) -> bool:
        return any(s.start >= s.stop for s in self.slices)

    def whole(self, tmap: TensorMap) -> bool:
        """The whole box of ``tmap`` is."""
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

"""The driver's cuTensorMapEncodeTiled: a tensor map from its arguments.

Kernels of ``cutlass.experimental`` have the driver encode their tensor maps, where those of
``cutlass.cute`` encode them in their own host code. The layout is that of
`cutex.sim.isa.tensormap`; the requirements are those of the CUDA driver API's reference (6.30,
Tensor Map Object Management).
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutex.sim.isa.tensormap import MAP_BYTES

# CUtensorMapDataType -> (the map's type, bits of an element)
_TYPES = {
    0: (0, 8), 1: (1, 16), 2: (2, 32), 3: (3, 32), 4: (4, 64), 5: (5, 64), 6: (6, 16), 7: (7, 32),
    8: (9, 64), 9: (10, 16), 10: (8, 32), 11: (7, 32), 12: (8, 32), 13: (11, 4), 14: (12, 4),
    15: (13, 6),
}  # fmt: skip
_TF32 = (11, 12)
_PADDED = (14, 15)  # 4- and 6-bit elements that take 16 bytes per 16 in shared memory
_PACKED = 13  # 4-bit elements without gaps
_SWIZZLE_BYTES = (0, 32, 64, 128, 128, 128, 128)  # CUtensorMapSwizzle
_INTERLEAVE_32 = 2


@dataclass(frozen=True)
class TiledMap:
    """The arguments of cuTensorMapEncodeTiled, innermost dimension first; ``strides`` in bytes,
    without that of the innermost; enumerations by their number in the driver's API.
    """

    kind: int
    address: int
    dims: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    steps: Sequence[int]  # element strides
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    nan_fill: bool = False

    def refusal(self) -> str | None:
        """The reason why the driver returns CUDA_ERROR_INVALID_VALUE, or None."""
        rank = len(self.dims)
        if self.kind not in _TYPES or self.interleave > 2 or self.swizzle >= len(_SWIZZLE_BYTES):
            return f"type {self.kind}, interleave {self.interleave}, swizzle {self.swizzle}"
        if rank < (3 if self.interleave else 1) or rank > 5:
            return f"rank {rank}"
        wide = self.interleave == _INTERLEAVE_32 or self.kind in _PADDED
        unit = 32 if wide else 16
        if self.address % unit:
            return f"address 0x{self.address:x}, no multiple of {unit}"
        for stride in self.strides:
            if stride % unit or stride >= 1 << 40:
                return f"a stride of {stride} bytes: a multiple of {unit} below 2^40 is needed"
        for what, values, most in (
            ("dimension", self.dims, 1 << 32),
            ("box dimension", self.box, 256),
            ("element stride", self.steps, 8),
        ):
            for value in values:
                if not 1 <= value <= most:
                    return f"{what} {value}: takes 1 to {most}"
        return self._refusal_of_innermost()

    def _refusal_of_innermost(self) -> str | None:
        among = {_PACKED: 2}.get(self.kind, 128 if self.kind in _PADDED else 1)
        if self.dims[0] % among:
            return f"innermost dimension {self.dims[0]}, no multiple of {among}"
        if self.kind in _PADDED:
            return (
                None if self.box[0] == 128 else f"a box of {self.box[0]} padded elements, not 128"
            )
        row = self.box[0] * _TYPES[self.kind][1] // 8
        if self.interleave:
            return None
        if row % 16:
            return f"box rows of {row} bytes, no multiple of 16"
        span = _SWIZZLE_BYTES[self.swizzle]
        return f"box rows of {row} bytes with a {span}-byte swizzle" if 0 < span < row else None

    def encode(self) -> bytes:
        """The 128 bytes of the map. Raises ValueError for arguments that the driver refuses."""
        why = self.refusal()
        if why is not None:
            raise ValueError(f"cuTensorMapEncodeTiled refuses {why}")
        words = np.zeros(MAP_BYTES // 4, np.uint32)
        words[0], words[1] = self.address & 0xFFFFFFFF, self.address >> 32
        words[2] = self._flags()
        for i, stride in enumerate(self.strides):
            words[3 + i] = stride >> 4 & 0xFFFFFFFF
            words[7] |= np.uint32((stride >> 36) << 4 * i)
        words[8 : 8 + len(self.dims)] = np.array(self.dims, np.uint64) - 1
        steps = sum((s - 1) << 3 * i for i, s in enumerate(self.steps))
        words[13] = steps | (self.box[0] - 1) << 24
        words[14] = sum((b - 1) << 8 * i for i, b in enumerate(self.box[1:]))
        return words.tobytes()

    def _flags(self) -> int:
        swizzle, atoms = min(self.swizzle, 3), max(self.swizzle - 3, 0)
        return (
            (len(self.dims) - 1) << 4
            | _TYPES[self.kind][0] << 7
            | self.interleave << 11
            | swizzle << 13
            | self.nan_fill << 15
            | (self.kind in _TF32) << 16
            | self.l2_promotion << 17
            | atoms << 19
        )


def encode_tiled(
    out: int,
    kind: int,
    rank: int,
    address: int | None,
    dims: C._Pointer[C.c_uint64],
    strides: C._Pointer[C.c_uint64],
    box: C._Pointer[C.c_uint32],
    steps: C._Pointer[C.c_uint32],
    interleave: int,
    swizzle: int,
    l2_promotion: int,
    fill: int,
) -> None:
    """Encode a map like the driver's function, with its arguments; raises ValueError for those it
    refuses.
    """
    shown = min(rank, 6)  # more dimensions are refused for their number
    tiled = TiledMap(
        kind,
        address or 0,
        dims[:shown],
        strides[: max(shown - 1, 0)],
        box[:shown],
        steps[:shown],
        interleave,
        swizzle,
        l2_promotion,
        bool(fill),
    )
    C.memmove(out, tiled.encode(), MAP_BYTES)

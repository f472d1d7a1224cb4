"""Bulk-tensor loads in im2col mode (PTX ISA 5.5.4): consecutive pixels of a batch of images, in the
order of a convolution.

The base of the filter moves through a bounding box in W, H and D, from the instruction's
coordinates: along W by its traversal stride, at the end of the box to the next row, then the next
plane, then the next image. Each pixel is at the base plus the instruction's offsets.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cutex.sim.errors import BadAddress, BadOperand
from cutex.sim.isa.tensormap import TensorMap
from cutex.sim.machine.memory import GlobalMemory, Region
from cutex.sim.ptx.program import Instruction


def start(
    tmap: TensorMap, coordinates: tuple[int, ...], offsets: tuple[int, ...], ins: Instruction
) -> tuple[int, ...]:
    """The start of an instruction's pixels, with its offsets appended. Raises BadOperand."""
    why = ""
    if tmap.pixels is None:
        why = "the tensor map is of tiled mode"
    elif len(coordinates) != tmap.rank or len(offsets) != tmap.rank - 2:
        why = f"{len(coordinates)} coordinates and {len(offsets)} offsets for rank {tmap.rank}"
    elif coordinates[0] * tmap.itemsize % 16:
        why = f"channel {coordinates[0]} is not a multiple of 16 bytes"
    else:
        limit = 1 << 16 // (tmap.rank - 2)
        box = zip(coordinates[1:-1], *tmap.pixels.bounds(tmap), strict=True)
        if not all(low <= at <= high for at, low, high in box):
            why = f"the filter's base {coordinates[1:-1]} lies outside the bounding box"
        elif not all(0 <= offset < limit for offset in offsets):
            why = f"offsets {offsets} are not from 0 to {limit - 1}"
    if why:
        raise BadOperand.at(ins, f"a load in im2col mode of a {tmap}: {why}")
    return coordinates + offsets


@lru_cache(maxsize=4096)
def pixels(tmap: TensorMap, at: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each pixel (pixels,), the bytes from the tensor's address to its first channel,
    and whether it is inside the tensor.
    """
    assert tmap.pixels is not None
    spatial = tmap.rank - 2
    base, shift = list(at[1 : tmap.rank]), (*at[tmap.rank :], 0)
    lower, upper = tmap.pixels.bounds(tmap)
    found = np.empty((tmap.pixels.count, spatial + 1), np.int64)
    for row in found:
        row[:] = base
        for i in range(spatial + 1):
            base[i] += tmap.steps[1 + i] if i < spatial else 1
            if i == spatial or base[i] <= upper[i]:
                break
            base[i] = lower[i]
    found += shift
    inside = np.all((found >= 0) & (found < tmap.dims[1:]), axis=1)
    return found @ np.array(tmap.strides[1:]) + at[0] * tmap.itemsize, np.asarray(inside)


class PixelBox:
    """The pixels that one load reads."""

    def __init__(self, memory: GlobalMemory, tmap: TensorMap, at: tuple[int, ...]) -> None:
        self.memory, self.tmap, self.at = memory, tmap, at

    @property
    def name(self) -> str:
        region = self.memory.find(self.tmap.address)
        return f"{region.name if region else 'a tensor'}{list(self.at)} ({self.tmap})"

    def places(self) -> tuple[Region, np.ndarray] | None:
        """Its tensor, and the offset of the first byte of each element there; None if none is
        inside.
        """
        tmap, (offsets, inside) = self.tmap, pixels(self.tmap, self.at)
        channels = min(tmap.box[0], tmap.dims[0] - self.at[0])
        first = offsets[inside]
        if not len(first) or channels <= 0 or self.at[0] < 0:
            return None
        last = tmap.address + int(first.max()) + channels * tmap.itemsize - 1
        region, end = self.memory.find(tmap.address + int(first.min())), self.memory.find(last)
        if region is None or region is not end:
            why = f"a load in im2col mode of {self.name} reaches outside of it"
            self.memory.view(tmap.address + int(first.min()), last + 1 - tmap.address, why)
        assert region is not None
        elements = first[:, None] + np.arange(channels) * tmap.itemsize
        places = (elements + (tmap.address - region.base)).reshape(-1)
        inside = region.holds(places, tmap.itemsize)
        if not inside.all():
            outside = region.base + int(places[inside.argmin()])
            raise BadAddress(
                f"a load in im2col mode of {self.name}: 0x{outside:x}, "
                f"{self.memory.why_not(outside, tmap.itemsize)}"
            )
        return region, places

    def chunks(self) -> np.ndarray:
        """The data written to shared memory, in chunks of 16 bytes before the swizzle, (bytes /
        16,).
        """
        tmap, (_, inside) = self.tmap, pixels(self.tmap, self.at)
        word = np.dtype(f"u{tmap.itemsize}")
        out = np.full((len(inside), tmap.box[0]), tmap.fill, word)
        found = self.places()
        if found is not None:
            region, elements = found
            raw = region.data[elements[:, None] + np.arange(tmap.itemsize)]
            values = np.ascontiguousarray(raw).view(word).reshape(int(inside.sum()), -1)
            out[inside, : values.shape[1]] = values
        return out.reshape(-1).view(np.complex128)

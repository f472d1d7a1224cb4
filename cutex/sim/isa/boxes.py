"""The places of a box in global memory."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.isa.im2col import PixelBox
from cutex.sim.isa.tensormap import Overlap, TensorMap, overlap
from cutex.sim.machine.memory import GlobalMemory, Region


def extent(tmap: TensorMap, part: Overlap) -> int:
    """The bytes from the first element of the tensor under the box to the end of the last."""
    steps = zip(part.slices, tmap.strides, [1, *tmap.steps[1:]], strict=True)
    return sum((s.stop - s.start - 1) * stride * n for s, stride, n in steps) + tmap.itemsize


def window(
    memory: GlobalMemory, tmap: TensorMap, part: Overlap, why: str, write: bool = False
) -> np.ndarray:
    """The tensor's elements under the box, a strided view (outermost first) of unsigned words.
    Raises BadAddress.
    """
    counts = [s.stop - s.start for s in part.slices]
    step = [1, *tmap.steps[1:]]
    strides = [st * s for st, s in zip(tmap.strides, step, strict=True)]
    address = tmap.address_of(part)
    region, at = memory.within(address, extent(tmap, part), why, write)
    if region.valid is not None:
        _check_padding(memory, region, at, [*counts[::-1], tmap.itemsize], [*strides[::-1], 1], why)
    raw = region.data[at : at + tmap.itemsize]
    return np.lib.stride_tricks.as_strided(raw.view(word_of(tmap)), counts[::-1], strides[::-1])


def _check_padding(
    memory: GlobalMemory, region: Region, at: int, shape: list[int], strides: list[int], why: str
) -> None:
    """Raise BadAddress where bytes under a box belong to none of the region's tensors."""
    assert region.valid is not None
    inside = np.lib.stride_tricks.as_strided(region.valid[at:], shape, strides)
    if not inside.all():
        first = np.argwhere(~inside)[0]
        address = region.base + at + int(first @ np.array(strides))
        raise BadAddress(f"{why}: 0x{address:x}, {memory.why_not(address, 1)}")


def word_of(tmap: TensorMap) -> np.dtype:
    """The numpy type of one element of the map in global memory."""
    return np.dtype(f"V{tmap.itemsize}" if tmap.padded else f"u{tmap.itemsize}")


def places_under(
    memory: GlobalMemory, tmap: TensorMap, part: Overlap, under: np.ndarray
) -> tuple[Region, np.ndarray]:
    """The tensor that contains the elements ``under`` a box, and the offset of each, in order."""
    address = tmap.address_of(part)
    region = memory.find(address)
    assert region is not None
    places = np.array(address - region.base)
    for count, stride in zip(under.shape, under.strides, strict=True):
        places = places[..., None] + np.arange(count) * stride
    return region, places.reshape(-1)


def box_range(memory: GlobalMemory, tmap: TensorMap, at: tuple[int, ...]) -> tuple[int, int]:
    """The address of the first byte of a tensor under a box, and the number of bytes from there to
    the last; 0 where there are none.
    """
    if tmap.pixels is not None:
        places = PixelBox(memory, tmap, at).places()
        if places is None:
            return 0, 0
        region, first = places
        low, high = int(first.min()), int(first.max())
        return region.base + low, high - low + tmap.itemsize
    part = overlap(tmap, at)
    return (0, 0) if part.empty else (tmap.address_of(part), extent(tmap, part))


def box_places(
    memory: GlobalMemory, tmap: TensorMap, at: tuple[int, ...], among: Container[int]
) -> tuple[Region, np.ndarray] | None:
    """The tensor that a load reads, and the offset of each element's first byte; None outside of
    it, or if its address is not ``among`` these.
    """
    if tmap.pixels is not None:
        found = PixelBox(memory, tmap, at).places()
        return None if found is None or found[0].base not in among else found
    part = overlap(tmap, at)
    if part.empty:
        return None
    region = memory.find(tmap.address_of(part))
    if region is None or region.base not in among:
        return None
    return places_under(memory, tmap, part, window(memory, tmap, part, "a TMA load"))

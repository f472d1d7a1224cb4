"""Address spaces of a simulated launch: global, parameters, constants, shared and local windows.

Global memory is the tensors of the launch and nothing else: an access outside every tensor, in the
padding of a strided view, or misaligned, raises BadAddress with lane, warp, address and the nearest
tensor.

Generic addresses (PTX ISA 5.1.1): a global address is the host address of the tensor's bytes; the
shared, local and parameter windows lie far above any host address.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutex.sim.capture import HostTensor
from cutex.sim.errors import BadAddress

PARAM_WINDOW = 1 << 60
SHARED_WINDOW = 1 << 61
LOCAL_WINDOW = 1 << 62
MODULE_WINDOW = 1 << 59  # .global and .const variables of the module

POISON32 = np.uint32(0x7FFF7FFF)  # a NaN as f32, as two f16 and as two bf16
POISON64 = np.uint64(0x7FFF7FFF7FFF7FFF)
POISON16 = np.uint16(0x7FFF)

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass
class Region:
    """A range of addresses backed by bytes; ``valid`` marks the bytes that belong to the tensor,
    None for all.
    """

    name: str
    base: int
    data: np.ndarray  # (bytes,) uint8
    valid: np.ndarray | None = None
    description: str = ""

    @property
    def end(self) -> int:
        return self.base + len(self.data)


class GlobalMemory:
    """The tensors of a launch and the module's own variables, by generic address."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._bases = np.zeros(0, np.uint64)

    def add(self, region: Region) -> None:
        """Adds a region; regions that overlap (views of one storage) merge into their union."""
        overlapping = [r for r in self.regions if r.base < region.end and region.base < r.end]
        if overlapping and len(region.data):
            region = _union([*overlapping, region])
            self.regions = [r for r in self.regions if r not in overlapping]
        self.regions.append(region)
        self.regions.sort(key=lambda r: r.base)
        self._bases = np.array([r.base for r in self.regions], np.uint64)

    def add_tensor(self, tensor: HostTensor) -> None:
        """Exactly the elements of ``tensor`` may be accessed, whatever its strides."""
        if any(s == 0 for s in tensor.shape):
            return
        low = sum(min(0, (n - 1) * s) for n, s in zip(tensor.shape, tensor.strides, strict=True))
        high = (
            sum(max(0, (n - 1) * s) for n, s in zip(tensor.shape, tensor.strides, strict=True)) + 1
        )
        size, count = tensor.itemsize, high - low
        base = tensor.address + low * size
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (count * size)).from_address(base))
        valid = None
        if int(np.prod(tensor.shape)) != count:
            elements = np.zeros(count, bool)
            view = np.lib.stride_tricks.as_strided(elements[-low:], tensor.shape, tensor.strides)
            view[...] = True
            valid = np.repeat(elements, size)
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        self.add(Region(tensor.name, base, data, valid, f"{tensor.name} ({shape} {tensor.dtype})"))

    def find(self, address: int) -> Region | None:
        i = int(np.searchsorted(self._bases, np.uint64(address), side="right")) - 1
        if i >= 0 and address < self.regions[i].end:
            return self.regions[i]
        return None

    def nearest(self, address: int) -> str:
        """'12 bytes past the end of c (200x136 bfloat16)' for reports."""
        if not self.regions:
            return "the launch has no tensors"
        region = min(self.regions, key=lambda r: max(r.base - address, address - r.end + 1, 0))
        what = region.description or region.name
        if address < region.base:
            return f"{region.base - address} bytes before {what}"
        if address >= region.end:
            return f"{address - region.end} bytes past the end of {what}"
        return f"in the padding of {what}, {address - region.base} bytes from its start"

    def region_of(self, addresses: np.ndarray, size: int, complain: Any) -> Region:
        """The one region that holds every ``size``-byte access of ``addresses`` (1-D, uint64).

        ``complain(k, why)`` must raise for the k-th address.
        """
        low = int(addresses.min())
        region = self.find(low)
        if region is None:
            complain(int(addresses.argmin()), self.nearest(low))
        assert region is not None
        high = int(addresses.max())
        if high + size > region.end:
            complain(int(addresses.argmax()), self.nearest(max(high, region.end)))
        offsets = (addresses - np.uint64(region.base)).astype(np.int64)
        if np.bitwise_and(addresses, np.uint64(size - 1)).any():
            bad = int(np.nonzero(addresses & np.uint64(size - 1))[0][0])
            complain(bad, f"not aligned to {size} bytes")
        if region.valid is not None:
            ok = region.valid[offsets] & region.valid[offsets + size - 1]
            if not ok.all():
                k = int(np.nonzero(~ok)[0][0])
                complain(k, self.nearest(int(addresses[k])))
        return region

    def load(self, addresses: np.ndarray, size: int, complain: Any) -> np.ndarray:
        """(n,) addresses -> (n, size) bytes; accesses may lie in different regions."""
        out = np.empty((len(addresses), size), np.uint8)
        for region, members in self._by_region(addresses, size, complain):
            offsets = (addresses[members] - np.uint64(region.base)).astype(np.int64)
            out[members] = region.data[offsets[:, None] + np.arange(size)]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, complain: Any) -> None:
        """``values`` (n, size) bytes; where addresses repeat, the last lane wins."""
        size = values.shape[1]
        for region, members in self._by_region(addresses, size, complain):
            offsets = (addresses[members] - np.uint64(region.base)).astype(np.int64)
            region.data[offsets[:, None] + np.arange(size)] = values[members]

    def _by_region(
        self, addresses: np.ndarray, size: int, complain: Any
    ) -> list[tuple[Region, Any]]:
        if not len(addresses):
            return []
        first = self.find(int(addresses.min()))
        last = self.find(int(addresses.max()))
        if first is last and first is not None:
            return [(self.region_of(addresses, size, complain), slice(None))]
        which = np.searchsorted(self._bases, addresses, side="right")
        out = []
        for i in np.unique(which):
            members = np.nonzero(which == i)[0]

            def complain_member(k: int, why: str, members: np.ndarray = members) -> None:
                complain(int(members[k]), why)

            out.append((self.region_of(addresses[members], size, complain_member), members))
        return out

    def view(self, address: int, size: int, why: str) -> np.ndarray:
        """(size,) bytes at ``address``, writable, for bulk copies. Raises BadAddress."""
        region = self.find(address)
        if region is None or address + size > region.end:
            raise BadAddress(f"{why}: 0x{address:x}..+{size} is {self.nearest(address)}")
        at = address - region.base
        return region.data[at : at + size]


def _union(parts: list[Region]) -> Region:
    base, end = min(r.base for r in parts), max(r.end for r in parts)
    valid = np.zeros(end - base, bool)
    for r in parts:
        valid[r.base - base : r.end - base] |= True if r.valid is None else r.valid
    data = np.ctypeslib.as_array((ctypes.c_uint8 * (end - base)).from_address(base))
    names = dict.fromkeys(r.description or r.name for r in parts)
    return Region(
        "/".join(dict.fromkeys(r.name for r in parts)),
        base,
        data,
        None if valid.all() else valid,
        " and ".join(names),
    )


def as_words(data: np.ndarray, size: int) -> np.ndarray:
    """(n, size) bytes -> (n,) unsigned words."""
    return np.ascontiguousarray(data).view(_UNSIGNED[size]).reshape(-1)


def as_bytes(words: np.ndarray) -> np.ndarray:
    """(n,) unsigned words -> (n, size) bytes."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.dtype.itemsize)

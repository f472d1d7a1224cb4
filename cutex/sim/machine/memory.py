"""Address spaces of a simulated launch: global, parameters, constants, shared and local windows.

Global memory is the tensors of the launch and nothing else: an access outside every tensor, in the
padding of a strided view, or misaligned, raises BadAddress with lane, warp, address and the nearest
tensor.

Generic addresses (PTX ISA 5.1.1): a global address is the host address of the tensor's bytes; the
shared, local and parameter windows are far above any host address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.host.capture import HostTensor

PARAM_WINDOW = 1 << 60
SHARED_WINDOW = 1 << 61
LOCAL_WINDOW = 1 << 62  # and, from bit 32 on, 1 + the resident thread whose memory it is
MODULE_WINDOW = 1 << 59  # .global and .const variables of the module
SYSTEM_SMEM = 1024  # reserved at the start of the shared window on sm_90 and later
WINDOWS = ("global", "param", "shared", "local")

# a NaN as f32, as two f16 or bf16 and as four e4m3, and not what a conversion of two NaNs gives,
# 0x7fff7fff, or what is written would count as unwritten
POISON32 = np.uint32(0xFFFF7FFF)
POISON64 = np.uint64(0xFFFF7FFFFFFF7FFF)
POISON16 = np.uint16(0x7FFF)
# what a script's empty tensors hold: a NaN as f32, f64 and 16-bit floats, and a value of none that
# is computed
BLANK32 = np.uint32(0xFFF57FE1)


def description(tensor: HostTensor) -> str:
    """The shape and dtype of a tensor: '200x136 bfloat16'."""
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def element_at(tensor: HostTensor, address: int) -> tuple[str, bool]:
    """The index of an address, '[3, 17]', by the tensor's strides, and whether the tensor has that
    element. Empty if the strides are ambiguous.
    """
    left = (address - tensor.address) // tensor.itemsize
    index = [0] * len(tensor.shape)
    for i in sorted(range(len(index)), key=lambda i: -tensor.strides[i]):
        if tensor.strides[i] < 0:
            return "", False
        if tensor.strides[i] and tensor.shape[i] > 1:
            index[i], left = divmod(left, tensor.strides[i])
    inside = left == 0 and all(0 <= i < n for i, n in zip(index, tensor.shape, strict=True))
    return (f"[{', '.join(map(str, index))}]" if index and left == 0 else ""), inside


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
    tensors: tuple[HostTensor, ...] = ()
    blank: bool = False  # holds BLANK32 where nothing has been written
    read_only: bool = False

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def element(self, offset: int) -> str:
        """The name of the byte at ``offset``: 'c[3, 17] (200x136 bfloat16)'."""
        for tensor in self.tensors:
            index, inside = element_at(tensor, self.base + offset)
            if inside:
                return f"{tensor.name}{index} ({description(tensor)})"
        return f"byte {offset} of {self.description or self.name}"

    def holds(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Whether all ``size`` bytes at each offset belong to the tensor, (n,)."""
        inside = (offsets >= 0) & (offsets <= len(self.data) - size)
        if self.valid is None:
            return inside
        last = len(self.data) - 1
        at = np.clip(offsets[:, None] + np.arange(size), 0, last)
        return inside & self.valid[at].all(1)


# of some addresses, those in a region: the region, which they are, and their offsets there
Part = tuple[Region, Any, np.ndarray]


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
        """Add exactly the elements of ``tensor``, whatever its strides."""
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
        what = f"{tensor.name} ({description(tensor)})"
        region = Region(tensor.name, base, data, valid, what, (tensor,), tensor.blank)
        region.read_only = tensor.read_only
        self.add(region)

    def find(self, address: int) -> Region | None:
        if not 0 <= address < 1 << 64:
            return None
        i = int(np.searchsorted(self._bases, np.uint64(address), side="right")) - 1
        if i >= 0 and address < self.regions[i].end:
            return self.regions[i]
        return None

    def why_not(self, address: int, size: int) -> str:
        """The reason why an access is invalid: '12 bytes past the end of c (200x136 bfloat16)'."""
        if abs(address - int(POISON64)) < 1 << 32:
            return "which comes from a register that nothing has written"
        if not self.regions:
            return "the launch has no tensors"
        region = min(self.regions, key=lambda r: max(r.base - address, address - r.end + 1, 0))
        what = region.description or region.name
        index = element_at(region.tensors[0], address)[0] if len(region.tensors) == 1 else ""
        there = f", where {region.name}{index} would be" if index else ""
        if address < region.base:
            return f"{region.base - address} bytes before {what}{there}"
        if address >= region.end:
            return f"{address - region.end} bytes past the end of {what}{there}"
        if address + size > region.end:
            return f"and its last {address + size - region.end} bytes lie past the end of {what}"
        return f"in the padding of {what}, {address - region.base} bytes from its start"

    def load(self, addresses: np.ndarray, size: int, complain: Any) -> np.ndarray:
        """The ``size`` bytes at each of ``addresses`` (n,), (n, size); they may be in different
        regions.

        ``complain(k, why)`` must raise for the k-th address.
        """
        out = np.empty((len(addresses), size), np.uint8)
        for region, members, offsets in self.by_region(addresses, size, complain):
            out[members] = region.data[offsets[:, None] + np.arange(size)]
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, complain: Any) -> None:
        """Store ``values``, (n, size) bytes; where addresses repeat, the last lane wins."""
        self.write(self.by_region(addresses, values.shape[1], complain, write=True), values)

    @staticmethod
    def write(parts: Sequence[Part], values: np.ndarray) -> None:
        """Store as `store`, to addresses that `by_region` has found."""
        for region, members, offsets in parts:
            region.data[offsets[:, None] + np.arange(values.shape[1])] = values[members]

    def by_region(
        self, addresses: np.ndarray, size: int, complain: Any, write: bool = False
    ) -> list[Part]:
        """For each region: the region, the addresses in it, and their offsets, all within bounds
        and, to ``write``, none of a read-only tensor; otherwise it complains as `load` does.
        """
        if not len(addresses):
            return []
        parts: list[Part] = []
        region = self.find(int(addresses.min()))
        if region is not None and int(addresses.max()) + size <= region.end:
            parts.append((region, slice(None), self._offsets(region, addresses)))
        else:
            which = np.searchsorted(self._bases, addresses, side="right") - 1
            for i in np.unique(which[which >= 0]).tolist():
                members = np.nonzero(which == i)[0]
                offsets = self._offsets(self.regions[i], addresses[members])
                parts.append((self.regions[i], members, offsets))
        bad = np.ones(len(addresses), bool)
        for region, members, offsets in parts:
            bad[members] = ~region.holds(offsets, size)
        if bad.any():
            k = int(np.argmax(bad))
            complain(k, self.why_not(int(addresses[k]), size))
        misaligned = np.bitwise_and(addresses, np.uint64(size - 1)) != 0
        if misaligned.any():
            complain(int(misaligned.argmax()), f"not aligned to {size} bytes")
        for region, members, offsets in parts if write else ():
            if region.read_only and len(offsets):
                k = np.arange(len(addresses))[members][0]
                complain(int(k), _read_only(region, int(offsets[0])))
        return parts

    @staticmethod
    def _offsets(region: Region, addresses: np.ndarray) -> np.ndarray:
        return (addresses - np.uint64(region.base)).astype(np.int64)

    def view(
        self,
        address: int,
        size: int,
        why: str,
        write: bool = False,
        only: np.ndarray | None = None,
    ) -> np.ndarray:
        """The ``size`` bytes at ``address``, for bulk copies, which take all or ``only`` some of
        them. Raises BadAddress.
        """
        region, at = self.within(address, size, why, write)
        if region.valid is not None:
            inside = region.valid[at : at + size]
            taken = np.arange(size) if only is None else only
            if not inside[taken].all():
                outside = address + int(taken[inside[taken].argmin()])
                raise BadAddress(f"{why}: 0x{address:x}..+{size}, {self.why_not(outside, 1)}")
        return region.data[at : at + size]

    def within(self, address: int, size: int, why: str, write: bool) -> tuple[Region, int]:
        """The region that ``size`` bytes at ``address`` are in, padding or not, and their offset.
        Raises BadAddress; to ``write``, for those of a read-only tensor too.
        """
        region = self.find(address)
        if region is None or address + size > region.end:
            raise BadAddress(f"{why}: 0x{address:x}..+{size}, {self.why_not(address, size)}")
        if write and region.read_only:
            there = _read_only(region, address - region.base)
            raise BadAddress(f"{why}: 0x{address:x}..+{size}, {there}")
        return region, address - region.base


def _read_only(region: Region, offset: int) -> str:
    return f"in {region.element(offset)}, a read-only array"


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
        tuple(t for r in parts for t in r.tensors),
        any(r.blank for r in parts),
        all(r.read_only for r in parts),
    )


def window_of(addresses: np.ndarray) -> np.ndarray:
    """The index in WINDOWS of each generic address; each window is 4 GB long, local memory one for
    each thread.
    """
    high = addresses >> np.uint64(32)
    places = (PARAM_WINDOW, SHARED_WINDOW)
    found = sum((high == np.uint64(w >> 32)) * (i + 1) for i, w in enumerate(places))
    return found + (addresses >> np.uint64(58) == np.uint64(LOCAL_WINDOW >> 58)) * 3


def local_window(warps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """What each thread adds to an offset in its local memory for a generic address."""
    thread = warps.astype(np.uint64) * np.uint64(32) + lanes.astype(np.uint64)
    return np.uint64(LOCAL_WINDOW) | (thread + np.uint64(1)) << np.uint64(32)


def shared_addresses(addresses: np.ndarray) -> np.ndarray:
    """Shared addresses, generic or not, as offsets: CTA in bits 24 and up, then its byte.

    An address that is neither gets a CTA that no cluster has, so that it is found out of bounds.
    """
    window = addresses >> np.uint64(61)
    offsets = addresses & np.uint64(SHARED_WINDOW - 1)
    return np.where(window <= 1, offsets, np.uint64(SHARED_WINDOW - 1))


def shared_address(address: int) -> int:
    """As `shared_addresses`, for one address."""
    return address & (SHARED_WINDOW - 1) if address >> 61 <= 1 else SHARED_WINDOW - 1


def as_bytes(words: np.ndarray) -> np.ndarray:
    """(n,) unsigned words as (n, size) bytes."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.dtype.itemsize)

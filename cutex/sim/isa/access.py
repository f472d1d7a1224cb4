"""Loads and stores of the lanes of a warp, by address space, with bounds and alignment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.machine.batch import Batch, Lanes
from cutex.sim.machine.events import SharedBytes
from cutex.sim.machine.memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOWS,
    local_window,
    window_of,
)
from cutex.sim.machine.runs import lanes_of
from cutex.sim.ptx.decode import Decoder

SPACES = ("param", "global", "shared", "local", "const")
_SYNCHRONISES = {"volatile", "relaxed", "acquire", "release"}


class Access:
    """The memory operand of one instruction, ``width`` bytes per lane."""

    def __init__(self, d: Decoder, operand: int, width: int) -> None:
        self.d, self.m, self.width = d, d.m, width
        self.space = next((s for s in SPACES if s in d.mods), None)
        self.synchronises = d.ins.name in ("atom", "red") or bool(_SYNCHRONISES & d.mods)
        self.address = d.address(operand)

    def lanes(self, b: Batch) -> Lanes:
        addresses = b.lanes(self.address(b))
        if b.mask is None:
            lanes = lanes_of(b.n)
            return Lanes(np.repeat(b.idx, 32), lanes, np.ascontiguousarray(addresses).reshape(-1))
        row, lane = np.nonzero(b.mask)
        return Lanes(b.idx[row], lane, addresses[row, lane])

    def load(self, b: Batch) -> np.ndarray:
        """The bytes that each lane loads, (n, 32, width); inactive lanes hold zeros."""
        got = self.fetch(self.lanes(b))
        if b.mask is None:
            return got.reshape(b.n, 32, -1)
        out = np.zeros((b.n, 32, self.width), np.uint8)
        out[b.mask] = got
        return out

    def store(self, b: Batch, data: np.ndarray) -> None:
        """Store ``data``, (n, 32, width) bytes."""
        where = self.lanes(b)
        if len(where.addresses):
            self.put(where, data.reshape(-1, self.width) if b.mask is None else data[b.mask])

    def fetch(self, where: Lanes) -> np.ndarray:
        """The bytes at ``where``, (lanes, width)."""
        out = np.zeros((len(where.addresses), self.width), np.uint8)
        for space, which in self._by_space(where.addresses):
            out[which] = self._fetch(space, where.pick(which))
        return out

    def put(self, where: Lanes, values: np.ndarray) -> None:
        """Store ``values``, (lanes, width) bytes; where addresses repeat, the last lane wins."""
        for space, which in self._by_space(where.addresses):
            self._put(space, where.pick(which), values[which])

    def _by_space(self, addresses: np.ndarray) -> Iterator[tuple[str, Any]]:
        if not len(addresses):
            return
        if self.space is not None:
            yield self.space, slice(None)
            return
        windows = window_of(addresses)
        found = np.unique(windows).tolist()
        for window in found:
            yield WINDOWS[window], slice(None) if len(found) == 1 else windows == window

    def _fetch(self, space: str, where: Lanes) -> np.ndarray:
        if space == "shared":
            words, first = self._shared(where, write=False)
            return _bytes(words[first[:, None] + np.arange(self.width // words.itemsize)])
        if space == "local":
            at = self._private(where, "local", self.m.local_bytes)
            place = where.warps[:, None], where.lanes[:, None], at
            if not self.m.local_written[place].all():
                never = ~self.m.local_written[place].any(1)
                self.m.events.local_unwritten(where.pick(never), at[never, 0], self.d.ins)
            self.m.events.local_accessed(where, at, False, self.d.ins)
            return self.m.local[place]
        if space == "param":
            return self.m.params[self._private(where, "parameter", len(self.m.params))]
        got = self.m.memory.load(where.addresses, self.width, self.refuse(where, "loads"))
        self.m.events.global_loaded(where, self.width, self.d.ins)
        return got

    def _put(self, space: str, where: Lanes, values: np.ndarray) -> None:
        self.m.progress += space != "local"  # no other thread sees local memory
        if space == "shared":
            words, first = self._shared(where, write=True)
            self.m.events.shared_stores(where, first * words.itemsize, values, self.d.ins)
            values = np.ascontiguousarray(values).view(words.dtype)
            words[first[:, None] + np.arange(self.width // words.itemsize)] = values
        elif space == "local":
            at = self._private(where, "local", self.m.local_bytes)
            place = where.warps[:, None], where.lanes[:, None], at
            self.m.local[place] = values
            self.m.local_written[place] = True
            self.m.events.local_accessed(where, at, True, self.d.ins)
        elif space == "global":
            self._put_global(where, values)
        else:
            raise self.d.unknown("a store to read-only memory")

    def _put_global(self, where: Lanes, values: np.ndarray) -> None:
        """Store to global memory; lanes of different clusters that store to the same places do so
        one after another.
        """
        m, refuse = self.m, self.refuse(where, "stores")
        owners = m.grid.cta_cluster[m.grid.warp_cta[where.warps]]
        several = bool((owners != owners[0]).any())
        if several and len(np.unique(where.addresses)) < len(where.addresses):
            turns: list[Any] = [owners == owner for owner in np.unique(owners).tolist()]
        else:
            turns = [slice(None)]
        for turn in turns:
            part, new = where.pick(turn), values[turn]
            places = m.memory.by_region(part.addresses, self.width, refuse, write=True)
            m.events.global_stores(part, new, places, self.d.ins)
            m.memory.write(places, new)

    def _shared(self, where: Lanes, write: bool) -> tuple[np.ndarray, np.ndarray]:
        """All shared memory as words, and the first word of each lane."""
        m = self.m
        self._in_window(where, "shared", SHARED_WINDOW)
        offsets = where.addresses & np.uint64(SHARED_WINDOW - 1)
        cta, offset = m.grid.shared_location(where.warps, offsets)
        m.check_shared(where.warps, where.lanes, cta, offset, self.width, self.d.ins)
        self.observe(where, cta, offset, self.width, write)
        word = min(self.width, 8)
        return m.smem_words(word), (cta * m.smem_bytes + offset) // word

    def _in_window(self, where: Lanes, what: str, window: int) -> None:
        """Raise BadAddress for an address that is neither an offset nor a generic address of the
        space.

        NOTE: in shared memory, bits 24 and up hold the CTA, which is checked together with the
        offset.
        """
        bits = {"shared": 61, "local": 58}.get(what, 32)
        high = where.addresses >> np.uint64(bits)
        bad = (high != 0) & (high != np.uint64(window >> bits))
        if bad.any():
            k = int(bad.argmax())
            who = f"{self.m.grid.name_warp(int(where.warps[k]))} lane {where.lanes[k]}"
            raise BadAddress.at(
                self.d.ins,
                f"{who} accesses {self.width} bytes at 0x{int(where.addresses[k]):x}, which is no "
                f"address of {what} memory",
            )

    def _private(self, where: Lanes, what: str, size: int) -> np.ndarray:
        """The offsets, (lanes, width), into a memory of ``size`` bytes that is not global or
        shared.
        """
        self._in_window(where, what, LOCAL_WINDOW if what == "local" else PARAM_WINDOW)
        if what == "local":
            require_own_local(self.d, where)
        at = (where.addresses & np.uint64(0xFFFFFFFF)).astype(np.int64)
        for bad, why in (
            (at + self.width > size, f"past the end of its {size} bytes"),
            (at % self.width != 0, f"not aligned to {self.width} bytes"),
        ):
            if bad.any():
                k = int(np.argmax(bad))
                who = f"{self.m.grid.name_warp(int(where.warps[k]))} lane {where.lanes[k]}"
                raise BadAddress.at(
                    self.d.ins,
                    f"{who} accesses {self.width} bytes of {what} memory at {at[k]}, {why}",
                )
        return at[:, None] + np.arange(self.width)

    def refuse(self, where: Lanes, verb: str) -> Any:
        """A function that raises BadAddress for the k-th access to global memory."""

        def refuse(k: int, why: str) -> None:
            who = f"{self.m.grid.name_warp(int(where.warps[k]))} lane {int(where.lanes[k])}"
            address = f"0x{int(where.addresses[k]):x}"
            raise BadAddress.at(self.d.ins, f"{who} {verb} {address}, {why}")

        return refuse

    def observe(
        self, where: Lanes, cta: np.ndarray, offset: np.ndarray, width: int, write: bool
    ) -> None:
        """Tell of an access to shared memory; what a store writes, no TMA load has swizzled."""
        m = self.m
        at = SharedBytes(where.warps, where.lanes, cta, offset, width)
        m.events.shared(at, write, not self.synchronises, self.d.ins)
        if write:
            m.box_swizzle[cta, offset >> 4] = 0


def require_own_local(d: Decoder, where: Lanes) -> None:
    """Raise BadAddress for a generic address of another thread's local memory, which no other can
    reach (PTX ISA 5.1.5): hardware takes the same place of the thread's own.
    """
    high = where.addresses >> np.uint64(32)
    other = (high != 0) & (high != local_window(where.warps, where.lanes) >> np.uint64(32))
    if other.any():
        k, names = int(other.argmax()), d.m.grid
        thread = (int(high[k]) & (1 << 26) - 1) - 1
        whose = f"lane {thread % 32} of {names.name_warp(thread // 32)}"
        if not 0 <= thread < 32 * names.num_warps:
            whose = "no thread"
        raise BadAddress.at(
            d.ins,
            f"{names.name_warp(int(where.warps[k]))} lane {int(where.lanes[k])} uses the address of"
            f" local memory of {whose}, which a thread has for itself: there it names its own",
        )


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)

"""Shared memory that nothing has written, or only with values that come from such.

Words that nothing has written hold the poison. A store or a copy may bring the same bytes, as parts
of NaNs: those count as written. A store of a value that comes from unwritten words keeps the
value's origin, by which a later load follows it on, as long as the word still holds that value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cutex.sim.machine.events import SharedBytes
from cutex.sim.machine.memory import POISON32
from cutex.sim.machine.operation import Operation, Span

if TYPE_CHECKING:
    from cutex.sim.machine.machine import Machine

_POISON = np.frombuffer(POISON32.tobytes(), np.uint8)


class UnwrittenShared:
    """Which bytes of the resident CTAs' shared memory are unwritten, and the origins of words."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self._stored: np.ndarray | None = None  # see `stored`
        # by CTA and word: the number of its value's origin, and that value
        self.origins: np.ndarray | None = None
        self.values: np.ndarray | None = None

    @property
    def words(self) -> np.ndarray:
        return self.m.smem.view(np.uint32)

    def stored(self) -> np.ndarray:
        """Which bytes are the poison's because something has written them, (CTAs, bytes)."""
        if self._stored is None:
            self._stored = np.zeros(self.m.smem.shape, bool)
        return self._stored

    def note(self, places: np.ndarray, values: np.ndarray, held: bool) -> None:
        """Note the bytes that a store of ``values``, (n, width), makes those of the poison, perhaps
        beside others that nothing has written. A store of what nothing has written, ``held``,
        leaves them so. ``places``: (n,), among the bytes of all CTAs.
        """
        at = places[:, None] + np.arange(values.shape[1])
        same = values == _POISON[at & 3]
        if same.any():
            self.stored().reshape(-1)[at[same]] = not held

    def keep(self, word: np.ndarray, values: np.ndarray, numbers: np.ndarray) -> None:
        """Keep the origins of what is stored to these words of all CTAs, (n,)."""
        if self.origins is None or self.values is None:
            self.origins = np.zeros(self.words.shape, np.int16)
            self.values = np.zeros(self.words.shape, np.uint32)
        self.origins.reshape(-1)[word] = numbers
        self.values.reshape(-1)[word] = values

    def brought(self, op: Operation) -> None:
        """Note what a copy brings, but TMA's boxes, which `Machine.box_swizzle` has."""
        source = next((place for place in op.reads if isinstance(place, Span)), None)
        for place in op.writes if "tensor" not in op.instruction.parts else ():
            if isinstance(place, Span):
                bytes_ = np.ones(place.high - place.low, bool)
                if source is not None and source.high - source.low == len(bytes_):
                    bytes_ = ~self._are_unwritten(source)
                self.stored()[place.cta, place.low : place.high] = bytes_

    def unwritten(self, at: SharedBytes) -> np.ndarray:
        """Which bytes of an access nothing has written, (n, width)."""
        byte = at.offset[:, None] + np.arange(at.width)
        unwritten = self.m.smem[at.cta[:, None], byte] == _POISON[byte & 3]
        if unwritten.any():
            unwritten &= self.m.box_swizzle[at.cta, at.offset >> 4, None] < 1
            if self._stored is not None:
                unwritten &= ~self._stored[at.cta[:, None], byte]
        return unwritten

    def _are_unwritten(self, place: Span) -> np.ndarray:
        byte = np.arange(place.low, place.high)
        found = self.m.smem[place.cta, place.low : place.high] == _POISON[byte & 3]
        found &= self.m.box_swizzle[place.cta, byte >> 4] < 1
        if self._stored is not None:
            found &= ~self._stored[place.cta, place.low : place.high]
        return np.asarray(found)

    def origins_of(self, cta: np.ndarray, words: np.ndarray) -> np.ndarray | None:
        """The numbers of the origins of these words, (n, w), 0 for none; None if all are 0."""
        if self.origins is None or self.values is None:
            return None
        found = self.origins[cta, words]
        if not found.any():
            return None
        return np.where(self.values[cta, words] == self.words[cta, words], found, np.int16(0))

    def in_span(self, place: Span) -> tuple[int, int] | None:
        """The first word of a copy's source that nothing has written, beside others that something
        has, and 0; or that holds a value of such an origin, and its number.
        """
        words = np.arange(place.low // 4, place.high // 4)
        beside = self.m.box_swizzle[place.cta, words >> 2] == 0
        bad = self._are_unwritten(place).reshape(-1, 4).all(1) & beside
        if bad.any():
            return 4 * int(words[int(bad.argmax())]), 0
        numbers = self.origins_of(np.array(place.cta), words)
        if numbers is None or not numbers.any():
            return None
        first = int((numbers != 0).argmax())
        return 4 * int(words[first]), int(numbers[first])

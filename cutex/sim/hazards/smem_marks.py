"""Marks of ordinary accesses to shared memory: which warps have touched each word, and when."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cutex.sim.machine.events import SharedBytes
from cutex.sim.machine.operation import WORD

WHOLE = np.uint8(0b1111)  # all bytes of a word
COPIED = np.uint8(0b10000)  # written by cp.async
ALONE = np.uint8(0b100000)  # accessed by one lane of its warp
PARTIAL = np.uint8(0b1000000)  # some lanes of the warp took no part
_PAGE = 64  # words

Words = tuple[np.ndarray, np.ndarray]  # CTAs and words, (n,) each


class Touches(NamedTuple):
    """The words that an access touches, (n,) each, by whom, and which bytes of each."""

    warps: np.ndarray
    lanes: Any  # (n,), or None: no lane's
    cta: np.ndarray
    word: np.ndarray
    part: Any = WHOLE  # (n,) or one for all

    @property
    def at(self) -> Words:
        return self.cta, self.word

    @staticmethod
    def of(at: SharedBytes) -> Touches:
        """The words of lanes, (lanes * words,)."""
        warps, lanes, cta, offset, width = at
        word = (offset // WORD)[:, None] + np.arange(max(width // WORD, 1))
        warps, lanes, cta = (
            np.broadcast_to(x[:, None], word.shape).reshape(-1) for x in (warps, lanes, cta)
        )
        part = WHOLE if width >= WORD else (((1 << width) - 1) << offset % WORD).astype(np.uint8)
        return Touches(warps, lanes, cta, word.reshape(-1), part)


class LastAccess:
    """The last access of a kind to each word of each CTA."""

    def __init__(self, shape: tuple[int, int], did: str) -> None:
        self.slot = np.zeros(shape, np.int16)
        self.count = np.zeros(shape, np.int32)  # 0: none
        self.bytes = np.zeros(shape, np.uint8)  # a bit for each byte of the word that it touched
        self.did = did

    def set(
        self, at: Words, slot: np.ndarray, count: np.ndarray, part: np.ndarray | np.uint8
    ) -> None:
        """Set the last access; the bytes of one agent's accesses add up."""
        if part is WHOLE:
            self.bytes[at] = part
        else:
            assert isinstance(part, np.ndarray)
            same = (self.slot[at] == slot) & (self.count[at] == count)
            self.bytes[at] = np.where(same, self.bytes[at], 0)
            self.slot[at], self.count[at] = slot, count
            last = self.slot[at] == slot  # of several agents in one batch
            np.bitwise_or.at(self.bytes, (at[0][last], at[1][last]), part[last])
        self.slot[at], self.count[at] = slot, count


class PartLanes:
    """The lanes that have stored parts of words, each its own bytes."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        # by CTA, word and byte: the lane and 1; 0 in words whose last store was of all bytes
        self.lanes: np.ndarray | None = None

    def store(self, touches: Touches) -> None:
        _, lanes, cta, word, part = touches
        if part is WHOLE:
            if self.lanes is not None:
                self.lanes[cta, word] = 0
            return
        if self.lanes is None:
            self.lanes = np.zeros((*self.shape, WORD), np.uint8)
        for byte in range(WORD):
            here = (part >> byte & 1).astype(bool)
            self.lanes[cta[here], word[here], byte] = lanes[here] + 1

    def of(self, touches: Touches, last: np.ndarray) -> np.ndarray:
        """The lane that stored the first byte of each access, (n,); ``last``: that of its word."""
        if self.lanes is None or touches.part is WHOLE:
            return last
        part = np.asarray(touches.part)
        first = np.log2(part & -part.astype(np.int8)).astype(int)
        lane = self.lanes[(*touches.at, first)].astype(last.dtype)
        return np.where(lane > 0, lane - 1, last)


class Several:
    """Accesses to words by warps that are not ordered among each other: for each warp a count, and
    the bytes of the word that it touched then."""

    def __init__(self, shape: tuple[int, int], warps: int) -> None:
        self.warps = warps
        # by CTA and page, (word of the page, warp's slot) of counts, and of bits
        self.pages: dict[tuple[int, int], np.ndarray] = {}
        self.bytes: dict[tuple[int, int], np.ndarray] = {}
        self.some = np.zeros(shape, bool)  # words that have any

    def add(
        self, at: Words, slot: np.ndarray, count: np.ndarray | int, part: np.ndarray | np.uint8
    ) -> None:
        """Add the accesses of warps to words, (n,) each; the bytes of those at one count add up."""
        cta, word = at
        self.some[at] = True
        count, part = (np.broadcast_to(x, slot.shape) for x in (count, part))
        for key in set(zip(cta.tolist(), (word // _PAGE).tolist(), strict=True)):
            mine = (cta == key[0]) & (word // _PAGE == key[1])
            page = self.pages.setdefault(key, np.zeros((_PAGE, self.warps), np.int32))
            bits = self.bytes.setdefault(key, np.zeros((_PAGE, self.warps), np.uint8))
            place = word[mine] % _PAGE, slot[mine]
            bits[place] = np.where(page[place] == count[mine], bits[place], 0)
            np.bitwise_or.at(bits, place, part[mine])
            page[place] = count[mine]

    def add_some(
        self,
        which: np.ndarray,
        at: Words,
        slot: np.ndarray,
        count: np.ndarray,
        part: np.ndarray | np.uint8,
    ) -> None:
        """Add those accesses of (n,) that are in ``which``."""
        if which.any():
            part = np.broadcast_to(part, slot.shape)[which] & WHOLE
            self.add((at[0][which], at[1][which]), slot[which], count[which], part)

    def of(self, cta: int, word: int) -> np.ndarray:
        """The counts of the warps, by slot."""
        return self.pages[cta, word // _PAGE][word % _PAGE]

    def touching(self, cta: int, word: int, part: np.uint8) -> np.ndarray:
        """The counts of those warps that touched any of these bytes of the word, else 0."""
        touched = self.bytes[cta, word // _PAGE][word % _PAGE] & part != 0
        return np.where(touched, self.of(cta, word), 0)

    def forget(self, cta: np.ndarray, word: np.ndarray) -> None:
        """Drop the accesses to words that are overwritten."""
        if not len(self.pages):
            return
        again = self.some[cta, word]
        if again.any():
            for c, w in zip(cta[again].tolist(), word[again].tolist(), strict=True):
                self.of(c, w)[:] = 0
            self.some[cta, word] = False

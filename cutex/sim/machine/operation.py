"""Asynchronous operations: who carries them out, and what they read and write."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from cutex.sim.ptx.parse import Instruction

WORD = 4  # bytes, the unit of shadow memory


@dataclass
class Span:
    """Bytes ``[low, high)`` of a CTA's shared memory; ``chunks`` the exact 16-byte pieces where
    they have gaps, ``words`` the exact 4-byte ones where those are not whole.
    """

    cta: int
    low: int
    high: int
    chunks: np.ndarray | None = None
    words: np.ndarray | None = None

    @property
    def size(self) -> int:
        if self.words is not None:
            return len(self.words) * WORD
        return self.high - self.low if self.chunks is None else self.chunks.size * 16

    @classmethod
    def of_words(cls, cta: int, words: np.ndarray) -> Span:
        low, high = int(words.min()) * WORD, int(words.max()) * WORD + WORD
        return cls(cta, low, high, np.unique(words // (16 // WORD)), words.reshape(-1))

    def meets(self, other: Span) -> bool:
        if self.cta != other.cta or self.low >= other.high or other.low >= self.high:
            return False
        if self.words is not None and other.words is not None:
            return bool(np.isin(self.words, other.words).any())
        if self.chunks is None and other.chunks is None:
            return True
        return bool(np.isin(self._pieces(), other._pieces()).any())

    def _pieces(self) -> np.ndarray:
        return (
            np.arange(self.low >> 4, (self.high + 15) >> 4)
            if self.chunks is None
            else self.chunks.reshape(-1)
        )


@dataclass
class Rectangle:
    """Columns ``[low, high)`` of all lanes ``[lane, lane_end)`` of a CTA's tensor memory."""

    cta: int
    lane: int
    lane_end: int
    low: int
    high: int

    def meets(self, other: Rectangle) -> bool:
        return (
            self.cta == other.cta
            and self.low < other.high
            and other.low < self.high
            and self.lane < other.lane_end
            and other.lane < self.lane_end
        )


Place = Span | Rectangle


def meet(a: Place, b: Place) -> bool:
    if isinstance(a, Span):
        return isinstance(b, Span) and a.meets(b)
    return isinstance(b, Rectangle) and a.meets(b)


class Engine(StrEnum):
    """The unit that carries out an operation."""

    TMA_LOAD = "TMA load"
    TMA_STORE = "TMA store"
    DSMEM = "distributed shared memory"  # bulk copies, st.async and red.async between CTAs
    CP_ASYNC = "cp.async"
    WGMMA = "wgmma"
    TCGEN05_MMA = "tcgen05.mma"
    TCGEN05_CP = "tcgen05.cp"
    LAUNCH_CONTROL = "cluster launch control"


@dataclass
class Operation:
    """One asynchronous operation; ``signals`` is the (cta, offset) of the mbarrier that it
    completes on, if any.
    """

    what: str
    warp: int
    instruction: Instruction
    queue: Hashable
    complete: Callable[[], None]
    engine: Engine
    bytes: int  # that it moves to or from shared memory, of all CTAs
    flops: int = 0
    reads: list[Place] = field(default_factory=list)
    writes: list[Place] = field(default_factory=list)
    signals: tuple[int, int] | None = None
    number: int = 0
    done: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)  # what its completion sets off

    @property
    def is_store(self) -> bool:
        """From shared to global memory, which bulk groups wait for."""
        return self.engine is Engine.TMA_STORE

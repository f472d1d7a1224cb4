"""The registers of an operand of wgmma."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class Registers:
    """32-bit registers of an operand, in fragment order; one object per tuple of indices."""

    __slots__ = ("array", "indices", "members")

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices, self.members = indices, frozenset(indices)
        self.array = np.array(indices, np.intp)

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(indices: tuple[int, ...]) -> Registers:
        return Registers(indices)

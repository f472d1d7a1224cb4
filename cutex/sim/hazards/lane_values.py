"""Values that instructions of a warp move between its lanes: of which lanes a result's value is.

Each function takes, for the registers of its operands, numbers of each lane, (n, 32), of which 0
stands for nothing, and returns those of the results; a result that depends on several has the
largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cutex.sim.isa.warp import shfl_sources

_LANE = np.arange(32)


def shuffled(
    mode: str, values: np.ndarray, distance: np.ndarray, control: np.ndarray
) -> np.ndarray:
    """Of a shfl (PTX ISA 9.7.9.6)."""
    source, inside = shfl_sources(mode, distance, control)
    return np.take_along_axis(values, np.where(inside, source, _LANE), 1)


def loaded_matrices(words: np.ndarray, transposed: bool) -> np.ndarray:
    """Of ldmatrix of 8x8 matrices of 16 bits: ``words``, (n, matrices, 8, 4), by row and word of
    four bytes; the result is (n, registers, 32).
    """
    if not transposed:
        return words.reshape(*words.shape[:2], 32)
    row, word = 2 * (_LANE % 4), _LANE // 8
    return np.minimum(words[:, :, row, word], words[:, :, row + 1, word])


def products(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Of an mma.sync of m16n8: lane t has row t / 4 of A, C and D, and in every second register of
    A, and the second half of those of C and D, the one 8 below; and column t / 4 of B.
    """
    rows = [np.max(a[half::2], axis=0).reshape(-1, 8, 4).max(2).repeat(4, 1) for half in (0, 1)]
    columns = np.max(b, axis=0).reshape(-1, 8, 4).max(2)  # (n, 8)
    pairs = [columns[:, 2 * (_LANE % 4) + i] for i in (0, 1)]
    out = []
    for k, old in enumerate(c):
        mine = pairs if len(c) == 2 else [pairs[k % 2]]  # two columns in a register of f16
        out.append(np.max([old, rows[2 * k // len(c)], *mine], axis=0))
    return out

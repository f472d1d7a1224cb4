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


def permuted(
    values: Sequence[np.ndarray], selector: np.ndarray, modes: Sequence[str]
) -> np.ndarray:
    """Of a prmt (PTX ISA 9.7.8.7) of which each byte is taken from a register that has a number."""
    if modes:
        return np.zeros(selector.shape, np.int16)
    taken = [np.where(selector >> 4 * k & 4, values[1], values[0]) for k in range(4)]
    return np.asarray(np.min(taken, axis=0))


def reduced(operation: str, values: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Of a redux (PTX ISA 9.7.9.15); of one that may drop a value, if each lane's has a number."""
    found = np.where(active, values, 0).max(1, keepdims=True)
    if operation not in ("add", "xor"):
        found = found * ((values != 0) | ~active).all(1, keepdims=True)
    return np.where(active, found, 0)


def deciding(name: str, kind: str, value: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """Where ``value``, one of two that an `and`, `or`, `max` or `min` combines, may decide alone:
    also where it is not known.
    """
    if value is None or kind in ("pred", "f16", "bf16") or "x" in kind:
        return np.ones(shape, bool)
    bits = int(kind[1:])
    if kind[0] == "f":
        if value.dtype.kind != "f":
            value = value.astype(f"u{bits // 8}").view(f"f{bits // 8}")
        return np.asarray(value == (np.inf if name == "max" else -np.inf))
    top, signed = (1 << bits) - 1, kind[0] == "s"
    alone = {"and": 0, "or": top, "max": top >> signed, "min": (top >> 1) + 1 if signed else 0}
    return np.asarray(value.astype(np.int64).astype(f"u{bits // 8}") == alone[name])

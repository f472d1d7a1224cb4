"""Warps that execute an instruction together, and its outcome for each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# The outcome of an instruction for each warp of its batch, if not all continue:
GO, RETRY, ARRIVED = 0, 1, 2  # next instruction; blocked, executes again; blocked, has executed


class Lanes(NamedTuple):
    """The active lanes of a batch, flattened: the warp, number and address of each."""

    warps: np.ndarray
    lanes: np.ndarray
    addresses: np.ndarray

    def pick(self, which: Any) -> Lanes:
        return Lanes(self.warps[which], self.lanes[which], self.addresses[which])


class Batch:
    """Warps that execute the same instruction together.

    ``idx`` (n,) warp numbers, ascending; ``sel`` the same as a slice where they are contiguous;
    ``mask`` (n, 32) the active lanes, None when all are.
    """

    __slots__ = ("idx", "mask", "n", "sel")

    def __init__(self, idx: np.ndarray, mask: np.ndarray | None) -> None:
        self.idx, self.mask, self.n = idx, mask, len(idx)
        contiguous = self.n and int(idx[-1]) - int(idx[0]) + 1 == self.n
        self.sel: Any = slice(int(idx[0]), int(idx[-1]) + 1) if contiguous else idx

    def active(self) -> np.ndarray:
        return np.ones((self.n, 32), bool) if self.mask is None else self.mask

    def lanes(self, values: Any) -> np.ndarray:
        """``values``, which may be one for all or one per warp, as (n, 32); read-only."""
        if getattr(values, "shape", None) == (self.n, 32):
            return values
        return np.broadcast_to(values, (self.n, 32))

    def any_active(self) -> np.ndarray:
        """Whether each warp has an active lane, (n,)."""
        return np.ones(self.n, bool) if self.mask is None else np.any(self.mask, axis=1)

    def first_lane(self) -> np.ndarray:
        """The lowest active lane of each warp, (n,); 0 if there is none."""
        return np.zeros(self.n, int) if self.mask is None else self.mask.argmax(1)

    def pick(self, rows: np.ndarray) -> Batch:
        """The batch of some of its warps."""
        return Batch(self.idx[rows], None if self.mask is None else self.mask[rows])

    def one(self, values: Any) -> np.ndarray:
        """The value of the lowest active lane of each warp, (n,)."""
        v = self.lanes(values)
        return v[:, 0] if self.mask is None else v[np.arange(self.n), self.first_lane()]

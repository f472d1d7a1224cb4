"""Marks of the bytes of large tensors, of which a run touches few.

Marks of a byte take four bytes, so those of a whole tensor of gigabytes do not fit in memory. Kept
are pages of those that an access has touched, up to so many for a launch; what is touched beyond
these is not marked, and the launch's report says so.
"""

from __future__ import annotations

import numpy as np

PAGE = 1 << 12  # bytes of a tensor, each with a mark
LARGEST = 1 << 26  # bytes of the largest tensor that has all its marks
MOST_PAGES = 1 << 16  # of a launch: 256 MB of tensors, 1 GB of marks


class Pages:
    """The pages that a launch may still make."""

    def __init__(self) -> None:
        self.left = MOST_PAGES

    def take(self, wanted: int) -> int:
        """How many of the wanted pages there are."""
        given = min(wanted, self.left)
        self.left -= given
        return given


class SparseMarks:
    """The marks of one tensor, 0 where there are none; indexed as an array of all would be."""

    def __init__(self, size: int, pages: Pages) -> None:
        self.size, self.pages = size, pages
        self.full = False  # whether marks have been dropped, as there were no pages left
        self.page = np.zeros(size // PAGE + 1, np.int32)  # its number in `kept`; 0: has no marks
        self.kept = np.zeros((16, PAGE), np.uint32)
        self.used = 1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: np.ndarray | slice) -> np.ndarray:
        at = self._at(places)
        return self.kept[self.page[at // PAGE], at % PAGE]

    def __setitem__(self, places: np.ndarray | slice, marks: np.ndarray | int) -> None:
        at = self._at(places)
        page = at // PAGE
        if not np.any(marks):
            some = self.page[page] != 0
            self.kept[self.page[page[some]], at[some] % PAGE] = 0
            return
        missing = page[self.page[page] == 0]
        if missing.size:
            self._make(np.unique(missing))
        self.kept[self.page[page], at % PAGE] = marks
        if self.full:
            self.kept[0] = 0

    def marked(self) -> np.ndarray:
        """Whether each byte has a mark, (size,)."""
        out = np.zeros((len(self.page), PAGE), bool)
        some = np.flatnonzero(self.page)
        out[some] = self.kept[self.page[some]] != 0
        return out.reshape(-1)[: self.size]

    def _at(self, places: np.ndarray | slice) -> np.ndarray:
        if isinstance(places, slice):
            return np.arange(*places.indices(self.size))
        return places

    def _make(self, wanted: np.ndarray) -> None:
        given = wanted[: self.pages.take(len(wanted))]
        self.full |= len(given) < len(wanted)
        end = self.used + len(given)
        if end > len(self.kept):
            more = np.zeros((max(end, 2 * len(self.kept)) - len(self.kept), PAGE), np.uint32)
            self.kept = np.concatenate([self.kept, more])
        self.page[given] = np.arange(self.used, end)
        self.used = end


Marks = np.ndarray | SparseMarks


def marks_of(size: int, pages: Pages, largest: int = LARGEST) -> Marks:
    """No marks yet of a tensor of so many bytes; sparse ones beyond the ``largest``."""
    return np.zeros(size, np.uint32) if size <= largest else SparseMarks(size, pages)


def marked(marks: Marks) -> np.ndarray:
    """Whether each byte has a mark."""
    return marks.marked() if isinstance(marks, SparseMarks) else marks != 0

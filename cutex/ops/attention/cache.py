"""Caches of keys: how a kernel steps through one, and the checks of the tensors that say what is in
it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from cutex.device.row_source import why_not_pages
from cutex.ops.attention.plan import ALIGN

MOST_ROWS = 2**31 - 2**20  # of a cache: TMA counts them in 32 bits
MOST_SPLITS = 256
MOST_STEP = 2**32  # elements, of a mode of size 1; TMA takes strides below 2^40 bytes


def room_of(cache: Tensor, table: Tensor | None) -> int:
    """The keys that a sequence has room for, in a cache (batch, room, ...) or, with a page table,
    (pages, page size, ...)."""
    rows = cache.shape[1]
    return rows if table is None else rows * table.shape[1]


def why_no_steps(x: Tensor) -> str | None:
    """Why TMA cannot step through a cache, or None."""
    if x.data_ptr() % ALIGN:
        return f"it starts at {x.data_ptr():#x}, which is no multiple of {ALIGN} bytes"
    return _why_no_strides(x.shape, x.stride(), x.element_size())


@lru_cache(maxsize=4096)
def _why_no_strides(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> str | None:
    """`why_no_steps` of any cache of this shape, whose elements have `element` bytes."""
    if strides[-1] != 1:
        return f"its head dim has stride {strides[-1]}, not 1"
    for n, stride in zip(shape[:-1], strides[:-1], strict=True):
        if n > 1 and (stride * element % ALIGN or stride <= 0):
            return f"its strides {strides} are no multiples of {ALIGN} bytes"
    return why_not_pages(_steps(shape, strides, element))


def stepped(x: Tensor) -> Tensor:
    """The same cache, with strides that TMA takes also in the modes of size 1."""
    wanted = _steps(x.shape, x.stride(), x.element_size())
    return x if wanted == x.stride() else x.as_strided(x.shape, wanted)


def _steps(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> tuple[int, ...]:
    """Strides that TMA takes, also in the modes of size 1."""
    (outer, row, head, one), unit = strides, shape[-1]
    if shape[2] == 1 and not _is_step(head, element):
        head = unit
    row = row if shape[1] > 1 else unit * (shape[2] if shape[2] > 1 else 1)
    if shape[1] == 1 and shape[0] > 1:
        row = outer  # pages of one row
    if shape[0] == 1 and (outer % row or not _is_step(outer, element)):
        outer = row * shape[1]
    return outer, row, head, one


def _is_step(stride: int, element: int) -> bool:
    """Whether TMA takes a stride of elements of `element` bytes."""
    return 0 < stride < MOST_STEP and stride * element % ALIGN == 0


def check_tensors(given: Iterable[tuple[str, object]]) -> None:
    """Raise TypeError or ValueError, in one sentence, unless every argument is a strided tensor on
    the device of the first, q."""
    device = None
    for name, x in given:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        device = x.device if device is None else device
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, but q is on {device}")
        if x.layout is not torch.strided or x.is_nested:
            layout = "a nested tensor" if x.is_nested else x.layout
            raise ValueError(f"{name} must be a strided tensor, got {layout}")
        if x.is_neg():  # NOTE: caches are read in place, and a launch sees the memory alone
            raise ValueError(f"{name} is a view that is negated lazily: pass its resolve_neg()")


def check_in_place(name: str, cache: Tensor) -> None:
    """Raise ValueError, in one sentence, for a cache that TMA cannot step through: it is never
    copied."""
    if reason := why_no_steps(cache):
        raise ValueError(f"{name} cannot be read in place: {reason}")
    steps, (pages, page) = stepped(cache).stride(), cache.shape[:2]
    if pages and (pages - 1) * (steps[0] // steps[1]) + page > MOST_ROWS:
        raise ValueError(f"{name} spans more than {MOST_ROWS} rows")


def check_table(name: str, table: Tensor, batch: int) -> None:
    """Raise ValueError, in one sentence, for a page table that is not (batch, pages)."""
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"{name} has shape {tuple(table.shape)}, it must be ({batch}, pages)")


def check_lengths(lengths: Tensor, room: int, new_keys: int | Tensor = 0) -> None:
    """Raise ValueError, in one sentence, for lengths, on the CPU, that exceed a cache's room."""
    if ((lengths < 0) | (lengths + new_keys > room)).any():
        shown = new_keys.tolist() if isinstance(new_keys, Tensor) else new_keys
        with_new = f" with {shown} new keys" if shown else ""
        raise ValueError(
            f"cache_seqlens must be from 0 to the {room} keys that there is room for{with_new}, "
            f"got {lengths.tolist()}"
        )


def check_pages(
    name: str,
    table: Tensor,
    lengths: Tensor,
    cache: Tensor,
    new_keys: int | Tensor = 0,
    first_keys: Tensor | None = None,
) -> None:
    """Raise ValueError, in one sentence, if a page table on the CPU names pages that `cache` does
    not have; pages before row `first_keys` of their sequence are not read, and not checked."""
    pages, size = cache.shape[:2]
    firsts = [0] * len(table) if first_keys is None else first_keys.tolist()
    for b, length in enumerate((lengths + new_keys).tolist()):
        used = table[b, firsts[b] // size : -(-length // size)]
        bad = used[(used < 0) | (used >= pages)]
        if bad.numel():
            raise ValueError(
                f"{name}[{b}] has page {int(bad[0])}, k_cache has pages 0 to {pages - 1}"
            )

"""Rows of torch tensors as the kernels for rows take them, and the launch of such a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import KNOWN, arch, kernels_of
from cutex.dtypes import of_torch
from cutex.kernels.row import choose
from cutex.ops.device import simulated_arch
from cutex.ops.plain import check_strided

if TYPE_CHECKING:
    from cutex.device.row.tile import RowTile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VECTOR = 16  # bytes
LINE = 128  # bytes of memory that are one line of a cache
COLUMNS = 2**31 - 2**17  # a part of a row behind its last one begins below 2^31, too
PIECE = 1 << 30  # elements of a launch on all elements of more than that


# ---- checks


def check(name: str, x: Any, like: Tensor | None = None) -> None:
    """Raise TypeError or ValueError, in one sentence, unless x is a strided tensor of a dtype that
    the kernels take, on the device of `like`."""
    check_strided(name, x)
    if x.dtype not in DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"{name} must be of {known}, got {x.dtype}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, not on {like.device} as the others")


def check_rows(name: str, x: Any) -> None:
    """The same, and that x has rows."""
    check(name, x)
    if x.dim() < 1:
        raise ValueError(f"{name} must have at least one dimension, got a scalar")


def check_alike(name: str, x: Any, other: str, y: Tensor) -> None:
    """Raise unless x has the dtype, the shape and the device of y, which is called `other`."""
    check(name, x, y)
    if x.dtype != y.dtype:
        raise TypeError(f"{name} is {x.dtype}, but {other} is {y.dtype}: they must be alike")
    if x.shape != y.shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but {other} has {tuple(y.shape)}")


def check_vector(name: str, x: Any, like: Tensor) -> None:
    """Raise unless x has one element for each column of `like`."""
    check(name, x, like)
    if x.shape != like.shape[-1:]:
        raise ValueError(f"{name} must have shape {tuple(like.shape[-1:])}, got {tuple(x.shape)}")


def arch_of(device: torch.device, function: str) -> str:
    """The arch that kernels for rows are compiled for on `device`; ValueError, in one sentence, if
    there is none."""
    from cutex.kernels.row.kernel import ARCHS

    own = [x for x in KNOWN.values() if {x.name, kernels_of(x.name)} & {*ARCHS}]
    if device.type == "cpu" and (simulated := simulated_arch()) is not None:
        major, minor = arch(simulated).capability
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
    else:
        raise ValueError(
            f"x is on {device}: {function} runs on an NVIDIA GPU from Ampere on; move its tensors "
            "there, or run them in the simulator with `with cutex.ops.simulated():`"
        )
    exact = [x.name for x in own if x.capability == (major, minor)]
    if exact:
        return exact[0]
    if major == 8:
        return "sm_80"  # whose code runs on all of them
    raise ValueError(
        f"x is on {device}, a GPU of compute capability {major}.{minor}: {function} has kernels "
        f"for {', '.join(ARCHS)}"
    )


@lru_cache
def sms_of(device: torch.device, arch_name: str) -> int:
    """The SMs of a GPU, or of the one simulated."""
    if device.type != "cuda":
        return arch(arch_name).num_sms
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- rows


def as_rows(x: Tensor) -> Tensor:
    """x as rows (M, N), contiguous in N: a view where there is one, else a copy."""
    n = x.shape[-1]
    if x.stride(-1) != 1 and n > 1:
        x = x.contiguous()
    try:
        rows = x.view(-1, n) if x.numel() else x.reshape(x.shape[:-1].numel(), n)
    except RuntimeError:
        rows = x.contiguous().view(-1, n)
    return rows


def dtype_of(x: Tensor) -> str:
    """Our name of the dtype of a checked tensor."""
    found = of_torch(x.dtype)
    assert found is not None
    return found.name


def empty_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of x's shape."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def tile_of(
    rows: Sequence[Tensor],
    vectors: Sequence[Tensor],
    arch: str,
    shifts: bool = True,
    wide: int = choose.WIDE,
    least: int = 8,
    in_warp: int = choose.WIDE,
) -> RowTile:
    """The tile for `rows` (M, N), whole, and `vectors` (N) that all rows share; `wide`, `least` and
    `in_warp` as of choose.tile."""
    x, loads = rows[0], loads_of(rows, vectors, shifts)
    # NOTE: of kernels that load a vector for all rows, too (docs/facts/rows.md#rows-norm-lines)
    lines = not (vectors and shifts) or all((y.data_ptr() | _step(y)) % LINE == 0 for y in rows)
    bits = 8 * x.element_size()
    return choose.tile(x.shape[-1], bits, kernels_of(arch), *loads, wide, least, lines, in_warp)


def few_of(rows: Sequence[Tensor], vectors: Sequence[Tensor], arch: str) -> RowTile | None:
    """The tile for few elements in all; None for more, and where the others' is as good."""
    (m, n), (unit, _) = rows[0].shape, loads_of(rows, vectors, False)
    return choose.few(m, n, unit, 8 * rows[0].element_size(), kernels_of(arch))


def part_of(rows: Sequence[Tensor]) -> RowTile:
    """The tile for a part of a row."""
    return choose.part(rows[0].shape[-1], 8 * rows[0].element_size(), *loads_of(rows, (), True))


def walk_of(rows: Sequence[Tensor], sms: int) -> RowTile:
    """The tile of a CTA that walks along a long row."""
    of_sm = rows[0].shape[0] / sms
    return choose.walk(8 * rows[0].element_size(), *loads_of(rows, (), True), of_sm)


def dense_of(rows: Sequence[Tensor]) -> int:
    """The elements of 16 bytes, if rows (M, N) lie one after another in each of them, and begin
    alike; else 0."""
    x = rows[0]
    if len(x) > 1 and any(y.stride(0) != x.shape[1] for y in rows):
        return 0
    widest, _ = loads_of(rows, (), True)
    return widest if widest * x.element_size() == VECTOR else 0


def loads_of(rows: Sequence[Tensor], vectors: Sequence[Tensor], shifts: bool) -> tuple[int, bool]:
    """The elements of a vector by which all are loaded, and whether rows begin anywhere.

    With `shifts`, rows that begin anywhere, but all alike, are loaded by the widest vectors, and
    by the element at their ends; otherwise by the widest vector that begins every row. Raises
    ValueError for rows whose columns 32 bits do not count.
    """
    if rows[0].shape[-1] > COLUMNS:
        raise ValueError(f"a row has {rows[0].shape[-1]} elements: at most {COLUMNS}")
    widest = VECTOR // rows[0].element_size()
    unit = min(_unit(y, widest) for y in (*rows, *vectors))
    alike = {(y.element_size(), y.data_ptr() % VECTOR, _step(y) % VECTOR) for y in rows}
    shifted = shifts and unit < widest and len(alike) == 1
    return (widest if shifted else unit), shifted


def _unit(x: Tensor, widest: int) -> int:
    """The elements of the widest vector of which every row of x is a whole number."""
    places = x.data_ptr() // x.element_size() | x.shape[-1] | _step(x) // x.element_size()
    return min(widest, places & -places)


def _step(x: Tensor) -> int:
    """The bytes from one row to the next."""
    return x.stride(0) * x.element_size() if x.dim() == 2 and x.shape[0] > 1 else 0

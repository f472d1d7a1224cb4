"""Global memory that a kernel needs beside its operands, kept for each stream.

Launches of one stream run one after another and share it. A CUDA graph may be replayed on any
stream, beside others, so captured launches get memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from cutex.compile import Workspace

Made = TypeVar("Made")
Shape = tuple[int, ...]

RESERVE = 1 << 20  # zeroed words that are kept for captures, 4 MB

# by device, stream and count; a negative count: of kernels that use them early
_flags: dict[tuple[int, int, int], Tensor] = {}
_sums: dict[tuple[int, int], Tensor] = {}  # by device and stream
_reserves: dict[int, Tensor] = {}  # by device: zeroed words that nothing uses yet
_captured: dict[tuple[int, int, int, int], Tensor] = {}  # by device, stream, capture and count
# by device, stream, name and kind
_scratch: dict[tuple[int, int, str, Shape, torch.dtype], Any] = {}
# what `buffers` returns outside captures, as tensors of tvm_ffi, by device, stream and numbers of
# sums and of flags
_together: dict[tuple[int, int, int, int], tuple[Any, Any]] = {}


def buffers(needs: Workspace, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sums and the flags for the next launch on the current stream of `device`."""
    return sums(device, needs.sums), flags(device, needs.flags, needs.early)


def buffers_of(needs: Workspace, device: torch.device) -> Callable[[], tuple[Any, Any]]:
    """A function that returns `buffers(needs, device)` for a kernel's launcher, faster: it looks
    the device up only once, and outside captures returns tvm_ffi tensors, which a launcher takes in
    a tenth of the time of torch's."""
    if device.type != "cuda":
        return lambda: buffers(needs, device)
    from tvm_ffi import from_dlpack

    index = device.index
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    stream_of = torch._C._cuda_getCurrentRawStream
    count, words = needs.sums, -needs.flags if needs.early else needs.flags

    def found() -> tuple[Any, Any]:
        stream = stream_of(index)
        if stream and is_capturing():  # NOTE: the default stream, 0, is never captured
            return buffers(needs, device)
        kept = _together.get((index, stream, count, words))
        if kept is None:
            sums, flags = map(from_dlpack, buffers(needs, device))
            kept = _together[index, stream, count, words] = sums, flags
        return kept

    return found


def untouched_of(needs: Workspace, device: torch.device) -> Callable[[], tuple[Any, Any]]:
    """As `buffers_of` for a kernel that takes a workspace and looks at none: all its launches have
    the same."""
    if device.type != "cuda":
        return lambda: buffers(needs, device)
    from tvm_ffi import from_dlpack

    kept: tuple[Any, Any] | None = None

    def found() -> tuple[Any, Any]:
        nonlocal kept
        if kept is None:
            if torch._C._cuda_isCurrentStreamCapturing():
                return buffers(needs, device)
            made = allocated_apart(lambda: [_zeros(device, n) for n in needs[:2]], device)
            kept = from_dlpack(made[0].view(torch.float32)), from_dlpack(made[1])
        return kept

    return found


def flags(device: torch.device, count: int, early: bool = False) -> Tensor:
    """`count` zeroed words (int32), which a launch leaves zeroed. `early`: as a Workspace's."""
    stream = 0
    if device.type == "cuda":
        if torch._C._cuda_isCurrentStreamCapturing():
            return _flags_of_capture(device, count, early)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    key = (index_of(device), stream, -count if early else count)
    found = _flags.get(key)
    if found is None:
        found = _flags[key] = allocated_apart(lambda: _zeros(device, count), device)
        if device.type == "cuda" and device.index not in _reserves:
            _reserves[device.index] = allocated_apart(lambda: _zeros(device, RESERVE), device)
    return found


def forget_flags(device: torch.device) -> None:
    """Make the next launches on `device` get newly zeroed words: a failed launch, as a simulated
    one may be, leaves words that are not zero."""
    for key in [key for key in _flags if key[0] == index_of(device)]:
        del _flags[key]
    _together.clear()


def flags_of(device: torch.device, count: int) -> Callable[[], Tensor]:
    """A function that returns `flags(device, count)`, in less time: it looks the device up only
    once."""
    if device.type != "cuda":
        return lambda: flags(device, count)
    index = device.index
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    stream_of = torch._C._cuda_getCurrentRawStream

    def found() -> Tensor:
        stream = stream_of(index)
        capturing = stream and is_capturing()  # NOTE: the default stream, 0, is never captured
        kept = None if capturing else _flags.get((index, stream, count))
        return flags(device, count) if kept is None else kept

    return found


def scratch_of(
    device: torch.device, name: str, shape: Shape, strides: Shape, dtype: torch.dtype,
    empty: Callable[..., Any],
) -> Callable[[], Any]:  # fmt: skip
    """A function that returns memory of any values, which nobody looks at behind the next launch on
    the current stream, another for each name among a launch's; `empty` allocates it for captures,
    whose replays may run beside others."""
    if device.type != "cuda":
        return lambda: empty(shape, strides, dtype)
    from tvm_ffi import from_dlpack

    index = device.index
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    stream_of = torch._C._cuda_getCurrentRawStream

    def found() -> Any:
        stream = stream_of(index)
        if stream and is_capturing():  # NOTE: the default stream, 0, is never captured
            return empty(shape, strides, dtype)
        key = index, stream, name, shape, dtype
        kept = _scratch.get(key)
        if kept is None:
            made = allocated_apart(lambda: torch.empty(shape, dtype=dtype, device=device), device)
            kept = _scratch[key] = from_dlpack(made)
        return kept

    return found


def sums(device: torch.device, count: int) -> Tensor:
    """At least `count` float32 elements, of any values."""
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        return torch.empty(count, dtype=torch.float32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    key = (index_of(device), stream)
    found = _sums.get(key)
    if found is None or found.numel() < count:
        kind = {"dtype": torch.float32, "device": device}
        _together.clear()  # else those would be kept that are too small for this one
        found = _sums[key] = allocated_apart(lambda: torch.empty(count, **kind), device)
    return found


def index_of(device: torch.device) -> int:
    """The index of a GPU; -1 for the CPU."""
    return device.index if device.type == "cuda" else -1


def allocated_apart(allocate: Callable[[], Made], device: torch.device) -> Made:
    """The result of `allocate` on the current stream, for longer than a call.

    NOTE: in its own thread: while torch.compile warms up its CUDA graph trees, everything that this
    thread allocates belongs to them, and must not outlive the call.
    """
    if device.type != "cuda":
        return allocate()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> Made:
        with torch.cuda.stream(stream):
            return allocate()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()


def _zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _flags_of_capture(device: torch.device, count: int, early: bool = False) -> Tensor:
    """The zeroed words for the launches of the current capture, on this stream.

    NOTE: taken from words that were zeroed before. Zeroing them in the graph would take 2 us of
    every replay; that happens only if no words are left.
    """
    from cuda.bindings import driver

    stream = torch._C._cuda_getCurrentRawStream(device.index)
    error, _, capture, *_ = driver.cuStreamGetCaptureInfo(stream)
    key = (device.index, stream, -1 if error else int(capture), -count if early else count)
    if not error and key in _captured:
        return _captured[key]
    reserve = _reserves.get(device.index)
    if error or reserve is None or reserve.numel() < count:
        _reserves.pop(device.index, None)
        _flags.clear()  # the next launch that is not captured finds a new reserve
        _together.clear()
        return _zeros(device, count)
    found, _reserves[device.index] = reserve[:count], reserve[count:]
    _captured[key] = found
    return found

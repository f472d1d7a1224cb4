"""Arguments of a script's jitted functions: the values passed to the captured host code, and the
stand-ins that the functions are compiled with.

Tensors may be torch's, the DSL's own (``from_dlpack``), or addresses (``make_ptr``).
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute import runtime

from cutex.sim.host.capture import HostTensor, of_dsl
from cutex.sim.host.loaded import is_stream


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "_dltensor_wrapper") or lends(value)


def lends(value: Any) -> bool:
    """Whether ``value`` is no tensor that is known here, and lends its memory by DLPack."""
    known = isinstance(value, torch.Tensor | type) or hasattr(value, "_dltensor_wrapper")
    return not known and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def _of_torch(value: Any) -> torch.Tensor:
    """The memory that ``value`` lends, as torch's tensor."""
    with torch._C.DisableTorchFunction():
        return torch.from_dlpack(value)


def is_record(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass of the script's."""
    own = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return own and not is_tensor(value) and not type(value).__module__.startswith("cutlass.")


def _fields(record: Any) -> list[tuple[str, Any]]:
    return [(f.name, getattr(record, f.name)) for f in dataclasses.fields(record)]


def holds_tensors(value: Any) -> bool:
    """Whether ``value`` is a tuple or list that contains a tensor, at any depth."""
    return isinstance(value, tuple | list) and any(is_tensor(v) or holds_tensors(v) for v in value)


def tensors_in(values: Iterable[Any]) -> Iterator[HostTensor]:
    """The tensors among captured arguments, also those in tuples."""
    for value in values:
        if isinstance(value, HostTensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_in(value)


def takes_stream(arguments: Any) -> bool:
    """Whether the host code needs a stream argument: without a tensor it cannot ask its
    environment.
    """
    return not any(is_tensor(a) or hasattr(a, "dynamic_shapes_mask") for a in arguments)


def captured(given: Any, name: str) -> Any:
    """An argument in the form that the captured host code takes."""
    if lends(given):
        given = _of_torch(given)
    if isinstance(given, torch.Tensor):
        return HostTensor.of(given, name)
    if hasattr(given, "_dltensor_wrapper"):
        return of_dsl(given, name)
    if hasattr(given, "_pointer"):
        return ctypes.c_void_p(int(given._pointer))
    if is_stream(given):
        return ctypes.c_void_p()  # the default stream
    if isinstance(given, cutlass.Numeric):
        return given.value
    if isinstance(given, tuple | list):
        return tuple(captured(g, f"{name}[{i}]") for i, g in enumerate(given))
    if is_record(given):  # as TVM-FFI unpacks it
        return tuple(captured(g, f"{name}.{field}") for field, g in _fields(given))
    return given


def stand_for(value: Any, own_stream: bool) -> Any:
    """The stand-in for an argument when a function is compiled: its type and layout."""
    if is_stream(value):
        return runtime.make_fake_stream(use_tvm_ffi_env_stream=own_stream)
    if lends(value):
        value = _of_torch(value)
    if isinstance(value, torch.Tensor):  # as the DSL's own TensorAdapter takes it
        value = runtime.from_dlpack(value).mark_layout_dynamic()
    if hasattr(value, "_dltensor_wrapper"):
        return _fake_of_dsl(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[stand_for(v, own_stream) for v in value])
    if isinstance(value, tuple | list):
        return type(value)(stand_for(v, own_stream) for v in value)
    if is_record(value):
        made = copy.copy(value)
        for name, item in _fields(value):
            object.__setattr__(made, name, stand_for(item, own_stream))  # it may be frozen
        return made
    return value


def _fake_of_dsl(tensor: Any) -> Any:
    """A fake tensor with the dynamic modes and divisibilities of ``tensor``; 4-bit elements come in
    pairs.
    """
    tensor.load_dltensor()
    kind = tensor.element_type
    pairs = 2 if kind.width == 4 else 1
    layout = str(tensor)[:-1].partition(" o ")[2]  # "(?,?{div=8}):(?{i64 div=8},1)"
    by_n, by_stride = (_divisibilities(part) for part in layout.split(":"))
    shape, strides = [], []
    for i, (n, stride) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
        among = max(by_n[i], pairs if stride == 1 else 1)
        shape.append(cute.sym_int(divisibility=among) if tensor.dynamic_shapes_mask[i] else n)
        among = max(by_stride[i], pairs)
        dynamic = tensor.dynamic_strides_mask[i]
        strides.append(cute.sym_int64(divisibility=among) if dynamic else stride)
    align = tensor._assumed_align or max(1, kind.width // 8)
    return runtime.make_fake_tensor(kind, tuple(shape), tuple(strides), assumed_align=align)


def _divisibilities(modes: str) -> list[int]:
    """The known divisor of each mode of a flat layout, as the DSL prints it; 1 if none is known."""
    found = (re.search(r"div=(\d+)", mode) for mode in modes.strip("()").split(","))
    return [int(m[1]) if m else 1 for m in found]

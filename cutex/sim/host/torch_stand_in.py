"""torch as a script sees it on a machine with a GPU, on a machine without one: "cuda" is the CPU.

The script's GPU tensors are in host memory, aligned as by the CUDA allocator, and are registered: a
kernel may reach one by an address alone, as a grouped GEMM does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_leaves

from cutex.arch import Arch
from cutex.sim.host.capture import HostTensor
from cutex.sim.host.cuda_graphs import CUDAGraph
from cutex.sim.host.streams import STREAMS
from cutex.sim.host.torch_cuda import (
    GPU,
    Generator,
    TritonTesting,
    cuda_functions,
    marks,
    uncompiled,
)
from cutex.sim.host.torch_profiler import of_activities, of_devices
from cutex.sim.host.torch_scaled import SCALED
from cutex.sim.machine.memory import BLANK32

ALIGNMENT = 512  # bytes, of the CUDA caching allocator
LARGEST = 1 << 26  # bytes of the largest tensor that is filled where nothing has written it
CPU = torch.device("cpu")
RETURNED = (tuple, list, *torch.return_types.all_return_types)  # several tensors
_IS_CUDA, _DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
_GRAD = torch.Tensor.grad.__get__


class Allocation(NamedTuple):
    """The part of its storage that a tensor occupies; the storage may be longer, for alignment."""

    storage: StorageWeakRef
    address: int
    size: int  # bytes
    blank: bool = False  # see `DeviceMemory.blank`


class DeviceMemory:
    """The memory that the script holds on its GPU."""

    def __init__(self) -> None:
        self._held: dict[int, Allocation] = {}  # by the address of the storage

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            storage = tensor.untyped_storage()
            new = Allocation(StorageWeakRef(storage), tensor.data_ptr(), span(tensor))
            self._held[storage.data_ptr()] = new
        return tensor

    def blank(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor that nothing has written with BLANK32, unless it is large."""
        if not tensor.numel() or tensor not in self:  # NOTE: or at the address of one that is gone
            return tensor
        at = tensor.untyped_storage().data_ptr()
        held = self._held[at]
        if held.size <= LARGEST:
            words = ctypes.c_uint32 * (held.size // 4)
            np.ctypeslib.as_array(words.from_address(held.address))[:] = BLANK32
            self._held[at] = held._replace(blank=True)
        return tensor

    def held(self, tensors: Iterable[torch.Tensor]) -> set[tuple[int, StorageWeakRef]]:
        """The addresses and storages of what these tensors are parts of, of those that are held."""
        parts = (self._held[t.untyped_storage().data_ptr()] for t in tensors if t in self)
        return {(part.address, part.storage) for part in parts}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        held = self._held.get(tensor.untyped_storage().data_ptr())
        return held is not None and not held.storage.expired()

    def regions(self, named: list[HostTensor]) -> list[HostTensor]:
        """All live memory, each part as the tensor of ``named`` that fills it, else as bytes; and
        the tensors of ``named`` that are outside of it."""
        self._held = {at: a for at, a in self._held.items() if not a.storage.expired()}
        inside: dict[int, list[HostTensor]] = {a.address: [] for a in self._held.values()}
        filling: dict[int, HostTensor] = {}
        others = []
        for tensor in named:
            homes = (a for a in self._held.values() if 0 <= tensor.address - a.address < a.size)
            home = next(homes, None)
            if home is None:
                others.append(tensor)
            else:
                inside[home.address].append(tensor)
                elements = math.prod(tensor.shape)
                steps = zip(tensor.shape, tensor.strides, strict=True)
                dense = 1 + sum((n - 1) * s for n, s in steps) == elements
                if dense and home.size == elements * tensor.itemsize:
                    filling[home.address] = tensor
        return others + [
            replace(
                filling.get(a.address) or HostTensor(a.address, (a.size,), (1,), "uint8", 1, None),
                owner=a.storage,
                name="/".join(dict.fromkeys(t.name for t in inside[a.address])) or "a tensor",
                views=tuple(inside[a.address]),
                blank=a.blank,
            )
            for a in self._held.values()
        ]


def span(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values and strides, at a multiple of ALIGNMENT."""
    if not tensor.numel() or tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    size = span(tensor)
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    flat = raw[start : start + size].view(tensor.dtype)
    out = flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())
    return out.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _names(kind: str, values: Any) -> bool:
    """Whether one of ``values`` is a device of this type."""
    return any(
        value.partition(":")[0] == kind if isinstance(value, str) else value.type == kind
        for value in values
        if isinstance(value, str | torch.device)
    )


def _on_cpu(value: Any) -> Any:
    return CPU if _names("cuda", [value]) else value


def _default_device() -> str:
    """The type of torch.set_default_device, or of the innermost `with torch.device(...)`."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device.type
    return "cpu"


def _no_gpu(
    context: DeviceContext, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """DeviceContext.__torch_function__: a GPU is named to `OnCpu` only, where that is still to
    come, and not to what it calls.
    """
    kwargs = dict(kwargs or {})
    if func in _CONSTRUCTORS and kwargs.get("device") is None:
        below = any(isinstance(m, OnCpu) for m in _get_current_function_mode_stack())
        if context.device.type != "cuda" or below:
            kwargs["device"] = context.device
    return func(*args, **kwargs)


def _of_type(product: Callable[..., Any]) -> Callable[..., Any]:
    """A product that torch rounds to a type of its own on GPUs only, of float32 operands."""

    def call(*operands: Any, out_dtype: torch.dtype, out: Any = None, **how: Any) -> Any:
        wide = [o.float() if isinstance(o, torch.Tensor) else o for o in operands]
        made = product(*wide, **how).to(out_dtype)
        return made if out is None else out.copy_(made)

    return call


_PRODUCTS = {
    f: _of_type(f)
    for product in ("mm", "bmm", "addmm", "baddbmm")
    for f in (getattr(torch, product), getattr(torch.Tensor, product))
}
_CONSTRUCTORS = _device_constructors()
_EMPTY = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted,
    torch.Tensor.new_empty, torch.Tensor.new_empty_strided,
}  # fmt: skip


# functions whose result is no tensor that read the values of one, and for which the host waits
_READ = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__",
         "__int__", "__index__", "cpu", "__format__", "__repr__"}  # fmt: skip
_WAITED = {*_READ, "cuda", "nonzero", "masked_select", "unique", "argwhere"}
_UNREAD = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
           "new_zeros", "new_ones", "new_full", "record_stream", "data_ptr"}  # fmt: skip


class OnCpu(TorchFunctionMode):
    """A mode in which calls that name the device "cuda", or take a tensor there, create their
    results there.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()
        self.memory = memory
        self.backward = False  # of tensors on the GPU: so are the gradients that torch makes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if STREAMS.several:
            return self._called_on_stream(func, args, kwargs)
        return self._called(func, args, kwargs)

    def _called_on_stream(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same where a script has several streams: of what torch reads and writes, the work
        that nothing orders before it is told."""
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        out = self._called(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if CUDAGraph.capturing is not None or name in _UNREAD or func in _EMPTY:
            return out
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        changed = [t for t in given if any(t is m for m in made)]
        changed += given[:1] if name == "__setitem__" else []
        held = self.memory.held(given)
        new = self.memory.held(made) - held
        if name not in _READ and not changed and not (made and (new or not held)):
            return out  # NOTE: a view, or a question of a shape
        written = self.memory.held(changed) | new
        STREAMS.computed(f"torch's {name}", held - new, written)
        beside_host = bool(held) and any(t not in self.memory for t in given)
        if name in _WAITED or beside_host or _names("cpu", (*args, *kwargs.values())):
            STREAMS.host_waits(STREAMS.recorded(STREAMS.current))
        return out

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.backward:
            for a in args:
                if isinstance(a, torch.Tensor) and a not in self.memory:
                    self.memory.add(a)
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.device or func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        if func is torch.Tensor.pin_memory or func is torch.Tensor.is_pinned:
            return args[0] if func is torch.Tensor.pin_memory else False
        kwargs.pop("pin_memory", None)
        if func in _CONSTRUCTORS and kwargs.get("device") is None and _default_device() == "cuda":
            kwargs["device"] = GPU
        if func == _IS_CUDA:
            return args[0] in self.memory
        if func == _GRAD:  # NOTE: the tensor itself, as a script may change it in place
            grad = func(*args)
            return self.memory.add(grad) if grad is not None and args[0] in self.memory else grad
        if func == _DEVICE:
            return GPU if args[0] in self.memory else func(*args)
        given = (*args, *kwargs.values())
        to_gpu = func is torch.Tensor.cuda or _names("cuda", given)
        to_host = func is torch.Tensor.cpu or _names("cpu", given)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            out = args[0].clone()
        else:
            rounded = _PRODUCTS if "out_dtype" in kwargs else {}
            call = SCALED.get(func) or rounded.get(func, func)
            out = call(*map(_on_cpu, args), **{k: _on_cpu(v) for k, v in kwargs.items()})
        placed = self._placed(out, args, to_gpu, to_host)
        return self.memory.blank(placed) if func in _EMPTY else placed

    def _placed(self, out: Any, args: tuple[Any, ...], to_gpu: bool, to_host: bool) -> Any:
        """The result of a call, with its tensors moved to the GPU where they should be."""
        if type(out) in RETURNED:  # as max(dim=0), topk and split return
            return type(out)([self._placed(x, args, to_gpu, to_host) for x in out])
        if not isinstance(out, torch.Tensor):
            return out
        if (to_gpu or to_host) and any(out is a for a in args):
            out = out.clone()
        if to_gpu or (not to_host and self._comes_from_gpu(out, args)):
            return self.memory.add(out if out.grad_fn is not None else aligned(out))
        return out

    def _comes_from_gpu(self, out: torch.Tensor, args: tuple[Any, ...]) -> bool:
        """Whether ``out`` was computed from a tensor on the GPU, and is no view of one there."""
        flat = [b for a in args for b in (a if isinstance(a, tuple | list) else [a])]
        made_of = any(isinstance(a, torch.Tensor) and a in self.memory for a in flat)
        return made_of and out not in self.memory


class CustomOps:
    """A replacement for torch.library.custom_op: a script's kernels for "cuda" serve all devices,
    and run within the stand-in, although torch disables modes during such a call.
    """

    def __init__(self, mode: OnCpu) -> None:
        self.mode, self.original = mode, torch.library.custom_op

    def __call__(
        self, name: str, fn: Any = None, /, *, mutates_args: Any, device_types: Any = None,
        schema: str | None = None, **how: Any,
    ) -> Any:  # fmt: skip
        """The replacement for torch.library.custom_op, with its signature."""

        def register(fn: Callable[..., Any]) -> Any:
            found = schema or torch.library.infer_schema(fn, mutates_args=mutates_args)
            return self.original(
                name, self.within(fn), mutates_args=mutates_args, schema=found,
                device_types=None if _names_kind("cuda", device_types) else device_types, **how,
            )  # fmt: skip

        return register if fn is None else register(fn)

    def within(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` run with the stand-in active."""

        @wraps(fn)
        def inside(*arguments: Any, **named: Any) -> Any:
            with self.mode:
                return fn(*arguments, **named)

        return inside


class Load:
    """torch.load: tensors on a GPU, by the file or by the script, are on the stand-in's."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory, self.original = memory, torch.load

    def __call__(self, file: Any, map_location: Any = None, *arguments: Any, **how: Any) -> Any:
        asked = _names("cuda", [map_location])
        placed = set()

        def place(storage: Any, location: str) -> Any:
            if asked or location.startswith("cuda"):
                placed.add(storage.data_ptr())
            return storage

        if map_location is None or asked:
            map_location = place
        out = self.original(file, map_location, *arguments, **how)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in placed:
                self.memory.add(leaf)
        return out


def _names_kind(kind: str, kinds: Any) -> bool:
    return kinds is not None and kind in ([kinds] if isinstance(kinds, str) else kinds)


@contextmanager
def patched(target: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes of ``target`` have other values."""
    before = {name: getattr(target, name) for name in values if hasattr(target, name)}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)


@contextmanager
def torch_on_cpu(arch: Arch) -> Iterator[DeviceMemory]:
    memory = DeviceMemory()
    with ExitStack() as stack:
        stack.enter_context(patched(torch.cuda, **cuda_functions(arch)))
        stack.enter_context(patched(torch._C, _cuda_getCurrentRawStream=lambda _: STREAMS.current))
        stack.enter_context(patched(torch.Tensor, record_stream=lambda *_: None))
        stack.enter_context(patched(torch, Generator=Generator, compile=uncompiled))
        stack.enter_context(patched(torch, load=Load(memory)))
        stack.enter_context(patched(torch.version, cuda="13.0"))
        stack.enter_context(
            patched(
                torch.accelerator,
                is_available=lambda: True,
                current_accelerator=lambda *_, **__: GPU,
            )
        )
        stack.enter_context(patched(DeviceContext, __torch_function__=_no_gpu))
        stack.enter_context(TritonTesting())
        stack.enter_context(patched(torch.cuda.nvtx, **marks()))
        stack.enter_context(patched(torch.cuda.profiler, start=lambda: None, stop=lambda: None))
        for profiler, only_cpu in (
            (torch.profiler._KinetoProfile, of_activities),
            (torch.autograd.profiler.profile, of_devices),
        ):
            stack.enter_context(patched(profiler, __init__=only_cpu(profiler.__init__)))
        emits = torch.autograd.profiler.emit_nvtx
        stack.enter_context(
            patched(emits, __enter__=lambda marks: marks, __exit__=lambda *_: False)
        )
        mode = stack.enter_context(OnCpu(memory))
        # NOTE: torch calls this one without asking a mode
        stack.enter_context(
            patched(torch.Tensor, get_device=lambda tensor: 0 if tensor in memory else -1)
        )
        ops, engine = CustomOps(mode), torch.autograd._engine_run_backward
        stack.enter_context(patched(torch.library, custom_op=ops))

        def backward(tensors: Any, *arguments: Any, **named: Any) -> Any:
            before, mode.backward = (
                mode.backward,
                any(isinstance(t, torch.Tensor) and t in memory for t in tensors),
            )
            STREAMS.all_wait()  # NOTE: torch orders the streams of the forward pass around it
            try:
                return ops.within(engine)(tensors, *arguments, **named)
            finally:
                mode.backward = before
                STREAMS.all_wait()

        stack.enter_context(patched(torch.autograd, _engine_run_backward=backward))
        yield memory

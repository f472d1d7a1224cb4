"""Whether tensors are plain memory, so that a kernel may be launched on them directly.

Everything else goes through torch's dispatcher: subclasses and fake tensors, tensors wrapped by
torch.func's transforms, views that are negated lazily, tensors without memory, and all calls while
a transform, a mode, a tracer or forward differentiation is active.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_guards: Any = torch._C._dynamo.guards
_eval_frame: Any = torch._C._dynamo.eval_frame
_PLAIN = (Tensor, torch.nn.Parameter)
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._is_tracing
_keys = torch._C._dispatch_keys

# the keys of a tensor that is memory of the CPU or of a GPU, outside inference mode
_PLAIN_KEYS = DispatchKeySet(DispatchKey.ADInplaceOrView)
for _device in ("CPU", "CUDA"):
    for _kind in ("", "Autograd", "Autocast"):
        _PLAIN_KEYS |= DispatchKeySet(getattr(DispatchKey, _kind + _device))
_FOREIGN_BITS = ~_PLAIN_KEYS.raw_repr()


def nobody_watches() -> bool:
    """Whether no transform, mode or tracer is active; torch.set_default_device does not count."""
    return (
        not _transforms_active()
        and not _dispatch_modes()
        and (not _function_modes() or _only_default_devices())
        and not _is_tracing()
        and forward_ad._current_level < 0
    )


def is_watched_unseen() -> bool:
    """Whether a mode is active that guards may miss: transforms and tracers change the dispatch
    keys that guards compare, these need not. A default device counts here."""
    return bool(_function_modes() or _dispatch_modes() or forward_ad._current_level >= 0)


def is_plain(x: Tensor) -> bool:
    """Whether x is plain memory of the CPU or of a GPU, by its class and all its dispatch keys."""
    return type(x) in _PLAIN and not _keys(x).raw_repr() & _FOREIGN_BITS


def guard(tensors: Sequence[Tensor], growing: Collection[int] = ()) -> Callable[..., bool]:
    """A function that returns whether other tensors have the same classes, dtypes, devices, sizes,
    strides, requires_grad and dispatch keys, under the modes that are active. Those with a number
    in `growing` may have another size in mode 1, and other strides but the last.

    NOTE: the tensors must be distinct: a guard never accepts the same tensor twice.
    """
    sizes: list[list[int | None]] = [list(x.shape) for x in tensors]
    strides: list[list[int | None]] = [list(x.stride()) for x in tensors]
    for i in growing:
        sizes[i][1] = None
        strides[i][:-1] = [None] * (len(strides[i]) - 1)
    return _guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check


# x's memory from its first element on, by shape and strides (tuples): a third of the time of x.view
view: Callable[..., Tensor] = _guards._reinterpret_tensor


def empty_of(device: torch.device, several: bool) -> Callable[..., Tensor]:
    """A function of shape, strides and dtype that allocates on `device`, in half the time of
    empty_strided; with `several` GPUs, only while it is the current one."""
    if device.type == "cpu":
        return _guards._empty_strided_cpu
    if not several:
        return _guards._empty_strided_cuda
    here, index = torch._C._cuda_getDevice, device.index

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        if here() == index:
            found: Tensor = _guards._empty_strided_cuda(shape, strides, dtype)
            return found
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """`function`, run untraced with all that it calls where a torch.compile graph breaks, as at a
    user's function; inside a graph dynamo still traces it.

    NOTE: dynamo would trace plans, the compiler and the simulator, one function at a time.
    torch.compiler.disable would import dynamo, which takes a second, and stay in between. On a
    torch without this hook, graph breaks only take longer.
    """
    assert isinstance(function, FunctionType)
    if (set_strategy := getattr(_eval_frame, "set_code_exec_strategy", None)) is not None:
        skip = _eval_frame._FrameAction.SKIP
        set_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def check_strided(name: str, x: Any) -> None:
    """Raise, in one sentence, unless x is a torch.Tensor with strides."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if torch.compiler.is_dynamo_compiling():
        return  # NOTE: dynamo takes strided tensors only, and refuses to trace this in a backward
    if x.layout is not torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else x.layout
        raise ValueError(f"{name} must be a strided tensor, got {layout}")


def check_held(name: str, x: Any) -> None:
    """Raise ValueError, in one sentence, for a tensor whose elements reach beyond its storage, as
    after `x.untyped_storage().resize_()`: a kernel would read and write what is not its memory."""
    if not isinstance(x, Tensor) or not is_plain(x) or not x.numel():
        return
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    end, held = (x.storage_offset() + last + 1) * x.itemsize, x.untyped_storage().nbytes()
    if not held or not x.data_ptr():
        raise ValueError(f"{name} has no memory: its storage was given back or never there")
    if end > held:
        raise ValueError(f"{name} reaches to byte {end} of its storage, which was cut to {held}")


def bare(x: Any) -> Any:
    """x without the tensor subclass that torch passes along to an operator's kernel."""
    if isinstance(x, Tensor) and type(x) not in _PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(Tensor)
    return x


def _only_default_devices() -> bool:
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())

"""torch.autocast: operands are cast as torch.matmul's are, and then everything runs as without it.

As in torch, a call with `out` is not cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

_CAST = (torch.float32, torch.float16, torch.bfloat16)  # fp8 has scales, it is not cast
_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


def is_on(device: torch.device) -> bool:
    return device.type in _KEYS and torch.is_autocast_enabled(device.type)


def cast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype for their device, for which `is_on` must be true."""
    return [
        x.to(torch.get_autocast_dtype(x.device.type)) if x.dtype in _CAST else x for x in tensors
    ]


def off(device: torch.device) -> Any:
    """A context in which autocast is off for `device`."""
    return torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_KEYS[device.type]))


def register(library: torch.library.Library, name: str, count: int) -> None:
    """Register autocast for an operator whose first `count` arguments, all tensors, are cast."""
    operator = getattr(getattr(torch.ops, library.ns), name).default

    def cast_and_call(*args: Any) -> Any:
        with off(args[0].device):
            return operator(*cast(*args[:count]), *args[count:])

    kernel: Callable[..., Any] = cast_and_call
    for key in _KEYS.values():
        library.impl(name, kernel, key.name)

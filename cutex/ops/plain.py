"""Whether a tensor is no more than memory, so that a kernel may be launched on it directly.

All else must go through torch's dispatcher: subclasses and fake tensors, tensors wrapped by
torch.func's transforms, lazily negated views, and whatever a mode, a tracer or an interpreter that
is on would want to see.
"""

from __future__ import annotations

import torch
from torch import Tensor

_interpreter = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_is_functional = torch._is_functional_tensor
_PLAIN = (Tensor, torch.nn.Parameter)


def nobody_watches() -> bool:
    """Whether no transform, mode or tracer is on."""
    return _interpreter() is None and not _dispatch_modes() and not _is_tracing()


def is_plain(x: Tensor) -> bool:
    return x.__class__ in _PLAIN and not x.is_neg() and not _is_functional(x)


def are_plain(a: Tensor, b: Tensor, c: Tensor) -> bool:
    """nobody_watches, and is_plain of three tensors of plain classes; for where time matters."""
    return (
        _interpreter() is None
        and not _dispatch_modes()
        and not _is_tracing()
        and not (a.is_neg() or b.is_neg() or c.is_neg())
        and not (_is_functional(a) or _is_functional(b) or _is_functional(c))
    )

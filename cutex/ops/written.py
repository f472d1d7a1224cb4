"""What a function owes to torch for a tensor of the caller's that it writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cutex.ops.overlap import share_memory, span

_increment_version = torch._C._increment_version


def written(*tensors: Tensor | None) -> None:
    """Count a write to the tensors, so that autograd detects changes of saved tensors."""
    _increment_version([x for x in tensors if x is not None])


def check_writable(name: str, x: Tensor) -> None:
    """Raise ValueError, in one sentence, for a tensor that may not be written to now. Where a
    compiler traces a call, it is the operator that asks."""
    if torch.compiler.is_compiling():
        return
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} is an inference tensor, which is not written to outside inference mode: clone "
            "it first"
        )


def are_apart(written: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
    """Whether no element of the tensors in `written` is also one of another tensor."""
    every = [*written, *read]
    if len({x.untyped_storage().data_ptr() for x in every}) == len(every):
        return True  # each has memory of its own, as nearly always
    return not any(share_memory(x, y) for i, x in enumerate(written) for y in every[i + 1 :])


def spans_apart(written: tuple[Tensor, Tensor], read: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of tensors of these sizes and strides, in this order: whether no byte from the
    first element to the last of one of the two that are `written` is another's. It takes less time
    than `are_apart`, which also says so of tensors whose elements alternate."""
    first_size, second_size = map(span, written)
    sizes = [span(x) for x in read]

    def apart(first: Tensor, second: Tensor, *others: Tensor) -> bool:
        first_begin, second_begin = first.data_ptr(), second.data_ptr()
        first_end, second_end = first_begin + first_size, second_begin + second_size
        if first_begin < second_end and second_begin < first_end:
            return False
        for x, size in zip(others, sizes, strict=True):
            begin = x.data_ptr()
            end = begin + size
            if begin < first_end and first_begin < end:
                return False
            if begin < second_end and second_begin < end:
                return False
        return True

    return apart

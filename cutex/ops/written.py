"""What a function owes to torch for a tensor of the caller's that it writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutex.ops.overlap import share_memory, span

written_all: Any = torch._C._increment_version  # `written` of a list of tensors, in less time


def written(*tensors: Tensor | None) -> None:
    """Count a write to the tensors, so that autograd detects changes of saved tensors."""
    written_all([x for x in tensors if x is not None])


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


def spans_apart(
    written: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor, Tensor]
) -> Callable[..., bool]:
    """A function of tensors with these sizes and strides, in this order: whether the spans of bytes
    of the `written` ones overlap no other tensor's. Faster than `are_apart`, which also accepts
    tensors whose elements alternate in memory."""
    (first_size, second_size), (x_size, y_size, z_size) = map(span, written), map(span, read)

    def apart(first: Tensor, second: Tensor, x: Tensor, y: Tensor, z: Tensor) -> bool:
        # NOTE: no loop, which would take as long again
        begin, other = first.data_ptr(), second.data_ptr()
        end, other_end = begin + first_size, other + second_size
        at, its, last = x.data_ptr(), y.data_ptr(), z.data_ptr()
        return (
            (end <= other or other_end <= begin)
            and (at >= end or at + x_size <= begin)
            and (at >= other_end or at + x_size <= other)
            and (its >= end or its + y_size <= begin)
            and (its >= other_end or its + y_size <= other)
            and (last >= end or last + z_size <= begin)
            and (last >= other_end or last + z_size <= other)
        )

    return apart

"""What tensors hold, to be put back after clusters have run only to be recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cutex.sim.host.capture import HostTensor


class Contents:
    """Copies of the memory of some tensors, that between their elements too."""

    def __init__(self, tensors: Sequence[HostTensor]) -> None:
        self.kept = [_copied(t) for t in tensors]

    def restore(self) -> None:
        for address, data in self.kept:
            ctypes.memmove(address, data, len(data))


def _copied(tensor: HostTensor) -> tuple[int, bytes]:
    """Where a tensor begins in memory, and its bytes."""
    spans = [(n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    low = tensor.address + tensor.itemsize * sum(min(0, span) for span in spans)
    count = 0 if 0 in tensor.shape else sum(abs(span) for span in spans) + 1
    return low, ctypes.string_at(low, count * tensor.itemsize)

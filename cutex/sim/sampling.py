"""Simulating some of a grid's clusters: they behave as in the whole grid, since nothing orders
clusters (PTX ISA 8.7); the writes of the others are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutex.sim.hazards.cluster_order import orders_clusters
from cutex.sim.host.capture import HostTensor, Launch
from cutex.sim.machine.memory import GlobalMemory
from cutex.sim.ptx.program import Program


@dataclass(frozen=True)
class Sampled:
    """A launch of which only some clusters were simulated."""

    kernel: str
    clusters: int
    of: int

    def __str__(self) -> str:
        return (
            f"{self.clusters} of the {self.of} clusters of {self.kernel} were simulated, "
            f"{self.of - self.clusters} were not run"
        )


def pick(program: Program, launch: Launch, count: int | None) -> list[int]:
    """The clusters to simulate, in order: ``count``, spread evenly from the first of the grid to
    the last; all of them if None, or if some may wait for others through global memory.
    """
    clusters = list(range(launch.num_ctas // launch.cluster_size))
    if count is None or count >= len(clusters) or orders_clusters(program):
        return clusters
    last = len(clusters) - 1
    return [last * i // max(count - 1, 1) for i in range(count)]


def refuse_more(sampled: Sequence[Sampled], launch: Launch) -> None:
    """Raise ValueError for a launch after a sampled one in the same call."""
    if sampled:
        raise ValueError(
            f"clusters={sampled[0].clusters}: {launch.kernel} may read what the clusters of "
            f"{sampled[0].kernel} that were not run would have written; simulate such a call whole"
        )


def elements(
    tensors: Sequence[HostTensor], memory: GlobalMemory, written: Sequence[dict[int, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Return, by the name of a tensor, its elements that were fully written, bool in its shape;
    ``written``: for each part of the grid, one bit per byte, by the memory's address.
    """
    found = {}
    for tensor in tensors:
        region = memory.find(tensor.address)
        if region is None:
            continue
        marks = np.zeros(len(region.data), bool)
        for part in written:
            if region.base in part:
                marks |= np.unpackbits(part[region.base], count=len(marks)).view(bool)
        strides = [s * tensor.itemsize for s in tensor.strides]
        each = np.lib.stride_tricks.as_strided(
            marks[tensor.address - region.base :], (*tensor.shape, tensor.itemsize), (*strides, 1)
        )
        found[tensor.name] = np.asarray(each.all(-1))
    return found

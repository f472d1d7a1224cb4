"""Operands that bulk copies and bulk-tensor copies share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.ptx.decode import Decoder

MODS = (
    "async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "shared", "cta", "cluster", "global",
    "tile", "mbarrier", "complete_tx", "bytes", "L2", "cache_hint", "bulk_group", "multicast",
    "cta_group", "1", "2",
    "reduce", "add", "min", "max", "and", "or", "xor",
)  # fmt: skip


def active_lanes(b: Batch) -> list[tuple[int, int]]:
    rows, lanes = np.nonzero(b.active())
    return list(zip(rows.tolist(), lanes.tolist(), strict=True))


class Value:
    """One operand, read per lane."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __call__(self, b: Batch) -> np.ndarray:
        return b.lanes(self.read(b))


def shared_place(
    d: Decoder, b: Batch, row: int, lane: int, address: int, size: int, align: int
) -> tuple[int, int]:
    """(cta, offset) of ``size`` bytes; raises BadAddress outside shared memory and BadOperand where
    misaligned.
    """
    warp = np.array([b.idx[row]])
    cta, offset = d.m.grid.shared_location(warp, shared_addresses(np.array([address], np.uint64)))
    d.m.check_shared(warp, np.array([lane]), cta, offset, 1, d.ins)
    if size:
        d.m.check_shared(warp, np.array([lane]), cta, offset + size - 1, 1, d.ins)
    if int(offset[0]) % align:
        raise BadOperand.at(
            d.ins,
            f"{d.m.grid.name_warp(int(warp[0]))} copies to shared 0x{int(offset[0]):x}, which is "
            f"not {align}-byte aligned",
        )
    return int(cta[0]), int(offset[0])


def targets(d: Decoder, cta: int, mask: int | None) -> list[int]:
    """CTAs that a (multicast) copy writes."""
    if mask is None:
        return [cta]
    first = cta - int(d.m.grid.cta_rank[cta])
    return [first + r for r in range(d.m.grid.cluster_size) if mask >> r & 1]


def multicast_mask(d: Decoder) -> Callable[[Batch], np.ndarray] | None:
    if "multicast" not in d.mods:
        return None
    last = len(d) - (2 if "cache_hint" in d.mods else 1)  # the mask stands before the cache policy
    return Value(d.src(last, "u16"))


def signalled(m: Machine, target: int, barrier_cta: int, pair: bool) -> int:
    """The CTA whose mbarrier a multicast copy into ``target`` completes on.

    Its own; with cta_group::2, that of its pair with the same parity of rank as the barrier's.
    """
    if not pair:
        return target
    rank = int(m.grid.cta_rank[target])
    return target - rank + (rank & ~1 | int(m.grid.cta_rank[barrier_cta]) & 1)

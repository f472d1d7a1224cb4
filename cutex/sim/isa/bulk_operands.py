"""Operands that bulk copies and bulk-tensor copies share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.tensormap import SWIZZLES
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.machine import Machine
from cutex.sim.machine.memory import shared_address
from cutex.sim.ptx.decode import Decoder
from cutex.sim.ptx.program import Instruction

MODS = (
    "async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "shared", "cta", "cluster", "global",
    "tile", "gather4", "scatter4", "mbarrier", "complete_tx", "bytes", "L2", "cache_hint",
    "bulk_group", "multicast", "cta_group", "1", "2",
    "reduce", "add", "min", "max", "and", "or", "xor",
)  # fmt: skip


def active_lanes(b: Batch) -> list[tuple[int, int]]:
    rows, lanes = np.nonzero(b.active())
    return list(zip(rows.tolist(), lanes.tolist(), strict=True))


class Value:
    """The value of one operand, read per lane."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __call__(self, b: Batch) -> np.ndarray:
        return b.lanes(self.read(b))


def shared_place(
    d: Decoder, b: Batch, row: int, lane: int, address: int, size: int, align: int
) -> tuple[int, int]:
    """The (cta, offset) of ``size`` bytes; raises BadAddress outside shared memory and BadOperand
    where misaligned.
    """
    warp, place = int(b.idx[row]), shared_address(address)
    cta, offset = d.m.shared_at(warp, lane, place, 1, d.ins)
    if size and offset + size > d.m.smem_end:
        last = np.array([offset + size - 1])
        d.m.check_shared(np.array([warp]), np.array([lane]), np.array([cta]), last, 1, d.ins)
    if offset % align:
        raise BadOperand.at(
            d.ins,
            f"{d.m.grid.name_warp(warp)} copies to or from shared 0x{offset:x}, which is "
            f"not {align}-byte aligned: the hardware traps",
        )
    return cta, offset


def targets(d: Decoder, cta: int, mask: int | None) -> list[int]:
    """The CTAs of the cluster of ``cta`` that a multicast mask names; ``cta`` itself without."""
    if mask is None:
        return [cta]
    grid, size = d.m.grid, d.m.grid.cluster_size
    if mask >> size:
        raise BadOperand.at(
            d.ins,
            f"the CTA mask 0x{mask:x} names rank {mask.bit_length() - 1}, in a cluster of {size} "
            f"CTA{'s' * (size > 1)}",
        )
    first = cta - int(grid.cta_rank[cta])
    return [first + r for r in range(size) if mask >> r & 1]


def check_one_cta(d: Decoder, cta: int, barrier_cta: int) -> None:
    """Refuse a copy to a CTA that completes on an mbarrier of another (9.7.9.25.4.1, 9.7.9.27)."""
    if barrier_cta != cta:
        name = d.m.grid.name_cta
        raise BadOperand.at(
            d.ins,
            f"a copy to {name(cta)} completes on an mbarrier of {name(barrier_cta)}: they must "
            "lie in the same CTA",
        )


def multicast_mask(d: Decoder) -> Callable[[Batch], np.ndarray] | None:
    if "multicast" not in d.mods:
        return None
    last = len(d) - (2 if "cache_hint" in d.mods else 1)  # the mask stands before the cache policy
    return Value(d.src(last, "u16"))


def signalled(m: Machine, target: int, barrier_cta: int, pair: bool) -> int:
    """The CTA whose mbarrier a multicast copy into ``target`` completes on: its own; with
    cta_group::2, the one of its pair whose rank has the parity of the barrier's.
    """
    if not pair:
        return target
    rank = int(m.grid.cta_rank[target])
    return target - rank + (rank & ~1 | int(m.grid.cta_rank[barrier_cta]) & 1)


def check_reduced(m: Machine, what: str, cta: int, low: int, high: int, ins: Instruction) -> None:
    """Report a reduction into bytes ``[low, high)`` of shared memory of which nothing has written
    some.
    """
    unwritten = np.flatnonzero(m.box_swizzle[cta, low >> 4 : (high + 15) >> 4] < 0)
    if len(unwritten):
        m.findings.add(
            "uninitialised",
            f"{what} changes shared memory 0x{(low >> 4) + int(unwritten[0]) << 4:x} of "
            f"{m.grid.name_cta(cta)}, and nothing has written it",
            ins,
            remedy="a store of the first value, and a barrier of the cluster behind it",
        )


def check_source(
    m: Machine, what: str, cta: int, modes: np.ndarray, swizzle: int | None, ins: Instruction
) -> None:
    """Report that a copy from shared memory takes chunks of 16 bytes that nothing has written, or
    that a TMA load wrote with another swizzle than its own (None: it copies bytes as they lie);
    ``modes``: those of `Machine.box_swizzle`.
    """
    if (modes < 0).any():
        m.findings.add(
            "uninitialised",
            f"{what} reads shared memory of {m.grid.name_cta(cta)} that nothing has written: "
            f"{16 * int((modes < 0).sum())} of {16 * modes.size} bytes",
            ins,
        )
    if swizzle is None:
        return
    wrong = modes[(modes > 0) & (modes != swizzle + 1)]
    if wrong.size:
        m.findings.add(
            "swizzle",
            f"{what} takes its box with {SWIZZLES[swizzle]} swizzle from shared memory that a TMA "
            f"load wrote with {SWIZZLES[int(wrong[0]) - 1]} swizzle",
            ins,
        )


def tell_of_lanes(d: Decoder, warp: int, lanes: int) -> None:
    """Tell that several lanes ask for one reduction: by the letter there are as many, where the
    hardware's uniform instruction may do it once.
    """
    if lanes > 1:
        d.m.findings.add(
            "every lane",
            f"{lanes} lanes of {d.m.grid.name_warp(warp)} issue this {d.ins.name}.{d.parts[1]} "
            "from one place to one place, each for itself: by the letter it is added as often",
            d.ins,
            advisory=True,
            remedy="elect_one() around it, and around its commit and wait",
        )

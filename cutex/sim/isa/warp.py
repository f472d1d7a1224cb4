"""Warp-wide instructions (PTX ISA 9.7.9.6, 9.7.13.8 and on): shfl, vote, elect, match, redux,
activemask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import POISON32
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Imm, Operand

_LANE = np.arange(32)


class _Members:
    """The membermask operand: every live lane in it must execute the instruction."""

    def __init__(self, d: Decoder, operand: Operand) -> None:
        self.d, self.read = d, d.read(operand, "u32")
        self.one = isinstance(operand, Imm)

    def each(self, execute: Callable[[Batch], None]) -> Execute:
        """``execute``, for the lanes of each membermask alone where those of a warp have several,
        as behind a branch whose sides both named themselves.
        """
        if self.one:
            return execute

        def execute_each(b: Batch) -> None:
            for part in by_mask(self.d, b, self.read(b)):
                execute(part)

        return execute_each

    def __call__(self, b: Batch) -> np.ndarray:
        """The lanes that take part, (n, 32) bool. Raises BadOperand if one in the mask is
        elsewhere.
        """
        mask = b.lanes(self.read(b))
        active = b.active()
        named = (b.one(mask)[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(bool)
        named &= self.d.m.live[b.idx]
        strangers = active & ~named
        if strangers.any():
            row, lane = (int(v[0]) for v in np.nonzero(strangers))
            who = self.d.m.grid.name_warp(int(b.idx[row]))
            raise BadOperand.at(
                self.d.ins,
                f"the membermask of {self.d.ins.op} does not name lane {lane} of {who}, which "
                "executes it",
            )
        missing = (named & ~active) & b.any_active()[:, None]
        if missing.any():
            row, lane = (int(v[0]) for v in np.nonzero(missing))
            raise BadOperand.at(
                self.d.ins,
                f"the membermask of {self.d.ins.op} names lane {lane} of "
                f"{self.d.m.grid.name_warp(int(b.idx[row]))}, which is not here (only lanes "
                f"{_lanes(active[row])} are)",
            )
        return active


def by_mask(d: Decoder, b: Batch, masks: np.ndarray) -> list[Batch]:
    """The batch in parts of which the lanes of a warp have one membermask of ``masks``. Raises
    BadOperand if a mask names a lane that executes the instruction with another.
    """
    masks, active = b.lanes(masks), b.active()
    several = ((masks != b.one(masks)[:, None]) & active).any(1)
    if not several.any():
        return [b]
    parts = [b.pick(~several)] if not several.all() else []
    for row in np.nonzero(several)[0].tolist():
        for mask in np.unique(masks[row][active[row]]).tolist():
            mine = active[row] & (masks[row] == mask)
            others = active[row] & ~mine & (mask >> np.arange(32) & 1).astype(bool)
            if others.any():
                lane, other = int(mine.argmax()), int(others.argmax())
                raise BadOperand.at(
                    d.ins,
                    f"lane {lane} of {d.m.grid.name_warp(int(b.idx[row]))} executes {d.ins.op} "
                    f"with membermask 0x{mask:x}, which names lane {other}; that one has "
                    f"0x{int(masks[row, other]):x}",
                )
            parts.append(Batch(b.idx[row : row + 1], mine[None]))
    return parts


def _lanes(row: np.ndarray) -> str:
    return ",".join(map(str, np.nonzero(row)[0]))


def shfl_sources(
    mode: str, distance: np.ndarray, control: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The lane whose register each lane reads, (n, 32), and whether it is in its segment.

    ``control`` holds the clamp (bits 0-4) and the segment mask (bits 8-12).
    """
    n = distance.astype(np.int64) & 31
    clamp, segment = control.astype(np.int64) & 31, control.astype(np.int64) >> 8 & 31
    top, low = (_LANE & segment) | (clamp & ~segment), _LANE & segment
    if mode == "up":
        return _LANE - n, _LANE - n >= top
    source = {"idx": low | (n & ~segment), "down": _LANE + n, "bfly": _LANE ^ n}[mode]
    return source, source <= top


@instruction("shfl")
def shfl(d: Decoder) -> Execute:
    """shfl (9.7.9.6): c holds the clamp (bits 0-4) and the segment mask (bits 8-12)."""
    d.only("sync", "idx", "up", "down", "bfly")
    mode = next(m for m in ("idx", "up", "down", "bfly") if m in d.mods)
    first, second = d.pair(0)
    write, valid = d.write(first, "b32"), d.write(second, "pred") if second is not None else None
    a, distance, c = d.src(1, "b32"), d.src(2, "u32"), d.src(3, "u32")
    members = _Members(d, d.ins.operands[4])

    def execute(b: Batch) -> None:
        active = members(b)
        values = b.lanes(a(b))
        j, ok = shfl_sources(mode, b.lanes(distance(b)), b.lanes(c(b)))
        j = np.where(ok, j, _LANE)
        row = np.arange(b.n)[:, None]
        got = values[row, j]
        absent = ~active[row, j]
        if absent.any():
            _tell_absent(d, b, absent & active, j)
            got = np.where(absent, POISON32, got)
        write(b, got)
        if valid:
            valid(b, ok)

    return members.each(execute)


def _tell_absent(d: Decoder, b: Batch, absent: np.ndarray, source: np.ndarray) -> None:
    """Tell of the first lane, of those ``absent`` (n, 32), that reads a lane which takes no part:
    what it gets is not defined, and poison here (9.7.9.6). That is no fault unless it is used.
    """
    if not absent.any():
        return
    row, lane = (int(v[0]) for v in np.nonzero(absent))
    d.m.findings.add(
        "shfl",
        f"{d.m.grid.name_warp(int(b.idx[row]))} lane {lane} reads the register of lane "
        f"{int(source[row, lane])}, which does not execute this {d.ins.op}: what it gets is not "
        "defined",
        d.ins,
        advisory=True,
    )


@instruction("vote")
def vote(d: Decoder) -> Execute:
    """vote (9.7.13.9): all, any, uniform or the ballot of a predicate."""
    d.only("sync", "all", "any", "uni", "ballot")
    mode = next(m for m in ("all", "any", "uni", "ballot") if m in d.mods)
    read, members = d.src(1, "pred"), _Members(d, d.ins.operands[2])
    write = d.dst(0, "b32" if mode == "ballot" else "pred")

    def execute(b: Batch) -> None:
        active = members(b)
        p = b.lanes(read(b))
        every, some = (p | ~active).all(1), (p & active).any(1)
        if mode == "ballot":
            write(b, _bits(p & active)[:, None])
        else:
            write(b, {"all": every, "any": some, "uni": every | ~some}[mode][:, None])

    return members.each(execute)


def _bits(rows: np.ndarray) -> np.ndarray:
    """(n, 32) bool as (n,) uint32, lane 0 in bit 0."""
    return np.packbits(rows, axis=1, bitorder="little").view(np.uint32).reshape(-1)


@instruction("elect")
def elect(d: Decoder) -> Execute:
    """elect (9.7.13.14): one leader among the lanes of the membermask, the same for the same
    mask."""
    d.only("sync")
    first, second = d.pair(0)
    lane_out = d.write(first, "b32")
    assert second is not None
    leads, members = d.write(second, "pred"), _Members(d, d.ins.operands[1])
    lane = np.arange(32)

    def execute(b: Batch) -> None:
        active = members(b)
        order = (lane - d.m.policy.elected) % 32  # lanes from the preferred one upward
        leader = np.where(active, order, 99).argmin(1)
        lane_out(b, leader.astype(np.uint32)[:, None])
        leads(b, lane[None, :] == leader[:, None])

    return members.each(execute)


@instruction("activemask")
def activemask(d: Decoder) -> Execute:
    """activemask (9.7.13.11): the active lanes, one bit each."""
    write = d.dst(0, "b32")
    return lambda b: write(b, _bits(b.active())[:, None])


@instruction("redux")
def redux(d: Decoder) -> Execute:
    """redux (9.7.13.12): a reduction over the lanes of the membermask."""
    d.only("sync", "add", "min", "max", "and", "or", "xor", "abs", "NaN")
    name = next(m for m in ("add", "min", "max", "and", "or", "xor") if m in d.mods)
    read, members, write = d.src(1), _Members(d, d.ins.operands[2]), d.dst()
    reduce: Any = {
        "add": np.add, "min": np.minimum if "NaN" in d.mods else np.fmin,
        "max": np.maximum if "NaN" in d.mods else np.fmax, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[name]  # fmt: skip

    def execute(b: Batch) -> None:
        active = members(b)
        values = b.lanes(read(b))
        values = np.abs(values) if "abs" in d.mods else values
        out = np.zeros((b.n, 1), values.dtype)
        for i in range(b.n):
            if active[i].any():
                out[i] = reduce.reduce(values[i][active[i]], dtype=values.dtype)
        write(b, out)

    return members.each(execute)


@instruction("match")
def match(d: Decoder) -> Execute:
    """match (9.7.13.10): the lanes with the same value; .all: whether all have it."""
    d.only("any", "all", "sync")
    first, second = d.pair(0)
    read, members = d.src(1), _Members(d, d.ins.operands[2])
    write, same = d.write(first, "b32"), d.write(second, "pred") if second is not None else None
    every = "all" in d.mods

    def execute(b: Batch) -> None:
        active = members(b)
        v = b.lanes(read(b))
        equal = (v[:, :, None] == v[:, None, :]) & active[:, None, :]
        bits = np.packbits(equal, axis=2, bitorder="little").view(np.uint32).reshape(b.n, 32)
        if every:
            whole = (equal.sum(2) == active.sum(1)[:, None]).any(1)
            bits = np.where(whole[:, None], _bits(active)[:, None], np.uint32(0))
            if same:
                same(b, whole[:, None])
        write(b, bits)

    return members.each(execute)

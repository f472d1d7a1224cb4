"""Instructions that change a tensor map: tensormap.replace and tensormap.cp_fenceproxy (PTX ISA
9.7.9.29, 9.7.13.16).

The place of each field, and that a stride is given in bytes and a rank minus one, were read from
the SASS that ptxas 13.0 generates for each form: a load, an insertion of bits and a store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.access import Access
from cutex.sim.isa.sync import require_whole_warp
from cutex.sim.isa.tensormap import MAP_BYTES
from cutex.sim.machine.batch import Batch, Lanes
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.strength import scope_of


class BitField(NamedTuple):
    """Bits of one word of a map, and the part of the operand's value that they hold."""

    word: int
    shift: int
    bits: int
    part: Callable[[int], int]


def _less_one(value: int) -> int:
    return value - 1


def _whole(value: int) -> int:
    return value


def _ordinal(d: Decoder, most: int) -> int:
    n = d.immediate(1)
    if not 0 <= n <= most:
        raise BadOperand.at(d.ins, f"{d.ins.op}: ordinal {n}, it takes 0..{most}")
    return n


def _bit_fields(d: Decoder, field: str) -> list[BitField]:
    if field == "global_address":
        return [BitField(0, 0, 32, _whole), BitField(1, 0, 32, lambda v: v >> 32)]
    if field == "global_stride":
        n = _ordinal(d, 3)
        return [
            BitField(3 + n, 0, 32, lambda v: v >> 4),
            BitField(7, 4 * n, 4, lambda v: v >> 36),
        ]
    if field == "global_dim":
        return [BitField(8 + _ordinal(d, 4), 0, 32, _less_one)]
    if field == "box_dim":
        n = _ordinal(d, 4)
        return [BitField(14, 8 * (n - 1), 8, _less_one) if n else BitField(13, 24, 8, _less_one)]
    if field == "element_stride":
        return [BitField(13, 3 * _ordinal(d, 4), 3, _less_one)]
    return {
        "rank": [BitField(2, 4, 3, _whole)],
        "interleave_layout": [BitField(2, 11, 2, _whole)],
        "swizzle_mode": [BitField(2, 13, 2, _whole), BitField(2, 22, 1, lambda v: v >> 2)],
        "swizzle_atomicity": [BitField(2, 19, 3, _whole)],
        "fill_mode": [BitField(2, 15, 1, _whole)],
        "elemtype": _type_fields(d.immediate(1)) if field == "elemtype" else [],
    }[field]


def _type_fields(kind: int) -> list[BitField]:
    """The bit fields of an element type; the PTX ISA numbers two types that the map lacks: tf32 and
    tf32.ftz.
    """
    if kind in (11, 12):
        return [BitField(2, 16, 1, lambda v: 1), BitField(2, 7, 4, lambda v: v - 4)]
    return [BitField(2, 7, 4, lambda v: v if v < 11 else v - 2)]


FIELDS = (
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride",
    "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode",
)  # fmt: skip


@instruction("tensormap.replace")
def replace(d: Decoder) -> Execute:
    """tensormap.replace: word by word, by ordinary loads and stores, as ptxas implements it."""
    d.only("replace", "tile", *FIELDS, "global", "shared", "cta", "b1024")
    field = next(f for f in FIELDS if f in d.mods)
    value = d.src(len(d) - 1)
    bit_fields, access = _bit_fields(d, field), Access(d, 0, 4)

    def execute(b: Batch) -> None:
        where = access.lanes(b)
        given = b.lanes(value(b))[b.active()].tolist()
        _check_units(d, field, given)
        for one in bit_fields:
            at = where._replace(addresses=where.addresses + np.uint64(4 * one.word))
            mask = (1 << one.bits) - 1 << one.shift
            new = [one.part(v) << one.shift & mask for v in given]
            kept = _held(access, at) & np.uint32(~mask & 0xFFFFFFFF)
            words = kept | np.array(new, np.uint32)
            access.put(at, words.view(np.uint8).reshape(-1, 4))

    return execute


def _held(access: Access, at: Lanes) -> np.ndarray:
    """The words of a map, (n,). Observers of global memory are not notified of this load:
    threads that all give a map the same field write the same bytes.
    """
    if access.space == "global":
        raw = access.m.memory.load(at.addresses, 4, access.refuse(at, "loads"))
        return raw.reshape(-1, 4).view(np.uint32)[:, 0]
    return access.fetch(at).view(np.uint32)[:, 0]


def _check_units(d: Decoder, field: str, given: list[int]) -> None:
    """Report an address or a stride of which the map would lose bits (9.7.9.29)."""
    what = {"global_address": "an address", "global_stride": "a stride"}.get(field)
    bad = [v for v in given if v % 16 or (field == "global_stride" and v >= 1 << 40)]
    if what and bad:
        d.m.findings.add(
            "tensor map",
            f"{d.ins.op} gives a tensor map {what} of {bad[0]} (0x{bad[0]:x}) bytes: it takes "
            f"multiples of 16{' below 2^40' if field == 'global_stride' else ''}, and drops other "
            "bits",
            d.ins,
        )


@instruction("tensormap.cp_fenceproxy")
def cp_fenceproxy(d: Decoder) -> Execute:
    """tensormap.cp_fenceproxy: the warp copies a map from shared to global memory, and releases it
    to TMA.
    """
    if d.immediate(2) != MAP_BYTES:
        raise d.unknown(f"{d.immediate(2)} bytes")
    source, target, m = Access(d, 1, 16), Access(d, 0, 16), d.m
    source.space, target.space = "shared", "global"
    scope = scope_of(d.ins.op)

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        rows = np.nonzero(b.any_active())[0]
        addresses = [b.one(a.address(b))[rows] for a in (source, target)]
        step = np.arange(0, MAP_BYTES, 16, dtype=np.uint64)
        warps = np.repeat(b.idx[rows], len(step))
        lanes = np.zeros(len(warps), int)
        frm, to = (
            Lanes(warps, lanes, (a.astype(np.uint64)[:, None] + step).reshape(-1))
            for a in addresses
        )
        target.put(to, source.fetch(frm))
        m.events.maps_released(b.idx[rows], scope)

    return execute

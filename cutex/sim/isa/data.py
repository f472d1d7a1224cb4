"""Data movement (PTX ISA 9.7.9): mov, cvta, ld, st."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.access import SPACES, Access, require_own_local
from cutex.sim.machine.batch import Batch, Lanes
from cutex.sim.machine.memory import (
    LOCAL_WINDOW,
    POISON32,
    SHARED_WINDOW,
    WINDOWS,
    local_window,
    window_of,
)
from cutex.sim.machine.runs import lanes_of
from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import TYPES, Decoder, Execute, instruction
from cutex.sim.ptx.operands import Address, Imm, Operand, Reg, Vector
from cutex.sim.ptx.renames import accumulators, rename
from cutex.sim.ptx.temporaries import homes

HINTS = {
    "nc", "weak", "relaxed", "acquire", "release", "volatile", "cta", "cluster", "gpu", "sys", "L1",
    "L2", "no_allocate", "evict_first", "evict_last", "evict_normal", "evict_unchanged",
    "cache_hint", "64B", "128B", "256B", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "entry", "func",
    "unified",
}  # fmt: skip


@instruction("mov")
def mov(d: Decoder) -> Execute:
    """mov (9.7.9.5): also packs and unpacks vectors, and takes the address of a variable."""
    d.only()
    if d.type == "b128":
        return _mov_128(d)
    kind = d.type if d.type == "pred" else f"b{WIDTH[d.type]}"
    read, write = d.src(1, kind), d.dst(0, kind)
    pair = rename(d.ins)
    if pair is None or pair[1] not in accumulators(d.m.program):
        return lambda b: write(b, read(b))
    to, of = (homes(d.m.program)[32][index] for index in pair)

    def renamed(b: Batch) -> None:
        write(b, read(b))
        d.m.warpgroups.renamed(b.idx, int(to), int(of))

    return renamed


def _mov_128(d: Decoder) -> Execute:
    """mov between a 128-bit register and another, or two of 64 bits."""
    halves = [words_128(d, o) for o in d.ins.operands[:2]]

    def execute(b: Batch) -> None:
        for (_, write), (read, _) in zip(halves[0], halves[1], strict=True):
            write(b, np.array(read(b)))

    return execute


def words_128(d: Decoder, operand: Operand) -> list[tuple[Any, Any]]:
    """Functions (read, write) of the low and of the high 64 bits of an operand."""
    if isinstance(operand, Vector):
        return [(d.read(o, "b64"), d.write(o, "b64")) for o in operand.items]
    assert isinstance(operand, Reg)
    whole = d.m.register(operand)  # (warps, 32, 2)

    def half(i: int) -> tuple[Any, Any]:
        def write(b: Batch, v: Any) -> None:
            now = whole[b.sel]
            now[..., i] = np.where(b.active(), v, now[..., i])
            whole[b.sel] = now

        return lambda b: whole[b.sel][..., i], write

    return [half(0), half(1)]


@instruction("cvta")
def cvta(d: Decoder) -> Execute:
    """cvta (9.7.9.20): to and from generic addresses; only those of the shared and local windows
    differ.
    """
    d.only("to", "param", "entry", *SPACES, "cta", "cluster")
    space = next(s for s in SPACES if s in d.mods)
    read, write = d.src(1), d.dst()
    kind = TYPES[d.type]
    if space == "local" and kind is np.uint64:
        return _cvta_local(d)
    window = np.uint64({"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0))
    if "to" in d.mods:
        return lambda b: write(b, (np.asarray(read(b)).astype(np.uint64) & ~window).astype(kind))
    return lambda b: write(b, (np.asarray(read(b)).astype(np.uint64) | window).astype(kind))


def _cvta_local(d: Decoder) -> Execute:
    """cvta of local memory: a generic address says whose it is."""
    read, write, low = d.src(1), d.dst(), np.uint64(0xFFFFFFFF)

    def generic(b: Batch) -> None:
        mine = local_window(b.idx[:, None], np.arange(32))
        write(b, b.lanes(read(b)).astype(np.uint64) | mine)

    def offset(b: Batch) -> None:
        given = b.lanes(read(b)).astype(np.uint64)
        where = Lanes(np.repeat(b.idx, 32), lanes_of(b.n), given.reshape(-1))
        require_own_local(d, where if b.mask is None else where.pick(b.mask.reshape(-1)))
        write(b, given & low)

    return offset if "to" in d.mods else generic


@instruction("isspacep")
def isspacep(d: Decoder) -> Execute:
    """isspacep (9.7.9.19): whether a generic address is in the space."""
    d.only(*SPACES, "cta", "cluster", "entry")
    space = next(s for s in SPACES if s in d.mods)
    read, write = d.src(1, "u64"), d.dst(0, "pred")
    own = "shared" in d.mods and "cluster" not in d.mods
    if space == "const":
        raise d.unknown()

    def execute(b: Batch) -> None:
        addresses = b.lanes(read(b))
        inside = window_of(addresses) == WINDOWS.index(space)
        if own:
            rank = d.m.grid.cta_rank[d.m.grid.warp_cta[b.idx]][:, None]
            inside &= (addresses >> np.uint64(24) & np.uint64(0xFF)).astype(np.int64) == rank
        write(b, inside)

    return execute


# -- loads and stores ------------------------------------------------------------------------------


def vector_length(d: Decoder) -> int:
    return next((n for n in (2, 4, 8) if f"v{n}" in d.mods), 1)


def elements(d: Decoder, k: int, count: int) -> tuple[Operand, ...]:
    """The items of a vector operand; of another operand, itself."""
    operand = d.ins.operands[k]
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count or isinstance(operand, Vector) != (count > 1):
        raise d.malformed(f"{len(items)} registers, and {count} are wanted")
    return items


@instruction("ld", "ldu")
def ld(d: Decoder) -> Execute:
    """ld (9.7.9.8): parameter, global, constant, shared, local and generic loads of 1 to 8
    elements.
    """
    d.only(*SPACES, *HINTS, "v2", "v4", "v8")
    if d.type == "b128":
        return _ld_128(d)
    count, kind = vector_length(d), TYPES[d.type]
    access = Access(d, 1, WIDTH[d.type] // 8 * count)
    writes = [d.write(t, d.type) for t in elements(d, 0, count)]

    def execute(b: Batch) -> None:
        values = np.ascontiguousarray(access.load(b)).view(kind).reshape(b.n, 32, count)
        for j, write in enumerate(writes):
            write(b, values[:, :, j])

    return execute


def _ld_128(d: Decoder) -> Execute:
    access, writes = Access(d, 1, 16), [w for _, w in words_128(d, d.ins.operands[0])]

    def execute(b: Batch) -> None:
        values = np.ascontiguousarray(access.load(b)).view(np.uint64).reshape(b.n, 32, 2)
        for j, write in enumerate(writes):
            write(b, values[:, :, j])

    return execute


@instruction("st")
def st(d: Decoder) -> Execute:
    """st (9.7.9.11): stores of 1 to 8 elements."""
    if "bulk" in d.mods:
        return _st_bulk(d)
    d.only(*SPACES, *HINTS, "v2", "v4", "v8")
    count, size = vector_length(d), WIDTH[d.type] // 8
    access, kind = Access(d, 0, size * count), f"b{8 * size}"
    if d.type == "b128":
        count, kind = 2, "b64"
        reads = [r for r, _ in words_128(d, d.ins.operands[1])]
    else:
        reads = [d.read(s, kind) for s in elements(d, 1, count)]

    def execute(b: Batch) -> None:
        data = np.empty((b.n, 32, count), TYPES[kind])
        for j, read in enumerate(reads):
            data[:, :, j] = read(b)
        access.store(b, data.view(np.uint8).reshape(b.n, 32, -1))

    return execute


def _st_bulk(d: Decoder) -> Execute:
    """st.bulk (9.7.9.13): zeros in a number of bytes, by a lane's ordinary stores to shared memory
    of its CTA or, without ``.shared::cta``, to a generic address there.
    """
    d.only("bulk", "weak", "shared", "cta")
    count, value = d.ins.operands[1], d.ins.operands[2]
    narrow = isinstance(count, Reg) and count.bank == 32  # since PTX ISA 9.0
    access, size = Access(d, 0, 8), d.src(1, "b32" if narrow else "b64")
    if not isinstance(value, Imm) or value.value != 0:
        raise d.malformed("st.bulk stores zeros only")

    def execute(b: Batch) -> None:
        where, sizes = access.lanes(b), b.lanes(size(b))
        each = (sizes.reshape(-1) if b.mask is None else sizes[b.mask]).astype(np.int64)
        outside = window_of(where.addresses) != WINDOWS.index("shared")
        wrong = np.flatnonzero((each % 8 != 0) | (each < 0) | (each > 1 << 24))
        if len(wrong):
            k = int(wrong[0])
            who = f"{d.m.grid.name_warp(int(where.warps[k]))} lane {int(where.lanes[k])}"
            why = "st.bulk takes a multiple of 8 up to 16,777,216"
            raise BadOperand.at(d.ins, f"{who} stores {int(each[k])} bytes: {why}")
        if access.space is None and outside.any():
            access.refuse(where, "stores zeros to")(int(outside.argmax()), "not of shared memory")
        lane = np.repeat(np.arange(len(each)), each // 8)
        offset = np.arange(len(lane)) - np.repeat(np.cumsum(each // 8) - each // 8, each // 8)
        place = where.pick(lane)
        place = place._replace(addresses=place.addresses + offset.astype(np.uint64) * np.uint64(8))
        if len(lane):
            access.put(place, np.zeros((len(lane), 8), np.uint8))

    return execute


@instruction("discard")
def discard(d: Decoder) -> Execute:
    """discard (9.7.9.17): 128 bytes of global memory lose their values, and hold poison here."""
    access, poison = Access(d, 0, 16), np.full(4, POISON32).view(np.uint8)
    d.ins.operands[1:]

    def execute(b: Batch) -> None:
        where = access.lanes(b)
        for at in range(0, 128, 16):
            place = where._replace(addresses=where.addresses + np.uint64(at))
            access.put(place, np.tile(poison, (len(where.addresses), 1)))

    return execute


@instruction("prefetch", "prefetchu", "applypriority", "createpolicy")
def cache_control(d: Decoder) -> Execute:
    """prefetch and other cache control (9.7.9.15 and on): no effect on values."""
    if d.ins.name == "createpolicy":
        write = d.dst(0, "b64")
        d.ins.operands[1:]
        return lambda b: write(b, np.uint64(0))
    d.address(0, isinstance(d.ins.operands[0], Address) and d.ins.operands[0].coords is not None)
    d.ins.operands[1:]
    return lambda b: None

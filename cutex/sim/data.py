"""Data movement (PTX ISA 9.7.9): mov, cvta, ld, st, atom, red, ldmatrix, stmatrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.decode import TYPES, Decoder, Execute, instruction
from cutex.sim.flight import Span
from cutex.sim.memory import (
    LOCAL_WINDOW,
    MODULE_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    as_bytes,
    as_words,
)
from cutex.sim.ptx import WIDTH, Address, Operand, Reg, Symbol, Vector

if TYPE_CHECKING:
    from cutex.sim.machine import Batch, Machine

_HINTS = {
    "nc", "weak", "relaxed", "acquire", "release", "volatile", "cta", "cluster", "gpu", "sys", "L1",
    "L2", "no_allocate", "evict_first", "evict_last", "evict_normal", "evict_unchanged",
    "cache_hint", "64B", "128B", "256B", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "entry", "func",
    "unified",
}  # fmt: skip
_SYNCHRONISES = {"volatile", "relaxed", "acquire", "release"}
_SPACES = ("param", "global", "shared", "local", "const")


@instruction("mov")
def mov(d: Decoder) -> Execute:
    """9.7.9.5: also packs and unpacks vectors, and takes the address of a variable."""
    d.only()
    if d.type == "b128":
        return _mov_128(d)
    kind = d.type if d.type == "pred" else f"b{WIDTH[d.type]}"
    read, write = d.src(1, kind), d.dst(0, kind)
    return lambda b: write(b, read(b))


def _mov_128(d: Decoder) -> Execute:
    """Between a 128-bit register and another, or two of 64 bits."""
    halves = [_halves(d, o) for o in d.ins.operands]

    def execute(b: Batch) -> None:
        for (_, write), (read, _) in zip(halves[0], halves[1], strict=True):
            write(b, np.array(read(b)))

    return execute


def _halves(d: Decoder, operand: Operand) -> list[tuple[Any, Any]]:
    """(read, write) of the low and the high 64 bits of an operand."""
    if isinstance(operand, Vector):
        return [(d.read(o, "b64"), d.write(o, "b64")) for o in operand.items]
    assert isinstance(operand, Reg)
    whole = d.m.registers[128][operand.index]  # (warps, 32, 2)

    def half(i: int) -> tuple[Any, Any]:
        def write(b: Batch, v: Any) -> None:
            now = whole[b.sel]
            now[..., i] = np.where(b.active(), v, now[..., i])
            whole[b.sel] = now

        return lambda b: whole[b.sel][..., i], write

    return [half(0), half(1)]


_WINDOW = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": 0, "global": 0, "const": 0}


@instruction("cvta")
def cvta(d: Decoder) -> Execute:
    """9.7.9.20: to and from generic addresses; only the shared and local windows are elsewhere."""
    d.only("to", "param", "entry", *_SPACES, "cta", "cluster")
    window = np.uint64(_WINDOW[next(s for s in _SPACES if s in d.mods)])
    read, write = d.src(1), d.dst()
    kind = TYPES[d.type]
    if "to" in d.mods:
        return lambda b: write(b, (np.asarray(read(b)).astype(np.uint64) & ~window).astype(kind))
    return lambda b: write(b, (np.asarray(read(b)).astype(np.uint64) | window).astype(kind))


@instruction("isspacep")
def isspacep(d: Decoder) -> Execute:
    """9.7.9.19"""
    window = np.uint64(_WINDOW[next(s for s in _SPACES if s in d.mods)] or MODULE_WINDOW)
    read, write = d.src(1, "u64"), d.dst(0, "pred")
    if "global" in d.mods:
        return lambda b: write(b, np.asarray(read(b)) < np.uint64(PARAM_WINDOW))
    return lambda b: write(b, (np.asarray(read(b)) & window) != 0)


# -- loads and stores ------------------------------------------------------------------------------


class Access:
    """One memory instruction: for the active lanes, ``count`` elements of ``size`` bytes each."""

    def __init__(self, d: Decoder, operand: int, size: int, count: int) -> None:
        self.d, self.m, self.size, self.count = d, d.m, size, count
        self.space = next((s for s in _SPACES if s in d.mods), None)
        self.synchronises = d.ins.name in ("atom", "red") or bool(_SYNCHRONISES & d.mods)
        address = d.ins.operands[operand]
        if (
            self.space == "param"
            and isinstance(address, Address)
            and isinstance(address.base, Symbol)
        ):
            self.space = "kernel parameter"
        self.address = d.address(operand)

    def lanes(self, b: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(warps, lanes, addresses) of the active lanes, flattened."""
        addresses = np.broadcast_to(self.address(b), (b.n, 32))
        if b.mask is None:
            return (
                np.repeat(b.idx, 32),
                np.tile(np.arange(32), b.n),
                np.ascontiguousarray(addresses).reshape(-1),
            )
        row, lane = np.nonzero(b.mask)
        return b.idx[row], lane, addresses[row, lane]

    def load(self, b: Batch) -> np.ndarray:
        """(n, 32, count * size) bytes; inactive lanes hold zeros."""
        warps, lanes, addresses = self.lanes(b)
        got = self.fetch(b, warps, lanes, addresses)
        if b.mask is None:
            return got.reshape(b.n, 32, -1)
        out = np.zeros((b.n, 32, got.shape[1]), np.uint8)
        out[b.mask] = got
        return out

    def fetch(
        self, b: Batch, warps: np.ndarray, lanes: np.ndarray, addresses: np.ndarray
    ) -> np.ndarray:
        width = self.size * self.count
        if not len(addresses):
            return np.zeros((0, width), np.uint8)
        space = self._space(addresses)
        if space == "shared":
            cta, offset = self.m.shared_location(warps, addresses & np.uint64(SHARED_WINDOW - 1))
            self.m.check_shared(warps, lanes, cta, offset, width, self.d.ins)
            self.observe(warps, cta, offset, width, False)
            word = min(width, 8)
            flat = self.m.smem_words(word)
            first = (cta * self.m.smem_bytes + offset) // word
            return as_bytes_2d(flat[first[:, None] + np.arange(width // word)])
        if space in ("param", "kernel parameter"):
            at = (addresses & np.uint64(PARAM_WINDOW - 1)).astype(np.int64)
            return self.m.params[at[:, None] + np.arange(width)]
        if space == "local":
            memory = local_memory(self.m)
            at = (addresses & np.uint64(LOCAL_WINDOW - 1)).astype(np.int64)
            return memory[warps[:, None], lanes[:, None], at[:, None] + np.arange(width)]
        return self.m.memory.load(
            addresses, width, self.d.complain(b, warps, lanes, addresses, "loads")
        )

    def store(self, b: Batch, data: np.ndarray) -> None:
        """``data`` (n, 32, count * size) bytes."""
        warps, lanes, addresses = self.lanes(b)
        if not len(addresses):
            return
        values = data.reshape(-1, data.shape[-1]) if b.mask is None else data[b.mask]
        self.m.progress += 1
        self.put(b, warps, lanes, addresses, values)

    def put(
        self,
        b: Batch,
        warps: np.ndarray,
        lanes: np.ndarray,
        addresses: np.ndarray,
        values: np.ndarray,
    ) -> None:
        width = values.shape[1]
        space = self._space(addresses)
        if space == "shared":
            cta, offset = self.m.shared_location(warps, addresses & np.uint64(SHARED_WINDOW - 1))
            self.m.check_shared(warps, lanes, cta, offset, width, self.d.ins)
            self.observe(warps, cta, offset, width, True)
            word = min(width, 8)
            first = (cta * self.m.smem_bytes + offset) // word
            words = np.ascontiguousarray(values).view(self.m.smem_words(word).dtype)
            self.m.smem_words(word)[first[:, None] + np.arange(width // word)] = words
            self.m.box_swizzle[cta, offset >> 4] = 0
        elif space == "local":
            memory = local_memory(self.m)
            at = (addresses & np.uint64(LOCAL_WINDOW - 1)).astype(np.int64)
            memory[warps[:, None], lanes[:, None], at[:, None] + np.arange(width)] = values
        elif space in ("param", "kernel parameter", "const"):
            raise self.d.unknown("a store to read-only memory")
        else:
            self.m.memory.store(
                addresses, values, self.d.complain(b, warps, lanes, addresses, "stores")
            )

    def _space(self, addresses: np.ndarray) -> str:
        if self.space is not None:
            return self.space
        top = int(addresses[0])
        for window, name in (
            (LOCAL_WINDOW, "local"),
            (SHARED_WINDOW, "shared"),
            (PARAM_WINDOW, "param"),
        ):
            if top & window:
                return name
        return "global"

    def observe(
        self, warps: np.ndarray, cta: np.ndarray, offset: np.ndarray, width: int, write: bool
    ) -> None:
        """Reports a race with other warps' accesses, and with what is in flight on these bytes."""
        m = self.m
        if not self.synchronises:
            m.clocks.generic(warps, cta, offset, width, write, self.d.ins)
        if not m.flight.count:
            return
        for c in np.unique(cta):
            if m.flight.busy(Span, int(c)):
                mine = cta == c
                at = offset[mine]
                pieces = np.unique(at >> 4)
                span = Span(int(c), int(at.min()), int(at.max()) + width, pieces)
                what = "a store" if write else "a load"
                m.flight.touch(span, write, what, int(warps[mine][0]), self.d.ins)


def as_bytes_2d(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)


def local_memory(m: Machine) -> np.ndarray:
    """(warps, 32, bytes) of thread-private memory, zeroed when first used."""
    if m.local is None:
        m.local = np.zeros((m.num_warps, 32, max(m.local_bytes, 1)), np.uint8)
    return m.local


def _vector_length(d: Decoder) -> int:
    return next((n for n in (2, 4, 8) if f"v{n}" in d.mods), 1)


@instruction("ld", "ldu")
def ld(d: Decoder) -> Execute:
    """9.7.9.8: parameter, global, constant, shared, local and generic loads of 1 to 8 elements."""
    count, size = _vector_length(d), max(WIDTH[d.type] // 8, 1)
    d.only(*_SPACES, *_HINTS, "v2", "v4", "v8")
    access = Access(d, 1, size, count)
    operand = d.ins.operands[0]
    targets = operand.items if count > 1 and isinstance(operand, Vector) else (operand,)
    if d.type == "b128":
        return _ld_128(d)
    writes = [d.write(t, d.type) for t in targets]
    kind = TYPES[d.type]

    def execute(b: Batch) -> None:
        values = np.ascontiguousarray(access.load(b)).view(kind).reshape(b.n, 32, count)
        for j, write in enumerate(writes):
            write(b, values[:, :, j])

    return execute


def _ld_128(d: Decoder) -> Execute:
    access, writes = Access(d, 1, 8, 2), [w for _, w in _halves(d, d.ins.operands[0])]

    def execute(b: Batch) -> None:
        values = np.ascontiguousarray(access.load(b)).view(np.uint64).reshape(b.n, 32, 2)
        for j, write in enumerate(writes):
            write(b, values[:, :, j])

    return execute


@instruction("st")
def st(d: Decoder) -> Execute:
    """9.7.9.11"""
    count, size = _vector_length(d), max(WIDTH[d.type] // 8, 1)
    d.only(*_SPACES, *_HINTS, "v2", "v4", "v8")
    access = Access(d, 0, size, count)
    operand = d.ins.operands[1]
    sources = operand.items if count > 1 and isinstance(operand, Vector) else (operand,)
    kind = f"b{8 * size}"
    reads = [d.read(s, kind) for s in sources]

    def execute(b: Batch) -> None:
        data = np.empty((b.n, 32, count), TYPES[kind])
        for j, read in enumerate(reads):
            data[:, :, j] = read(b)
        access.store(b, data.view(np.uint8).reshape(b.n, 32, count * size))

    return execute


_ATOMIC: dict[str, Any] = {
    "add": lambda old, x: old + x, "min": min, "max": max, "and": lambda old, x: old & x,
    "or": lambda old, x: old | x, "xor": lambda old, x: old ^ x, "exch": lambda old, x: x,
    "inc": lambda old, x: old * 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}  # fmt: skip


@instruction("atom", "red")
def atomic(d: Decoder) -> Execute:
    """9.7.13.5, 9.7.13.6: lane by lane, in lane order, each whole."""
    d.only("global", "shared", *_ATOMIC, "cas", *_HINTS, "acq_rel", "noftz", "async")
    returns = d.ins.name == "atom"
    at = 1 if returns else 0
    if d.type in ("f16", "bf16", "f16x2", "bf16x2") or "v2" in d.mods or "v4" in d.mods:
        raise d.unknown("packed atomic")
    size, kind = WIDTH[d.type] // 8, TYPES[d.type]
    access = Access(d, at, size, 1)
    swap = "cas" in d.mods
    operation = _ATOMIC.get(next((p for p in d.parts if p in _ATOMIC), ""))
    x = d.src(at + 1)
    y = d.src(at + 2) if swap else None
    write = d.dst(0) if returns else None

    def execute(b: Batch) -> None:
        warps, lanes, addresses = access.lanes(b)
        row = np.searchsorted(b.idx, warps)
        xs = np.broadcast_to(x(b), (b.n, 32))[row, lanes]
        ys = np.broadcast_to(y(b), (b.n, 32))[row, lanes] if y else None
        olds = np.zeros((b.n, 32), kind)
        d.m.progress += 1
        for k in range(len(addresses)):
            one = slice(k, k + 1)
            old = as_words(access.fetch(b, warps[one], lanes[one], addresses[one]), size).view(
                kind
            )[0]
            if ys is not None:
                new = ys[k] if old == xs[k] else old
            else:
                assert operation is not None
                new = operation(old, xs[k])
            word = np.array([new], kind).view(f"u{size}")
            access.put(b, warps[one], lanes[one], addresses[one], as_bytes(word))
            olds[row[k], lanes[k]] = old
        if write:
            write(b, olds)

    return execute


# -- matrix loads and stores -----------------------------------------------------------------------


def _matrix_addresses(
    d: Decoder, operand: int, b: Batch, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(cta, offset), each (n, 8 * count): row r of matrix i is at the address that lane 8 i + r
    holds.
    """
    addresses = np.broadcast_to(d.address(operand)(b), (b.n, 32))[:, : 8 * count] & np.uint64(
        SHARED_WINDOW - 1
    )
    warps = np.repeat(b.idx, 8 * count)
    cta, offset = d.m.shared_location(warps, addresses.reshape(-1))
    lanes = np.tile(np.arange(8 * count), b.n)
    d.m.check_shared(warps, lanes, cta, offset, 16, d.ins)
    return cta.reshape(b.n, -1), offset.reshape(b.n, -1)


def _matrix_shape(d: Decoder) -> tuple[int, bool]:
    d.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "cta")
    if d.type != "b16":
        raise d.unknown()
    return next(n for n in (1, 2, 4) if f"x{n}" in d.mods), "trans" in d.mods


@instruction("ldmatrix")
def ldmatrix(d: Decoder) -> Execute:
    """9.7.14.5.15: 8x8 matrices of 16-bit elements; lane t holds row t/4, columns 2(t%4)+{0,1}."""
    count, transposed = _matrix_shape(d)
    operand = d.ins.operands[0]
    targets = operand.items if isinstance(operand, Vector) else (operand,)
    writes = [d.write(t, "b32") for t in targets]
    access = Access(d, 1, 16, 1)

    def execute(b: Batch) -> None:
        cta, offset = _matrix_addresses(d, 1, b, count)
        access.observe(np.repeat(b.idx, 8 * count), cta.reshape(-1), offset.reshape(-1), 16, False)
        first = (cta * d.m.smem_bytes + offset) // 2
        rows = d.m.smem_words(2)[first[..., None] + np.arange(8)].reshape(b.n, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(b.n, count, 32)
        for i, write in enumerate(writes):
            write(b, words[:, i])

    return execute


@instruction("stmatrix")
def stmatrix(d: Decoder) -> Execute:
    """9.7.14.5.16: the inverse of ldmatrix."""
    count, transposed = _matrix_shape(d)
    operand = d.ins.operands[1]
    sources = operand.items if isinstance(operand, Vector) else (operand,)
    reads = [d.read(s, "b32") for s in sources]
    access = Access(d, 0, 16, 1)

    def execute(b: Batch) -> None:
        cta, offset = _matrix_addresses(d, 0, b, count)
        access.observe(np.repeat(b.idx, 8 * count), cta.reshape(-1), offset.reshape(-1), 16, True)
        words = np.stack([np.broadcast_to(r(b), (b.n, 32)) for r in reads], 1)  # (n, count, 32)
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(b.n, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        first = (cta * d.m.smem_bytes + offset) // 2
        d.m.smem_words(2)[first[..., None] + np.arange(8)] = rows.reshape(b.n, count * 8, 8)
        d.m.progress += 1

    return execute


@instruction("prefetch", "prefetchu", "applypriority", "discard", "createpolicy")
def cache_control(d: Decoder) -> Execute:
    """9.7.9.15 and on: no effect on values."""
    if d.ins.name == "createpolicy":
        write = d.dst(0, "b64")
        return lambda b: write(b, np.uint64(0))
    return lambda b: None

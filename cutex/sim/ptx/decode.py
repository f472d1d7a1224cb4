"""Turns an instruction into a function of a batch: operand access by type, and the table of
definitions.

A definition is registered with ``@instruction("add", ...)`` under the first part of the opcode. It
receives a `Decoder` and returns ``execute(batch)``. ``execute`` returns None where every warp goes
on, else (n,) of GO, RETRY or ARRIVED per warp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cutex.sim.errors import SimError, UnknownInstruction
from cutex.sim.machine.memory import MODULE_WINDOW, PARAM_WINDOW
from cutex.sim.ptx.declarations import SPACES, WIDTH
from cutex.sim.ptx.forms import has_form, misfit
from cutex.sim.ptx.operands import (
    Address,
    Imm,
    Minus,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cutex.sim.ptx.program import Instruction

if TYPE_CHECKING:
    from cutex.sim.machine.batch import Batch
    from cutex.sim.machine.machine import Machine

Execute = Callable[["Batch"], "np.ndarray | None"]
Read = Callable[["Batch"], Any]
Write = Callable[["Batch", Any], None]

TYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.uint64, "pred": bool,
    "tf32": np.uint32, "b128": np.uint64,
}  # fmt: skip
UNSIGNED: dict[int, Any] = {
    1: bool,
    8: np.uint8,
    16: np.uint16,
    32: np.uint32,
    64: np.uint64,
    128: np.uint64,
}

_SPACES = tuple(space.removeprefix(".") for space in SPACES)
_OF_SPACE = ("ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix", "prefetch")
# For instructions, the places of operands that have a type which the opcode names, by its number.
_OF_TYPE = {
    0: {
        **dict.fromkeys(("mov", "neg", "abs", "ld", "ldu", "rcp", "sqrt", "rsqrt", "ex2"), (0, 1)),
        **dict.fromkeys(("lg2", "sin", "cos", "tanh"), (0, 1)),
        **dict.fromkeys(("st", "red"), (1,)),
        **dict.fromkeys(("add", "sub", "mul", "min", "max", "div", "rem", "selp"), (0, 1, 2)),
        **dict.fromkeys(("fma", "mad", "bfe"), (0, 1, 2, 3)),
        "shr": (0, 1, 2), "slct": (0, 1, 2), "atom": (0, 2, 3),
        "setp": (1, 2), "cvt": (0,), "set": (0,), "popc": (1,),
    },
    1: {"cvt": (1, 2), "set": (1, 2), "slct": (3,)},
}  # fmt: skip
WIDER = ("ld", "st", "cvt")  # whose registers may be wider than their types (PTX ISA 9.4.1)

_DEFINITIONS: dict[str, Callable[[Decoder], Execute]] = {}


def instruction(
    *names: str,
) -> Callable[[Callable[[Decoder], Execute]], Callable[[Decoder], Execute]]:
    """Register a definition for opcodes whose first part (or first two, dotted) is one of
    ``names``.
    """

    def register(define: Callable[[Decoder], Execute]) -> Callable[[Decoder], Execute]:
        for name in names:
            assert name not in _DEFINITIONS, name
            _DEFINITIONS[name] = define
        return define

    return register


_MISSING = {
    IndexError: "an operand is missing",
    StopIteration: "a modifier is missing",
    KeyError: "a modifier or a type is missing",
    AssertionError: "a part of it is missing",
}


def decode(ins: Instruction, machine: Machine) -> Execute:
    """The function that executes ``ins``. Raises UnknownInstruction, naming the instruction and its
    line.
    """
    two = ".".join(ins.parts[:2])
    define = _DEFINITIONS.get(two) or _DEFINITIONS.get(ins.name)
    if define is None:
        raise UnknownInstruction(
            f"unknown instruction {ins.op}: the simulator does not define it\n    at {ins.where()}"
        )
    d = Decoder(ins, machine)
    if wrong := misfit(ins.op):
        raise d.unknown(wrong)
    d.checked = has_form(ins.op)
    d.check_types()
    try:
        execute = define(d)
        d.account()
    except SimError:
        raise
    except Exception as error:  # NOTE: malformed PTX must not crash the simulator
        why = _MISSING.get(type(error)) or f"{type(error).__name__}: {error}"
        raise d.malformed(why) from error
    return execute


class Decoder:
    """Typed access to the operands of one instruction."""

    def __init__(self, ins: Instruction, machine: Machine) -> None:
        self.ins, self.m = ins, machine
        self.parts = ins.parts
        self.mods = frozenset(ins.parts[1:])
        self.types = [p for p in ins.parts[1:] if p in WIDTH]
        self.checked = False  # whether the definition has listed the modifiers that it implements
        ins.operands.asked.clear()

    @property
    def type(self) -> str:
        """The last type that the instruction names."""
        if not self.types:
            raise self.unknown("it names no type")
        return self.types[-1]

    @type.setter
    def type(self, kind: str) -> None:
        self.types = [kind]

    def unknown(self, why: str = "") -> UnknownInstruction:
        detail = f" ({why})" if why else ""
        return UnknownInstruction(
            f"unknown instruction {self.ins.op}: the simulator does not define this form{detail}\n"
            f"    at {self.ins.where()}"
        )

    def malformed(self, why: str) -> UnknownInstruction:
        """The error for operands that no PTX instruction of this form has."""
        error = self.unknown(why)
        error.exists = False
        return error

    def only(self, *allowed: str) -> None:
        """Raise UnknownInstruction for a modifier not in ``allowed``: a wrong result is worse than
        an error.
        """
        self.checked = True
        for part in self.ins.parts[1:]:
            if part not in allowed and part not in WIDTH:
                raise self.unknown(f"modifier .{part}")

    def account(self) -> None:
        """Raise UnknownInstruction for a modifier or an operand that the definition has not looked
        at.
        """
        if not self.checked:
            self.only()
        if "cache_hint" in self.mods:
            # NOTE: the policy changes no value; a byte mask stands behind it
            self.src(len(self) - 1 - ("cp_mask" in self.mods), "b64")
        for k, operand in enumerate(self.ins.operands):
            if k not in self.ins.operands.asked:
                raise self.malformed(f"operand {k + 1}, {operand}")

    def __len__(self) -> int:
        return len(self.ins.operands)

    # -- sources -----------------------------------------------------------------------------------

    def src(self, k: int, kind: str | None = None) -> Read:
        return self.read(self.ins.operands[k], kind or self.type)

    def read(self, operand: Operand, kind: str) -> Read:
        """A function that reads ``operand`` as ``kind``: (n, 32) of the numpy type, or an array
        that broadcasts to it.
        """
        bits, dtype = WIDTH[kind], TYPES[kind]
        if isinstance(operand, Reg):
            return self._read_register(operand, bits, dtype)
        if isinstance(operand, Not):
            plain = self._read_register(operand.reg, 1, bool)
            return lambda b: ~plain(b)
        if isinstance(operand, Minus):
            return self._negated(operand, bits, dtype)
        if isinstance(operand, Imm):
            if not _may_be(operand, kind, bits, self.types):
                raise self.malformed(f"the constant {operand.value}")
            value = _immediate(operand.value, bits, dtype)
            return lambda b: value
        if isinstance(operand, Special):
            return self._special(operand, dtype)
        if isinstance(operand, Symbol):
            return self._symbol(operand, dtype)
        if isinstance(operand, Vector) and WIDTH[kind] > 1:
            return self._pack(operand, kind)
        raise self.malformed(f"operand {operand}")

    def check_types(self) -> None:
        """Raise for a register whose declared type does not agree with that of the instruction."""
        for kind, of in zip(self.types, _OF_TYPE.values(), strict=False):
            for k in of.get(self.ins.name, ()):
                reg = list.__getitem__(self.ins.operands, k) if k < len(self) else None
                if isinstance(reg, Reg) and not reg.agrees(kind):
                    why = f"{reg.name} is declared .{reg.declared}, not .{kind} or .b"
                    raise self.malformed(why)

    def _read_register(self, reg: Reg, bits: int, dtype: Any) -> Read:
        array = self.m.register(reg)
        if reg.bank == bits or (bits == 128 and reg.bank == 64):
            if array.dtype == dtype:
                return lambda b: array[b.sel]
            return lambda b: array[b.sel].view(dtype)
        if reg.bank > bits and (bits == 8 or self.ins.name in WIDER):
            narrow = UNSIGNED[bits]
            return lambda b: array[b.sel].astype(narrow).view(dtype)
        raise self.malformed(f"{reg.name} has {reg.bank} bits, and {bits} are wanted")

    def _negated(self, operand: Minus, bits: int, dtype: Any) -> Read:
        plain, word = self.read(operand.of, f"b{bits}"), UNSIGNED[bits]
        signs = word(operand.signs)
        return lambda b: (np.asarray(plain(b), word) ^ signs).view(dtype)

    def _special(self, operand: Special, dtype: Any) -> Read:
        read = _SPECIAL.get(operand.name.removeprefix("%"))
        if read is None:
            raise self.unknown(f"special register {operand.name}")
        m = self.m
        return lambda b: np.asarray(read(m, b)).astype(dtype)

    def _symbol(self, operand: Symbol, dtype: Any) -> Read:
        m = self.m
        for p in m.program.params:
            if p.name == operand.name:
                value = dtype(PARAM_WINDOW + p.offset + operand.offset)
                return lambda b: value
        v = m.program.variables.get(operand.name)
        if v is None:
            raise self.malformed(f"symbol {operand.name}")
        offset = m.offsets[v.name] + operand.offset
        if v.space == "shared":
            return lambda b: ((m.grid.cta_rank[m.grid.warp_cta[b.idx]] << 24) + offset).astype(
                dtype
            )[:, None]
        value = dtype(offset + (MODULE_WINDOW if v.space in ("global", "const") else 0))
        return lambda b: value

    def _pack(self, operand: Vector, kind: str) -> Read:
        """A function that reads ``{lo, hi}`` as one wider value (mov.b64 %rd, {%r0, %r1})."""
        part = self._part(operand, kind)
        reads = [self.read(o, f"b{part}") for o in operand.items]
        wide = UNSIGNED[WIDTH[kind]]

        def read(b: Batch) -> Any:
            parts = np.empty((b.n, 32, len(reads)), UNSIGNED[part])
            for j, r in enumerate(reads):
                parts[:, :, j] = r(b)
            return parts.view(wide)[:, :, 0].view(TYPES[kind])

        return read

    # -- destinations ------------------------------------------------------------------------------

    def dst(self, k: int = 0, kind: str | None = None) -> Write:
        return self.write(self.ins.operands[k], kind or self.type)

    def write(self, operand: Operand, kind: str) -> Write:
        """A function that writes (n, 32) values of ``kind`` to the active lanes."""
        if isinstance(operand, Sink):
            return lambda b, v: None
        if isinstance(operand, Vector):
            return self._unpack(operand, kind)
        if not isinstance(operand, Reg):
            raise self.malformed(f"destination {operand}")
        array = self.m.register(operand)
        unsigned = UNSIGNED[WIDTH[kind]]
        signed = TYPES[kind] in (np.int8, np.int16, np.int32, np.int64)
        wide = operand.bank > WIDTH[kind]
        fits = not wide or WIDTH[kind] == 8 or self.ins.name in WIDER
        if not fits or (operand.bank < WIDTH[kind] and kind != "b128"):
            raise self.malformed(f"{operand.name} has {operand.bank} bits, and .{kind} is written")

        def write(b: Batch, v: Any) -> None:
            v = np.asarray(v)
            if v.dtype.kind == "f":
                v = v.astype(TYPES[kind], copy=False).view(unsigned)
            elif wide:  # sign-extended for signed types, else zero-extended
                v = v.astype(TYPES[kind] if signed else unsigned).astype(
                    np.int64 if signed else np.uint64
                )
            if b.mask is None:
                array[b.sel] = v
            elif isinstance(b.sel, slice):
                np.copyto(array[b.sel], v, where=b.mask, casting="unsafe")
            else:
                now = array[b.sel]
                np.copyto(now, v, where=b.mask, casting="unsafe")
                array[b.sel] = now

        return write

    def _part(self, operand: Vector, kind: str) -> int:
        """The bits of each item of a vector that is one value of ``kind``."""
        count = len(operand.items)
        if count not in (2, 4, 8) or WIDTH[kind] // count not in (8, 16, 32, 64):
            raise self.malformed(f"{count} items in a .{kind}")
        return WIDTH[kind] // count

    def _unpack(self, operand: Vector, kind: str) -> Write:
        part = self._part(operand, kind)
        writes = [self.write(o, f"b{part}") for o in operand.items]
        narrow = UNSIGNED[part]
        wide = UNSIGNED[WIDTH[kind]]

        def write(b: Batch, v: Any) -> None:
            v = b.lanes(np.asarray(v).view(wide) if np.ndim(v) else wide(v))
            parts = np.ascontiguousarray(v).view(narrow).reshape(b.n, 32, len(writes))
            for j, w in enumerate(writes):
                w(b, parts[:, :, j])

        return write

    def map(self, f: Callable[..., Any], sources: int) -> Execute:
        """The execution of ``f`` on the first ``sources`` operands, lane by lane, in the
        instruction's type.
        """
        reads, write = [self.src(k + 1) for k in range(sources)], self.dst()
        return lambda b: write(b, f(*(r(b) for r in reads)))

    def immediate(self, k: int) -> int:
        operand = self.ins.operands[k]
        if not isinstance(operand, Imm):
            raise self.malformed(f"operand {operand}, where a constant belongs")
        return int(operand.value)

    def pair(self, k: int = 0) -> tuple[Operand, Operand | None]:
        operand = self.ins.operands[k]
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    # -- addresses ---------------------------------------------------------------------------------

    def address(self, k: int, coordinates: bool = False) -> Read:
        """A function that computes ``[base+offset]``, (n, 32) uint64. The sum with a 32-bit base
        has 32 bits: compilers leave bases below zero. With ``coordinates``, the bracket holds these
        as well.
        """
        operand = self.ins.operands[k]
        if not isinstance(operand, Address) or coordinates == (operand.coords is None):
            raise self.malformed("address expected")
        base, offset = operand.base, np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        if isinstance(base, Symbol):
            self._check_space(base)
        if isinstance(base, Reg):
            array = self.m.register(base)
            if array.itemsize == 4:
                narrow = np.uint32(operand.offset & 0xFFFFFFFF)
                return lambda b: (array[b.sel].view(np.uint32) + narrow).astype(np.uint64)

            def read(b: Batch) -> Any:
                return (array[b.sel].astype(np.int64) + offset).astype(np.uint64)

            return read
        inner = self.read(base, "u64")

        def read_other(b: Batch) -> Any:
            value = np.asarray(inner(b)).astype(np.int64) + offset
            return b.lanes(value.astype(np.uint64))

        return read_other

    def _check_space(self, symbol: Symbol) -> None:
        """Raise for an access of another space than that of the name in its address."""
        if self.ins.name not in _OF_SPACE or "async" in self.mods:
            return
        named = next((p for p in self.ins.parts if p in (*_SPACES, "param")), None)
        v = self.m.program.variables.get(symbol.name)
        space = v.space if v is not None else "param"
        if named is not None and named != space:
            raise self.malformed(f"{symbol.name} lies in .{space}, not in .{named}")
        atomic = self.ins.name in ("atom", "red")
        if named is None and space in ("const", "param", *(("local",) if atomic else ())):
            raise self.malformed(
                f"{symbol.name} lies in .{space}, which .{self.ins.name} must name"
            )

    def coordinates(self, k: int) -> list[Read]:
        operand = self.ins.operands[k]
        if not isinstance(operand, Address) or operand.coords is None:
            raise self.malformed("coordinates expected")
        return [self.read(c, "s32") for c in operand.coords]


def _may_be(constant: Imm, kind: str, bits: int, types: list[str]) -> bool:
    """Whether a constant may be read as ``kind``: a float constant only by a float type."""
    if not constant.bits and not isinstance(constant.value, float):
        return True
    if constant.bits not in (0, bits) or any(t[0] in "us" for t in (kind, *types)):
        return False
    return bool(constant.bits) or any(t in ("f16", "f32", "f64") for t in (kind, *types))


def _immediate(value: int | float, bits: int, dtype: Any) -> Any:
    if dtype is bool:
        return bool(value)
    if isinstance(value, float):
        return np.array(value, {16: np.float16, 32: np.float32, 64: np.float64}[bits]).view(dtype)[
            ()
        ]
    bits_only = int(value) & ((1 << bits) - 1)
    return np.array([bits_only], UNSIGNED[bits]).view(dtype)[0]


def _dimension(name: str, values: Callable[[Machine, Any, int], Any]) -> dict[str, Any]:
    return {f"{name}.{axis}": (lambda m, b, i=i: values(m, b, i)) for i, axis in enumerate("xyz")}


def _thread(m: Machine, b: Any, axis: int) -> Any:
    linear = m.grid.warp_in_cta[b.idx][:, None] * 32 + np.arange(32)
    x, y, _ = m.grid.block
    return (linear % x, linear // x % y, linear // (x * y))[axis]


def _cta(m: Machine, b: Any) -> np.ndarray:
    return m.grid.cta_coord[m.grid.warp_cta[b.idx]].astype(np.int64)  # (n, 3)


def _lane_mask(compare: Any) -> Any:
    lane = np.arange(32)
    return np.array([sum(1 << int(j) for j in lane if compare(j, i)) for i in lane], np.uint64)[
        None, :
    ]


_SPECIAL: dict[str, Any] = {
    **_dimension("tid", _thread),
    **_dimension("ntid", lambda m, b, i: m.grid.block[i]),
    **_dimension("nctaid", lambda m, b, i: m.grid.dims[i]),
    **_dimension("ctaid", lambda m, b, i: _cta(m, b)[:, i : i + 1]),
    **_dimension("clusterid", lambda m, b, i: _cta(m, b)[:, i : i + 1] // m.grid.cluster[i]),
    **_dimension("nclusterid", lambda m, b, i: m.grid.dims[i] // m.grid.cluster[i]),
    **_dimension("cluster_ctaid", lambda m, b, i: _cta(m, b)[:, i : i + 1] % m.grid.cluster[i]),
    **_dimension("cluster_nctaid", lambda m, b, i: m.grid.cluster[i]),
    "cluster_ctarank": lambda m, b: m.grid.cta_rank[m.grid.warp_cta[b.idx]][:, None],
    "cluster_nctarank": lambda m, b: m.grid.cluster_size,
    "is_explicit_cluster": lambda m, b: m.grid.cluster_size > 1,
    "laneid": lambda m, b: np.arange(32)[None, :],
    "warpid": lambda m, b: m.grid.warp_in_cta[b.idx][:, None],
    "nwarpid": lambda m, b: m.grid.warps_per_cta,
    "smid": lambda m, b: m.grid.warp_cta[b.idx][:, None],
    "nsmid": lambda m, b: m.grid.num_ctas,
    "dynamic_smem_size": lambda m, b: m.smem_bytes - m.static_smem - 1024,
    "total_smem_size": lambda m, b: m.smem_bytes - 1024,
    "lanemask_eq": lambda m, b: _lane_mask(lambda j, i: j == i),
    "lanemask_lt": lambda m, b: _lane_mask(lambda j, i: j < i),
    "lanemask_le": lambda m, b: _lane_mask(lambda j, i: j <= i),
    "lanemask_gt": lambda m, b: _lane_mask(lambda j, i: j > i),
    "lanemask_ge": lambda m, b: _lane_mask(lambda j, i: j >= i),
    "clock": lambda m, b: m.clock() & 0xFFFFFFFF,
    "clock64": lambda m, b: m.clock(),
    "globaltimer": lambda m, b: m.clock(),
    "globaltimer_lo": lambda m, b: m.clock() & 0xFFFFFFFF,
    "globaltimer_hi": lambda m, b: m.clock() >> 32,
}

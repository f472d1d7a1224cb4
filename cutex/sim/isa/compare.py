"""Comparison and selection (PTX ISA 9.7.7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutex.sim.isa.floating import PACKED, is_float, read_float
from cutex.sim.ptx.declarations import WIDTH
from cutex.sim.ptx.decode import Decoder, Execute, instruction

_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


_COMBINE: dict[str | None, Any] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: lambda x, y: x,
}  # fmt: skip


def _comparison(d: Decoder) -> Any:
    name = d.parts[1]
    if name in _COMPARE:
        compare = _COMPARE[name]
        if not is_float(d):
            return compare
        if name == "ne":  # ordered
            return lambda x, y: np.not_equal(x, y) & ~np.isnan(x) & ~np.isnan(y)
        return compare
    if name == "num":
        return lambda x, y: ~np.isnan(x) & ~np.isnan(y)
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name.endswith("u") and name[:-1] in _COMPARE:  # unordered: true where either is NaN
        compare = _COMPARE[name[:-1]]
        return lambda x, y: compare(x, y) | np.isnan(x) | np.isnan(y)
    raise d.unknown(f"comparison .{name}")


def _comparands(d: Decoder) -> tuple[Any, Any]:
    if is_float(d):
        return read_float(d, 1), read_float(d, 2)
    return d.src(1), d.src(2)


_NAMES = (
    *_COMPARE,
    "and",
    "or",
    "xor",
    "ftz",
    "num",
    "nan",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
)


@instruction("setp")
def setp(d: Decoder) -> Execute:
    """setp (9.7.7.2): p = compare [boolop c]; q, in p|q, has the complement of the comparison,
    combined likewise. Packed types write p of the lower and q of the upper element.
    """
    d.only(*_NAMES)
    compare = _comparison(d)
    f = _COMBINE[next((c for c in ("and", "or", "xor") if c in d.mods), None)]
    x, y = _comparands(d)
    combines = bool({"and", "or", "xor"} & d.mods)
    c = d.src(3, "pred") if combines else (lambda b: True)
    packed = d.type in PACKED
    first, second = d.pair(0)
    p = d.write(first, "pred")
    q = d.write(second, "pred") if second is not None else None

    def execute(b: Any) -> None:
        t, shape = compare(x(b), y(b)), (b.n, 32, 2) if packed else (b.n, 32)
        t = t if np.shape(t) == shape else np.broadcast_to(t, shape)
        one, other = (t[..., 0], t[..., 1]) if packed else (t, ~t)
        condition = c(b)
        results = f(one, condition), f(other, condition)  # NOTE: c may be p itself
        p(b, results[0])
        if q:
            q(b, results[1])

    return execute


@instruction("set")
def set_(d: Decoder) -> Execute:
    """set (9.7.7.1): all ones (or 1.0) where the comparison holds."""
    d.only(*_NAMES)
    if d.type in PACKED or len(d) > 3:
        raise d.unknown()
    compare = _comparison(d)
    x, y = _comparands(d)
    result = d.parts[-2]
    if result not in ("u32", "s32", "f32"):
        raise d.unknown(f"result .{result}")
    write = d.dst(0, result)
    true = {"u32": np.uint32(0xFFFFFFFF), "s32": np.int32(-1), "f32": np.float32(1)}[result]
    return lambda b: write(b, np.where(compare(x(b), y(b)), true, true.dtype.type(0)))


@instruction("selp")
def selp(d: Decoder) -> Execute:
    """selp (9.7.7.3): c ? a : b."""
    d.only()
    kind = f"b{WIDTH[d.type]}"
    a, b2, c, write = d.src(1, kind), d.src(2, kind), d.src(3, "pred"), d.dst(0, kind)
    return lambda b: write(b, np.where(c(b), a(b), b2(b)))


@instruction("slct")
def slct(d: Decoder) -> Execute:
    """slct (9.7.7.4): c >= 0 ? a : b."""
    d.only("ftz")
    kind = f"b{WIDTH[d.parts[-2]]}"
    a, b2, c, write = d.src(1, kind), d.src(2, kind), d.src(3), d.dst(0, kind)
    return lambda b: write(b, np.where(np.asarray(c(b)) >= 0, a(b), b2(b)))

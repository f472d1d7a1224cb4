"""One instruction over arrays: each thread applies it to its element."""

from __future__ import annotations

from itertools import product

import numpy as np
from ptx_kernel import Shape

BLOCK = 128
_REGISTER = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}


def apply(execute, code: str, out, *inputs: np.ndarray, also=None, head: str = ""):
    """Apply ``code`` to each element, with {a} {b} {c} .. for the registers of the inputs and {d}
    for the result, whose dtype is ``out``; ``bool`` stands for predicates. ``also``: dtype of a
    second result, {e}.

    Returns the results, one per input element.
    """
    n = len(inputs[0])
    padded = -(-n // BLOCK) * BLOCK
    arrays, lines, names = {}, [], {}
    for k, (name, x) in enumerate(zip("abcf", inputs, strict=False)):
        stored = x.astype(np.uint8) if x.dtype.kind == "b" else x
        arrays[name] = np.resize(stored, padded)
        register = f"{_REGISTER[stored.itemsize]}{k}"
        lines.append(f"ld.global.{_kind(stored.dtype)} {register}, [%{name}_i];")
        if x.dtype.kind == "b":
            lines.append(f"setp.ne.u16 %p{k}, {register}, 0;")
            register = f"%p{k}"
        names[name] = register
    results = [("d", np.dtype(out), 10)] + ([("e", np.dtype(also), 11)] if also else [])
    after = []
    for name, dtype, k in results:
        predicate = dtype.kind == "b"
        arrays[name] = np.zeros(padded, np.uint8 if predicate else dtype)
        register = f"{_REGISTER[dtype.itemsize]}{k}"
        names[name] = f"%p{k}" if predicate else register
        if predicate:
            after.append(f"selp.u16 {register}, 1, 0, %p{k};")
        after.append(f"st.global.{_kind(arrays[name].dtype)} [%{name}_i], {register};")
    body = "\n".join([*lines, code.format(**names), *after])
    execute(body, arrays, Shape(grid=padded // BLOCK, block=BLOCK), head=head)
    got = [arrays[name][:n].view(dtype) for name, dtype, _ in results]
    return got if also else got[0]


def _kind(dtype: np.dtype) -> str:
    letter = {"i": "s", "u": "u", "f": "b", "b": "u"}[dtype.kind]
    return f"{letter}{8 * dtype.itemsize}"


def integers(dtype, seed: int = 0, count: int = 40) -> np.ndarray:
    """Edge values of an integer type and random ones of all magnitudes."""
    info, random = np.iinfo(dtype), np.random.default_rng(seed)
    bits = info.bits
    edges = {0, 1, 2, 3, 5, bits - 1, bits, info.max, info.max - 1, info.min, info.min + 1}
    edges |= {1 << (bits // 2), (1 << (bits // 2)) - 1, 1 << (bits - 2), 0x55}
    if info.min < 0:
        edges |= {-1, -2, -7, -(1 << (bits // 2))}
    raw = [int.from_bytes(random.bytes(8), "little") >> int(random.integers(0, 64)) for _ in
           range(count)]  # fmt: skip
    values = sorted(edges) + [_wrap(v, bits, info.min < 0) for v in raw]
    return np.array(values, dtype)


def _wrap(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def crossed(*columns: np.ndarray, limit: int = 2048, seed: int = 1) -> list[np.ndarray]:
    """All combinations of the columns' values, or ``limit`` of them drawn at random."""
    shape = tuple(len(c) for c in columns)
    total = int(np.prod(shape))
    if total <= limit:
        picks = np.array(list(product(*(range(n) for n in shape)))).T
    else:
        drawn = np.random.default_rng(seed).choice(total, limit, replace=False)
        picks = np.array(np.unravel_index(drawn, shape))
    return [c[p] for c, p in zip(columns, picks, strict=True)]


def expect_equal(got: np.ndarray, want: np.ndarray, *inputs: np.ndarray) -> None:
    """Assert equal bits, where both are not NaN; the message has the first operands that differ."""
    want = np.asarray(want, got.dtype)
    raw = f"u{got.itemsize}"
    same = got.view(raw) == want.view(raw)
    if got.dtype.kind == "f":
        same |= np.isnan(got) & np.isnan(want)
    if not same.all():
        k = int((~same).argmax())
        operands = ", ".join(str(x[k]) for x in inputs)
        raise AssertionError(f"{operands}: got {got[k]}, want {want[k]} ({(~same).sum()} differ)")

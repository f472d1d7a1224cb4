"""Faults put into compiled kernels by editing their PTX, which a report must name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Mutant:
    """A compiled kernel with other PTX; the host half is the original's."""

    object_path: Path
    symbol: str
    ptx: str


def mutate(compiled, pattern: str, replacement: str, count: int = 1) -> Mutant:
    """Replace the first ``count`` matches; a pattern without a match is a broken test."""
    ptx, n = re.subn(pattern, replacement, compiled.ptx, count=count, flags=re.M)
    assert n == count, f"{pattern!r} matched {n} times"
    return Mutant(compiled.object_path, compiled.symbol, ptx)


def expect_tx_plus(compiled, delta: int) -> Mutant:
    return mutate(
        compiled,
        r"^(\s*)(@%p\d+ )?(mbarrier\.arrive\.expect_tx[^;]*, )(%r\d+);",
        rf"\1{{ .reg .b32 wrong; add.s32 wrong, \4, {delta}; \2\3wrong; }}",
    )


def without(compiled, instruction: str) -> Mutant:
    """Drop the first instruction whose opcode starts with the given text."""
    return mutate(compiled, rf"^\s*(@!?%p\d+ )?{re.escape(instruction)}[^;]*;", "")


def flipped_parity(compiled, which: int) -> Mutant:
    """Make the ``which``-th try_wait of the program wait for the other parity."""
    waits = list(
        re.finditer(r"mbarrier\.try_wait\.parity[^;]*?\], (%r\d+|\d)(, 10000000)?;", compiled.ptx)
    )
    m = waits[which]
    wait = compiled.ptx[m.start() : m.end()].replace(f"], {m.group(1)}", "], other")
    text = f"{{ .reg .b32 other; xor.b32 other, {m.group(1)}, 1; {wait} }}"
    return Mutant(
        compiled.object_path,
        compiled.symbol,
        compiled.ptx[: m.start()] + text + compiled.ptx[m.end() :],
    )


def other_swizzle(compiled, arch: str) -> Mutant:
    """Give shared memory descriptors a 64-byte swizzle where TMA wrote with 128."""
    shift, old, new = (61, 2, 4) if arch == "sm_100a" else (62, 1, 2)

    def swap(m: re.Match[str]) -> str:
        value = int(m.group(2))
        if value >> 46 == 0 or value >> shift != old:
            return m.group(0)
        return f"{m.group(1)}{value - (old << shift) + (new << shift)};"

    ptx = re.sub(r"(or\.b64 \s*%rd\d+, %rd\d+, )(\d+);", swap, compiled.ptx)
    assert ptx != compiled.ptx
    return Mutant(compiled.object_path, compiled.symbol, ptx)


def store_past_the_end(compiled, offset: int) -> Mutant:
    return mutate(compiled, r"(st\.global[.\w]*\s+\[%rd\d+)(\+\d+)?\]", rf"\g<1>+{offset}]")

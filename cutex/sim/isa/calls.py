"""Calls (PTX ISA 9.7.12.5): of vprintf only, because a kernel's own functions are inlined.

``cute.printf``, ``cute.print_tensor`` and device-side assertions print by it (CUDA C++ Programming
Guide, Formatted Output). Lanes print in order as soon as their warp executes the call, to stdout; a
GPU keeps the text until the host synchronises.
"""

from __future__ import annotations

import ctypes as C
import re
import sys
from typing import Any

import numpy as np

from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import LOCAL_WINDOW
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Symbol, Vector

_CONVERSION = re.compile(
    rb"%[-+ #0]*(?:\*|\d*)(?:\.(?:\*|\d*))?"
    rb"(?P<length>hh|h|ll|l|j|z|t)?(?P<kind>[diouxXcsfFeEgGaAp%])"
)


@instruction("call")
def call(d: Decoder) -> Execute:
    d.only("uni")
    if len(d) != 3:
        raise d.unknown(f"{len(d)} operands")
    results, called, arguments = d.ins.operands[0:3]
    name = called.name if isinstance(called, Symbol) else ""
    if name != "vprintf" or not isinstance(results, Vector) or not isinstance(arguments, Vector):
        raise d.unknown(f"a call of {name or 'a function by its address'}")
    reads = [d.read(o, "u64") for o in arguments.items]
    write = d.write(results.items[0], "s32")

    def execute(b: Batch) -> None:
        templates, values = (b.lanes(read(b)) for read in reads)
        count = np.zeros((b.n, 32), np.int32)
        for row, lane in np.argwhere(b.active()).tolist():
            given = Arguments(d, int(b.idx[row]), lane, int(values[row, lane]))
            sys.stdout.write(printed(_text(d, int(templates[row, lane])), given))
            count[row, lane] = given.taken
        write(b, count)

    return execute


def _text(d: Decoder, address: int) -> bytes:
    """The bytes at ``address`` up to the first zero."""
    region = d.m.memory.find(address)
    if region is None:
        raise d.unknown(f"text at 0x{address:x}, outside global memory")
    return region.data[address - region.base :].tobytes().partition(b"\0")[0]


class Arguments:
    """The arguments of a vprintf call, read one after another, each aligned to its size."""

    def __init__(self, d: Decoder, warp: int, lane: int, address: int) -> None:
        self.d, self.at, self.taken = d, 0, 0
        if address >> 58 != LOCAL_WINDOW >> 58:
            raise d.unknown("arguments of vprintf outside local memory")
        self.memory = d.m.local[warp, lane, address & 0xFFFFFFFF :]

    def take(self, kind: Any) -> Any:
        """The next value, as a C type."""
        size = C.sizeof(kind)
        start = -(-self.at // size) * size
        self.at, self.taken = start + size, self.taken + 1
        if self.at > len(self.memory):
            raise self.d.unknown("vprintf with fewer arguments than its text asks for")
        return kind.from_buffer_copy(self.memory[start : self.at].tobytes())

    def text(self) -> C.c_char_p:
        address = self.take(C.c_uint64).value
        return C.c_char_p(_text(self.d, address) if address else None)


def printed(template: bytes, arguments: Any) -> str:
    """The text that printf makes of ``template``, each conversion by the C library's own
    snprintf."""

    def converted(m: re.Match[bytes]) -> bytes:
        spec, kind = m[0], m["kind"]
        values = [arguments.take(C.c_int32) for _ in range(spec.count(b"*"))]
        if kind == b"s":
            values.append(arguments.text())
        elif kind != b"%":
            values.append(arguments.take(_c_type(kind, m["length"])))
        return _snprintf(spec, *values)

    return _CONVERSION.sub(converted, template).decode(errors="replace")


def _c_type(kind: bytes, length: bytes | None) -> Any:
    if kind in b"fFeEgGaA":
        return C.c_double
    if kind == b"p":
        return C.c_void_p
    return C.c_int64 if length in (b"l", b"ll", b"j", b"z", b"t") else C.c_int32


def _snprintf(spec: bytes, *values: Any) -> bytes:
    library = C.CDLL(None)
    size = library.snprintf(None, C.c_size_t(0), spec, *values) + 1
    text = C.create_string_buffer(size)
    library.snprintf(text, C.c_size_t(size), spec, *values)
    return text.value

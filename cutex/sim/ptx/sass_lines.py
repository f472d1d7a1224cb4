"""The machine instructions that each line of a kernel's PTX was compiled to, read from its cubin.

ptxas writes a line table from addresses to lines of the PTX (.nv_debug_line_sass, in the form of
DWARF 2) into a cubin that is compiled with line information. Of an instruction of 16 bytes the
lowest 9 bits are its operation; those that matter here were read off nvdisasm's output for sm_90a
and sm_100a.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Iterator

from cutex.cubin import Elf

FMA, ADD, MUL, OTHER = "fma", "add", "mul", "other"
_OPERATIONS = {
    0x020: MUL, 0x021: ADD, 0x023: FMA,  # FMUL, FADD, FFMA
    0x028: MUL, 0x029: ADD, 0x02B: FMA,  # DMUL, DADD, DFMA
    0x032: MUL, 0x030: ADD, 0x031: FMA, 0x035: FMA,  # HMUL2, HADD2, HFMA2, HFMA2.MMA
    0x04A: MUL, 0x04B: ADD, 0x049: FMA,  # FMUL2, FADD2, FFMA2
}  # fmt: skip
_NOP = 0x118
_WIDTH = 16  # bytes of an instruction

Lines = dict[int, frozenset[str]]  # line of the PTX: the operations compiled from it


def sass_lines(cubin: bytes) -> dict[str, Lines]:
    """Return, by kernel, the operations of each line; no kernel without line information."""
    elf = Elf(cubin)
    table = elf.content(".nv_debug_line_sass")
    found: dict[str, Lines] = {}
    for kernel, rows in _sequences(table, _relocated(elf)):
        code = elf.content(f".text.{kernel}")
        lines: dict[int, set[str]] = defaultdict(set)
        for (start, line), (end, _) in itertools.pairwise(rows):
            for at in range(start, min(end, len(code)), _WIDTH):
                operation = int.from_bytes(code[at : at + 2], "little") & 0x1FF
                if operation != _NOP:
                    lines[line].add(_OPERATIONS.get(operation, OTHER))
        found[kernel] = {line: frozenset(what) for line, what in lines.items()}
    return found


def assembled_text(cubin: bytes) -> str:
    """The PTX that a cubin with line information was made of; its lines end with zeros there."""
    return Elf(cubin).content(".nv_debug_ptx_txt").decode(errors="replace").replace("\0", "\n")


def _relocated(elf: Elf) -> dict[int, str]:
    """The kernel whose code the address at each offset of the line table is in."""
    entries = elf.content(".rela.nv_debug_line_sass")
    if entries:
        each = [(at, info >> 32) for at, info, _ in struct.iter_unpack("<QQq", entries)]
    else:
        entries = elf.content(".rel.nv_debug_line_sass")
        each = [(at, info >> 32) for at, info in struct.iter_unpack("<QQ", entries)]
    return {at: elf.section_of(symbol).removeprefix(".text.") for at, symbol in each}


def _sequences(
    table: bytes, relocated: dict[int, str]
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each kernel's rows of the line table: (address, line), the last one behind its end."""
    unit = 0
    while unit + 10 <= len(table):
        length, _, header = struct.unpack_from("<IHI", table, unit)
        at, end = unit + 10 + header, unit + 4 + length
        yield from _run(table, at, end, table[unit + 10 : unit + 15], relocated)
        unit = end


def _run(
    table: bytes, at: int, end: int, header: bytes, relocated: dict[int, str]
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Run the line-number program of one unit (DWARF 2, section 6.2.5)."""
    step, _, base, spread, first = struct.unpack("<BBbBB", header)
    kernel, address, line, rows = "", 0, 1, list[tuple[int, int]]()
    while at < end:
        opcode, at = table[at], at + 1
        if opcode >= first:
            address += (opcode - first) // spread * step
            line += base + (opcode - first) % spread
            rows.append((address, line))
        elif opcode == 0:
            size, at = _unsigned(table, at)
            match table[at]:
                case 1:  # end of the sequence
                    rows.append((address, 0))
                    yield kernel, rows
                    kernel, address, line, rows = "", 0, 1, []
                case 2:
                    kernel = relocated.get(at + 1, "")
                    address = int.from_bytes(table[at + 1 : at + size], "little")
            at += size
        elif opcode == 1:
            rows.append((address, line))
        elif opcode == 2:
            by, at = _unsigned(table, at)
            address += by * step
        elif opcode == 3:
            by, at = _signed(table, at)
            line += by
        elif opcode in (4, 5):  # the file, the column
            _, at = _unsigned(table, at)
        elif opcode == 8:
            address += (255 - first) // spread * step
        elif opcode == 9:
            address += int.from_bytes(table[at : at + 2], "little")
            at += 2


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length (LEB128), and the offset behind it."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, end = _unsigned(data, at)
    bits = 7 * (end - at)
    return value - (1 << bits if value >> (bits - 1) & 1 else 0), end

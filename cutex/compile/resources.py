"""What a compiled kernel takes: registers, spills, shared and tensor memory, instructions.

Registers and stack are read from the cubin, an ELF file, so no CUDA toolkit is needed. Instructions
are counted in the SASS, which nvdisasm prints; it comes with the pip package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cutex.errors import NoDisassembler

# what each class of instructions is called in SASS, by how the opcode begins
CLASSES = {
    "mma": ("HGMMA", "UTCHMMA", "UTCQMMA", "HMMA"),
    "mma wait": ("WARPGROUP.DEPBAR", "UTCBAR"),
    "tma load": ("UTMALDG",),
    "tma store": ("UTMASTG", "UTMAREDG"),
    "tmem load": ("LDTM",),
    "tmem store": ("STTM",),
    "mbarrier": ("SYNCS",),
    "barrier": ("BAR",),
    "global load": ("LDG",),
    "global store": ("STG",),
    "shared load": ("LDS",),
    "shared store": ("STS",),
    "spill load": ("LDL",),
    "spill store": ("STL",),
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes. Registers and spills are per thread, memory per CTA."""

    kernel: str
    num_threads: int
    registers: int
    spill_bytes: int  # stack: spilled registers and arrays that could not be kept in registers
    smem_bytes: int  # static and dynamic, as launched, without the system's own 1024
    tmem_columns: int
    instructions: dict[str, int] = field(default_factory=dict)  # by class, "total" last
    note: str = ""  # why `instructions` is empty

    def __str__(self) -> str:
        lines = [
            f"kernel        {self.kernel}",
            f"threads       {self.num_threads}",
            f"registers     {self.registers} per thread",
            f"spills        {self.spill_bytes} bytes per thread",
            f"smem          {self.smem_bytes} bytes",
            f"tmem          {self.tmem_columns} columns",
        ]
        counts = [f"{name:<14}{count}" for name, count in self.instructions.items() if count]
        return "\n".join([*lines, *(counts or [self.note])])


class Code(Protocol):
    """A compiled kernel, of cutex or of others."""

    @property
    def ptx(self) -> str: ...
    @property
    def cubin(self) -> bytes: ...
    @property
    def dynamic_smem(self) -> int: ...


def resources(compiled: Code) -> Resources:
    cubin = Cubin(compiled.cubin)
    try:
        instructions, note = count_instructions(sass(compiled)), ""
    except NoDisassembler as missing:
        instructions, note = {}, f"no instruction counts: {missing}"
    return Resources(
        kernel=cubin.kernel,
        num_threads=cubin.num_threads,
        registers=cubin.registers,
        spill_bytes=cubin.stack_bytes,
        smem_bytes=cubin.static_smem + compiled.dynamic_smem,
        tmem_columns=tmem_columns(compiled.ptx),
        instructions=instructions,
        note=note,
    )


def tmem_columns(ptx: str) -> int:
    """Tensor memory that the kernel allocates, from the constants given to tcgen05.alloc."""
    total = 0
    for alloc in re.finditer(r"tcgen05\.alloc\S*\s+\[[^]]+\],\s*(%r\d+|\d+);", ptx):
        count = alloc[1]
        if count.startswith("%"):
            moves = re.findall(rf"mov\.[bu]32\s+{count},\s*(\d+);", ptx[: alloc.start()])
            if not moves:
                raise ValueError(f"tcgen05.alloc takes {count}, which is no constant in the PTX")
            count = moves[-1]
        total += int(count)
    return total


def count_instructions(text: str) -> dict[str, int]:
    """How many instructions of each class stand in the SASS `text`, and in all, nops aside."""
    counts = dict.fromkeys(CLASSES, 0)
    total = 0
    for opcode in opcodes(text):
        total += opcode != "NOP"
        for name, heads in CLASSES.items():
            if any(opcode == head or opcode.startswith(head + ".") for head in heads):
                counts[name] += 1
    return {**counts, "total": total}


def opcodes(text: str) -> Iterator[str]:
    """The opcodes in the SASS `text`, modifiers included, as HGMMA.64x256x16.F32.BF16."""
    for line in re.finditer(
        r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][^\s;]*)", text, re.M
    ):
        yield line[1]


def sass(compiled: Code) -> str:
    """The machine code as text. NoDisassembler if there is no nvdisasm."""
    with tempfile.TemporaryDirectory(prefix="cutex-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.cubin)
        done = subprocess.run(
            [str(_nvdisasm()), "-c", str(file)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def _nvdisasm() -> Path:
    for folder in sys.path:
        for name in ("cu*/bin/nvdisasm", "cuda_nvdisasm/bin/nvdisasm"):
            for found in sorted(Path(folder or ".").glob(f"nvidia/{name}")):
                return found
    if in_path := shutil.which("nvdisasm"):
        return Path(in_path)
    raise NoDisassembler("nvdisasm is not here, pip install nvidia-cuda-nvdisasm brings it")


# attributes in the .nv.info sections of a cubin (names as cuobjdump -elf prints them)
_REQUIRED_THREADS = 0x10  # EIATTR_REQNTID
_FRAME_SIZE = 0x11  # EIATTR_FRAME_SIZE
_REGISTERS = 0x2F  # EIATTR_REGCOUNT
_RESERVED_SMEM = 1024  # the system's, at the bottom of every CTA's smem; counted in .nv.shared
_WITH_LENGTH = 4  # EIFMT_SVAL: a 16-bit length follows, then the value; else a 16-bit value


class Cubin:
    """The figures of the one kernel in a cubin, a 64-bit little-endian ELF file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        sections = dict(self._sections())
        kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
        if len(kernels) != 1:
            raise ValueError(f"a cubin of one kernel was due, this one has {kernels}")
        self.kernel = kernels[0]
        index = self._symbol_index(sections)
        whole = list(self._attributes(sections[".nv.info"]))
        own = list(self._attributes(sections[f".nv.info.{self.kernel}"]))
        self.registers = self._of_symbol(whole, _REGISTERS, index)
        self.stack_bytes = self._of_symbol(whole, _FRAME_SIZE, index)
        self.num_threads = 0
        for kind, value in own:
            if kind == _REQUIRED_THREADS:
                x, y, z = struct.unpack("<3I", value)
                self.num_threads = x * y * z
        _, _, smem = sections.get(f".nv.shared.{self.kernel}", (0, 0, 0))
        self.static_smem = max(0, smem - _RESERVED_SMEM)

    def _sections(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """(name, (type, offset, size)) of each section, names made unique by the first."""
        (table,) = struct.unpack_from("<Q", self._data, 0x28)
        width, count, names = struct.unpack_from("<3H", self._data, 0x3A)
        rows = [struct.unpack_from("<IIQQQQ", self._data, table + i * width) for i in range(count)]
        for name, kind, _, _, offset, size in rows:
            yield self._string(rows[names][4], name), (kind, offset, size)

    def _string(self, table: int, offset: int) -> str:
        start = table + offset
        return self._data[start : self._data.index(b"\0", start)].decode()

    def _symbol_index(self, sections: dict[str, tuple[int, int, int]]) -> int:
        _, offset, size = sections[".symtab"]
        strings = sections[".strtab"][1]
        for i in range(size // 24):
            name, info = struct.unpack_from("<IB", self._data, offset + i * 24)
            if info & 0xF == 2 and self._string(strings, name) == self.kernel:  # STT_FUNC
                return i
        raise ValueError(f"no symbol {self.kernel} in the cubin")

    def _attributes(self, section: tuple[int, int, int]) -> Iterator[tuple[int, bytes]]:
        _, at, size = section
        end = at + size
        while at < end:
            form, kind, value = struct.unpack_from("<BBH", self._data, at)
            at += 4
            if form == _WITH_LENGTH:
                yield kind, self._data[at : at + value]
                at += value
            else:
                yield kind, struct.pack("<H", value)

    @staticmethod
    def _of_symbol(attributes: list[tuple[int, bytes]], wanted: int, symbol: int) -> int:
        for kind, value in attributes:
            if kind == wanted:
                index, number = struct.unpack("<2I", value)
                if index == symbol:
                    return number
        raise ValueError(f"no attribute {wanted:#x} for symbol {symbol} in the cubin")

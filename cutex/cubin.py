"""A cubin, the ELF file of a compiled kernel: its registers, memory and threads; and nvdisasm's
path."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from cutex.errors import NoDisassembler


def nvdisasm() -> Path:
    """Return the path of nvdisasm. Raises NoDisassembler if it is not installed."""
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


class Elf:
    """The sections and symbols of a 64-bit little-endian ELF file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 0x28)
        width, count, names = struct.unpack_from("<3H", data, 0x3A)
        self.rows = [struct.unpack_from("<IIQQQQ", data, table + i * width) for i in range(count)]
        self.names = [self.string(self.rows[names][4], row[0]) for row in self.rows]
        # (type, offset, size) of each section
        self.sections = {
            name: (row[1], row[4], row[5]) for name, row in zip(self.names, self.rows, strict=True)
        }

    def string(self, table: int, offset: int) -> str:
        start = table + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def content(self, section: str) -> bytes:
        """The bytes of a section; none if there is no such section."""
        _, offset, size = self.sections.get(section, (0, 0, 0))
        return self.data[offset : offset + size]

    def section_of(self, symbol: int) -> str:
        """The name of the section in which a symbol lies."""
        _, offset, _ = self.sections[".symtab"]
        (index,) = struct.unpack_from("<H", self.data, offset + symbol * 24 + 6)
        return self.names[index]


class Cubin:
    """The registers, memory and threads of a kernel in a cubin."""

    def __init__(self, data: bytes, kernel: str | None = None) -> None:
        """``kernel``: its name; None for the only one."""
        self._data, self._elf = data, Elf(data)
        sections = self._elf.sections
        kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
        if kernel is not None:
            kernels = [name for name in kernels if name == kernel]
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

    def _symbol_index(self, sections: dict[str, tuple[int, int, int]]) -> int:
        _, offset, size = sections[".symtab"]
        strings = sections[".strtab"][1]
        for i in range(size // 24):
            name, info = struct.unpack_from("<IB", self._data, offset + i * 24)
            if info & 0xF == 2 and self._elf.string(strings, name) == self.kernel:  # STT_FUNC
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

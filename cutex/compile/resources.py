"""The resources of a compiled kernel: registers, spills, shared and tensor memory, instructions.

Registers and stack are read from the cubin, an ELF file, so no CUDA toolkit is needed. Instructions
are counted in the SASS, which nvdisasm prints; it comes with the pip package nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cutex.cubin import Cubin, nvdisasm
from cutex.errors import NoDisassembler

# the opcodes of each class of instructions in SASS, by their first parts
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
    """The resources of one compiled kernel. Registers and spills are per thread, memory per CTA."""

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
    """Compiled code, of cutex or of others: one kernel, or those that a call launches."""

    @property
    def ptx(self) -> str: ...
    @property
    def cubin(self) -> bytes: ...
    @property
    def dynamic_smem(self) -> Mapping[str, int]: ...


def all_resources(compiled: Code) -> list[Resources]:
    """The resources of each kernel, in the order of their launches."""
    return [resources(compiled, kernel) for kernel in compiled.dynamic_smem]


def resources(compiled: Code, kernel: str | None = None) -> Resources:
    """The resources of the kernel of that name; None for the only one."""
    cubin = Cubin(compiled.cubin, kernel)
    try:
        instructions, note = count_instructions(sass(compiled, cubin.kernel)), ""
    except NoDisassembler as missing:
        instructions, note = {}, f"no instruction counts: {missing}"
    return Resources(
        kernel=cubin.kernel,
        num_threads=cubin.num_threads,
        registers=cubin.registers,
        spill_bytes=cubin.stack_bytes,
        smem_bytes=cubin.static_smem + compiled.dynamic_smem[cubin.kernel],
        tmem_columns=tmem_columns(_entry(compiled.ptx, cubin.kernel)),
        instructions=instructions,
        note=note,
    )


def _entry(ptx: str, kernel: str) -> str:
    """The part of a PTX module that defines `kernel`."""
    start = re.search(rf"\.entry\s+{kernel}\s*\(", ptx)
    if start is None:
        raise ValueError(f"no entry {kernel} in the PTX")
    rest = ptx[start.end() :]
    end = re.search(r"^[^/\n]*\.entry\s", rest, re.M)
    return rest[: end.start()] if end else rest


def tmem_columns(ptx: str) -> int:
    """The columns of tensor memory that the kernel allocates, from the constants given to
    tcgen05.alloc."""
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
    """The number of instructions of each class in the SASS `text`, and in total, without nops."""
    counts = dict.fromkeys(CLASSES, 0)
    total = 0
    for opcode in opcodes(text):
        total += opcode != "NOP"
        for name, heads in CLASSES.items():
            if any(opcode == head or opcode.startswith(head + ".") for head in heads):
                counts[name] += 1
    return {**counts, "total": total}


def opcodes(text: str) -> Iterator[str]:
    """The opcodes in the SASS `text`, with modifiers, such as HGMMA.64x256x16.F32.BF16."""
    for line in re.finditer(
        r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][^\s;]*)", text, re.M
    ):
        yield line[1]


def sass(compiled: Code, kernel: str | None = None) -> str:
    """The machine code as text, of all kernels or of one. Raises NoDisassembler if there is no
    nvdisasm."""
    with tempfile.TemporaryDirectory(prefix="cutex-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.cubin)
        done = subprocess.run(
            [str(nvdisasm()), "-c", str(file)],
            capture_output=True,
            text=True,
            check=False,
            encoding="utf-8",
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    if kernel is None:
        return done.stdout
    _, *sections = re.split(r"^\t\.section\t", done.stdout, flags=re.M)
    return "".join(s for s in sections if s.startswith(f".text.{kernel},"))

"""The cost of a kernel's ordinary instructions at an SM's sub-core, from its machine code.

The cubin names for each SASS instruction the line of the PTX that it was compiled from
(.nv_debug_line_sass, in a kernel compiled with line information), and its 128-bit encoding has the
assembler's decisions: the cycles to stall before the next instruction, the scoreboards that it
waits for and the one that it sets. So a PTX instruction costs as much as the SASS compiled from it;
one without SASS costs nothing.

order.py decides which of them run in which order.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from cutex.cubin import nvdisasm
from cutex.errors import NoDisassembler

# cycles for which an instruction of a warp keeps a pipe of its sub-core busy, by the start of its
# opcode: 32 lanes over the lanes that the CUDA programming guide gives for 9.0 and 10.0 (table
# "throughput of native arithmetic instructions"), a quarter of the SM's each
FMA, ALU, MUFU, LSU, UNIFORM = "fma", "alu", "mufu", "lsu", "uniform"
PIPES = (FMA, ALU, MUFU, LSU, UNIFORM)
_PIPE = (
    (("FFMA2", "FMUL2", "FADD2"), FMA, 2.0),
    (("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"), FMA, 1.0),
    (("IMAD", "IDP"), FMA, 2.0),
    (("F2FP",), ALU, 2.0),
    (("MUFU", "F2I", "I2F", "FRND", "F2F", "POPC", "FLO", "BREV"), MUFU, 8.0),
    (("LDS", "STS", "LDSM", "STSM", "LDG", "STG", "LDL", "STL", "SHFL", "ATOM", "RED"), LSU, 4.0),
    (("U", "R2UR", "S2UR"), UNIFORM, 1.0),
)
# cycles until the result of an instruction that sets a scoreboard is available (Hopper; the
# published figures of a B300 are within 10 %)
_LATENCY = (
    (("F2FP",), 6),
    (("MUFU", "F2I", "I2F", "FRND", "F2F"), 24),
    (("SHFL",), 26),
    (("LDS", "LDSM"), 30),
    (("S2R", "S2UR", "R2UR", "CS2R"), 24),
    (("LDC", "ULDC"), 30),
    (("VOTE", "ELECT", "POPC", "FLO"), 16),
)
_ASYNCHRONOUS = (
    "SYNCS", "HGMMA", "QGMMA", "IGMMA", "WARPGROUP", "UTMA", "UBLKCP", "BAR", "UCGABAR", "UTC",
    "LDTM", "STTM", "LDG", "DEPBAR", "MEMBAR", "NANOSLEEP", "CCTL", "ACQBULK", "ERRBAR", "FENCE",
    "USETMAXREG", "LDGDEPBAR", "ATOM", "WARPSYNC", "PREEXIT", "ACQSHMINIT", "UTMACMDFLUSH",
)  # fmt: skip
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")


@dataclass
class Sass:
    """One instruction of the machine code."""

    at: int  # its address
    opcode: str
    line: int  # its line of the PTX; 0: none
    stall: int  # cycles before the next may issue
    sets: tuple[int, ...]  # scoreboards
    waits: int  # scoreboards, a mask
    block: int = 0  # number of its basic block


@dataclass
class Cost:
    """The load of one execution of a PTX instruction on the sub-core: issue slots, the cycles that
    a single warp takes, and cycles of each pipe.
    """

    slots: float = 0.0
    cycles: float = 0.0
    beside: float = 0.0  # cycles that a single warp takes longer beside a wgmma
    pipes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PIPES, 0.0))
    sass: list[tuple[int, int]] = field(default_factory=list)  # block, address of each instruction
    parts: list[Cost] = field(default_factory=list)  # the cost of each of ``sass``
    asynchronous: list[int] = field(default_factory=list)  # addresses of SASS that is an event
    products: list[int] = field(default_factory=list)  # addresses of the wgmmas among them

    def add(self, more: Cost) -> None:
        self.slots += more.slots
        self.cycles += more.cycles
        self.beside += more.beside
        for pipe, busy in more.pipes.items():
            self.pipes[pipe] += busy
        self.sass += more.sass
        self.parts.append(more)


_LINE = re.compile(r'//## File "\.nv_debug_ptx_txt", line (\d+)')
_CODE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);\s*/\* 0x(\w{16}) \*/"
)
_SECOND = re.compile(r"^\s*/\* 0x(\w{16}) \*/")


def disassemble(cubin: bytes) -> list[Sass]:
    """Return the SASS of the kernels of ``cubin``. Raises NoDisassembler without an nvdisasm,
    and ValueError where the cubin has no line information.
    """
    with tempfile.TemporaryDirectory(prefix="cutex-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(nvdisasm()), "-c", "-gp", "-hex", str(file)],
            capture_output=True, text=True, check=False,
         encoding="utf-8")  # fmt: skip
    if done.returncode:
        raise NoDisassembler(f"nvdisasm failed: {done.stderr.strip()}")
    return read(done.stdout)


def read(text: str) -> list[Sass]:
    """Parse the output of nvdisasm into instructions with the numbers of their basic blocks."""
    code: list[Sass] = []
    line, block, ends = 0, 0, False
    waiting: Sass | None = None
    for row in text.splitlines():
        if found := _LINE.search(row):
            line = int(found[1])
        elif re.match(r"\.L_x_\d+:|\.text\.", row) or ends:
            block, ends = block + 1, False
        if found := _CODE.search(row):
            waiting = Sass(int(found[1], 16), found[2], line, 1, (), 0, block)
            code.append(waiting)
            ends = found[2].split(".")[0] in ("BRA", "EXIT", "RET", "CALL", "BRX", "JMP")
        elif waiting is not None and (found := _SECOND.match(row)):
            control = int(found[1], 16) >> 41
            waiting.stall = max(1, control & 0xF)
            sets = (control >> 5 & 7, control >> 8 & 7)
            waiting.sets = tuple(s for s in sets if s != 7)
            waiting.waits = control >> 11 & 0x3F
            waiting = None
    if not any(i.line for i in code):
        raise ValueError("the cubin has no line information: compile with GenerateLineInfo")
    return code


def costs(
    code: list[Sass], beside: Mapping[str, float] = MappingProxyType({}), lost: float = 0.0
) -> dict[int, Cost]:
    """Return, by line of the PTX, the cost of one execution of its instruction.

    ``beside`` gives by pipe how many times slower it is while a wgmma runs, ``lost`` the cycles
    that MUFU then loses to each FMA or ALU instruction.
    """
    found: dict[int, Cost] = defaultdict(Cost)
    blocks: dict[int, set[int]] = defaultdict(set)
    for ins in code:
        blocks[ins.line].add(ins.block)
    slow = _in_order(code, beside, lost) if beside else None
    for i, (ins, cycles) in enumerate(zip(code, _in_order(code, {}), strict=True)):
        if ins.opcode == "NOP":
            continue
        part = 1.0 / len(blocks[ins.line])  # one of several copies of the line is executed
        pipe, busy = _pipe(ins.opcode)
        pipes = dict.fromkeys(PIPES, 0.0) | {pipe: part * busy}
        longer = max(0.0, slow[i] - cycles) if slow else 0.0
        cost = found[ins.line]
        cost.add(Cost(part, part * cycles, part * longer, pipes, [(ins.block, ins.at)]))
        if ins.opcode.startswith(_PRODUCTS):
            cost.products.append(ins.at)
        elif ins.opcode.startswith(_ASYNCHRONOUS):
            cost.asynchronous.append(ins.at)
    return dict(found)


def _in_order(code: list[Sass], slower: Mapping[str, float], lost: float = 0.0) -> list[float]:
    """The cycles of each instruction in a single warp, which issues it when the stall of the one
    before has passed, the scoreboards that it waits for are clear and its pipe is free.
    """
    taken: list[float] = []
    ready = [0.0] * 6
    free: dict[str, float] = {}
    now, block = 0.0, -1
    for ins in code:
        if ins.block != block:
            block, now, ready, free = ins.block, 0.0, [0.0] * 6, {}
        issue = max([now, *(ready[i] for i in range(6) if ins.waits >> i & 1)])
        if ins.opcode != "NOP":
            pipe, busy = _pipe(ins.opcode)
            issue = max(issue, free.get(pipe, 0.0))
            free[pipe] = issue + busy * slower.get(pipe, 1.0)
            if pipe in (FMA, ALU):
                free[MUFU] = free.get(MUFU, 0.0) + lost
        for scoreboard in ins.sets:
            ready[scoreboard] = max(ready[scoreboard], issue + _latency(ins.opcode))
        taken.append(issue + ins.stall - now)
        now = issue + ins.stall
    return taken


def _pipe(opcode: str) -> tuple[str, float]:
    for heads, pipe, cycles in _PIPE:
        if opcode.startswith(heads):
            return pipe, cycles
    return ALU, 2.0


def _latency(opcode: str) -> float:
    if opcode.startswith(_ASYNCHRONOUS):
        return 0.0  # their completion is an event of the replay
    for heads, cycles in _LATENCY:
        if opcode.startswith(heads):
            return float(cycles)
    return 6.0

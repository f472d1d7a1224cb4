"""The cost of a kernel's ordinary instructions at an SM's sub-core, from its machine code.

The cubin names for each SASS instruction the line of the PTX that it was compiled from
(.nv_debug_line_sass, in a kernel compiled with line information), and its 128-bit encoding has the
assembler's decisions: the cycles to stall before the next instruction, the scoreboards that it
waits for and the one that it sets. So a PTX instruction costs as much as the SASS compiled from it;
one without SASS costs nothing.

order.py decides which of them run in which order.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from cutex.cubin import nvdisasm
from cutex.errors import NoDisassembler

# cycles for which an instruction of a warp keeps a pipe of its sub-core busy, by the start of its
# opcode: 32 lanes over the lanes that the CUDA programming guide gives for 9.0 and 10.0 (table
# "throughput of native arithmetic instructions"), a quarter of the SM's each; of those that the
# table has not, and of mma.sync, what a probe gave on an H200 (docs/facts/timing.md)
FMA, ALU, MUFU, LSU, UNIFORM, FP64, MMA = "fma", "alu", "mufu", "lsu", "uniform", "fp64", "mma"
PIPES = (FMA, ALU, MUFU, LSU, UNIFORM, FP64, MMA)
_PIPE = (
    (("FFMA2", "FMUL2", "FADD2"), FMA, 2.0),
    (("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"), FMA, 1.0),
    (("IMAD.WIDE", "IMAD.HI"), FMA, 4.0),
    (("IMAD", "IDP"), FMA, 2.0),
    (("DFMA", "DADD", "DMUL", "DSETP"), FP64, 2.0),
    (("HMMA.1688.F32.TF32",), MMA, 6.2),
    (("HMMA.1688",), MMA, 4.4),
    (("HMMA", "IMMA"), MMA, 6.2),
    (("F2FP", "I2FP", "F2IP"), ALU, 2.0),
    (("MUFU", "F2I", "I2F", "FRND", "F2F", "POPC", "FLO", "BREV", "FCHK"), MUFU, 8.0),
    (("REDUX",), UNIFORM, 8.0),
    (("LDGSTS", "LDGDEPBAR"), LSU, 4.0),
    (("ATOMS.CAS", "LDG"), LSU, 8.0),
    (("LDS", "STS", "LDSM", "STSM", "STG", "LDL", "STL", "SHFL", "ATOM", "RED"), LSU, 4.0),
    (("U", "R2UR", "S2UR"), UNIFORM, 1.0),
    (("BRA", "BRX", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "EXIT", "WARPSYNC", "NOP"), ALU, 0.0),
)
# cycles until the result of an instruction that sets a scoreboard is available (Hopper; the
# published figures of a B300 are within 10 %)
_LATENCY = (
    (("F2FP",), 6),
    (("MUFU", "F2I", "I2F", "FRND", "F2F"), 24),
    (("SHFL",), 26),
    (("LDS", "LDSM"), 30),
    (("ATOMS",), 26),
    (("REDUX",), 40),
    (("S2R", "S2UR", "R2UR", "CS2R"), 24),
    (("LDC", "ULDC"), 30),
    (("VOTE", "ELECT", "POPC", "FLO"), 16),
)
_ASYNCHRONOUS = (
    "SYNCS", "HGMMA", "QGMMA", "IGMMA", "WARPGROUP", "UTMA", "UBLKCP", "BAR", "UCGABAR", "UTC",
    "LDTM", "STTM", "LDG", "DEPBAR", "MEMBAR", "NANOSLEEP", "CCTL", "ACQBULK", "ERRBAR", "FENCE",
    "USETMAXREG", "LDGDEPBAR", "ATOMG", "WARPSYNC", "PREEXIT", "ACQSHMINIT", "UTMACMDFLUSH",
)  # fmt: skip
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
# opcodes of which a PTX instruction that has no other SASS becomes one
_SINGLE = frozenset(("FADD", "FMUL", "FFMA", "LDG", "LDS", "STG", "STS", "SHFL"))


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
    goes: int = 0  # the basic block that a branch goes to
    guarded: bool = False  # by a predicate


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
    depth: int = 0  # of one of ``parts``: in how many loops it is

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
    r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);\s*/\* 0x(\w{16}) \*/"
)
_LABEL = re.compile(r"\.L_x_\d+")
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
    labels: dict[str, int] = {}
    branches: list[tuple[Sass, str]] = []
    line, block, ends = 0, 0, False
    waiting: Sass | None = None
    for row in text.splitlines():
        if found := _LINE.search(row):
            line = int(found[1])
        elif re.match(r"\.L_x_\d+:|\.text\.", row) or ends:
            block, ends = block + 1, False
            labels[row.partition(":")[0]] = block
        elif re.match(r"\s*\$\S+:", row):  # a function that is called, as a division's slow path
            line, block = 0, block + 1
        if found := _CODE.search(row):
            waiting = Sass(int(found[1], 16), found[3], line, 1, (), 0, block)
            waiting.guarded = bool(found[2])
            if found[3].startswith("BRA") and (to := _LABEL.search(found[4])):
                branches.append((waiting, to[0]))
            code.append(waiting)
            ends = found[3].split(".")[0] in ("BRA", "EXIT", "RET", "CALL", "BRX", "JMP")
        elif waiting is not None and (found := _SECOND.match(row)):
            control = int(found[1], 16) >> 41
            waiting.stall = max(1, control & 0xF)
            sets = (control >> 5 & 7, control >> 8 & 7)
            waiting.sets = tuple(s for s in sets if s != 7)
            waiting.waits = control >> 11 & 0x3F
            waiting = None
    if not any(i.line for i in code):
        raise ValueError("the cubin has no line information: compile with GenerateLineInfo")
    blocks = sorted({ins.block for ins in code})
    for ins, label in branches:
        at = bisect_left(blocks, labels.get(label, 0))
        ins.goes = blocks[min(at, len(blocks) - 1)]
    return code


def costs(
    code: list[Sass],
    beside: Mapping[str, float] = MappingProxyType({}),
    lost: float = 0.0,
    loops: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, Cost]:
    """Return, by line of the PTX, the cost of one execution of its instruction.

    ``beside`` gives by pipe how many times slower it is while a wgmma runs, ``lost`` the cycles
    that MUFU then loses to each FMA or ALU instruction, ``loops`` by line of the PTX a number that
    lines in the same loops share.
    """
    found: dict[int, Cost] = defaultdict(Cost)
    depths = _depths(code)
    parts = _parts(code, depths, loops)
    slow = _in_order(code, beside, lost) if beside else None
    for i, (ins, cycles) in enumerate(zip(code, _in_order(code, {}), strict=True)):
        if ins.opcode == "NOP":
            continue
        part = parts[i]
        pipe, busy = _pipe(ins.opcode)
        pipes = dict.fromkeys(PIPES, 0.0) | {pipe: part * busy}
        longer = max(0.0, slow[i] - cycles) if slow else 0.0
        cost = found[ins.line]
        place, depth = [(ins.block, ins.at)], depths[ins.block]
        cost.add(Cost(part, part * cycles, part * longer, pipes, place, depth=depth))
        if ins.opcode.startswith(_PRODUCTS):
            cost.products.append(ins.at)
        elif ins.opcode.startswith(_ASYNCHRONOUS):
            cost.asynchronous.append(ins.at)
    return dict(found)


def _parts(code: list[Sass], depth: Mapping[int, int], loops: Mapping[int, int]) -> list[float]:
    """How much of each instruction one execution of its PTX line executes: of the blocks in the
    innermost loop, which come most often, one of several copies, and where ptxas has unrolled the
    PTX's loop, in part or whole, one of the copies in its block. An instruction that calls a
    function in a block of its own does so rarely: the slow path.
    """
    kinds: dict[tuple[int, int], list[str]] = defaultdict(list)  # of a line in a block
    lines: dict[int, set[int]] = defaultdict(set)
    heads = [ins.opcode.split(".")[0] for ins in code]
    for ins, head in zip(code, heads, strict=True):
        kinds[ins.line, ins.block].append(head)
        lines[ins.line].add(ins.block)
    rare = {
        (line, b) for (line, b), found in kinds.items() if "CALL" in found and len(lines[line]) > 1
    }
    for line, blocks in lines.items():
        most = max(depth[b] for b in blocks if (line, b) not in rare)
        rare |= {(line, b) for b in blocks if depth[b] < most}
    copies: dict[tuple[int, str], set[int]] = defaultdict(set)
    for (line, block), found in kinds.items():
        if (line, block) not in rare:
            for head in found:
                copies[line, head].add(block)
    turns = _turns(kinds, loops)
    return [
        0.0
        if (ins.line, ins.block) in rare
        else 1.0 / (len(copies[ins.line, head]) * turns[ins.block, loops.get(ins.line, 0)])
        for ins, head in zip(code, heads, strict=True)
    ]


def _turns(
    kinds: Mapping[tuple[int, int], list[str]], loops: Mapping[int, int]
) -> dict[tuple[int, int], int]:
    """By block and the PTX's loops, how often the block has the innermost of them: what the counts
    of all lines with an opcode of ``_SINGLE`` have in common. In a loop that has none of those, of
    integers alone, the count of most of its lines, of which some may be of 64 bits and so two.
    """
    sure: dict[tuple[int, int], int] = defaultdict(int)
    likely: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for (line, block), found in kinds.items():
        place = block, loops.get(line, 0)
        if len(set(found)) == 1:
            likely[place][len(found)] += 1
            if found[0] in _SINGLE:
                sure[place] = math.gcd(sure[place], len(found))
    turns: dict[tuple[int, int], int] = defaultdict(lambda: 1, sure)
    for place, counts in likely.items():
        count, lines = counts.most_common(1)[0]
        if place not in sure and place[1] and count > 2 and 2 * lines > counts.total():
            turns[place] = count
    return turns


def _depths(code: list[Sass]) -> dict[int, int]:
    """In how many loops each basic block is."""
    last = {ins.block: ins for ins in code}
    order = list(last)
    before: dict[int, set[int]] = defaultdict(set)  # the blocks that go on to one
    for block, following in zip(order, [*order[1:], 0], strict=True):
        ins = last[block]
        if ins.goes:
            before[ins.goes].add(block)
        leaves = ins.opcode.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP")
        if following and (ins.guarded or not leaves):
            before[following].add(block)
    loops: dict[int, set[int]] = defaultdict(set)  # by first block: all of its loop
    for block in order:
        head = last[block].goes
        if not head or head > block:
            continue
        body, left = {head}, [block]
        while left:
            if (one := left.pop()) not in body:
                body.add(one)
                left += before[one]
        if min(body) == head:  # NOTE: else code that stands behind its place, and goes back
            loops[head] |= body
    return {block: sum(block in body for body in loops.values()) for block in order}


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

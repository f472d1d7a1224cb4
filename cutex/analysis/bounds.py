"""python -m cutex.bounds: facts and bounds of a kernel for a GPU that is not here.

Registers, memory and the mainloop are read from the compiled code: the MMA (its instruction
descriptor in the PTX), the number of MMAs between two waits (the innermost loop of the SASS that
starts MMAs), the bytes that a step of it loads (expect_tx in the PTX). The tile, the ring and the
sharing of operands come from the config. From these follow bounds on the time of one problem, by
each unit alone:

    tensor   MMAs back to back in every wave; an MMA takes N/2 cycles
    smem     the operands that MMAs read
    L2       the loads of all CTAs
    HBM      inputs and outputs once

each at its rate in the simulator's clock (docs/time.md), which predicts the same stages from the
same constants.

A bound is not a prediction. It leaves out the prologue and epilogue of a kernel, those of a tile
where the kernel does not overlap them, and any wait for latency.

Rows are kept in results/bounds/*.jsonl, and docs/bounds.md is rendered from them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cutex.arch import arch
from cutex.command import Parser, answered, in_clone
from cutex.compile.resources import Code, resources, sass
from cutex.peers import cutlass_example
from cutex.problem import DEFAULT_OP, Problem, problem_class
from cutex.problem.stage import Stage, stages
from cutex.sim.timing.gpus import Gpu, gpu, of_arch
from cutex.whole_file import write_whole

ARCH = "sm_100a"
GHZ = arch(ARCH).clock_hz / 1e9  # the clock at which the stated peak holds
BOARD = gpu(of_arch(ARCH)).at(GHZ)
PROBLEM = problem_class(DEFAULT_OP).of(problem_class(DEFAULT_OP).cases["cuda"][0])
FOLDER, PAGE = Path("results/bounds"), Path("docs/bounds.md")
PREDICTED = Path("results/timing") / f"predicted-{ARCH}.jsonl"
INST_BYTES = 32  # bytes of each row of A and of B that one MMA reads, whatever its kind
INST_K = {"tf32": 8, "f16": 16, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4nvf4": 64}


@dataclass(frozen=True)
class Row:
    """One compiled sm_100a kernel. Bytes of memory are per CTA; a step is one iteration of the
    mainloop."""

    kernel: str
    title: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    tmem_columns: int
    tile: tuple[int, int]  # rows and columns of the output that `ctas` CTAs compute together
    ctas: int
    mma: tuple[int, int, int]  # M, N, K of one instruction
    step_mmas: int
    step_bytes: int  # bytes that all `ctas` CTAs load
    ring_bytes: int  # bytes of A and B that one CTA can have in flight
    kind: str = "f16"  # of MMA (cutex.arch)

    @property
    def mma_cycles(self) -> float:
        """Cycles that one MMA occupies the tensor cores."""
        m, n, k = self.mma
        rates = arch(ARCH).mma_tflops
        faster = rates[self.kind] / rates["f16"]
        return 2 * m * n * k / (BOARD.mma_flops * faster * self.ctas)

    @property
    def mma_smem_bytes(self) -> int:
        """Bytes that one SM reads for its part of one MMA."""
        m, n, _ = self.mma
        return INST_BYTES * (m + n) // self.ctas

    @property
    def step_flops(self) -> int:
        m, n, k = self.mma
        return self.step_mmas * 2 * m * n * k

    @property
    def flops_per_byte(self) -> float:
        """FLOPs for each byte loaded through L2."""
        return self.step_flops / self.step_bytes

    @property
    def smem_share(self) -> float:
        """The busy share of the smem port while the tensor cores run MMAs back to back."""
        return self.mma_smem_bytes / BOARD.smem_bytes / self.mma_cycles

    def waves(self, problem: Problem, board: Gpu) -> tuple[int, float]:
        """The number of waves, and the share of the SMs' time in them that computes a tile."""
        tiles = problem.grid(self.tile)
        at_once = board.sms // self.ctas
        waves = -(-tiles // at_once)
        return waves, tiles * self.ctas / (waves * board.sms)

    def bounds(self, problem: Problem, board: Gpu) -> dict[str, float]:
        """The least cycles that each unit needs."""
        steps = problem.steps(self.tile, self.step_flops)
        per_tile = steps * self.step_mmas
        waves, _ = self.waves(problem, board)
        loaded = problem.grid(self.tile) * steps * self.step_bytes
        return {
            "tensor": waves * per_tile * self.mma_cycles,
            "smem": waves * per_tile * self.mma_smem_bytes / board.smem_bytes,
            "L2": loaded * (1.0 - board.l2_merged) / board.l2_bytes,
            "HBM": problem.bytes / board.hbm_bytes,
        }


# ---- read from code


def row(compiled: Code, kernel: str, title: str, **config: Any) -> Row:
    """The Row of a compiled kernel; `config` has the fields that the code does not show."""
    found = resources(compiled)
    m, n, ctas = mma_shape(compiled.ptx)
    kind = one_kind(compiled.ptx)
    return Row(
        kernel=kernel,
        title=title,
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        smem_bytes=found.smem_bytes,
        tmem_columns=found.tmem_columns,
        ctas=ctas,
        mma=(m, n, INST_K[kind]),
        kind=kind,
        step_mmas=step_mmas(sass(compiled)),
        step_bytes=max(constants(compiled.ptx, r"mbarrier\.arrive\.expect_tx\S*\s+\S+ \[\S+\], ")),
        **config,
    )


def constants(ptx: str, before: str) -> set[int]:
    """Return the possible values of the operand after `before`, followed back through mov, selp and
    or, from which the DSL builds instruction descriptors. Raises ValueError where they are not
    constants."""
    values: set[int] = set()
    for use in re.finditer(rf"{before}(%r\d+|\d+)", ptx):
        values |= _possible(ptx[: use.start()], use[1])
    if not values:
        raise ValueError(f"nothing that matches {before} in the PTX")
    return values


def _possible(ptx: str, operand: str) -> set[int]:
    if operand.isdecimal():
        return {int(operand)}
    definitions = [*re.finditer(rf"\b(mov|selp|or)\.b32\s+{operand}, ([^;]*);", ptx)]
    if not definitions:
        raise ValueError(f"{operand} is no constant in the PTX")
    last = definitions[-1]
    sources = [_possible(ptx[: last.start()], x) for x in last[2].split(", ")[:2]]
    if last[1] == "or":
        return {x | y for x in sources[0] for y in sources[1]}
    return set().union(*sources)


def one_kind(ptx: str) -> str:
    """The one kind of tcgen05.mma in `ptx`."""
    found = set(re.findall(r"tcgen05\.mma\S*\.kind::(\w+)", ptx))
    if len(found) != 1 or not found <= INST_K.keys():
        kinds = ", ".join(sorted(found)) or "none"
        raise ValueError(f"bounds are of tcgen05 MMAs of one kind, this code has {kinds}")
    return found.pop()


def mma_shape(ptx: str) -> tuple[int, int, int]:
    """Return M, N and CTAs of the one kind of tcgen05.mma in `ptx` (PTX ISA, instruction
    descriptor)."""
    found = {
        ((d >> 24 & 0x1F) * 16, (d >> 17 & 0x3F) * 8, int(group))
        for group in re.findall(r"tcgen05\.mma\.cta_group::(\d)", ptx)
        for d in constants(ptx, r"tcgen05\.mma\S+ \[\S+\], %rd\d+, %rd\d+, ")
    }
    if len(found) != 1:
        raise ValueError(f"MMAs of one shape were due, these are {found}")
    return found.pop()


def step_mmas(code: str) -> int:
    """The MMAs for each commit in the mainloop: of the innermost loops in the SASS that start MMAs,
    the one with most (others may compute the first or the last steps of a tile)."""
    lines = code.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L_x_\d+):", line))}
    loops = []
    for i, line in enumerate(lines):
        to = re.search(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)", line)
        if to and labels.get(to[1], i) < i and _count("UTCHMMA", lines[labels[to[1]] : i]):
            loops.append((labels[to[1]], i))
    innermost = [
        (a, b)
        for a, b in loops
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    if not innermost:
        raise ValueError("no loop in the SASS starts MMAs")
    return max(
        _count("UTCHMMA", lines[a:b]) // max(1, _count("UTCBAR", lines[a:b])) for a, b in innermost
    )


def _count(opcode: str, lines: Sequence[str]) -> int:
    return sum(bool(re.search(rf"\b{opcode}\b", line)) for line in lines)


def stage_row(stage: Stage[Any, Any], dtype: str = "bf16") -> Row:
    from cutex.compile import compile

    compiled = compile(stage.kernel(), dtype, stage.arch)
    one_kind(compiled.ptx)  # ValueError for a kernel without MMAs, whose config has no such tiles
    c = stage.config()
    return row(
        compiled,
        f"stage {stage.number}",
        stage.title,
        tile=(c.tile_m, c.tile_n),
        ring_bytes=c.num_stages * c.stage_bytes // c.ctas,
    )


def peer_row(clone: Path) -> Row:
    """CUTLASS's own example of the operator, compiled from a clone of CUTLASS."""
    example = cutlass_example.compiled(clone)
    found = row(example, "CUTLASS", "its persistent example", tile=example.tile, ring_bytes=0)
    return replace(found, ring_bytes=example.num_stages * found.step_bytes // found.ctas)


# ---- kept and rendered

COLUMNS = (
    ("kernel", "what it is"),
    ("registers", "a thread"),
    ("spills", "bytes a thread"),
    ("smem", "KB a CTA"),
    ("TMEM", "columns"),
    ("MMA", "shape, CTAs"),
    ("MMAs", "a step"),
    ("MFLOP", "a step"),
    ("ring", "KB a CTA"),
    ("L2", "FLOP/byte"),
    ("smem port", "% busy"),
    ("waves", "% of SMs"),
    *((unit, "us") for unit in ("tensor", "smem", "L2", "HBM")),
    ("bound", "TFLOPS"),
    ("model", "TFLOPS"),
)


def cells(r: Row, problem: Problem, board: Gpu, model: Mapping[str, float]) -> list[str]:
    waves, used = r.waves(problem, board)
    needs = {u: cycles / board.clock / 1e3 for u, cycles in r.bounds(problem, board).items()}
    unit = max(needs, key=lambda u: needs[u])
    return [
        f"{r.kernel}: {r.title}",
        f"{r.registers}",
        f"{r.spill_bytes}",
        f"{r.smem_bytes / 1024:.0f}",
        f"{r.tmem_columns}",
        "{}x{}x{}, {}".format(*r.mma, r.ctas),
        f"{r.step_mmas}",
        f"{r.step_flops / 1e6:.1f}",
        f"{r.ring_bytes / 1024:.0f}",
        f"{r.flops_per_byte:.0f}",
        f"{100 * r.smem_share:.0f}",
        f"{waves}, {100 * used:.0f}",
        *(f"{us:.0f}" for us in needs.values()),
        f"{unit} {problem.flops / needs[unit] / 1e6:.0f}",
        f"{model[r.kernel]:.0f}" if r.kernel in model else "",
    ]


def predicted(problem: Problem, file: Path) -> dict[str, float]:
    """The TFLOPS of each stage at the same clock rate, predicted by the simulator's clock
    (docs/time.md)."""
    rows = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.exists()
        else []
    )
    mine = [r for r in rows if (r["op"], r["size"]) == (problem.op, problem.size)]
    cycles = {f"stage {r['stage']}": r["cycles"] for r in mine}
    return {k: problem.flops * GHZ / c / 1e3 for k, c in cycles.items()}


def table(rows: Iterable[Row], problem: Problem = PROBLEM, board: Gpu = BOARD) -> str:
    """The rows as a Markdown table."""
    head = [f"{name}<br>{unit}" for name, unit in COLUMNS]
    rule = ["---", *("---:" for _ in COLUMNS[1:])]
    model = predicted(problem, PREDICTED)
    body = [cells(r, problem, board, model) for r in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def page(rows: Sequence[Row]) -> str:
    facts, p = arch(ARCH), PROBLEM
    return f"""# What is known of the {facts.title} ladder without a {facts.board}

`python -m cutex.bounds` writes this page from `results/bounds/`. Nothing in it was timed.

{table(rows)}

Times are bounds for {p.size} in bf16 on {BOARD.sms} SMs at {GHZ:.2f} GHz,
the clock at which the stated {facts.dense_tflops["bf16"]:.0f} TFLOPS hold; each unit by itself, as
`cutex/analysis/bounds.py` says, at its rate in the simulator's clock ([time.md](time.md), where
every constant has its source): {BOARD.mma_flops:.0f} FLOP, {BOARD.smem_bytes:.0f} bytes of shared
memory a cycle and SM, {BOARD.l2_bytes:.0f} bytes a cycle from L2 and {BOARD.hbm_gbs:.0f} GB/s from
HBM for all. They leave out what a kernel does not overlap: stages 0 and 1 load and compute in turn,
stages 0 to 5 store after they have computed; what they then leave is the last column, the cycles of
that clock at the same rate. CUTLASS's example is compiled from a clone of CUTLASS that the user
names, for the same problem, 256x256 tiles and clusters of 2x1.
"""


def read(folder: Path) -> list[Row]:
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            values["tile"], values["mma"] = tuple(values["tile"]), tuple(values["mma"])
            rows.append(Row(**values))
    return rows


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Stages first, then the kernels of others."""
    return sorted(rows, key=lambda r: (not r.kernel.startswith("stage"), r.kernel))


def write(rows: Iterable[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(json.dumps(asdict(r)) + "\n" for r in rows))


@answered
def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(
        prog="python -m cutex.bounds", description="Write results/bounds/ and docs/bounds.md."
    )
    p.add_argument(
        "--cutlass",
        default=os.environ.get("CUTEX_CUTLASS", ""),
        metavar="DIR",
        help="a clone of CUTLASS, whose example then stands beside the stages; or CUTEX_CUTLASS",
    )
    args = p.parse_args(argv)
    in_clone(PAGE)
    try:
        if args.cutlass:
            write([peer_row(Path(args.cutlass))], FOLDER / f"{ARCH}-cutlass.jsonl")
        write((stage_row(s) for s in stages(DEFAULT_OP, ARCH)), FOLDER / f"{ARCH}.jsonl")
    except ValueError as error:
        print(f"cutex: {error}", file=sys.stderr)
        return 2
    rows = in_order(read(FOLDER))
    write_whole(PAGE, page(rows))
    print(table(rows))
    return 0

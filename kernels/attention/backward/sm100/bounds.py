"""python -m cutex.kernels.attention.backward.sm100.bounds: its resources and bounds, not timed.

Registers, spills and memory are those of the compiled kernels for sm_100a and sm_103a. From the
config follow the least cycles of a block, 128 keys by tile_m queries, by each unit alone:

    MMA     the products, at 8192 FLOP a cycle; of 64 queries dQ takes as long as of 128
    MUFU    the exponentials, at 16 a cycle, 32 on sm_103a
    smem    what MMAs read, and what TMA and threads write, at 128 bytes a cycle

Rows are kept in results/attention-bounds/, and the second part of docs/attention-bounds.md is
rendered from them; its table of instructions for each score, of the records that the clock is
judged by, is written by `python -m cutex.clock --page`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cutex.arch import arch
from cutex.command import Parser, answered, in_clone
from cutex.compile.resources import all_resources
from cutex.kernels.attention.backward.config import ELEMENT
from cutex.kernels.attention.backward.sm100.choose import fitted
from cutex.kernels.attention.backward.sm100.config import (
    FOLDED,
    ROWS,
    Sm100BackwardConfig,
)
from cutex.kernels.attention.spec import HEAD_DIMS

ARCHS = ("sm_100a", "sm_103a")
MODULE = "cutex.kernels.attention.backward.sm100.bounds"  # as `python -m` takes it
FILE = Path("results/attention-bounds/backward.jsonl")
PAGE, TITLE = Path("docs/attention-bounds.md"), "# The backward\n"
MARKS = "<!-- instructions -->\n", "<!-- end of instructions -->"
# what is compiled of each head dim: fields that differ from the default, and the dtype
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, "bf16"),
    "causal": ({"causal": True}, "bf16"),
    "causal fp16": ({"causal": True}, "fp16"),
    "causal softcap": ({"causal": True, "softcap": True}, "bf16"),
    "causal deterministic": ({"causal": True, "deterministic": True}, "bf16"),
}


@dataclass(frozen=True)
class Row:
    """The figures of the three kernels of one config."""

    arch: str
    kind: str
    head_dim: int
    head_dim_v: int
    registers: tuple[int, ...]  # main's by role: add, compute, other
    spill_bytes: tuple[int, ...]  # of preprocess, main and convert
    smem_bytes: int
    tmem_columns: int

    @property
    def config(self) -> Sm100BackwardConfig:
        return config_of(self.kind, self.head_dim, self.head_dim_v)


def config_of(kind: str, head_dim: int, head_dim_v: int) -> Sm100BackwardConfig:
    changed, dtype = KINDS[kind]
    return fitted(Sm100BackwardConfig(head_dim=head_dim, head_dim_v=head_dim_v, **changed), dtype)


def cycles(c: Sm100BackwardConfig, name: str) -> dict[str, float]:
    """The least cycles of one block on one SM, by unit."""
    gpu, m, n = arch(name), c.tile_m, ROWS
    folded = 2 * FOLDED if c.folded else 0  # of K, of S and of dP each
    macs = m * n * (c.head_dim + c.head_dim_v + 2 * folded)  # S, dP
    macs += m * n * (c.dv_width + c.dk_width) + max(m, ROWS) * n * c.dk_width
    reads: float = (m + n) * (c.head_dim + c.head_dim_v + 2 * folded)  # both operands of S and dP
    reads += m * (c.dv_width + c.dk_width) + c.late_dk * m * n  # B of dV and dK, maybe A of dK
    reads += m * n * c.dq_parts + n * c.dk_width  # A of dQ for each part, and B
    written = m * n + m * (c.head_dim + c.head_dim_v)  # dS, and Q and dO by TMA
    smem = ELEMENT * (reads + written) + c.stats_bytes + 2 * c.dq_slots * c.dq_bytes
    return {
        "MMA": 2 * macs / gpu.mma_flops,
        "MUFU": m * n / gpu.exponentials,
        "smem": smem / gpu.smem_bytes_per_clock,
    }


def row(name: str, kind: str, head_dim: int, head_dim_v: int) -> Row:
    from cutex.compile import compile
    from cutex.kernels.attention.backward.sm100.backward import Backward

    c = config_of(kind, head_dim, head_dim_v)
    found = all_resources(compile(Backward(c), KINDS[kind][1], name))
    main = next(r for r in found if r.tmem_columns)
    spills = tuple(r.spill_bytes for r in found)
    return Row(
        name, kind, head_dim, head_dim_v, c.registers, spills, main.smem_bytes, main.tmem_columns
    )


def cases() -> Iterator[tuple[str, str, int, int]]:
    """The arguments of `row` for all rows."""
    for name in ARCHS:
        for d, dv in HEAD_DIMS:
            for kind in KINDS:
                yield name, kind, d, dv


# ---- kept and rendered


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _dims(r: Row) -> str:
    return f"{r.head_dim}" if r.head_dim == r.head_dim_v else f"{r.head_dim}/{r.head_dim_v}"


def bounds_table(rows: Iterable[Row]) -> str:
    """The bounds of a block, full, by head dim."""
    head = (
        "head dim", "queries", "registers<br>add, compute, other", "smem<br>KB", "TMEM<br>columns",
        "MMA<br>cycles a block", "MUFU", "smem", "binds",
    )  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for r in rows:
        if (r.arch, r.kind) == (ARCHS[0], "full"):
            units = cycles(r.config, r.arch)
            lines.append(
                (
                    _dims(r), f"{r.config.tile_m}", ", ".join(map(str, r.registers)),
                    f"{r.smem_bytes / 1024:.0f}", f"{r.tmem_columns}",
                    *(f"{x:.0f}" for x in units.values()), max(units, key=units.__getitem__),
                )
            )  # fmt: skip
    return _markdown(lines)


def spills_table(rows: Iterable[Row]) -> str:
    """The bytes that a thread spills, of each launch, by head dim, arch and kind."""
    found = {(_dims(r), r.arch, r.kind): r.spill_bytes for r in rows}
    head = ("head dim", *(f"{name}<br>{kind}" for name in ARCHS for kind in KINDS))
    lines = [head, ("---",) * len(head)]
    for dims in dict.fromkeys(d for d, _, _ in found):
        cells = (found.get((dims, name, kind)) for name in ARCHS for kind in KINDS)
        lines.append((dims, *("" if x is None else ", ".join(map(str, x)) for x in cells)))
    return _markdown(lines)


def part(rows: Sequence[Row], instructions: str = "") -> str:
    """The part of the page that is the backward's, with what is between its marks."""
    return f"""{TITLE}
`python -m {MODULE}` writes this part.
Nothing in it was timed. Cycles are those that a block takes at least, 128 keys by the queries
named, on one SM, by each unit alone, as the module says:

{bounds_table(rows)}

Bytes that a thread spills, of preprocess, main and convert, by what is compiled; `softcap`, `fp16`
and head dim 256 read LSE and delta instead of having tensor cores subtract them:

{spills_table(rows)}

Instructions of the machine code for a score (those of all warps of 32 lanes, times 32, by the
scores), in blocks without a mask, counted in the records of which the clock's table is made; of
head dim 256 two of our CTAs compute each score. FlashAttention-4's two CTAs are a pair:

{MARKS[0]}{instructions}{MARKS[1]}
"""


def between_marks(page: str) -> str:
    return page.partition(MARKS[0])[2].partition(MARKS[1])[0]


def with_part(page: str, text: str) -> str:
    """The page with `text` as its backward's part."""
    return page.partition(TITLE)[0].rstrip("\n") + "\n\n" + text


def read(file: Path) -> list[Row]:
    kept = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tuples = ("registers", "spill_bytes")
    return [Row(**{**r, **{name: tuple(r[name]) for name in tuples}}) for r in kept]


@answered
def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(prog=f"python -m {MODULE}", description=f"Write the second part of {PAGE} anew.")
    p.add_argument("--kept", action="store_true", help=f"from the rows of {FILE}, compile nothing")
    args = p.parse_args(argv)
    in_clone(PAGE)
    rows = read(FILE) if args.kept else [row(*key) for key in cases()]
    FILE.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_part(page, part(rows, between_marks(page))), encoding="utf-8")
    print(spills_table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

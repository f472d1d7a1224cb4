"""python -m cutex.kernels.attention.forward.sm100.bounds: bounds on its time, without a B200.

Registers and memory are those of the compiled kernel, by role those that setmaxnreg gives it; the
instructions for each score are counted in the SASS of its shortest loop of exponentials, that of
the blocks without a mask. From the config follow the cycles that a block of keys takes at least, of
all Q tiles of a CTA, by each unit alone:

    MMA     both products, at 8192 FLOP a cycle
    MUFU    the exponentials that FMA units do not take, at 16 a cycle
    smem    what MMAs read and what TMA writes, at 128 bytes a cycle
    issue   the softmax loop, of which each of four schedulers has a warp for each Q tile

FlashAttention-4's own kernel is compiled beside it where it can be imported (extra `peers`). Rows
are kept in results/attention-bounds/, and docs/attention-bounds.md is rendered from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cutex.arch import arch
from cutex.command import Parser, answered, in_clone
from cutex.compile.resources import Code, opcodes, resources, sass
from cutex.kernels.attention.forward.config import ELEMENT
from cutex.kernels.attention.forward.sm100.choose import fitted
from cutex.kernels.attention.forward.sm100.config import ROWS, Sm100ForwardConfig
from cutex.kernels.attention.spec import HEAD_DIMS, AttentionSpec, Shape
from cutex.peers import flash_attention, flash_attention_code

ARCH = "sm_100a"
BACKWARD = "\n# The backward\n"  # where the page's other part begins (backward/sm100/bounds.py)
MODULE = "cutex.kernels.attention.forward.sm100.bounds"  # as `python -m` takes it
FILE, PAGE = Path("results/attention-bounds/sm_100a.jsonl"), Path("docs/attention-bounds.md")
SHAPE = Shape(batch=1, heads_q=16, heads_kv=16, longest_q=4096, longest_k=4096, mean_q=4096)


@dataclass(frozen=True)
class Row:
    """The figures of one compiled kernel."""

    kernel: str
    head_dim: int
    head_dim_v: int
    causal: bool
    ctas: int  # CTAs that share K and V
    q_tiles: int
    tile_n: int
    registers: str  # by role: epilogue, softmax, other
    spill_bytes: int
    smem_bytes: int
    tmem_columns: int
    by_mufu: int  # exponentials on MUFU, out of tile_n of a row
    loop: int  # instructions of the softmax loop, for one block

    def cycles(self) -> dict[str, float]:
        """The cycles of one block of keys, by unit."""
        gpu, n, both = arch(ARCH), self.tile_n, self.head_dim + self.head_dim_v
        rows = ROWS * self.q_tiles
        reads = self.q_tiles * (ROWS + n // self.ctas) * self.head_dim  # A and B of QK
        reads += self.q_tiles * n * self.head_dim_v // self.ctas  # B of PV
        smem = ELEMENT * (reads + n * both // self.ctas)
        return {
            "MMA": 2 * rows * n * both / gpu.mma_flops,
            "MUFU": rows * self.by_mufu / gpu.exponentials,
            "smem": smem / gpu.smem_bytes_per_clock,
            "issue": self.q_tiles * self.loop,
        }


# ---- read from code


def loops(text: str) -> Iterator[list[str]]:
    """The opcodes of every loop of a SASS listing, from a label to a branch back to it."""
    lines = text.splitlines()
    labels = {m[1]: i for i, x in enumerate(lines) if (m := re.match(r"\s*(\.L\w+):", x))}
    for i, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(\.L\w+)", line)
        if target and labels.get(target[1], i) < i:
            yield list(opcodes("\n".join(lines[labels[target[1]] : i + 1])))


def softmax_loop(text: str, tile_n: int) -> tuple[int, int]:
    """The number of instructions of the shortest loop that computes a block's exponentials, and how
    many of them are MUFU."""
    found = []
    for ops in loops(text):
        exponentials = sum(op.startswith("MUFU.EX2") for op in ops)
        if exponentials > tile_n // 4:
            found.append((len(ops), exponentials))
    if not found:
        raise ValueError("no loop of exponentials in the SASS")
    return min(found)


def row(config: Sm100ForwardConfig) -> Row:
    from cutex.compile import compile
    from cutex.kernels.attention.forward.sm100.forward import Forward

    kernel = Forward(config)
    compiled = compile(kernel, "bf16", ARCH)
    return read_code(
        compiled,
        kernel="cutex",
        head_dim=config.head_dim,
        head_dim_v=config.head_dim_v,
        causal=config.causal,
        ctas=config.ctas,
        q_tiles=config.q_tiles,
        tile_n=config.tile_n,
        registers=", ".join(map(str, kernel.roles.registers)),
    )


def peer_rows() -> list[Row]:
    """The rows of FlashAttention-4's kernels; none if it is not installed."""
    return [
        read_code(
            code,
            tile_n=128,
            kernel=flash_attention.version(),
            head_dim=d,
            head_dim_v=d,
            causal=False,
            ctas=1,
            q_tiles=2,
            registers=registers,
        )
        for d, registers, code in flash_attention_code.kernels()
    ]


def read_code(compiled: Code, tile_n: int, **known: Any) -> Row:
    found = resources(compiled)
    loop, by_mufu = softmax_loop(sass(compiled), tile_n)
    return Row(
        tile_n=tile_n,
        spill_bytes=found.spill_bytes,
        smem_bytes=found.smem_bytes,
        tmem_columns=found.tmem_columns,
        by_mufu=min(by_mufu, tile_n),  # one more scales the sums
        loop=loop,
        **known,
    )


def configs() -> Iterator[Sm100ForwardConfig]:
    for d, dv in HEAD_DIMS:
        for causal in (False, True):
            yield fitted(AttentionSpec(d, dv, causal=causal), SHAPE, arch(ARCH))


# ---- kept and rendered


def table(rows: Iterable[Row]) -> str:
    head = (
        "kernel", "head dim", "mask", "CTAs, Q tiles", "registers<br>epilogue, softmax, other",
        "spills<br>bytes", "smem<br>KB", "TMEM<br>columns", "exponentials<br>% on FMA units",
        "softmax loop<br>instructions a score", "MMA<br>cycles a block", "MUFU", "smem", "issue",
        "binds",
    )  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for r in rows:
        cycles = r.cycles()
        dims = f"{r.head_dim}" if r.head_dim == r.head_dim_v else f"{r.head_dim}/{r.head_dim_v}"
        lines.append(
            (
                r.kernel, dims, "causal" if r.causal else "full", f"{r.ctas}, {r.q_tiles}",
                r.registers, f"{r.spill_bytes}", f"{r.smem_bytes / 1024:.0f}", f"{r.tmem_columns}",
                f"{100 * (1 - r.by_mufu / r.tile_n):.0f}", f"{r.loop / r.tile_n:.2f}",
                *(f"{x:.0f}" for x in cycles.values()), max(cycles, key=cycles.__getitem__),
            )
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(rows: Sequence[Row]) -> str:
    return f"""# What is known of the Blackwell attention forward without a B200

`python -m {MODULE}` writes this page from `results/attention-bounds/`.
Nothing in it was timed.

{table(rows)}

Cycles are those that a block of {rows[0].tile_n} keys takes at least, for all Q tiles of a CTA, by
each unit alone, as the module says. The softmax loop is that of blocks without a mask: where it
looks for no larger score it holds nothing else; at head dims 192 and 256, where MMAs take by far
the longest, it looks for one, and counts what scales O when that moves far. FlashAttention-4's is
the loop that it has for all blocks without a mask, of its kernel of one CTA a tile.
"""


def read(file: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


@answered
def main(argv: Sequence[str] | None = None) -> int:
    Parser(prog=f"python -m {MODULE}", description=f"Write {PAGE} anew.").parse_args(argv)
    in_clone(PAGE)
    rows = [row(c) for c in configs()]
    rows += peer_rows() or [r for r in (read(FILE) if FILE.exists() else []) if r.kernel != "cutex"]
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows), encoding="utf-8")
    kept = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(page(rows) + "".join(kept.partition(BACKWARD)[1:]), encoding="utf-8")
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Rates that others published of B200s at full clock and power, beside ours by the clock.

    python -m cutex.clock_errors.published

prints the table of docs/time.md; `python -m cutex.clock --page` writes it. The kernels are not the
same: others' were timed, ours are predicted. But all keep tensor cores busy most of the time, so
that the clock that power allows on the data that they used decides. Two constants were chosen by
these rows, the energies of a FLOP and of an instruction (`Power.flop_pj`, `issue_pj`), by the two
that say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cutex.clock_errors.processes import Job, results
from cutex.clock_errors.rows import FOLDER, Summary, traces_file
from cutex.command import Parser, answered
from cutex.sim.timing import stored
from cutex.sim.timing.call import time_launch
from cutex.sim.timing.gpus import B200, Gpu
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.timed import Whole

TRACES = FOLDER / "traces-published-sm_100a.json.gz"
SWEEP = "cuBLAS, the best of square sizes, 4096 to 15360 (gn-kernels)"


@dataclass(frozen=True)
class Published:
    """A published rate, and our record that is nearest."""

    what: str
    tflops: float
    source: str
    record: str  # its name
    size: tuple[int, ...]  # (m, n, k), or attention's (batch, seqlen, heads, head dim)
    tile: tuple[int, int] = (1, 1)  # of a CTA, of a GEMM
    causal: bool = False
    data: str = "normal"
    fitted: bool = False

    @property
    def flops(self) -> float:
        if len(self.size) == 3:
            return 2.0 * math.prod(self.size)
        batch, seqlen, heads, head_dim = self.size
        return 4.0 * batch * heads * seqlen**2 * head_dim / (2 if self.causal else 1)

    @property
    def whole(self) -> Whole:
        """The work of a GEMM's grid, whose tiles at the edge are whole; an attention's record knows
        its own."""
        if len(self.size) == 4:
            return Whole()
        (m, n, k), (tile_m, tile_n) = self.size, self.tile
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
        return Whole(2.0 * tiles * tile_m * tile_n * k, 2.0 * tile_m * tile_n * k)


@dataclass(frozen=True)
class PublishedError:
    row: Published
    tflops: float  # predicted
    ghz: float

    @property
    def rate(self) -> float:
        """The relative error."""
        return self.tflops / self.row.tflops - 1


LARGE, CUBED, HEADS = (8192, 8192, 8192), (4096, 4096, 4096), (4, 8192, 16, 128)
ROWS = (
    Published("bf16, Gaussian", 1722.5, SWEEP, "bf16/8192x8192x8192", LARGE, (256, 256),
              fitted=True),
    Published("MXFP8, Gaussian", 3171.9, SWEEP, "mxfp8/8192x8192x8192", LARGE, (256, 128)),
    Published("NVFP4, random bits", 6241.6, SWEEP, "nvfp4/8192x8192x8192", LARGE, (256, 128)),
    Published("fp16, small integers, 8192x8192x4096", 1840, "deciding/cutex",
              "gemm/sm_100a/9/8192x8192x4096", (8192, 8192, 4096), (256, 256), data="int"),
    Published("bf16, 4096x4096x4096", 1540, "ThunderKittens 2.0",
              "gemm/sm_100a/9/4096x4096x4096", CUBED, (256, 160)),
    Published("attention, 4x8192, 16 heads of 128, full", 1535, "flash-attention#2280",
              "attention/4x8192", HEADS, fitted=True),
    Published("the same, causal", 1418, "flash-attention#2280", "attention/4x8192 causal", HEADS,
              causal=True),
)  # fmt: skip


def errors(
    rows: Iterable[Published], traces: Mapping[str, Recorded], gpu: Gpu
) -> Iterator[PublishedError]:
    """The error of each row that was recorded."""
    for row in rows:
        if row.record in traces:
            yield error(row, traces, gpu)


def error(row: Published, traces: Mapping[str, Recorded], gpu: Gpu) -> PublishedError:
    """The error of a row that was recorded."""
    found = time_launch(traces[row.record], gpu, row.whole, data=row.data)
    return PublishedError(row, row.flops / found.us / 1e6, found.clock_ghz)


def table(found: Sequence[PublishedError]) -> str:
    """Markdown: each rate, the predicted one and its error; of those held out a summary."""
    lines = [
        "| what | of | published | ours, predicted | GHz | error |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for e in found:
        error = f"{100 * e.rate:+.0f} %" + (", fitted" if e.row.fitted else "")
        cells = e.row.what, e.row.source, f"{e.row.tflops:.0f}", f"{e.tflops:.0f}", f"{e.ghz:.2f}"
        lines.append(f"| {' | '.join([*cells, error])} |")
    return "\n".join(lines)


def held_out(found: Iterable[PublishedError]) -> Summary:
    """The errors of the rows that no constant was fitted to."""
    return Summary.of(e.rate for e in found if not e.row.fitted)


def traces() -> Mapping[str, Recorded]:
    """Our records, of those that the ladders have and of those kept for these rows."""
    return stored.load(traces_file("gemm", "sm_100a"), TRACES)


def jobs() -> list[Job[PublishedError]]:
    """Of each row that was recorded, what computes its error."""
    records = traces()
    return [partial(error, row, records, B200) for row in ROWS if row.record in records]


@answered
def main(argv: Sequence[str] | None = None) -> int:
    Parser(
        prog="python -m cutex.clock_errors.published",
        description="Hold the simulator's clock against rates of B200s that others have published.",
    ).parse_args(argv)
    print(table(results("rates are predicted", jobs())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

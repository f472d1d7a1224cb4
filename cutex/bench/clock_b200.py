"""How far off the clock is on a B200 that others measured: CUTLASS's persistent GEMMs, 1300 MHz.

The rows are hbarclay/gemm-model's (commit 0de20a8): 40 problems x tiles x clusters in fp16, fp8 and
nvfp4, with the SMs' clock held, so that cycles alone count. Two short K of each kernel are
recorded; the time of a problem is linear in K between and beyond them. Half of the problems are
held out of every fit, by a hash of their sizes.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cutex.bench.clock_errors import FOLDER, Summary
from cutex.sim.timing.gpus import Gpu, gpu
from cutex.sim.timing.predict import whole_cycles
from cutex.sim.timing.replay import Replay, Run
from cutex.sim.timing.trace import Traced
from cutex.sim.timing.traffic import clusters_at_once, loaded
from cutex.sim.timing.units import Memory

ROWS = FOLDER / "b200-1300mhz.csv"
TRACES = FOLDER / "traces-cutlass-sm_100a.json.gz"
GHZ = 1.3
ROW = 128  # bytes of K of a box
PADDED = 16  # bytes that TMA wants rows of a tensor to be a multiple of
COLUMNS = ("dtype", "m", "n", "k", "mma_m", "mma_n", "cluster_m", "cluster_n", "us")
BYTES = {"fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5}  # of an element of A and B
FACTORS = 16  # elements of nvfp4 that share a scale factor of a byte
LENGTHS = {"fp16": (1024, 2048), "fp8": (2048, 4096), "nvfp4": (4096, 8192)}  # K that are recorded
OVERHEAD_US = 10.7  # that these rows have more than a launch in a graph: fit, +-1


@dataclass(frozen=True)
class B200Row:
    """One kernel on one problem, measured. ``tile`` is that of a pair of CTAs."""

    dtype: str
    mnk: tuple[int, int, int]
    tile: tuple[int, int]
    cluster: tuple[int, int]
    us: float

    @property
    def held_out(self) -> bool:
        text = "x".join(map(str, self.mnk))
        return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2 == 1

    def key(self, k: int) -> str:
        """The name of the record with this K."""
        (m, n), (x, y) = self.tile, self.cluster
        return f"{self.dtype}/{m}x{n}/{x}x{y}/{k}"

    @property
    def keys(self) -> tuple[str, str]:
        return self.key(LENGTHS[self.dtype][0]), self.key(LENGTHS[self.dtype][1])


@dataclass(frozen=True)
class B200Error:
    row: B200Row
    us: float  # predicted

    @property
    def relative(self) -> float:
        return self.us / self.row.us - 1


def measured(file: Path = ROWS) -> list[B200Row]:
    """Rows of the published file; ValueError for another."""
    with file.open() as text:
        found = list(csv.DictReader(text))
    if not found or not set(COLUMNS) <= set(found[0]):
        raise ValueError(f"{file} is no table of {', '.join(COLUMNS)}")
    return [
        B200Row(
            r["dtype"], (int(r["m"]), int(r["n"]), int(r["k"])), (int(r["mma_m"]), int(r["mma_n"])),
            (int(r["cluster_m"]), int(r["cluster_n"])), float(r["us"]),
        )
        for r in found
    ]  # fmt: skip


@dataclass
class B200Model:
    """Times of rows by one set of constants; replays are kept."""

    traced: Mapping[str, Traced]
    gpu: Gpu = field(default_factory=lambda: gpu(f"b200,clock={GHZ}"))
    runs: dict[tuple[str, float, float, int], Run] = field(default_factory=dict)

    def us(self, row: B200Row) -> float:
        short, long = LENGTHS[row.dtype]
        a, b = (self._cycles(row, k) for k in (short, long))
        cycles = a + (b - a) * (row.mnk[2] - short) / (long - short)
        return (cycles + self.gpu.launch) / GHZ / 1e3 + OVERHEAD_US

    def _cycles(self, row: B200Row, k: int) -> float:
        """Of the row's grid, if its K were ``k``."""
        record = self.traced[row.key(k)].record
        m, n, whole_k = row.mnk
        size = row.cluster[0] * row.cluster[1]
        rows = math.ceil(m / (row.tile[0] * row.cluster[0] / 2))
        columns = math.ceil(n / (row.tile[1] * row.cluster[1]))
        at_once = min(clusters_at_once(self.gpu, size), rows * columns)
        loads = loaded(record)
        tile = 2.0 * (row.tile[0] * row.cluster[0] / 2) * (row.tile[1] * row.cluster[1]) * k
        times = rows * columns * (whole_k / k) / (record.flops / tile)
        # clusters walk along M first
        part_a, part_b = min(rows, at_once) / at_once, math.ceil(at_once / rows) / at_once
        parts = dict(zip(sorted(loads), (part_a, part_b) * 2, strict=False))
        footprint = dict(zip(sorted(loads), self._footprints(row), strict=False))
        again = sum(footprint.values()) > self.gpu.l2_capacity
        missed = sum(
            max(min(footprint[x], times * size), parts[x] * times * size if again else 0.0)
            for x, size in loads.items()
        )
        total = sum(loads.values())
        miss = round(min(1.0, missed / (times * total)), 2)
        shared = round(1.0 - sum(parts[x] * size for x, size in loads.items()) / total, 2)
        found = row.key(k), miss, shared, at_once * size
        if found not in self.runs:
            memory = Memory(miss, at_once * size, shared)
            self.runs[found] = Replay(record, self.gpu, memory).run()
        tiles = math.ceil(rows * columns / at_once)
        cycles = whole_cycles(self.runs[found], tiles * tile, tile, record.flops)
        return cycles + tiles * self._outside(row)

    def _outside(self, row: B200Row) -> float:
        """Cycles of a tile whose last boxes are outside in part, which TMA has one at a time; only
        where rows of A and B had to be padded (K of 257) do the measured times show them.
        """
        if row.mnk[2] * BYTES[row.dtype] % PADDED == 0:
            return 0.0
        x, y = row.cluster  # CTAs of a cluster share what they load
        boxes = ROW * (row.tile[0] / 2 / y + row.tile[1] / x)
        return boxes / self.gpu.tma_outside

    @staticmethod
    def _footprints(row: B200Row) -> tuple[float, ...]:
        """Bytes of A, B and their scale factors."""
        m, n, k = row.mnk
        size = BYTES[row.dtype]
        return m * k * size, n * k * size, m * k / FACTORS, n * k / FACTORS


def errors(rows: Iterable[B200Row], model: B200Model) -> Iterator[B200Error]:
    """Of rows whose kernel was recorded."""
    for row in rows:
        if all(key in model.traced for key in row.keys):
            yield B200Error(row, model.us(row))


def losses(found: Sequence[B200Error]) -> list[float]:
    """What the tile and cluster that the model calls best lose to the best, by problem."""
    problems: dict[tuple[str, tuple[int, int, int]], list[B200Error]] = {}
    for e in found:
        problems.setdefault((e.row.dtype, e.row.mnk), []).append(e)
    return [
        min(mine, key=lambda e: e.us).row.us / min(e.row.us for e in mine) - 1
        for mine in problems.values()
    ]


def table(found: Sequence[B200Error]) -> str:
    """Markdown: by type of the operands, fitted and held out."""
    lines = [
        "| B200, 1300 MHz | rows | median % | nine of ten % | largest % | "
        "tile called best loses, mean % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for dtype in dict.fromkeys(e.row.dtype for e in found):
        mine = [e for e in found if e.row.dtype == dtype]
        for name, held in (("held out", True), ("fitted", False)):
            part = [e for e in mine if e.row.held_out is held]
            loss = losses(part)
            mean = 100 * sum(loss) / len(loss) if loss else 0.0
            summary = Summary.of(e.relative for e in part)
            lines.append(f"| {dtype}, {name} | {summary} | {mean:.1f} |")
    return "\n".join(lines)

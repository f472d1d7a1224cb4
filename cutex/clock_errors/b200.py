"""The error of the clock on published times of a B200: CUTLASS's persistent GEMMs at 1300 MHz.

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from cutex.clock_errors.processes import Job
from cutex.clock_errors.rows import FOLDER, Summary
from cutex.sim.timing.gpus import Gpu, gpu
from cutex.sim.timing.replay import Replay, Run, when
from cutex.sim.timing.trace import Traced
from cutex.sim.timing.traffic import clusters_at_once, loaded
from cutex.sim.timing.units import Memory

ROWS = FOLDER / "b200-1300mhz.csv"
TRACES = FOLDER / "traces-cutlass-sm_100a.json.gz"
GHZ = 1.3
COLUMNS = ("dtype", "m", "n", "k", "mma_m", "mma_n", "cluster_m", "cluster_n", "us")
BYTES = {"fp16": 2.0, "fp8": 1.0, "nvfp4": 0.5}  # bytes of an element of A and B
FACTORS = 16  # elements of nvfp4 that share a scale factor of a byte
LENGTHS = {  # values of K that are recorded
    "fp16": (256, 512, 1024, 2048), "fp8": (256, 512, 1024, 2048), "nvfp4": (512, 2048, 4096),
}  # fmt: skip
STEADY = 2  # the last tiles of a record, whose pace all later ones keep
OVERHEAD_US = 7.0  # the rows' time beyond that of a launch in a graph: fit, +-1
SLOW_US = 80.0  # a launch's first us, in which MMAs take longer: fit, +-30
SLOWER = {"fp16": 0.12, "fp8": 0.25, "nvfp4": 0.12}  # by how much: fit, +-0.04
HOST_US = {"fp16": 0.0, "fp8": 0.0, "nvfp4": 23.1}  # the host's time of a launch: fit, +-0.5


@dataclass(frozen=True)
class B200Row:
    """One kernel on one problem, measured. ``tile`` is the tile of a pair of CTAs."""

    dtype: str
    mnk: tuple[int, int, int]
    tile: tuple[int, int]
    cluster: tuple[int, int]
    us: float

    @property
    def held_out(self) -> bool:
        text = "x".join(map(str, self.mnk))
        return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2 == 1

    @property
    def padded(self) -> tuple[int, int, int]:
        """The problem as it was run: each extent a multiple of 16 bytes of A and B."""
        elements = round(16 / BYTES[self.dtype])
        m, n, k = (-(-x // elements) * elements for x in self.mnk)
        return m, n, k

    def key(self, k: int) -> str:
        """The name of the record with this K."""
        (m, n), (x, y) = self.tile, self.cluster
        return f"{self.dtype}/{m}x{n}/{x}x{y}/{k}"


@dataclass(frozen=True)
class B200Error:
    row: B200Row
    us: float  # predicted

    @property
    def relative(self) -> float:
        return self.us / self.row.us - 1


def measured(file: Path = ROWS) -> list[B200Row]:
    """Return the rows of the published file. Raises ValueError for another file."""
    with file.open(encoding="utf-8") as text:
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
    """The predicted times of rows by one set of constants; replays are cached."""

    traced: Mapping[str, Traced]
    gpu: Gpu = field(default_factory=lambda: gpu(f"b200,clock={GHZ}"))
    overhead: float = OVERHEAD_US
    runs: dict[tuple[str, float, int], Run] = field(default_factory=dict)

    def us(self, row: B200Row) -> float:
        k = row.padded[2]
        short, long = _beside(k, LENGTHS[row.dtype])
        (a, _), (b, tensor) = (self._cycles(row, length) for length in (short, long))
        slope = (b - a) / (long - short)
        if k > long:  # NOTE: the tensor cores may bind at this K, though not at a short one
            slope = max(slope, tensor / long)
        cycles = max(b + slope * (k - long) + self.gpu.launch, 0.0)
        us = cycles / GHZ / 1e3 + self.overhead
        slow = SLOWER[row.dtype] * slow_start(tensor / long * k / GHZ / 1e3, us)
        return max(us + slow, HOST_US[row.dtype])

    def _cycles(self, row: B200Row, k: int) -> tuple[float, float]:
        """The cycles of the row's grid, if its K were ``k``; and the busy cycles of the tensor
        cores."""
        record = self.traced[row.key(k)].record
        m, n, whole_k = row.padded
        size = row.cluster[0] * row.cluster[1]
        rows = math.ceil(m / (row.tile[0] * row.cluster[0] / 2))
        columns = math.ceil(n / (row.tile[1] * row.cluster[1]))
        at_once = min(clusters_at_once(self.gpu, size), rows * columns)
        loads = loaded(record)
        tile = 2.0 * (row.tile[0] * row.cluster[0] / 2) * (row.tile[1] * row.cluster[1]) * k
        times = rows * columns * (whole_k / k) / (record.flops / tile)
        # clusters walk along M first, so A is needed again for each group of columns
        passes = columns / math.ceil(at_once / rows)
        missed = 0.0
        for x, footprint in zip(sorted(loads), self._footprints(row), strict=False):
            again = 0.0
            if x in sorted(loads)[::2]:
                again = (passes - 1) * footprint * refetched(footprint / self.gpu.l2_capacity)
            missed += min(footprint + again, times * size * loads[x])
        miss = _rounded(min(1.0, missed / (times * size * sum(loads.values()))))
        found = row.key(k), miss, at_once * size
        if found not in self.runs:
            memory = Memory(miss, at_once * size, ahead=self.gpu.l2_ahead)
            self.runs[found] = Replay(record, self.gpu, memory).run()
        tiles = math.ceil(rows * columns / at_once)
        run = self.runs[found]
        tensor = tiles * tile * run.units["tensor core"] / record.flops
        return after_tiles(run, tiles, tile, math.floor(record.flops / tile + 1e-6)), tensor

    @staticmethod
    def _footprints(row: B200Row) -> tuple[float, ...]:
        """Bytes of A, B and their scale factors."""
        m, n, k = row.padded
        size = BYTES[row.dtype]
        return m * k * size, n * k * size, m * k / FACTORS, n * k / FACTORS


def after_tiles(run: Run, tiles: int, tile: float, recorded: int) -> float:
    """The end of the stores of the last of ``tiles`` tiles of ``tile`` FLOPs. All later ones take
    as long as the last of the recorded ones, for by then buffers no longer hide loads and
    stores."""
    if tiles <= len(run.tiles):
        return run.tiles[tiles - 1]
    ends = [when(run, n * tile) for n in range(1, recorded + 1)]
    each = (ends[-1] - ends[-1 - STEADY]) / STEADY
    stored = len(run.tiles)
    drain = run.tiles[-1] - ends[stored - 1] if stored else run.drain
    return ends[-1] + (tiles - recorded) * each + drain


def slow_start(tensor: float, us: float) -> float:
    """Microseconds of MMAs at a launch's start that are slower in these rows. The tensor cores are
    busy for ``tensor`` of the launch's ``us``; where others bind they hide the loss."""
    return min(tensor, SLOW_US) * min(1.0, tensor / us) ** 2


def refetched(ratio: float) -> float:
    """The share of a tensor that is evicted before it is read again, where it is ``ratio`` times as
    large as a cache that replaces lines at random: m = 1 - exp(-m ratio)."""
    if ratio <= 1.0:
        return 0.0
    part = 1.0
    for _ in range(100):
        part = 1.0 - math.exp(-part * ratio)
    return part


def _beside(k: int, lengths: Sequence[int]) -> tuple[int, int]:
    """The two recorded values of K between which ``k`` is, or the two nearest to it."""
    for pair in pairwise(lengths):
        if k <= pair[1]:
            return pair
    return lengths[-2], lengths[-1]


def _rounded(part: float) -> float:
    """Round to steps of an eighth of an octave, so that few different replays are needed."""
    return 2.0 ** (round(8 * math.log2(part)) / 8) if part > 1e-3 else 0.0


def errors(rows: Iterable[B200Row], model: B200Model) -> Iterator[B200Error]:
    """The errors of the rows whose kernel was recorded."""
    for row in rows:
        if all(row.key(k) in model.traced for k in LENGTHS[row.dtype]):
            yield B200Error(row, model.us(row))


def by_kernel(rows: Iterable[B200Row]) -> list[list[B200Row]]:
    """The rows of each kernel, whose replays `B200Model` shares."""
    kernels: dict[str, list[B200Row]] = {}
    for row in rows:
        kernels.setdefault(row.key(0), []).append(row)
    return list(kernels.values())


def jobs(rows: Iterable[B200Row], traced: Mapping[str, Any]) -> list[Job[list[B200Error]]]:
    """What computes the errors of the rows of each kernel."""
    return [partial(_of_kernel, of, traced) for of in by_kernel(rows)]


def _of_kernel(rows: Sequence[B200Row], traced: Mapping[str, Any]) -> list[B200Error]:
    return list(errors(rows, B200Model(traced)))


def losses(found: Sequence[B200Error]) -> list[float]:
    """The time that the config ranked first by the model loses to the fastest one, relative, by
    problem."""
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

"""FlashAttention-4's backward on a B200, published and by the clock, and ours in the same model.

    python -m cutex.clock_errors.backward

prints the table of docs/time.md; `python -m cutex.clock --page` writes it. Of each kernel a cluster
was recorded on 6 and on 14 blocks of 128 queries, and the launches before and behind it; the time
of a cluster is linear in its blocks. Nothing is fitted to these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from cutex.clock_errors.processes import Job, results
from cutex.clock_errors.rows import FOLDER
from cutex.command import Parser, answered
from cutex.sim.timing import stored
from cutex.sim.timing.call import time_launch
from cutex.sim.timing.events import Fetched, Work
from cutex.sim.timing.gpus import B200, Gpu
from cutex.sim.timing.lengths import Lengths
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.trace import Sharing, Traced
from cutex.sim.timing.traffic import loaded

TRACES = FOLDER / "traces-backward-sm_100a.json.gz"
BLOCK = 128  # queries of a step, keys of a CTA
LIBRARIES = ("fa4", "cutex")
COMPUTING = ("compute", "compute_loop")  # our role, and theirs
STEPS = (6, 14)  # blocks of queries of the recorded clusters
WALKED = 2  # tiles of keys of a recorded cluster that takes one after the other


@dataclass(frozen=True)
class Case:
    """A backward of as many heads of k as of q, and what FlashAttention-4 was published to reach;
    0: nothing was."""

    head_dim: int
    head_dim_v: int
    ctas: int  # of its clusters
    batch: int
    seqlen: int
    heads: int
    full: float  # TFLOPS
    causal: float
    source: str = ""

    def flops(self, causal: bool) -> float:
        pairs = self.batch * self.heads * self.seqlen**2 / (2 if causal else 1)
        return 2.0 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)

    @property
    def dims(self) -> str:
        d, dv = self.head_dim, self.head_dim_v
        return f"{d}" if d == dv else f"{d}/{dv}"


CASES = (
    Case(128, 128, 1, 4, 8192, 16, 1248, 1118, "flash-attention#2280"),
    Case(128, 128, 2, 4, 8192, 16, 1360, 1209, "flash-attention#2280"),
    Case(64, 64, 1, 2, 32768, 32, 841, 808, "flash-attention#2804"),
    Case(192, 128, 2, 4, 8192, 16, 1073, 971, "flash-attention#2270"),
    Case(256, 256, 2, 4, 8192, 8, 0, 0),
)


def key(library: str, case: Case, causal: bool, launch: int | str) -> str:
    """The name of a record; of ours the number of CTAs does not matter."""
    ctas = f"/{case.ctas}" if library == "fa4" else ""
    return f"{library}/{case.dims}{ctas}/{'causal' if causal else 'full'}/{launch}"


def repeats(library: str, case: Case) -> int:
    """CTAs with the same keys: of head dim 256 two of ours, with half of the columns each."""
    return 2 if library == "cutex" and case.head_dim == 256 else 1


def blocks_of(case: Case, causal: bool, keys: int, copies: int, together: int) -> tuple[int, ...]:
    """The blocks of queries of each cluster of a grid, which owns ``keys`` keys: those that see the
    most first, of ``together`` heads at a time; each comes ``copies`` times."""
    most, heads = case.seqlen // BLOCK, case.batch * case.heads
    found: list[int] = []
    for first in range(0, heads, together):
        for n in range(case.seqlen // keys):
            steps = most - n * keys // BLOCK if causal else most
            found += [steps] * copies * min(together, heads - first)
    return tuple(found)


def main_launch(
    short: Traced, long: Traced, case: Case, causal: bool, copies: int, together: int
) -> Lengths:
    """The records of a main kernel with the grid of a case."""
    size = long.record.cluster_size
    tiles = blocks_of(case, causal, BLOCK * size, copies, together)
    walked = WALKED if long.takes_over else 1
    flops = short.record.flops / walked, long.record.flops / walked
    found = Lengths(short, long, STEPS, tiles, flops)
    few, many = (
        {tmap: bytes_ / walked for tmap, bytes_ in loaded(x.record).items()} for x in (short, long)
    )
    sharing = {}
    for tmap, bytes_ in many.items():
        grows = bytes_ > few.get(tmap, 0.0)  # rows of queries: all clusters of a head load them
        of_head = found.at((few.get(tmap, 0.0), bytes_), case.seqlen // BLOCK)
        heads = case.batch * case.heads
        footprint = of_head * heads if grows else bytes_ * len(tiles) / copies
        sharing[tmap] = Sharing(1.0, 1.0, footprint)
    grid = (len(tiles) * size, 1, 1)
    return replace(found, long=replace(long, grid=grid, sharing=sharing))


def side_launch(one: Traced, case: Case) -> Traced:
    """The record of a launch before or behind the main one, with the grid of a case: each of its
    clusters has rows of its own."""
    clusters = case.batch * case.heads * case.seqlen // BLOCK * one.clusters // STEPS[1]
    record = one.record
    fetched = {
        at: Fetched(f.loaded, f.different, f.different * clusters)
        for at, f in record.fetched.items()
    }
    grid = (clusters * record.cluster_size, 1, 1)
    return replace(one, grid=grid, record=replace(record, fetched=fetched))


@dataclass(frozen=True)
class BackwardTime:
    """The predicted rate of all launches of a backward, and the cycles of its main one."""

    tflops: float
    cycles: float


def timed(
    library: str, case: Case, causal: bool, traces: Mapping[str, Recorded], gpu: Gpu
) -> BackwardTime | None:
    """The prediction for a backward; None where it was not recorded."""
    short, long = (traces.get(key(library, case, causal, f"main {n}")) for n in STEPS)
    if not isinstance(short, Traced) or not isinstance(long, Traced):
        return None
    together = 1 if library == "fa4" else max(1, 2 * gpu.sms * BLOCK // case.seqlen)
    launch = main_launch(short, long, case, causal, repeats(library, case), together)
    main = time_launch(launch, gpu)
    us = main.us
    for number in (0, 1):
        side = traces.get(key(library, case, causal, number))
        if isinstance(side, Traced):
            us += time_launch(side_launch(side, case), gpu).us
    return BackwardTime(case.flops(causal) / us / 1e6, main.cycles)


def instructions(
    library: str,
    case: Case,
    causal: bool,
    traces: Mapping[str, Recorded],
    roles: Sequence[str] = (),
) -> float | None:
    """The instructions of the machine code of all warps, or of those of `roles`, for each score of
    a block without a mask, of 32 lanes each."""
    slots, size = [], 1
    for n in STEPS:
        one = traces.get(key(library, case, causal, f"main {n}"))
        if not isinstance(one, Traced):
            return None
        record, walked = one.record, WALKED if one.takes_over else 1
        size = record.cluster_size
        programs = [p for w, p in record.programs.items() if not roles or record.roles[w] in roles]
        work = sum(e.slots for program in programs for e in program if isinstance(e, Work))
        slots.append(work / walked)
    scores = (STEPS[1] - STEPS[0]) * BLOCK * BLOCK * size
    return 32 * repeats(library, case) * (slots[1] - slots[0]) / scores


Times = Mapping[tuple[str, Case, bool], BackwardTime | None]  # by library, case, causal
TIMED = tuple(product(LIBRARIES, CASES, (False, True)))


def jobs(traces: Mapping[str, Recorded], gpu: Gpu = B200) -> list[Job[BackwardTime | None]]:
    """What computes each of TIMED."""
    return [partial(timed, *one, traces, gpu) for one in TIMED]


def table(traces: Mapping[str, Recorded], times: Times) -> str:
    """Markdown: each case's published and predicted rate, the error, and ours; the ratio to
    FlashAttention-4's rate, and of its main launch's cycles to ours, which no clock changes."""
    lines = [
        "| head dim, CTAs of FlashAttention-4 | size | mask | published | predicted | error "
        "| cutex, predicted | of FlashAttention-4 | by cycles | instructions a score |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in CASES:
        for causal, published in ((False, case.full), (True, case.causal)):
            theirs, ours = times["fa4", case, causal], times["cutex", case, causal]
            known = theirs and published
            error = f"{100 * (theirs.tflops / published - 1):+.0f} %" if theirs and known else ""
            ratios = ["", ""]
            if ours and theirs:
                faster = ours.tflops / theirs.tflops, theirs.cycles / ours.cycles
                ratios = [f"{x:.2f}" for x in faster]
            size = f"{case.batch}x{case.seqlen}, {case.heads} heads"
            rates = published, theirs and theirs.tflops, ours and ours.tflops
            cells = [f"{x:.0f}" if x else "" for x in rates]
            mask = "causal" if causal else "full"
            both = (instructions(library, case, causal, traces) for library in ("fa4", "cutex"))
            slots = ", ".join(f"{x:.1f}" if x else "-" for x in both)
            row = [f"{case.dims}, {case.ctas}", size, mask, *cells[:2], error, cells[2], *ratios]
            lines.append(f"| {' | '.join([*row, slots])} |")
    return "\n".join(lines)


def instructions_table(traces: Mapping[str, Recorded]) -> str:
    """Markdown: the instructions for a score, of all warps and of those that compute P and dS."""
    lines = [
        "| head dim | mask | cutex, all warps | those that compute "
        "| FlashAttention-4, CTAs | all warps | those that compute |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in CASES:
        for causal in (False, True):
            found = [
                instructions(library, case, causal, traces, roles)
                for library in reversed(LIBRARIES)
                for roles in ((), COMPUTING)
            ]
            ours, theirs = ([f"{x:.1f}" if x else "-" for x in found[i : i + 2]] for i in (0, 2))
            mask = "causal" if causal else "full"
            lines.append(f"| {' | '.join([case.dims, mask, *ours, f'{case.ctas}', *theirs])} |")
    return "\n".join(lines)


@answered
def main(argv: Sequence[str] | None = None) -> int:
    Parser(
        prog="python -m cutex.clock_errors.backward",
        description="Hold the simulator's clock against measured times of attention's backward.",
    ).parse_args(argv)
    traces = stored.load(TRACES)
    found = results("backwards are timed", jobs(traces))
    print(table(traces, dict(zip(TIMED, found, strict=True))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

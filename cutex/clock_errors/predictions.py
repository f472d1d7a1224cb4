"""Predicted times of the ladders that no GPU has run: of each stage a row, from stored records."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import chain, product
from typing import Any

from cutex.bench.clock import launched, record
from cutex.bench.run import compile_stage, settle
from cutex.clock_errors.processes import results
from cutex.clock_errors.rows import FOLDER, board, traces_file
from cutex.errors import BadOption
from cutex.problem import OPS, Problem, problem_class
from cutex.problem.stage import AnyStage, ladders, stages
from cutex.sim.timing import stored
from cutex.sim.timing.call import time_launch
from cutex.sim.timing.sampled import sample
from cutex.sim.timing.stored import Recorded
from cutex.sim.timing.timed import Whole

ARCH = "sm_100a"
PREDICTED = FOLDER / f"predicted-{ARCH}.jsonl"
# of fp32 kernels without tensor cores an H200's times are .72 to 1.16 of what the clock says
UNSURE = ("gemm_fp32",)


@cache
def predicted_ops() -> tuple[str, ...]:
    """The operators that have a ladder to predict."""
    return tuple(op for op in OPS if ARCH in ladders(op).archs and op not in UNSURE)


def predicted(op: str, arch: str, anew: bool) -> list[dict[str, Any]]:
    """A row for each stage of a ladder on each problem that a rented GPU times: microseconds with
    their band, from the stored records, or `anew` of the code as it is, whose records are stored.
    """
    kind, file = problem_class(op), traces_file(op, arch)
    problems = [kind.of(sizes) for sizes in kind.cases["confirm"]]
    every = list(product(problems, stages(op, arch)))
    if anew:
        parts = results(f"stages of {op} are recorded", [partial(recorded, *c) for c in every])
        stored.save(dict(chain.from_iterable(part.items() for part in parts)), file)
    traces = stored.load(file) if file.is_file() else {}
    rows = []
    for problem, one in every:
        mine = _launches(name(problem, one), traces)
        if not mine:
            raise BadOption(
                f"--predict: {name(problem, one)} is not in {file}; --predict --store records it"
            )
        rows.append(partial(_row, problem, one, mine))
    return results(f"stages of {op} are predicted", rows)


def name(problem: Problem, one: AnyStage) -> str:
    """The name of a stage's record, and the beginning of those of several launches."""
    beside = "" if problem.dtype == "bf16" else f"/{problem.dtype}"
    return f"{one.op}/{one.arch}/{one.number}/{problem.size}{beside}"


def recorded(problem: Problem, one: AnyStage) -> dict[str, Recorded]:
    """The records of a stage's launches by name."""
    one = settle(one, problem, timed=False)
    whole = name(problem, one)
    if len(compile_stage(one, problem.dtype).dynamic_smem) == 1:
        return {whole: record(problem, one)[0]}
    return {f"{whole}/launch {i}": x for i, x in enumerate(launched(problem, one, sample))}


def _launches(whole: str, traces: Mapping[str, Recorded]) -> list[Recorded]:
    """The records of a stage's launches, in their order."""
    if whole in traces:
        return [traces[whole]]
    found: list[Recorded] = []
    while (one := f"{whole}/launch {len(found)}") in traces:
        found.append(traces[one])
    return found


def _row(problem: Problem, one: AnyStage, launches: list[Recorded]) -> dict[str, Any]:
    one, board_ = settle(one, problem, timed=False), board(one.arch)
    # NOTE: of several launches no work is known beforehand; their clusters were recorded whole
    whole = Whole(*problem.work(one.config())) if len(launches) == 1 else None
    reports = [time_launch(x, board_, whole, data=problem.init) for x in launches]
    longest = max(reports, key=lambda r: r.us)
    return {
        "op": one.op, "arch": one.arch, "stage": one.number, "size": problem.size,
        "problem": problem.as_dict(), "gpu": board_.name, "predicted": True,
        "cycles": round(sum(r.cycles for r in reports)), "ghz": round(longest.clock_ghz, 3),
        "us": round(sum(r.us for r in reports), 1),
        "us_low": round(sum(r.us_band[0] for r in reports), 1),
        "us_high": round(sum(r.us_band[1] for r in reports), 1),
        "binds": longest.binds,
    }  # fmt: skip

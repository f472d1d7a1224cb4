"""The predicted time of a stage, by the simulator's clock, without a check or a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from cutex.arch import arch
from cutex.bench.run import compile_stage, settle
from cutex.problem import Problem
from cutex.problem.stage import AnyStage, Ways

if TYPE_CHECKING:
    from cutex.sim.timing.gpus import Gpu
    from cutex.sim.timing.lengths import Lengths
    from cutex.sim.timing.report import TimeReport
    from cutex.sim.timing.timed import Whole
    from cutex.sim.timing.trace import Traced

T = TypeVar("T")
TILES = 2.6  # recorded tiles of a cluster, for each warpgroup that has tiles of its own
DETAILED_FLOPS = 6e8  # recorded MMA FLOPs of a CTA, where tiles differ
WALKED = 3  # recorded tiles of a CTA, where they differ in their steps
STEPS = (6, 14)  # steps of the two tiles that are recorded, where tiles differ in their steps
# the same where data other than Gaussian steer the kernel: what a tile has seen decides about the
# rest of it, so that short tiles tell little
STEERED_STEPS = (16, 32)


def record(problem: Problem, stage: AnyStage) -> tuple[Traced | Lengths, Whole]:
    """Return the record of one cluster of a stage's launch, and the work of the whole grid."""
    from cutex.sim.timing.timed import Whole

    stage = settle(stage, problem, timed=False)
    config = stage.config()
    whole = Whole(*problem.work(config))
    if tiles := problem.tile_steps(config):
        stage = stage.with_config(problem.recorded(config))
        return _record_lengths(problem, stage, tiles), whole
    at_once = 2 if getattr(config, "pingpong", False) else 1
    limit = DETAILED_FLOPS
    if 0 < whole.tile_flops < DETAILED_FLOPS:
        limit = (TILES * at_once - at_once + 1) * whole.tile_flops
    return _record(problem, stage, limit), whole


def _record_lengths(problem: Problem, stage: AnyStage, tiles: tuple[int, ...]) -> Lengths:
    """Return records of tiles of two lengths, with the sharing of loads in the whole grid."""
    from cutex.sim.timing.lengths import Lengths
    from cutex.sim.timing.trace import look_at

    config = stage.config()
    longest = max(tiles)
    # NOTE: enough tiles that a persistent CTA computes several of them here, too
    count = min(len(tiles), WALKED * arch(stage.arch).num_sms + 1)
    records, lengths, flops = [], [], []
    steered = problem.data_steers and problem.init != "normal"
    short_steps, long_steps = STEERED_STEPS if steered else STEPS
    for wanted in (min(short_steps, max(1, longest // 2)), min(long_steps, longest)):
        brief = problem.with_steps(config, wanted, count)
        steps, (all_flops, of_cta) = brief.tile_steps(config), brief.work(config)
        records.append(_record(brief, stage, (WALKED + 0.3) * of_cta, look=False))
        lengths.append(steps[0])
        flops.append(all_flops / len(steps))
    long = launched(problem, stage, lambda h, p, a, r: look_at(h, p, a, r, records[1]))
    short = replace(records[0], grid=long.grid, sharing=long.sharing)
    return Lengths(short, long, (lengths[0], lengths[1]), tiles, (flops[0], flops[1]))


def _record(problem: Problem, stage: AnyStage, limit: float, look: bool = True) -> Traced:
    from cutex.sim.timing.trace import trace

    return launched(problem, stage, lambda h, p, a, r: trace(h, p, a, r, limit, look)[0])


def launched(problem: Problem, stage: AnyStage, how: Callable[..., T]) -> T:
    """Return ``how``'s record of a call; on zeros, which cost nothing, where the data does not
    change what is computed."""
    from cutex.sim.host.loaded import captured

    compiled = compile_stage(stage, problem.dtype)
    found: list[T] = []

    def launched(*tensors: Any) -> None:
        found.append(how(*captured(compiled, tensors)))

    blind = "zeros" in problem.inits and not problem.data_steers
    data = "zeros" if blind else problem.init
    empty = replace(problem, init=data)  # type: ignore[type-var]
    problem.launcher(launched, compiled.argument_names)(*empty.inputs(), *empty.outputs())
    return found[0]


def time_stage(problem: Problem, stage: AnyStage, gpu: Gpu, log: bool = False) -> TimeReport:
    """The time of a stage that is one launch."""
    from cutex.sim.timing.call import time_launch

    traced, whole = record(problem, stage)
    report = time_launch(traced, gpu, whole, log=log, data=problem.init)
    report.flops = problem.flops
    report.ways = ways_of(stage.ways, traced.record.entered)
    report.ways_lost = stage.ways is not None and not report.ways
    return report


def ways_of(ways: Ways | None, entered: dict[str, int]) -> dict[str, float]:
    """The share of the recorded steps that came in each of a kernel's `ways`, and how often each of
    its events happened a step; of functions that were `entered` so often. Empty where none of its
    steps was."""
    if ways is None:
        return {}

    def count(functions: tuple[str, ...]) -> int:
        return sum(n for name, n in entered.items() if name.endswith(functions))

    parts = {name: count(of) for name, of in ways.steps.items()}
    steps = sum(parts.values())
    if ways.tried:
        parts["in vain"] = max(0, parts[ways.tried] - count(ways.held))
        steps -= parts["in vain"]
    parts |= {name: count(of) for name, of in ways.events.items()}
    return {name: n / steps for name, n in parts.items()} if steps else {}


def time_launches(
    problem: Problem, stage: AnyStage, gpu: Gpu, log: bool = False
) -> list[TimeReport]:
    """The time of each launch of a stage. Of several launches no work is known beforehand: clusters
    spread over the grid of each are recorded whole."""
    from cutex.sim.timing.call import time_launch
    from cutex.sim.timing.sampled import sample

    stage = settle(stage, problem, timed=False)
    if len(compile_stage(stage, problem.dtype).dynamic_smem) == 1:
        return [time_stage(problem, stage, gpu, log)]
    found = launched(problem, stage, sample)
    return [time_launch(one, gpu, log=log, data=problem.init) for one in found]

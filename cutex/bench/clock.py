"""The predicted time of a stage, by the simulator's clock; nothing is checked or measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutex.bench.run import compile_stage, settle
from cutex.problem import Problem
from cutex.problem.stage import Stage

if TYPE_CHECKING:
    from cutex.sim.timing.gpus import Gpu
    from cutex.sim.timing.predict import Whole
    from cutex.sim.timing.report import TimeReport
    from cutex.sim.timing.trace import Traced

TILES = 2.6  # that a cluster runs in detail, of each warpgroup that has tiles of its own
DETAILED_FLOPS = 6e8  # a CTA, where tiles differ


def record(problem: Problem, stage: Stage) -> tuple[Traced, Whole]:
    """One cluster of a stage's launch, and what the whole grid has to do."""
    from cutex.sim.run import captured
    from cutex.sim.timing.predict import Whole
    from cutex.sim.timing.trace import trace

    stage = settle(stage, problem, timed=False)
    config = stage.config()
    compiled = compile_stage(stage, problem.dtype)
    flops, tile = problem.work(config)
    at_once = 2 if getattr(config, "pingpong", False) else 1
    limit = (TILES * at_once - at_once + 1) * tile if tile else DETAILED_FLOPS

    def traced(*tensors: Any) -> list[Traced]:
        return trace(*captured(compiled, tensors), limit)

    data = "zeros" if "zeros" in problem.inits else problem.init
    empty = replace(problem, init=data)  # type: ignore[type-var]
    launch = problem.launcher(traced, compiled.argument_names)
    found = launch(*empty.inputs(), *empty.outputs())
    return found[0], Whole(flops, tile)  # type: ignore[index]


def time_stage(problem: Problem, stage: Stage, gpu: Gpu, log: bool = False) -> TimeReport:
    from cutex.sim.timing.report import time_launch

    traced, whole = record(problem, stage)
    report = time_launch(traced, gpu, whole, log=log, data=problem.init)
    report.flops = problem.flops
    return report

"""Autotuning: the model proposes configs of a stage, this GPU times them, and a file keeps the
fastest.

The candidates that the model ranks first (`Stage.shortlist`) are compiled and timed with the
project's own protocol (cutex/bench/timing.py: graphs, cold L2, turns in random order), the best few
of them once more and longer. The winner is kept in

    <cache>/tuned/<key>.json

where the key holds the GPU, the class of problem, the versions and the sources. The file is written
under another name and renamed; two processes that want the same choice make it once; one that
cannot be read is made anew.

CUTEX_AUTOTUNE=0 turns all of it off: then the model's first choice is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from cutex.arch import arch as arch_named
from cutex.bench import timing
from cutex.bench.progress import progress
from cutex.cache import cache_dir, make_private, write_file
from cutex.compile import compile
from cutex.compile.sources import sources_digest
from cutex.problem import Problem
from cutex.problem.stage import AnyStage, Config

Timer = Callable[[Sequence[Config], int], dict[Config, float]]  # configs, rounds -> us

CANDIDATES = 20  # configs of the model's ranking that are timed
FINALISTS = 4
ROUNDS, FINAL_ROUNDS = 8, 30
WARM_UP_SECONDS = 0.3


def enabled() -> bool:
    """Return False if CUTEX_AUTOTUNE is 0. Raises ValueError if it is neither 0 nor 1 nor unset."""
    given = os.environ.get("CUTEX_AUTOTUNE", "1")
    if given not in ("0", "1"):
        raise ValueError(f"CUTEX_AUTOTUNE={given!r}: 0 takes the model's choice, 1 times it")
    return given == "1"


def tuned(stage: AnyStage, problem: Problem, time: Timer | None = None) -> Config:
    """Return the config of `stage` for `problem` on this process's GPU: kept from before, or timed
    now.

    It takes 10 to 20 seconds the first time for a class of problems, mostly to compile. `time`
    takes the place of the GPU's own measurement.
    """
    from filelock import FileLock

    target = arch_named(stage.arch)
    if not enabled():
        return stage.choose(problem)
    try:
        copies = timing.copies_to_rotate(problem.bytes, target.l2_bytes, "cold")
    except ValueError:  # NOTE: operands too small to rotate; such a problem gains nothing, either
        return stage.choose(problem)
    key = _key(stage, problem)
    file = cache_dir() / "tuned" / f"{_digest(key)}.json"
    if (found := _read(file, key, stage)) and found.why_not(problem, target) is None:
        return found
    make_private(file.parent)
    with FileLock(file.with_suffix(".lock")):
        if (found := _read(file, key, stage)) and found.why_not(problem, target) is None:
            return found  # another process chose while this one waited
        times = compete(stage, problem, time or _on_gpu(stage, problem, copies))
        best = min(times, key=times.__getitem__)
        _write(file, key, best, times)
    return best


def remembered(stage: AnyStage, problem: Problem) -> Config | None:
    """The config that `tuned` chose for the class of `problem` before; None if it never did."""
    if not enabled():
        return None
    key = _key(stage, problem)
    return _read(cache_dir() / "tuned" / f"{_digest(key)}.json", key, stage)


def compete(stage: AnyStage, problem: Problem, time: Timer) -> dict[Config, float]:
    """Time the model's candidates, then the best of them longer; return the latter's
    microseconds."""
    first = stage.shortlist(problem, CANDIDATES)
    times = time(first, ROUNDS)
    finalists = sorted(times, key=times.__getitem__)[:FINALISTS]
    return time(finalists, FINAL_ROUNDS)


# ---- on the GPU


def _on_gpu(stage: AnyStage, problem: Problem, copies: int) -> Timer:
    operands = [(*problem.inputs("cuda", copy=i), *problem.outputs("cuda")) for i in range(copies)]

    def time(configs: Sequence[Config], rounds: int) -> dict[Config, float]:
        with progress(f"tuning {problem.size}", len(configs) + 1) as step:
            kernels = {}
            for i, config in enumerate(configs):
                compiled = compile(stage.kernel(config), problem.dtype, stage.arch)
                kernels[str(i)] = problem.launcher(compiled, compiled.argument_names)
                step()
            sampling = timing.Sampling(rounds, WARM_UP_SECONDS)
            measured = timing.time_variants(kernels, operands, "cold", sampling=sampling)
            step()
        return {c: measured.timings[str(i)].median_us for i, c in enumerate(configs)}

    return time


# ---- on the disk


def _key(stage: AnyStage, problem: Problem) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "stage": [stage.op, stage.arch, stage.number],
        "class": problem.tuning_class(),
        "dtype": problem.dtype,
        "versions": {name: metadata.version(name) for name in ("nvidia-cutlass-dsl", "torch")},
        "sources": sources_digest([stage.module, stage.chooser]),
    }


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _read(file: Path, key: dict[str, Any], stage: AnyStage) -> Config | None:
    """The config in `file`; None if it is missing, incomplete or of another key."""
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        return stage.config_from_row(entry["config"]) if entry["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, key: dict[str, Any], best: Config, times: dict[Config, float]) -> None:
    entry = {
        "key": key,
        "config": asdict(best),
        "finalists": [{"us": round(us, 2), "config": asdict(c)} for c, us in times.items()],
    }
    write_file(file, json.dumps(entry, indent=1))

"""The preflight: everything is compiled and simulated on this machine before anything is rented."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cutex.bench.progress import progress
from cutex.bench.run import compile_stage, run_stages
from cutex.cloud import remote
from cutex.cloud.calls import Plan, Request
from cutex.problem import Problem, problem_class
from cutex.problem.stage import AnyStage, Config
from cutex.problem.stage import stage as stage_named


def preflight(made: Plan, say: Callable[[str], None]) -> tuple[bool, dict[str, bytes]]:
    """Compile every kernel of the plan, and simulate it on a reduced problem.

    Returns whether all results were right, and by arch the compiled kernels, packed for the
    container.
    """
    entries: dict[str, set[Path]] = {}
    layers: dict[str, list[Request]] = {}
    staged: list[Request] = []
    right = True
    for request in made.requests:
        folders = entries.setdefault(request.arch, set())
        if request.probes:
            right &= _preflight_probes(request.arch, folders, say)
        if request.script is not None:
            right &= _preflight_script(request, say)
        if request.layers:
            layers.setdefault(request.arch, []).append(request)
        if request.problem is not None:
            staged.append(request)
    right &= _preflight_stages(staged, entries, say)
    for name, requests in layers.items():
        right &= _preflight_layers(name, requests, entries[name], say)
    return right, {name: remote.pack(folders) for name, folders in entries.items()}


def _preflight_stages(
    requests: list[Request], entries: dict[str, set[Path]], say: Callable[[str], None]
) -> bool:
    """Compile the stages of all `requests` and simulate each once, on a reduced problem. Return
    whether all results were right."""
    right, seen = True, set()
    with progress("preflight: stages", sum(len(r.stages) for r in requests)) as step:
        for request in requests:
            problem = problem_class(request.op)(**(request.problem or {}))
            for number in request.stages:
                stage = stage_named(request.op, request.arch, number).fitted(problem)
                for config in _configs(stage, problem):
                    compiled = compile_stage(stage.with_config(config), problem.dtype)
                    entries[request.arch].add(compiled.object_path.parent)
                small = problem.reduced()
                if (stage, small) not in seen:
                    seen.add((stage, small))
                    result = run_stages(small, [stage], "sim")[0]
                    if not result.ok:
                        right = False
                        what = f"stage {stage.number} of {stage.arch} on {small.size}"
                        say(f"preflight: {what}: {result.message}")
                step()
    return right


def _configs(stage: AnyStage, problem: Problem) -> list[Config]:
    """All configs that `stage` may run with in the container: every candidate, for a stage that
    chooses by timing."""
    if not stage.chooses:
        return [stage.config()]
    from cutex.bench.autotune import CANDIDATES

    return stage.shortlist(problem, CANDIDATES)


def _preflight_script(request: Request, say: Callable[[str], None]) -> bool:
    """Run the script in the simulator, in a process of its own, and show its output. Return whether
    its exit code was 0."""
    assert request.script is not None
    with tempfile.TemporaryDirectory(prefix="cutex-") as folder:
        file = Path(folder) / request.script
        file.write_bytes(request.source)
        command = [sys.executable, "-m", "cutex.sim", "--arch", request.arch, str(file)]
        code = subprocess.run([*command, *request.arguments], check=False).returncode
    if code:
        say(f"preflight: {request}: exit code {code} in the simulator")
    return code == 0


def _preflight_layers(
    target: str, requests: list[Request], folders: set[Path], say: Callable[[str], None]
) -> bool:
    """Compile the kernels of all layers in `requests`, which are of one arch."""
    with tempfile.TemporaryDirectory(prefix="cutex-") as folder:
        only = Path(folder) / "only"
        only.write_text(
            "\n".join(name for request in requests for name in request.layers), encoding="utf-8"
        )
        command = [sys.executable, "-m", "cutex.sweep", *requests[0].arguments]
        command += ["--preflight", target, "--only", str(only)]
        ran = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
    folders |= {Path(line) for line in ran.stdout.splitlines()}
    if ran.returncode:
        say(f"preflight: layers of models on {target}: exit code {ran.returncode}")
    return ran.returncode == 0


def _preflight_probes(target: str, folders: set[Path], say: Callable[[str], None]) -> bool:
    from cutex.bench.probes import compile_all, measure
    from cutex.sim import SimError

    with progress("preflight: probes"):
        folders |= {compiled.object_path.parent for compiled in compile_all(target)}
        try:
            wrong = [row["probe"] for row in measure(target, "sim") if not row["ok"]]
        except SimError as error:
            wrong = [str(error)]
    for what in wrong:
        say(f"preflight: probe: {what}")
    return not wrong

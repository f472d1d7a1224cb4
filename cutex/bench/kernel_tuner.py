"""Tuning a kernel of the user's own: the constants of a @cute.jit function, by time.

Every combination of the given values is compiled and timed: on the GPU that is there, in turns,
with a cold L2, from the GPU's own record of when each launch began and ended; without one by the
simulator's clock, which docs/time.md describes. What was found is kept as a file in the cache,

    <cache>/kernels-tuned/<key>.json

under everything that it depends on: the function and all that it refers to, the layouts of its
tensors, its other arguments, the values, the DSL and the GPU.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cutex.arch import local_arch
from cutex.bench.progress import progress
from cutex.cache import cache_dir, write_file
from cutex.compile.user_function import UserFunction
from cutex.errors import CutexError, NoCache
from cutex.sim.host.loaded import compile_for, is_stream
from cutex.sim.run import simulate

ROUNDS = 20  # in which each variant is timed once
WARM_UP = 3
FLUSH_L2 = 2  # times the L2 that is written before each launch

Values = Mapping[str, Any]
Check = Callable[..., Any]


@dataclass(frozen=True)
class Variant:
    """A combination of values, its microseconds, and if it has none, why."""

    values: dict[str, Any]
    us: float | None = None
    why: str = ""


@dataclass(frozen=True, eq=False)
class TunedKernel:
    """The fastest variant of a function. Calling it launches that variant on tensors of the layouts
    that it was tuned for, given without the constants; without a GPU that runs in the simulator.

    choice: the value of each constant that was tuned. variants: all of them, the fastest first.
    gpu: where they were timed; predicted: by the simulator's clock, not on that GPU.
    """

    choice: dict[str, Any]
    variants: list[Variant]
    gpu: str
    predicted: bool
    launch: Callable[..., Any]

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)

    def __str__(self) -> str:
        names = list(self.choice)
        head = [*names, "us"]
        rows = [
            [*(str(v.values[n]) for n in names), v.why if v.us is None else f"{v.us:,.2f}"]
            for v in self.variants
        ]
        widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(names))]
        lines = ["  ".join(x.rjust(w) for x, w in zip(r, widths, strict=False)) + f"  {r[-1]}"
                 for r in [head, *rows]]  # fmt: skip
        how = "predicted for" if self.predicted else "measured on"
        return "\n".join([*lines, f"{how} {self.gpu}"])


def tune_kernel(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    over: Mapping[str, Sequence[Any]],
    check: Check | None = None,
    gpu: str = "",
) -> TunedKernel:
    """`cutex.tune` of a function: see there."""
    subject = _Subject(kernel, arguments, over)
    if check is not None and not callable(check):
        raise TypeError(f"check must be a function or None, got {type(check).__name__}")
    if gpu and subject.on_gpu:
        raise ValueError(f"gpu={gpu!r} is for tensors on the CPU: these are timed on theirs")
    timer: _OnGpu | _ByClock = _OnGpu(subject) if subject.on_gpu else _ByClock(subject, gpu)
    key = subject.key(timer.gpu, check)
    known = _remembered(key)
    if known is not None:
        choice = known[0].values
        return TunedKernel(choice, known, timer.gpu, timer.predicted, timer.launcher(choice))
    variants = timer.time(list(subject.combinations()), check)
    variants.sort(key=lambda v: float("inf") if v.us is None else v.us)
    if variants[0].us is None:
        raise ValueError(f"no variant of {subject.name} runs: {_named(variants[0])}")
    _remember(key, variants)
    choice = variants[0].values
    return TunedKernel(choice, variants, timer.gpu, timer.predicted, timer.launcher(choice))


class _Subject:
    """The function to tune, its arguments, and the values that its constants may take."""

    def __init__(
        self,
        kernel: Callable[..., Any],
        arguments: Sequence[Any],
        over: Mapping[str, Sequence[Any]],
    ) -> None:
        self.kernel, self.arguments = kernel, tuple(arguments)
        if not isinstance(over, Mapping):
            raise TypeError(f"over must be a dict of lists of values, got {type(over).__name__}")
        for name, values in over.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise TypeError(f"over has {values!r} for {name}: it must be a list of values")
        self.over = {name: list(values) for name, values in over.items()}
        self.name = getattr(kernel, "__name__", type(kernel).__name__)
        target = kernel if inspect.isroutine(kernel) else type(kernel).__call__
        signature = inspect.signature(target)
        names = [n for n in signature.parameters if n != "self"]
        for name, values in self.over.items():
            if name not in names:
                raise ValueError(f"over names {name}, {self.name} takes {', '.join(names)}")
            if not values:
                raise ValueError(f"over has no value for {name}")
        if not self.over:
            raise ValueError("over is empty: give the values of the constants to choose among")
        given = [n for n in names if n not in self.over]
        required = [n for n in given if signature.parameters[n].default is inspect.Parameter.empty]
        if not len(required) <= len(self.arguments) <= len(given):
            raise TypeError(
                f"{self.name} takes {', '.join(given)} besides {', '.join(self.over)}, and got "
                f"{len(self.arguments)} argument{'s' * (len(self.arguments) != 1)}"
            )
        self.given = dict(zip(given, self.arguments, strict=False))
        self.order = [n for n in names if n in self.over or n in self.given]
        self.constants = {
            n for n in names if "Constexpr" in str(signature.parameters[n].annotation)
        } | set(self.over)
        self.tensors = [x for x in self.arguments if isinstance(x, Tensor)]
        kinds = {x.device.type for x in self.tensors}
        if len(kinds) != 1 or not kinds <= {"cpu", "cuda"}:
            raise ValueError(f"{self.name} needs tensors that all lie on the CPU or all on a GPU")
        self.on_gpu = kinds == {"cuda"}

    def combinations(self) -> Sequence[dict[str, Any]]:
        return [
            dict(zip(self.over, values, strict=True)) for values in product(*self.over.values())
        ]

    def complete(self, values: Values) -> list[Any]:
        """All arguments in their order, with constants of these values."""
        return [values[n] if n in values else self.given[n] for n in self.order]

    def at_run_time(self, arguments: Sequence[Any]) -> list[Any]:
        """Of arguments in the order of `given`, those that a compiled function takes."""
        named = zip(self.given, arguments, strict=True)
        return [x for n, x in named if n not in self.constants and not is_stream(x)]

    def key(self, gpu: str, check: Check | None) -> dict[str, Any] | None:
        """What the choice depends on; None where that cannot be known in another process."""
        own, checked = UserFunction(self.kernel), UserFunction(check or bool)
        if not (own.cacheable and checked.cacheable):
            return None
        layouts = [
            [str(x.dtype), list(x.shape), list(x.stride()), x.data_ptr() % 32]
            if isinstance(x, Tensor) else repr(x)
            for x in self.arguments
        ]  # fmt: skip
        return {
            "kernel": own.key, "check": checked.key, "arguments": layouts, "gpu": gpu,
            "over": {name: [repr(v) for v in values] for name, values in self.over.items()},
            "dsl": metadata.version("nvidia-cutlass-dsl"),
        }  # fmt: skip


# ---- by the simulator's clock


class _ByClock:
    """Times by the clock of the simulator, on a GPU that need not be there."""

    predicted = True

    def __init__(self, subject: _Subject, gpu: str) -> None:
        from cutex.sim.timing.gpus import gpu as gpu_named

        self.subject, self.board = subject, gpu_named(gpu or "h200")
        self.gpu = gpu or "h200"

    def time(self, combinations: Sequence[dict[str, Any]], check: Check | None) -> list[Variant]:
        out = []
        with progress(f"timing {self.subject.name} by the clock", len(combinations)) as step:
            for values in combinations:
                out.append(self._timed(values, check))
                step()
        return out

    def _timed(self, values: dict[str, Any], check: Check | None) -> Variant:
        from cutex.sim.host.loaded import captured
        from cutex.sim.timing.call import time_call

        complete = self.subject.complete(values)
        given = self.subject.at_run_time(self.subject.arguments)
        try:
            compiled = compile_for(self.subject.kernel, complete, self.board.arch)
            if check is not None:
                simulate(compiled, *given, arch=self.board.arch, checks=False)
            times = time_call(*captured(compiled, given, self.board.arch), self.gpu)
        except Exception as error:  # of the DSL, which raises what it likes, or of the run
            return Variant(values, None, _first_line(error))
        if check is not None and (why := _refusal(check, given)) is not None:
            return Variant(values, None, why)
        return Variant(values, sum(t.us for t in times))

    def launcher(self, values: Values) -> Callable[..., Any]:
        subject, target = self.subject, self.board.arch
        compiled = compile_for(subject.kernel, subject.complete(values), target)
        return lambda *given: simulate(compiled, *subject.at_run_time(given), arch=target)


# ---- on a GPU


class _OnGpu:
    """Times on the GPU that holds the tensors."""

    predicted = False

    def __init__(self, subject: _Subject) -> None:
        self.subject, self.device = subject, subject.tensors[0].device
        self.gpu = torch.cuda.get_device_name(self.device)
        found = local_arch()
        if found is None:
            raise ValueError(f"{self.gpu} is no GPU that cutex knows")
        self.arch, self.l2_bytes = found.name, found.l2_bytes

    def launcher(self, values: Values) -> Callable[..., Any]:
        subject = self.subject
        compiled = compile_for(subject.kernel, subject.complete(values), self.arch)
        return lambda *given: compiled(*subject.at_run_time(given))

    def time(self, combinations: Sequence[dict[str, Any]], check: Check | None) -> list[Variant]:
        refused, launches = [], {}
        with progress(f"compiling {self.subject.name}", len(combinations)) as step:
            for i, values in enumerate(combinations):
                try:
                    launches[i] = self.launcher(values)
                except Exception as error:
                    refused.append(Variant(values, None, _first_line(error)))
                step()
        for i, launch in list(launches.items()):
            why = None
            try:
                launch(*self.subject.arguments)
                torch.cuda.synchronize(self.device)
            except Exception as error:
                why = _first_line(error)
            if why is None and check is not None:
                why = _refusal(check, self.subject.at_run_time(self.subject.arguments))
            if why is not None:
                refused.append(Variant(combinations[i], None, why))
                del launches[i]
        us = self._in_turns(launches) if launches else {}
        return [*(Variant(combinations[i], t) for i, t in us.items()), *refused]

    def _in_turns(self, launches: Mapping[int, Callable[..., Any]]) -> dict[int, float]:
        """The median microseconds from the begin of a variant's first kernel to the end of its last
        one, in ROUNDS rounds of another order each."""
        l2 = torch.empty(FLUSH_L2 * self.l2_bytes, dtype=torch.uint8, device=self.device)

        def call(i: int) -> None:
            launches[i](*self.subject.arguments)

        kernels = {i: len(self._recorded([lambda i=i: call(i)])) for i in launches}  # type: ignore[misc]
        flushes = len(self._recorded([l2.zero_]))
        rng, order = random.Random(0), []
        for _ in range(WARM_UP + ROUNDS):
            order += rng.sample(list(launches), len(launches))
        steps: list[Callable[[], Any]] = []
        for i in order:
            steps += [l2.zero_, lambda i=i: call(i)]  # type: ignore[misc]
        spans = self._recorded(steps)
        if len(spans) != sum(flushes + kernels[i] for i in order):
            raise CutexError(
                "the GPU's record of launches is incomplete: they cannot be distinguished"
            )
        took: dict[int, list[float]] = {i: [] for i in launches}
        at = 0
        for i in order:
            own = spans[at + flushes : at + flushes + kernels[i]]
            took[i].append(max(end for _, end in own) - own[0][0])
            at += flushes + kernels[i]
        return {i: median(times[WARM_UP:]) for i, times in took.items()}

    def _recorded(self, steps: Sequence[Callable[[], Any]]) -> list[tuple[float, float]]:
        """Begin and end, in microseconds, of everything that the GPU runs for `steps`."""
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as profile:
            for step in steps:
                step()
            torch.cuda.synchronize(self.device)
        found = [
            (e.time_range.start, e.time_range.end)
            for e in profile.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
        ]
        return sorted(found)


# ---- what is kept


def _file(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / "kernels-tuned" / f"{digest}.json"


def _remembered(key: dict[str, Any] | None) -> list[Variant] | None:
    """The variants that were timed under `key`, the fastest first."""
    if key is None:
        return None
    try:
        entry = json.loads(_file(key).read_text(encoding="utf-8"))
        return [Variant(**v) for v in entry["variants"]] if entry["key"] == key else None
    except (NoCache, OSError, ValueError, KeyError, TypeError):
        return None


def _remember(key: dict[str, Any] | None, variants: Sequence[Variant]) -> None:
    """Keep them, if the values can be read back as they are."""
    entry = {"key": key, "variants": [vars(v) for v in variants]}
    try:
        text = json.dumps(entry, indent=1)
        if key is not None and json.loads(text) == entry:
            write_file(_file(key), text)
    except (NoCache, TypeError, ValueError):
        return


# ---- sentences


def _refusal(check: Check, arguments: Sequence[Any]) -> str | None:
    """Why `check` refuses a result; None if it does not."""
    try:
        said = check(*arguments)
    except AssertionError as error:
        return f"wrong: {error}" if str(error) else "wrong"
    return "wrong" if said is False else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _named(variant: Variant) -> str:
    values = ", ".join(f"{n}={v!r}" for n, v in variant.values.items())
    return f"{values}: {variant.why}"

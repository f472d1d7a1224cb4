"""The timing of kernels: variants interleaved, inputs rotated, launch cost left out.

Each variant is captured once into a CUDA graph that launches it several times; a sample is one
replay of that graph, divided by its launches. Variants take turns in a random order, another for
each round, so that a drift of clock or temperature falls on all alike. The first part of this file
is plain arithmetic and runs anywhere; the second needs a GPU.
"""

from __future__ import annotations

import ctypes
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from cutex.problem import Launch
from cutex.results import Timing

if TYPE_CHECKING:
    import torch

    Operands = tuple[torch.Tensor, ...]  # a problem's inputs, then its outputs

CACHE_STATES = ("cold", "hot")
ROTATE_L2 = 3  # times the L2 that the operands between two uses of a line must fill

ROUNDS = 50
LEAST_ROUNDS = 7
MAX_SECONDS = 15.0  # of all rounds, unless LEAST_ROUNDS take longer
WARM_UP_SECONDS = 1.0
SAMPLE_US = 5000.0  # aimed length of one graph replay
MAX_LAUNCHES = 1024  # in one graph, unless there are more copies
MAX_COPIES = 4096
EAGER_CALLS = 50  # for the launch cost; well under the depth of the launch queue
LONG_US = 20_000.0  # a launch of which one is enough to estimate its time
EAGER_SECONDS = 0.5  # of GPU time for them, unless three calls take longer


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1), linear between the two nearest samples."""
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def copies_to_rotate(operand_bytes: int, l2_bytes: int, cache_state: str) -> int:
    """Return the number of sets of operands to take turns with.

    cold: together at least ROTATE_L2 times the L2, and never fewer than two, so that no launch
    finds its own operands where the launch before left them. hot: one. Raises ValueError for
    operands so small that it would take more than MAX_COPIES.
    """
    if cache_state == "hot":
        return 1
    copies = max(2, math.ceil(ROTATE_L2 * l2_bytes / operand_bytes))
    if copies > MAX_COPIES:
        raise ValueError(
            f"cache state cold needs operands of at least {ROTATE_L2 * l2_bytes // MAX_COPIES} "
            f"bytes to fill the L2 with, these have {operand_bytes}; take hot, or check only"
        )
    return copies


def launches_per_sample(launch_us: float, copies: int, sample_us: float = SAMPLE_US) -> int:
    """The number of launches in one graph: whole turns through the copies, about `sample_us`
    long."""
    turns = sample_us / (launch_us * copies)
    return copies * max(1, min(round(turns), MAX_LAUNCHES // copies))


def rounds_in(seconds: float, most: int, max_seconds: float = MAX_SECONDS) -> int:
    """The number of rounds of so many seconds each: at most `most`, fewer where all would take
    longer than `max_seconds`, but no fewer than LEAST_ROUNDS."""
    return min(most, max(LEAST_ROUNDS, int(max_seconds / seconds)))


def interleave(names: Sequence[str], rounds: int, seed: int = 0) -> Iterator[list[str]]:
    """Yield `rounds` random orders of `names`."""
    rng = random.Random(seed)
    for _ in range(rounds):
        yield rng.sample(names, len(names))


def summarise(
    samples: Sequence[float], launches: int, cache_state: str, launch_us: float
) -> Timing:
    return Timing(
        median_us=quantile(samples, 0.5),
        p20_us=quantile(samples, 0.2),
        p80_us=quantile(samples, 0.8),
        n=len(samples),
        launches=launches,
        cache_state=cache_state,
        launch_us=launch_us,
    )


# ---- on a GPU


@dataclass(frozen=True)
class Sampling:
    """The length and the number of samples of a timing."""

    rounds: int = ROUNDS
    warm_up_seconds: float = WARM_UP_SECONDS
    sample_us: float = SAMPLE_US  # aimed length of one graph replay
    eager_calls: int = EAGER_CALLS


@dataclass(frozen=True)
class Measured:
    """The result of time_variants."""

    timings: dict[str, Timing]
    gpu_before: dict[str, float] | None  # clock, power, temperature, in the first timed round
    gpu_after: dict[str, float] | None  # the same in the last
    replay: dict[str, Callable[[], None]]  # replays the graph that was timed
    operands: Operands = ()  # those of its first launch


def time_variants(
    variants: Mapping[str, Launch],
    operands: Sequence[Operands],
    cache_state: str,
    seed: int = 0,
    sampling: Sampling | None = None,
    dropped: Callable[[str, Exception], None] | None = None,
) -> Measured:
    """Time every variant on the same rotating `operands` (see copies_to_rotate).

    A variant that cannot be called or captured is left out after `dropped(name, error)`, which may
    raise the error itself; without `dropped` it is raised. Results are not checked here.
    """
    import torch

    how = sampling or Sampling(ROUNDS, WARM_UP_SECONDS, SAMPLE_US, EAGER_CALLS)
    launch_us, graphs, launches = {}, {}, {}
    round_us = 0.0
    for name, launch in variants.items():
        try:
            # NOTE: all on the stream of the capture, since autograd runs a backward on the stream
            # of its forward, which is run in the first call.
            with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
                estimate = _estimate(launch, operands)
                calls = min(how.eager_calls, max(3, int(EAGER_SECONDS * 1e6 / estimate)))
                launch_us[name] = _launch_cost(launch, operands[0], calls)
            launches[name] = launches_per_sample(estimate, len(operands), how.sample_us)
            graphs[name] = _capture(launch, operands, launches[name])
        except Exception as error:
            if dropped is None:
                raise
            dropped(name, error)
        else:
            round_us += estimate * launches[name]

    def enqueue(order: list[str]) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = {}
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # NOTE: keeps the GPU busy while the host submits the graph: without it the first
            # sample of a round would include the submission.
            torch.cuda._sleep(200_000)
            start.record()
            graphs[name].replay()
            end.record()
            events[name] = start, end
        return events

    names = list(graphs)
    rounds = rounds_in(round_us / 1e6, how.rounds) if names else 0
    until = time.monotonic() + how.warm_up_seconds
    while names and time.monotonic() < until:
        enqueue(names)
        torch.cuda.synchronize()

    samples: dict[str, list[float]] = {name: [] for name in names}
    gpu_before = gpu_after = gpu_state()
    for i, order in enumerate(interleave(names, rounds, seed)):
        events = enqueue(order)
        if i == 0:
            gpu_before = gpu_state()
        elif i == rounds - 1:
            gpu_after = gpu_state()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            samples[name].append(start.elapsed_time(end) * 1e3 / launches[name])
    timings = {
        name: summarise(samples[name], launches[name], cache_state, launch_us[name])
        for name in names
    }
    replay = {name: graphs[name].replay for name in names}
    return Measured(timings, gpu_before, gpu_after, replay, operands[0])


def _launch_cost(launch: Launch, operands: Operands, calls: int) -> float:
    """The host time of one eager call, the median in microseconds; it also warms the variant up."""
    import torch

    for _ in range(3):
        launch(*operands)
    torch.cuda.synchronize()
    samples = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        launch(*operands)
        samples.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return quantile(samples, 0.5)


def _estimate(launch: Launch, operands: Sequence[Operands]) -> float:
    """The GPU time of an eager launch, in microseconds, approximately: of one launch if that is
    long, else of ten. It also compiles what the first call compiles."""
    import torch

    def of(repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        for i in range(repeats):
            launch(*operands[i % len(operands)])
        end.record()
        torch.cuda.synchronize()
        return max(1.0, start.elapsed_time(end) * 1e3 / repeats)

    launch(*operands[0])
    one = of(1)
    return one if one > LONG_US else of(10)


def _capture(launch: Launch, operands: Sequence[Operands], launches: int) -> torch.cuda.CUDAGraph:
    """Capture a graph of so many launches.

    NOTE: not by torch.cuda.graph, which collects garbage first: 0.25 s each time in a process that
    has compilers loaded.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        graph.capture_begin()
        try:
            for i in range(launches):
                launch(*operands[i % len(operands)])
        except BaseException:
            _end_broken_capture(graph)
            raise
        graph.capture_end()
    return graph


def _end_broken_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End the capture of a launch that failed, so that torch's random generators leave it too."""
    import torch

    with suppress(RuntimeError):  # says only that there was an error before
        graph.capture_end()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        whole = torch.cuda.CUDAGraph()
        whole.capture_begin()
        whole.capture_end()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream on which all graphs are captured, since libraries allocate memory for each
    stream."""
    import torch

    return torch.cuda.Stream(device)


def driver_version() -> str | None:
    """The NVIDIA driver's own version, such as "580.65.06", from NVML; None without."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode(errors="replace")


def gpu_state() -> dict[str, float] | None:
    """Clock, power and temperature of the CUDA device at this moment, from NVML; None without."""
    import torch

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)):
        return None
    state = {}
    value = ctypes.c_uint()
    sm_clock, gpu_sensor = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
    if not nvml.nvmlDeviceGetClockInfo(device, sm_clock, ctypes.byref(value)):
        state["clock_mhz"] = float(value.value)
    if not nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(value)):
        state["power_w"] = value.value / 1e3
    if not nvml.nvmlDeviceGetTemperature(device, gpu_sensor, ctypes.byref(value)):
        state["temperature_c"] = float(value.value)
    return state or None

"""Result: the outcome of one run of one stage, and the line of JSON that stores it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from cutex.arch import arch
from cutex.problem import BESIDE_SIZES, Problem, problem_class, size_name


@dataclass(frozen=True)
class Timing:
    """The time of one variant on a GPU, in microseconds per launch, launch cost excluded."""

    median_us: float
    p20_us: float
    p80_us: float
    n: int  # samples; each is the mean of `launches` launches in one CUDA graph
    launches: int
    cache_state: str  # "cold": inputs rotated over at least 3x L2; "hot": the same inputs each time
    launch_us: float  # host time of one eager call, median


@dataclass(frozen=True)
class Peer:
    """A kernel by others, timed interleaved with ours in the same process."""

    name: str
    version: str
    timing: Timing


@dataclass(frozen=True)
class Result:
    """The outcome of one stage on one problem and one device."""

    op: str
    stage: int
    title: str
    arch: str
    device: str  # "cuda" | "sim"
    device_name: str
    problem: dict[str, Any]  # its fields: sizes, dtype, init, seed
    config: dict[str, Any]
    ok: bool
    max_error: float | None  # None where the output holds a NaN, or there is no output
    tolerance: float | None  # None where it is not finite
    message: str  # the reason why it is ok or not
    run: str  # UTC time at which the run began; the same for all interleaved variants
    environment: dict[str, Any]  # versions, commit
    compile_seconds: float = 0.0
    from_cache: bool = False
    # on a GPU
    timing: Timing | None = None
    tflops: float | None = None
    gbs: float | None = None
    percent_of_peak: float | None = None  # of the stated peak of the units that compute
    peers: list[Peer] = field(default_factory=list)
    gpu_before: dict[str, float | None] | None = (
        None  # clock_mhz, power_w, temperature_c under load
    )
    gpu_after: dict[str, float | None] | None = None
    # in the simulator
    sim_seconds: float | None = None
    sim_instructions: int | None = None
    sim_orders: list[str] = field(default_factory=list)
    sim_counts: dict[str, int] | None = None  # transactions with memory, of lanes (--count)
    # why it was run, and what it cost
    id: str = ""  # of the run: the same run, delivered twice, is recorded once
    expect: str = ""  # the note: what was expected and why, written down before the run
    cost_usd: float | None = None  # this row's share of what the GPU was rented for

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The values of all of the problem's fields but dtype, init and seed."""
        return tuple([v for name, v in self.problem.items() if name not in BESIDE_SIZES])

    @property
    def size(self) -> str:
        """The sizes as one word."""
        return size_name(self.op, self.problem)

    @property
    def case(self) -> Problem:
        """The problem; ValueError or TypeError if this version does not have it."""
        return _case(self.op, tuple(self.problem.items()))

    @property
    def known(self) -> bool:
        """Whether this version has the arch, and the problem with its FLOPs and bytes."""
        try:
            arch(self.arch)
            return type(self.case.flops) is type(self.case.bytes) is int
        except (ArithmeticError, ValueError, TypeError):
            return False

    def ratio(self, peer: str) -> float | None:
        """The speed relative to `peer` in the same run: above 1 is faster than the peer."""
        for p in self.peers:
            if p.name == peer and self.timing is not None:
                return p.timing.median_us / self.timing.median_us
        return None

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of a row: two rows of one key are one result, delivered twice."""
        what = self.op, self.stage, self.arch, self.device_name, *self.problem.values()
        return self.id or self.run, *what

    def to_json(self) -> str:
        return json.dumps(_plain(asdict(self)), allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=4096)
def _case(op: str, problem: tuple[tuple[str, Any], ...]) -> Problem:
    try:
        return problem_class(op)(**dict(problem))
    except (ArithmeticError, AttributeError, KeyError) as error:  # of a row from elsewhere
        raise ValueError(f"{op} of {dict(problem)} is no problem: {error}") from None


def tflops(flops: int, microseconds: float) -> float:
    return flops / microseconds / 1e6


def gbs(num_bytes: int, microseconds: float) -> float:
    return num_bytes / microseconds / 1e3


DIGITS = 6  # significant digits of a float in the ledger; no clock used is more precise


def _plain(value: Any) -> Any:
    """`value` for JSON, which has no NaN and no infinity: these become null. Floats keep DIGITS
    digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        case dict():
            return {key: _plain(v) for key, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
    return value

"""The rate of a time, in the unit of what limits the problem: TFLOPS, or GB/s of memory."""

from __future__ import annotations

from dataclasses import dataclass

from cutex.arch import arch
from cutex.problem import Problem
from cutex.results.result import Result, gbs, tflops


@dataclass(frozen=True)
class Rate:
    """The rate of one time; `peak` is the arch's stated peak in the same unit."""

    value: float
    unit: str  # "TFLOPS" | "GB/s"
    us: float
    peak: float

    @property
    def percent(self) -> float:
        return 100 * self.value / self.peak

    @property
    def by_memory(self) -> bool:
        return self.unit == "GB/s"

    def __str__(self) -> str:
        """The rate as tables show it: '655' or '6.2' in TFLOPS; '4101 GB/s, 32.8 us' where memory
        limits."""
        if self.by_memory:
            return f"{self.value:.0f} GB/s, {self.us:.1f} us"
        return f"{self.value:.0f}" if self.value >= 10 else f"{self.value:.1f}"


def rate(problem: Problem, arch_name: str, us: float) -> Rate:
    """The rate of a time of `us` microseconds. Memory limits where a problem's bytes take longer at
    the stated bandwidth than its FLOPs take at the stated peak of the units that compute them."""
    target, needs = arch(arch_name), problem.needs
    peak = needs.peak_tflops(target)
    if peak is None or problem.bytes / target.hbm_gbs / 1e3 > problem.flops / peak / 1e6:
        return Rate(gbs(problem.bytes, us), "GB/s", us, target.hbm_gbs)
    return Rate(tflops(problem.flops, us), "TFLOPS", us, peak)


def rate_of(result: Result) -> Rate | None:
    """The rate of a result; None if it has no timing, or if this version does not have its
    problem."""
    if result.timing is None or not result.known:
        return None
    return rate(result.case, result.arch, result.timing.median_us)

"""The least work that a computation needs, by unit of a GPU, and the least time of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutex.arch import Arch

TENSOR, FMA, MUFU = "tensor cores", "FMA pipes", "exponentials"
LEVELS = {"hbm": "memory", "l2": "L2"}  # levels of memory, by the key of their bytes
COMPUTE = (TENSOR, FMA)  # the units whose work is counted in FLOPs


@dataclass(frozen=True)
class Work:
    """What any kernel of a computation must do at least.

    Exponentials bind nothing by themselves: a kernel may compute a part of them on the FMA pipes.
    """

    mma: Mapping[str, float] = field(default_factory=dict)  # FLOPs by kind of MMA (cutex.arch)
    fp32: float = 0.0  # FLOPs of the FMA pipes
    exponentials: float = 0.0
    bytes: Mapping[str, float] = field(default_factory=dict)  # by level of memory

    def us(self, on: Arch) -> dict[str, float]:
        """The least microseconds of each unit that has work, at the stated rates of `on`. A kind of
        MMA that `on` does not have gives no time."""
        us = {TENSOR: sum(n / on.mma_tflops[k] for k, n in self.mma.items() if k in on.mma_tflops)}
        us[FMA] = self.fp32 / on.fp32_tflops
        us[MUFU] = self.exponentials / (on.exponentials * on.num_sms * on.clock_hz) * 1e12
        rates = {"hbm": on.hbm_gbs, "l2": on.l2_bytes_per_clock * on.clock_hz / 1e9}
        us |= {LEVELS[level]: 1e3 * n / rates[level] for level, n in self.bytes.items()}
        return {unit: time / 1e6 for unit, time in us.items() if time}

    @property
    def flops(self) -> float:
        return sum(self.mma.values()) + self.fp32

    def binding(self, on: Arch) -> str | None:
        """The unit whose least time is the longest; None where no rate is known."""
        us = {unit: time for unit, time in self.us(on).items() if unit != MUFU}
        return max(us, key=us.__getitem__) if us else None

    def peak_tflops(self, on: Arch) -> float | None:
        """The TFLOPS at which the busiest unit of `COMPUTE` is never idle; None where there are no
        FLOPs, or no rate of theirs."""
        us = self.us(on)
        longest = max((us.get(unit, 0.0) for unit in COMPUTE), default=0.0)
        return self.flops / longest / 1e6 if longest else None

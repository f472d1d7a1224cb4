"""When a CTA may ask memory for its next K tile, where memory limits and each CTA has one tile.

SMs that memory answers sooner ask for more, and end up to 8 us of 30 before the others. That gains
nothing, for memory is busy all the time, and it costs: requests that come together for what all
CTAs share are merged on their way to L2, and those that come apart are not. When none is faster
than memory could serve them all, they stay together: 1.01 to 1.03 times as fast (docs/facts.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, cute

from cutex.arch import Arch

FIRST_NS = 1000  # until the first load has come
LOOKS = 256  # at the clock


@dataclass(frozen=True)
class Pace:
    """Of CTAs that read operands together, step by step. Memory that is slower than the one it
    is made for is not held back by it."""

    bytes_per_ns: int
    least_bytes: int  # in all: L2 may hold a good part of less, and needs no pace

    @staticmethod
    def of(arch: Arch, share: float) -> Pace:
        """Of CTAs that together get `share` of the memory's peak."""
        return Pace(int(arch.hbm_gbs * share), arch.l2_bytes * 3 // 2)

    def step_ns(self, step_bytes: Int32 | int, num_steps: Int32 | int) -> Int32 | int:
        """From step to step, of which all CTAs together read `step_bytes`; 0 for no pace.

        Plain operators only: Python ints run it, and the same code traces in the DSL.
        """
        return step_bytes // self.bytes_per_ns * (num_steps > self.least_bytes // step_bytes)

    def lead_ns(self, step_ns: Int32 | int, ring: int) -> Int32 | int:
        """From the first loads, a `ring` of them, to the one after."""
        return FIRST_NS + ring * step_ns // 4


@cute.jit
def wait_until(due: Int64) -> None:
    """`due` as of `now`.

    NOTE: so many looks at the clock and no more: a clock that stops must stop no kernel.
    """
    looks = Int32(0)
    while looks < LOOKS and now() < due:
        looks += 1


def now() -> Int64:
    """Nanoseconds, the same for all SMs."""
    return Int64(cute.arch.globaltimer())

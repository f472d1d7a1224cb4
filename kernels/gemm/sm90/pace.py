"""The pace of loads where memory limits and each CTA has one tile: the time before which the next
load may not start.

SMs that get their answers sooner request more, and end up to 8 us of 30 before the others. That
gains nothing, since memory is busy all the time, and it costs: requests for shared data that come
at the same time are merged on their way to L2, later ones are not. If no SM is faster than memory
could serve them all, they stay together: 1.01 to 1.03 times as fast
(docs/facts/gemm.md#cta-loads-faster-memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, cute

from cutex.arch import Arch

FIRST_NS = 1000  # until the first load has arrived
LOOKS = 256  # most reads of the clock in one wait


@dataclass(frozen=True)
class Pace:
    """The rate of CTAs that read operands together, step by step.

    It never holds back loads on a memory slower than the one it is made for.
    """

    bytes_per_ns: int
    least_bytes: int  # in all: L2 may hold a good part of fewer, which then need no pace

    @staticmethod
    def of(arch: Arch, share: float) -> Pace:
        """The pace of CTAs that together get `share` of the memory's peak rate."""
        return Pace(int(arch.hbm_gbs * share), arch.l2_bytes * 3 // 2)

    def step_ns(self, step_bytes: Int32 | int, num_steps: Int32 | int) -> Int32 | int:
        """The nanoseconds from step to step, in which all CTAs together read `step_bytes`; 0 for no
        pace.

        Plain operators only: Python ints run it, and the same code traces in the DSL.
        """
        return step_bytes // self.bytes_per_ns * (num_steps > self.least_bytes // step_bytes)

    def lead_ns(self, step_ns: Int32 | int, ring: int) -> Int32 | int:
        """The nanoseconds from the first loads, a `ring` of them, to the one after."""
        return FIRST_NS + ring * step_ns // 4


@cute.jit
def wait_until(due: Int64) -> None:
    """Wait until `now` is `due`, but at most LOOKS reads of the clock, so that a stopped clock
    cannot hang the kernel."""
    looks = Int32(0)
    while looks < LOOKS and now() < due:
        looks += 1


def now() -> Int64:
    """The GPU's global timer in nanoseconds, the same for all SMs."""
    return Int64(cute.arch.globaltimer())

"""The barriers between the roles of a CTA of the Blackwell decode kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cutlass import Int32
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import Barrier, PipelineState

BUFFERS = 2  # blocks of S


@dataclass(frozen=True)
class Barriers:
    """barrier      arrives                                   waits
    q_full          1 a SOFTMAX warp: its part of Q is in     MMA, before a unit's first product
                    smem, and O of the unit before is read
    s_full[buffer]  1: the commit of QK                       SOFTMAX
    p_full[buffer]  1 a SOFTMAX warp: P is there, O scaled    MMA, before PV
    o_full[buffer]  1: the commit of PV                       SOFTMAX, before it scales or reads O
    """

    q_full: Barrier
    s_full: Barrier
    p_full: Barrier
    o_full: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, softmax_warps: int) -> Barriers:
        return Barriers(
            Barrier.allocate(smem, "q full", arrivals=softmax_warps),
            Barrier.allocate(smem, "s full", arrivals=1, slots=BUFFERS),
            Barrier.allocate(smem, "p full", arrivals=softmax_warps, slots=BUFFERS),
            Barrier.allocate(smem, "o full", arrivals=1, slots=BUFFERS),
        )

    def __iter__(self) -> Iterator[Barrier]:
        return iter((self.q_full, self.s_full, self.p_full, self.o_full))

    @staticmethod
    def buffers() -> PipelineState:
        """The state of a role that waits for buffers in turn."""
        return PipelineState(BUFFERS, Int32(0), Int32(0))

    def wait_output(self, number: Int32) -> None:
        """Wait for PV `number` of all that this CTA starts, of which up to two are under way.

        NOTE: a wait looks only one phase back, which a barrier of both PVs may have left behind.
        """
        self.o_full.wait(number // BUFFERS & 1, number % BUFFERS)

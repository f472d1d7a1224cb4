"""IssueOrder: the warpgroups of a CTA alternate in issuing their products (FlashAttention-3)."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from cutex.device.pipeline import OrderedBarrier


@dataclass(frozen=True)
class IssueOrder:
    """The order in which the warpgroups of a CTA issue their products: ping-pong, a step each."""

    barrier: OrderedBarrier
    warpgroup: Int32  # this one
    warpgroups: int

    @cute.jit
    def start(self) -> None:
        """Let the first warpgroup issue; the last one signals it."""
        if self.warpgroup == self.warpgroups - 1:
            self.barrier.signal(0)

    def wait(self) -> None:
        """Wait until the warpgroup before has issued its step."""
        self.barrier.wait(self.warpgroup)

    def end(self) -> None:
        """Let the next warpgroup issue."""
        self.barrier.signal((self.warpgroup + 1) % self.warpgroups)

"""The config of a reduction. Loads no DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.reduce import ReduceProblem


@dataclass(frozen=True)
class ReduceConfig:
    """Threads of a CTA, and what each of them takes."""

    threads: int = 1024
    vectors: int = 0  # loads of 16 bytes of a thread at one time; 0: it loads one element
    ctas: int = 0  # of a launch in one pass; 0: as many as there are elements for
    cluster: int = 1  # CTAs that add up in distributed smem

    def why_not(self, problem: ReduceProblem | None, arch: Arch) -> str | None:
        if self.threads & (self.threads - 1) or not 64 <= self.threads <= 1024:
            return f"threads={self.threads} must be a power of two from 64 to 1024"
        if self.cluster > 1 and arch.capability < (9, 0):
            return f"cluster={self.cluster}: {arch.name} has no clusters"
        elements = self.threads * max(1, 4 * self.vectors)  # of a CTA, of fp32
        if not self.ctas and problem is not None and problem.n > elements**3:
            return f"N={problem.n}: three launches of {self.threads} threads add up fewer"
        return None

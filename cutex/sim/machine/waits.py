"""The waits of blocked warps, and the waits that have let them pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cutex.sim.ptx.program import Instruction


@dataclass(slots=True, eq=False)
class Wait:
    """The reason why a warp is blocked, for wake-ups and for the deadlock report."""

    kind: str
    key: Any  # the argument of `Machine.wake` that ends it
    instruction: Instruction
    tell: Callable[[], str]
    lanes: np.ndarray | None = None  # of a diverged warp; None for all
    on_wake: Callable[[], None] | None = None  # called when it ends


class PassedWait(NamedTuple):
    """A wait by parity that has let a warp pass, with the barrier's phases at that time."""

    parity: int
    phases: int  # completed
    instruction: Instruction

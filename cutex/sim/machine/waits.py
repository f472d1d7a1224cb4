"""Why warps are blocked, and which waits have let them pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cutex.sim.ptx.parse import Instruction


@dataclass(slots=True, eq=False)
class Wait:
    """Why a warp is blocked, for wake-ups and for the deadlock report."""

    kind: str
    key: Any  # what `Machine.wake` is called with
    instruction: Instruction
    tell: Callable[[], str]
    lanes: np.ndarray | None = None  # of a warp whose lanes are apart; None for all
    on_wake: Callable[[], None] | None = None  # what it was waiting for is there


class PassedWait(NamedTuple):
    """A wait by parity that let a warp pass: what the warp then knew of the barrier."""

    parity: int
    phases: int  # completed
    instruction: Instruction

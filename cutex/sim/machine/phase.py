"""One mbarrier: its counts and its phases."""

from __future__ import annotations

from dataclasses import dataclass

from cutex.sim.ptx.program import Instruction


@dataclass
class MBarrier:
    cta: int
    offset: int
    expected: int  # arrivals per phase
    pending: int
    made: Instruction
    tx: int = 0
    phases: int = 0  # completed
    tx_expected: int = 0  # bytes announced, and bytes arrived, in this phase
    tx_arrived: int = 0
    last: tuple[str, Instruction] | None = None  # the last thread that used it, and how
    remote: bool = False  # the last arrival came from another CTA
    counted_up: int = 0  # arrivals of cp.async without .noinc, which were expected in addition
    announced: Instruction | None = None  # the last instruction that announced bytes

"""Runs compiled sm_90a and sm_100a kernels on a CPU: values, races, deadlocks, bad addresses.

from cutex.sim import simulate
report = simulate(compiled, a, b, c, order="random", seed=3)
"""

from __future__ import annotations

from cutex.errors import NoCompiler
from cutex.sim.errors import (
    BadAddress,
    BadOperand,
    BarrierMisuse,
    Deadlock,
    Endless,
    Finding,
    Hazards,
    LaunchError,
    SimError,
    UnknownInstruction,
)
from cutex.sim.run import SimReport, simulate

__all__ = [
    "BadAddress", "BadOperand", "BarrierMisuse", "Deadlock", "Endless", "Finding", "Hazards",
    "LaunchError", "NoCompiler", "SimError", "SimReport", "UnknownInstruction", "simulate",
]  # fmt: skip

"""Runs compiled sm_90a and sm_100a kernels on a CPU: values, races, deadlocks, bad addresses.

from cutex.sim import simulate
report = simulate(compiled, a, b, c, order="random", seed=3)

Names are imported on first use, so that the command lines answer before numpy is there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutex.errors import NoCompiler
    from cutex.sim.errors import (
        BadAddress,
        BadOperand,
        BarrierMisuse,
        Deadlock,
        Endless,
        Hazards,
        LaunchError,
        SimError,
        UnknownInstruction,
    )
    from cutex.sim.finding import Finding
    from cutex.sim.run import simulate
    from cutex.sim.simulation import SimReport

__all__ = [
    "BadAddress", "BadOperand", "BarrierMisuse", "Deadlock", "Endless", "Finding", "Hazards",
    "LaunchError", "NoCompiler", "SimError", "SimReport", "UnknownInstruction", "simulate",
]  # fmt: skip

_HOMES = {
    "Finding": "cutex.sim.finding",
    "NoCompiler": "cutex.errors",
    "SimReport": "cutex.sim.simulation",
    "simulate": "cutex.sim.run",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cutex.sim' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "cutex.sim.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

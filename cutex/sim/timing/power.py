"""The clock that power allows: what a kernel draws at each clock, held against the board's limit.

Watts are those that the board draws anyway, and energy for each FLOP of the tensor cores, each byte
through L2, each byte of HBM and each cycle of an SM, which all grow with the square of the voltage;
that grows with the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.timing.gpus import Gpu

if TYPE_CHECKING:
    from cutex.sim.timing.predict import Timed

DATA = {"normal": 1.0, "uniform": 0.97, "int": 0.72, "zeros": 0.45}  # switching, part of Gaussian


def watts(timed: Timed, gpu: Gpu, ghz: float, data: str = "normal") -> float:
    """At a clock of ``ghz``."""
    p = gpu.power
    seconds = timed.cycles / ghz * 1e-9
    volts = (p.volts_base + p.volts_slope * ghz) / (p.volts_base + p.volts_slope * gpu.clock)
    switching = (
        DATA.get(data, 1.0) * p.flop_pj * timed.flops
        + p.l2_pj * (timed.loaded + timed.stored)
        + p.sm_pj * timed.cycles * gpu.sms
    )
    moved = p.hbm_pj * (timed.dram + timed.stored)
    return p.idle_w + (switching * volts**2 + moved) * 1e-12 / seconds


def clock_ghz(timed: Timed, gpu: Gpu, data: str = "normal") -> float:
    """The highest clock, in steps of 15 MHz, at which the board stays below its limit."""
    ghz = gpu.clock
    while ghz > gpu.power.lowest_ghz and watts(timed, gpu, ghz, data) > gpu.power.limit_w:
        ghz -= 0.015
    return ghz

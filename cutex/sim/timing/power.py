"""The clock that power allows: the highest at which a kernel stays below the board's limit.

The watts are those of the idle board, and an energy for each FLOP of the tensor cores, each
instruction of a warp, each byte through L2 and each byte of HBM; all but the last grow with the
square of the voltage, which is linear in the clock. A FLOP of operands narrower than 16 bits takes
as much less energy as it takes fewer cycles. Kernels whose tensor cores run in bursts lose clock
though they draw far less than the limit (stages 0 and 1 of the GEMM ladder: 1.80 and 1.70 GHz at
490 to 640 W): for those the model is a line through measurements (`Power.burst_ghz`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutex.sim.timing.gpus import Gpu

if TYPE_CHECKING:
    from cutex.sim.timing.timed import Timed

DATA = {"normal": 1.0, "uniform": 0.95, "int": 0.65, "zeros": 0.5}  # energy of a FLOP, relative
MEMORY = ("HBM share",)
BURSTS = 0.5  # share of the time with MMAs below which they are taken to run in bursts


def watts(timed: Timed, gpu: Gpu, ghz: float, data: str = "normal") -> float:
    """The watts that the board draws at a clock of ``ghz``."""
    p = gpu.power
    seconds = timed.cycles / ghz * 1e-9
    volts = (p.volts_base + p.volts_slope * ghz) / (p.volts_base + p.volts_slope * gpu.clock)
    # instructions of warps, from the issue slots of the four sub-cores of each SM
    issued = 4 * gpu.sms * timed.busy.get("issue slots", 0.0) * timed.cycles
    switching = (
        DATA.get(data, 1.0) * p.flop_pj * timed.flops * timed.narrow
        + p.l2_pj * (timed.loaded + timed.stored)
        + p.issue_pj * issued
    )
    moved = p.hbm_pj * (timed.dram + timed.written)
    return p.idle_w + (switching * volts**2 + moved) * 1e-12 / seconds


def clock_ghz(timed: Timed, gpu: Gpu, data: str = "normal") -> float:
    """The highest clock, in steps of 15 MHz, at which the board stays below its limit."""
    ghz = gpu.clock
    tensor = timed.flops * timed.narrow / gpu.mma_flops / gpu.sms / timed.cycles
    if tensor < BURSTS and gpu.power.limit_w != float("inf") and timed.binds not in MEMORY:
        ghz -= gpu.power.burst_ghz * tensor
    while ghz > gpu.power.lowest_ghz and watts(timed, gpu, ghz, data) > gpu.power.limit_w:
        ghz -= 0.015
    return ghz

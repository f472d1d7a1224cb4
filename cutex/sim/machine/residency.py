"""The number of a grid's CTAs that run at one time: only CTAs among these may wait for each other.

It is as many as the GPU holds, by the threads and the shared memory of its SMs. A GPU may hold
fewer: the register count is only known to the assembler, the use of tensor memory to the running
program, and how clusters fill GPCs is not documented.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutex.arch import ARCHS, KNOWN, Arch
from cutex.sim.host.capture import Launch
from cutex.sim.machine.memory import SYSTEM_SMEM
from cutex.sim.ptx.program import Program

SM_THREADS, SM_CTAS = 2048, 32
SM_SMEM = 233472  # bytes
# registers of an SM, its parts, and the unit in which a warp gets registers
_REGISTERS, _PARTS, _UNIT = 65536, 4, 256
_TMEM_COLUMNS = 512
_STATE_BYTES = 1 << 30  # registers, shared and tensor memory that the simulator may hold


@dataclass(frozen=True)
class Residency:
    """The number of resident CTAs, ``ctas``, which is a multiple of the cluster's size."""

    ctas: int
    why: str  # the limiting resource
    gpu_ctas: int = 0  # CTAs that the GPU holds, whatever the simulator holds
    per_sm: int = 1  # of these on one SM


def residency(program: Program, launch: Launch, ctas: int | None = None) -> Residency:
    """The residency in whole clusters: as many as the GPU holds, or as fit in the simulator's
    memory if that is less. ``ctas``: the CTAs of the grid that run.
    """
    num_ctas = launch.num_ctas if ctas is None else ctas
    gpu = gpu_of(program)
    per_sm = _per_sm(program, launch)
    limits = [
        (gpu.num_sms * per_sm, f"{per_sm} on each of the {gpu.num_sms} SMs of one {gpu.board}"),
        (_STATE_BYTES // _state(program, launch), "as the simulator has memory for"),
    ]
    if any(i.name == "clusterlaunchcontrol" for i in program.code):
        # NOTE: with all clusters resident there would be none left to take over
        limits.append((num_ctas // 3, "so that cluster launch control finds others"))
    most, why = min(limits, key=lambda limit: limit[0])
    size = launch.cluster_size
    return Residency(min(num_ctas, max(1, most // size) * size), why, limits[0][0], per_sm)


def held(gpu: Arch, warps: int, smem: int, registers: int = 0, columns: int = 0) -> tuple[int, str]:
    """How many CTAs an SM holds, and the resource that limits them. Of a CTA: its ``warps``, bytes
    of ``smem``, ``registers`` of a thread and ``columns`` of tensor memory; 0: not known, or none.
    """
    room = {
        "the most that an SM takes": SM_CTAS,
        "threads": gpu.sm_threads // (32 * warps),
        "shared memory": (gpu.smem_per_cta + SYSTEM_SMEM) // (SYSTEM_SMEM + smem),
    }
    if registers:
        of_warp = -(-registers * 32 // _UNIT) * _UNIT
        room["registers"] = _REGISTERS // _PARTS // of_warp * _PARTS // warps
    if columns:
        room["tensor memory"] = _TMEM_COLUMNS // columns
    limit, ctas = min(room.items(), key=lambda item: item[1])
    return ctas, limit


def gpu_of(program: Program) -> Arch:
    return KNOWN.get(program.target, ARCHS["sm_100a"])


def _per_sm(program: Program, launch: Launch) -> int:
    static = sum(v.size for v in program.variables.values() if v.space == "shared")
    return max(1, held(gpu_of(program), launch.warps_per_cta, static + launch.smem)[0])


def _state(program: Program, launch: Launch) -> int:
    """The bytes of state that the simulator holds per CTA."""
    registers = sum(count * 32 * max(bank // 8, 1) for bank, count in program.registers.items())
    tensor_memory = 4 * 128 * 512 if "sm_10" in program.target else 0
    return launch.warps_per_cta * registers + launch.smem + 2048 + tensor_memory

"""The SM resources of a launched kernel, and its shared memory bank conflicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutex.cubin import Cubin
from cutex.sim.machine.residency import SM_THREADS, gpu_of, held

if TYPE_CHECKING:
    from cutex.sim.host.capture import Launch
    from cutex.sim.machine.banks import BankConflicts, Wavefronts
    from cutex.sim.machine.machine import Machine
    from cutex.sim.machine.sectors import GlobalSectors

_NAME = 48  # characters of a kernel's name: the DSL's contain the types of all arguments


@dataclass(frozen=True)
class Conflict:
    """An access to shared memory that takes more wavefronts than it needs."""

    place: str  # in the source, or the PTX line
    instruction: str
    needed: int
    taken: int

    def __str__(self) -> str:
        ratio = f"{self.taken / self.needed:.3g}"
        return (
            f"{self.place}: bank conflicts, {self.instruction} takes {ratio} times the wavefronts "
            f"that it needs ({self.taken} instead of {self.needed})"
        )


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel as it was launched; registers and spills are per thread, None if
    unknown.
    """

    kernel: str
    threads: int
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int  # static and dynamic
    tmem_columns: int
    ctas_per_sm: int
    limit: str  # the resource that limits ctas_per_sm
    conflicts: tuple[Conflict, ...]
    wavefronts: int = 0  # of shared memory, by accesses of lanes
    least_wavefronts: int = 0  # without a conflict
    requests: int = 0  # of warps to global memory
    sectors: int = 0  # of 32 bytes that they ask for

    @property
    def counts(self) -> dict[str, int]:
        """The transactions with memory, by name."""
        names = ("requests", "sectors", "wavefronts", "least_wavefronts")
        return {name: getattr(self, name) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "conflicts": [vars(c) for c in self.conflicts], "text": str(self)}

    def __str__(self) -> str:
        known = self.registers is not None
        registers = f"{self.registers} registers" if known else "registers not known"
        spills = f"{self.spill_bytes} bytes spilled" if known else ""
        tmem = f"{self.tmem_columns} columns of tensor memory" if self.tmem_columns else ""
        occupancy = self.ctas_per_sm * self.threads / SM_THREADS
        ctas = f"{self.ctas_per_sm} CTA{'s' * (self.ctas_per_sm != 1)} per SM"
        parts = [f"{self.threads} threads", registers, spills, f"{self.smem_bytes} bytes of smem",
                 tmem, f"{ctas} ({occupancy:.0%} of its threads, by {self.limit})"]  # fmt: skip
        name = self.kernel if len(self.kernel) <= _NAME else f"{self.kernel[: _NAME - 3]}..."
        lines = [f"{name}: {', '.join(p for p in parts if p)}"]
        lines += [f"  {c}" for c in self.conflicts] or ["  no bank conflicts"]
        if self.requests:
            each = f"{self.sectors / self.requests:.3g} each"
            lines.append(
                f"  global memory: {self.requests} requests, {self.sectors} sectors, {each}"
            )
        return "\n".join(lines)


def resources(
    machine: Machine,
    launch: Launch,
    cubin: bytes | None,
    banks: BankConflicts,
    memory: GlobalSectors,
) -> KernelResources:
    """The resources of the kernel that ``machine`` has run; ``cubin`` is its code, for the
    registers.
    """
    try:
        code = Cubin(cubin, launch.kernel) if cubin else None
    except ValueError:  # NOTE: kernels compiled by others may lack the attributes
        code = None
    smem = machine.static_smem + launch.smem
    ctas, limit = held(
        gpu_of(machine.program), launch.warps_per_cta, smem, code.registers if code else 0,
        machine.tmem.most,
    )  # fmt: skip
    return KernelResources(
        machine.program.title, launch.num_threads, code.registers if code else None,
        code.stack_bytes if code else None, smem, machine.tmem.most, ctas, limit,
        tuple(_conflicts(banks)), banks.taken, banks.needed, memory.requests, memory.sectors,
    )  # fmt: skip


def _conflicts(banks: BankConflicts) -> list[Conflict]:
    """The bank conflicts, the worst first."""
    worse: list[Wavefronts] = sorted(
        (w for w in banks.by_line.values() if w.taken > w.needed),
        key=lambda w: w.needed - w.taken,
    )
    return [Conflict(w.instruction.place(), w.instruction.op, w.needed, w.taken) for w in worse]

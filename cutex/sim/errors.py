"""What a simulated run can report: findings, and the errors that end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cutex.errors import CutexError

if TYPE_CHECKING:
    from cutex.sim.ptx.parse import Instruction
    from cutex.sim.sides import Side


@dataclass(frozen=True)
class Finding:
    """One thing that the simulator holds against a kernel.

    ``rule`` is a short name ("race", "tx-count", "uninitialised", ...), ``message`` one sentence
    that says who did what to which memory, ``where`` the PTX and Python lines that did it. An
    ``advisory`` breaks the letter of the PTX ISA in a way that hardware is known to bear.
    ``sides``: the instructions that it names, the one at fault first; ``remedy``: what would order
    the two, if that is what it is about.
    """

    rule: str
    message: str
    where: str
    advisory: bool = False
    sides: tuple[Side, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        level = "advisory, " if self.advisory else ""
        return f"{level}{self.rule}: {self.message}\n    at {self.where}"


class SimError(CutexError):
    """A simulated run that cannot go on, or that ended with findings."""

    rule = "error"
    sides: tuple[Side, ...] = ()  # the instructions that it names

    @classmethod
    def at(cls, ins: Instruction, message: str) -> Self:
        """``message`` under the rule's name, and the PTX and Python lines of ``ins``."""
        return cls(f"{cls.rule}: {message}\n    at {ins.where()}")


class Deadlock(SimError):
    """Nothing can run, nothing is in flight, and not every warp has returned."""

    rule = "deadlock"


class Endless(SimError):
    """Warps that go on without end, or for longer than they were given."""

    rule = "endless"


class BadAddress(SimError):
    """An access outside every tensor, outside shared or tensor memory, or misaligned."""

    rule = "bad address"


class BarrierMisuse(SimError):
    """An mbarrier or named barrier used in a way that the PTX ISA leaves undefined."""

    rule = "barrier misuse"


class BadOperand(SimError):
    """An instruction with an operand that the hardware would trap on or leave undefined."""

    rule = "bad operand"


class UnknownInstruction(SimError):
    """PTX that this simulator does not define; running on would give a wrong result."""

    rule = "unknown instruction"


class Hazards(SimError):
    """The run finished, but broke a rule of the memory model; ``findings`` lists each case."""

    rule = "hazard"

    def __init__(self, findings: list[Finding]) -> None:
        from cutex.sim.reports import told

        self.findings = findings
        head = f"{len(findings)} hazard{'s' if len(findings) > 1 else ''} found"
        super().__init__(f"{head}\n{told(findings)}")


class CooperativeTooLarge(SimError):
    """A cooperative launch of more CTAs than run side by side, which the driver refuses."""

    rule = "launch"


class LaunchError(SimError):
    """The kernel's own host code refused the arguments, before anything was launched."""

    rule = "launch"

"""The errors that end a simulated run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from cutex.errors import CutexError
from cutex.sim.finding import Finding

if TYPE_CHECKING:
    from cutex.sim.ptx.program import Instruction
    from cutex.sim.sides import Side


class SimError(CutexError):
    """A simulated run that cannot go on, or that ended with findings."""

    rule = "error"
    sides: tuple[Side, ...] = ()  # the instructions that it names

    @classmethod
    def at(cls, ins: Instruction, message: str) -> Self:
        """``message`` under the rule's name, and the PTX and Python lines of ``ins``."""
        return cls(f"{cls.rule}: {message}\n    at {ins.where()}")


class Deadlock(SimError):
    """No warp can run, nothing is in flight, and not every warp has returned."""

    rule = "deadlock"


class Endless(SimError):
    """Warps that run without end, or longer than their limit."""

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
    """PTX that this simulator does not define; continuing would give a wrong result."""

    rule = "unknown instruction"
    exists = True  # whether the PTX ISA may have it

    @classmethod
    def of(cls, ins: Instruction, what: str, wrong: str) -> Self:
        """The error of an instruction that the PTX ISA does not have: ``what`` of it, and the
        modifier that is wrong.
        """
        from cutex.sim.reports import headed
        from cutex.sim.sides import Side

        sides = (Side.of(ins),)
        text = (
            f"{cls.rule} {ins.op}: the simulator does not define {what}, nor has the PTX ISA "
            f"any such ({wrong})\n    at {ins.where()}"
        )
        error = cls(headed(text, sides))
        error.sides, error.exists = sides, False
        return error


class Hazards(SimError):
    """The run finished, but broke a rule of the memory model; ``findings`` lists each case."""

    rule = "hazard"

    def __init__(self, findings: list[Finding]) -> None:
        from cutex.sim.reports import as_text

        self.findings = findings
        head = f"{len(findings)} hazard{'s' if len(findings) > 1 else ''} found"
        super().__init__(f"{head}\n{as_text(findings)}")


class CooperativeTooLarge(SimError):
    """A cooperative launch of more CTAs than run at one time, which the driver refuses."""

    rule = "launch"


class LaunchError(SimError):
    """The kernel's own host code refused the arguments, before anything was launched."""

    rule = "launch"

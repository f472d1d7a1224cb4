"""A finding of a simulated run, of which reports are made and with which an error may end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutex.sim.sides import Side


@dataclass(frozen=True)
class Finding:
    """A rule that a kernel breaks, at one place.

    ``rule`` is a short name ("race", "tx-count", "uninitialised", ...), ``message`` one sentence
    with the threads, their accesses and the memory, ``where`` the PTX and Python lines. An
    ``advisory`` breaks the letter of the PTX ISA in a way that hardware is known to tolerate.
    ``sides``: the instructions involved, the one at fault first; ``remedy``: what would order the
    two, for findings about order.
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

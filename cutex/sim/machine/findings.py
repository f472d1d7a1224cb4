"""The findings of a launch, once per rule and instruction."""

from __future__ import annotations

from collections.abc import Iterator

from cutex.errors import CutexError
from cutex.sim.finding import Finding
from cutex.sim.ptx.program import Instruction, Program
from cutex.sim.sides import SmemNames, sides_of


class Found(CutexError):
    """The first finding of a run that ends with it, as another run tells what there is."""


class Findings:
    """The findings about a kernel, in the order in which they were found. ``first_ends``: the first
    one raises Found instead.
    """

    def __init__(self, program: Program, names: SmemNames) -> None:
        self.program, self.names = program, names
        self.first_ends = False
        self._found: dict[tuple[str, int, bool], Finding] = {}

    def add(
        self,
        rule: str,
        message: str,
        instruction: Instruction,
        advisory: bool = False,
        cause: int | None = None,
        remedy: str = "",
    ) -> None:
        """Add a finding. ``cause``: the PTX line that findings of one cause share, if it is another
        instruction's: only the first of them is reported. ``remedy``: what would order the two
        accesses.
        """
        if self.first_ends:
            raise Found
        key = rule, instruction.line if cause is None else -cause, advisory
        if key not in self._found:
            message, where = self.names.with_names(message), instruction.where()
            sides = sides_of(f"{where} {message}", self.program)
            self._found[key] = Finding(
                rule, message, where, advisory, sides, self.names.with_names(remedy)
            )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

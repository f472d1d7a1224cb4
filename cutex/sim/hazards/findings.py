"""The findings of a launch, once per rule and instruction."""

from __future__ import annotations

from collections.abc import Iterator

from cutex.sim.errors import Finding
from cutex.sim.ptx.parse import Instruction


class Findings:
    """What the simulator holds against a kernel, in the order in which it was found."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, bool], Finding] = {}

    def add(
        self,
        rule: str,
        message: str,
        instruction: Instruction,
        advisory: bool = False,
        cause: int | None = None,
    ) -> None:
        """``cause``: the PTX line that all with the same cause share, where it is another one's:
        then only the first of them is reported.
        """
        self._found.setdefault(
            (rule, instruction.line if cause is None else -cause, advisory),
            Finding(rule, message, instruction.where(), advisory),
        )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

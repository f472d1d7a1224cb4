"""A call's function, written out line by line when it is planned.

NOTE: a loop over a call's operands, what each of them needs, takes 2 us of a call's 4
(docs/facts/rows.md#rows-host-written).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutex.ops.plain import untraced


class Written:
    """The lines so far, and the values that they use."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}

    def add(self, line: str, *used: Any) -> None:
        """Add a line, in which each {} stands for one of the values used."""
        names = [f"v{len(self.values) + i}" for i in range(len(used))]
        self.values.update(zip(names, used, strict=True))
        self.lines.append(line.format(*names))

    def function(self, arguments: Sequence[str], returns: Sequence[str]) -> Callable[..., Any]:
        """The function of arguments with these names that returns variables of the lines: the only
        one, or a tuple."""
        found = ", ".join(returns)
        last = f"return {found}" if len(returns) == 1 else f"return ({found})"
        text = "\n  ".join([f"def on({', '.join(arguments)}):", *self.lines, last])
        exec(text, self.values)
        return untraced(self.values["on"])

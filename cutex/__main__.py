"""python -m cutex: the commands, a line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from cutex.command import answered, commands
from cutex.errors import BadOption


@answered
def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given not in (["-h"], ["--help"]):
        raise BadOption(_instead(given))
    for command, what in commands():
        print(f"{command:<29}  {what}")
    print("\nEach takes --help. In Python: cutex.matmul, cutex.flash_attn_func, cutex.simulate.")
    return 0


def _instead(given: list[str]) -> str:
    """What to type instead of `python -m cutex` with arguments."""
    name = given[0].removeprefix("cutex.")
    known = [command.split()[2].removeprefix("cutex.") for command, _ in commands()]
    if name in known:
        return f"the command is python -m cutex.{' '.join([name, *given[1:]])}"
    near = get_close_matches(name, known, 1)
    meant = f"; did you mean python -m cutex.{near[0]}?" if near else ""
    return f"{given[0]!r} is no command: python -m cutex lists them{meant}"


if __name__ == "__main__":
    raise SystemExit(main())

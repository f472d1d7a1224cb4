"""python -m cutex: the commands, a line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cutex.command import answered, commands, instead, refuse


@answered
def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if list(given) not in ([], ["-h"], ["--help"]):
        return refuse(instead(given))
    for command, what in commands():
        print(f"{command:<29}  {what}")
    print("\nEach takes --help. In Python: cutex.matmul, cutex.flash_attn_func, cutex.simulate.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex: the commands, a line each."""

from __future__ import annotations

from cutex.command import answered, commands


@answered
def main() -> int:
    for command, what in commands():
        print(f"{command:<29}  {what}")
    print("\nEach takes --help. In Python: cutex.matmul, cutex.flash_attn_func, cutex.simulate.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex.reduce: run, check and time the reduction ladder (see --help)."""

from __future__ import annotations

from collections.abc import Sequence

from cutex.bench import cli
from cutex.problem.reduce import ReduceProblem


def parser() -> cli.Parser:
    return cli.parser(ReduceProblem)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(ReduceProblem, argv)


if __name__ == "__main__":
    raise SystemExit(main())

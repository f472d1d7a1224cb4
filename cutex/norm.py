"""python -m cutex.norm: run, check and time the RMS norm ladder (see --help)."""

from __future__ import annotations

from collections.abc import Sequence

from cutex.bench import cli
from cutex.problem.norm import NormProblem


def parser() -> cli.Parser:
    return cli.parser(NormProblem)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(NormProblem, argv)


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex.gemm: run, check and time the GEMM ladder (see --help)."""

from __future__ import annotations

from collections.abc import Sequence

from cutex.bench import cli
from cutex.problem.gemm import GemmProblem


def parser() -> cli.Parser:
    return cli.parser(GemmProblem)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(GemmProblem, argv)


if __name__ == "__main__":
    raise SystemExit(main())

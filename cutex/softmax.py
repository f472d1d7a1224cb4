"""python -m cutex.softmax: run, check and time the softmax ladder (see --help)."""

from __future__ import annotations

from collections.abc import Sequence

from cutex.bench import cli
from cutex.problem.softmax import SoftmaxProblem


def parser() -> cli.Parser:
    return cli.parser(SoftmaxProblem)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(SoftmaxProblem, argv)


if __name__ == "__main__":
    raise SystemExit(main())

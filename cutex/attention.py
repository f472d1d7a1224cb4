"""python -m cutex.attention: run, check and time the attention ladder (see --help)."""

from __future__ import annotations

from collections.abc import Sequence

from cutex.bench import cli
from cutex.problem.attention import AttentionProblem


def parser() -> cli.Parser:
    return cli.parser(AttentionProblem)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(AttentionProblem, argv)


if __name__ == "__main__":
    raise SystemExit(main())

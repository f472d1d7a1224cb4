"""python -m cutex.attention: run, check and time the attention ladder (see --help)."""

from __future__ import annotations

from functools import partial
from typing import Any

from cutex.bench import cli
from cutex.problem.attention import AttentionProblem

parser = partial(cli.parser, AttentionProblem)
main = partial(cli.main, AttentionProblem)


def __getattr__(name: str) -> Any:  # activate and deactivate, which load torch
    from cutex.ops.attention import activation

    return getattr(activation, name)


if __name__ == "__main__":
    raise SystemExit(main())

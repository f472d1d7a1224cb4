"""python -m cutex.sweep: time cutex.matmul on layers of public models (see --help)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutex.bench import sweep


def ours() -> tuple[Callable[..., Any], Callable[[], Any]]:
    from cutex.ops import matmul, tuning

    return matmul, tuning


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(ours, argv)


if __name__ == "__main__":
    raise SystemExit(main())

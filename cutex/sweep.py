"""python -m cutex.sweep: time cutex.matmul on layers of public models (see --help)."""

from __future__ import annotations

from collections.abc import Sequence

from cutex.bench import sweep


def ours() -> sweep.Ours:
    from cutex.ops import simulated
    from cutex.ops.matmul import matmul, tuning
    from cutex.ops.matmul.warming import build_ahead, tiles_of

    return sweep.Ours(matmul, tuning, build_ahead, tiles_of, simulated)


def main(argv: Sequence[str] | None = None) -> int:
    return sweep.main(ours, argv)


if __name__ == "__main__":
    raise SystemExit(main())

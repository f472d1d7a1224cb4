"""python -m cutex.gemm: run, check and time the GEMM ladder (see --help)."""

from __future__ import annotations

from cutex.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

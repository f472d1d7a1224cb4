"""python -m cutex.check (see --help): the command of cutex.bench.check."""

from __future__ import annotations

from cutex.bench.check import main

if __name__ == "__main__":
    raise SystemExit(main())

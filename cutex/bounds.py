"""python -m cutex.bounds (see --help): the command of cutex.analysis.bounds."""

from __future__ import annotations

from cutex.analysis.bounds import main

if __name__ == "__main__":
    raise SystemExit(main())

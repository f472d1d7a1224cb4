"""python -m cutex.report: one page of all results, and the tables of the README (see --help)."""

from __future__ import annotations

from cutex.report import main

if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex.report (see --help)."""

from __future__ import annotations

from cutex.report import main

if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex.results (see --help)."""

from __future__ import annotations

from cutex.results.history import main

if __name__ == "__main__":
    raise SystemExit(main())

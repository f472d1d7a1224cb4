"""python -m cutex.results: read the ledger of results (see --help)."""

from __future__ import annotations

from cutex.results.history import main

if __name__ == "__main__":
    raise SystemExit(main())

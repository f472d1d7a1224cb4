"""python -m cutex.layout (see --help): the command of cutex.analysis.layout."""

from __future__ import annotations

from cutex.analysis.layout import main

if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex.layout: draw layouts and instructions as SVG (see --help)."""

from __future__ import annotations

from cutex.analysis.layout import main

if __name__ == "__main__":
    raise SystemExit(main())

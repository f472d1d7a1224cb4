"""python -m cutex.roofline: which limit binds a problem, and how fast it could be (see --help)."""

from __future__ import annotations

from cutex.analysis.roofline import main

if __name__ == "__main__":
    raise SystemExit(main())

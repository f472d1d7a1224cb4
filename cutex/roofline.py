"""python -m cutex.roofline (see --help): the command of cutex.analysis.roofline."""

from __future__ import annotations

from cutex.analysis.roofline import main

if __name__ == "__main__":
    raise SystemExit(main())

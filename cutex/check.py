"""python -m cutex.check: run a script in the simulator, in every order of events (see --help)."""

from __future__ import annotations

from cutex.bench.check import main

if __name__ == "__main__":
    raise SystemExit(main())

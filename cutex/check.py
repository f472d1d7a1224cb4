"""python -m cutex.check FILE.py: a script in the simulator, in every order: cutex/bench/check.py."""

from __future__ import annotations

from cutex.bench.check import main

if __name__ == "__main__":
    raise SystemExit(main())

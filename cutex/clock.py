"""python -m cutex.clock: how far off the simulator's clock is, and docs/time.md.

python -m cutex.clock          print the table of errors, from the stored records
python -m cutex.clock --page   and write it, with every constant, into docs/time.md
python -m cutex.clock --store  record all measured rows anew first (a quarter of an hour)
"""

from __future__ import annotations

from cutex.bench.clock_page import main

if __name__ == "__main__":
    raise SystemExit(main())

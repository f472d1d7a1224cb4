"""python -m cutex.bounds: what is known of the Blackwell GEMMs from their code (see --help)."""

from __future__ import annotations

from cutex.analysis.bounds import main

if __name__ == "__main__":
    raise SystemExit(main())

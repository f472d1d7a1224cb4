"""python -m cutex.clock: the error of the simulator's clock, and docs/time.md.

python -m cutex.clock          print the table of errors, from the stored records
python -m cutex.clock --page   and write it, with every constant, into docs/time.md
python -m cutex.clock --store  record all measured rows anew first (three quarters of an hour)
python -m cutex.clock --predict  predict the stages on a B200 anew, from their stored records
python -m cutex.clock --b200   against CUTLASS's GEMMs, from published times of a B200
python -m cutex.clock --fit power | b200  fit energies, or rates and latencies, to what is measured
"""

from __future__ import annotations

from cutex.command import answered


@answered
def main(argv: list[str] | None = None) -> int:
    from cutex.clock_errors import page  # NOTE: imports numpy, which may be missing

    return page.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())

"""python -m cutex.new: write a small working kernel, stage or operator of your own, with its test.

python -m cutex.new kernel NAME     NAME.py, a @cute.jit function, and test_NAME.py
python -m cutex.new stage NAME      NAME.py, stage 2 of the GEMM ladder changed, and its test
python -m cutex.new operator NAME   NAME/, a Problem and a ladder of one stage, and test_NAME.py
"""

from __future__ import annotations

from cutex.scaffold import main

if __name__ == "__main__":
    raise SystemExit(main())

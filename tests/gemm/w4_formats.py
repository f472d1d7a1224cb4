"""The formats of 4-bit weights that the tests pack."""

from __future__ import annotations

from cutex.problem.w4.layout import W4Format

FORMATS = [
    W4Format(),
    W4Format("int4", 0),
    W4Format("int4", 32, True),
    W4Format("fp4", 16),
    W4Format("fp4", 32),
]

"""Number formats and roundings of the arithmetic: small floats, sums of tensor cores."""

from __future__ import annotations

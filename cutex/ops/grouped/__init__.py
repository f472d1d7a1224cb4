"""`cutex.grouped_mm` and `cutex.scaled_grouped_mm`: products of rows in groups with a matrix for
each."""

from __future__ import annotations

from cutex.ops.grouped.function import grouped_mm
from cutex.ops.grouped.scaled import scaled_grouped_mm

__all__ = ["grouped_mm", "scaled_grouped_mm"]

"""`cutex.moe`: a layer of a mixture of experts."""

from __future__ import annotations

from cutex.ops.mixture.function import moe

__all__ = ["moe"]

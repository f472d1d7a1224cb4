"""The state of a simulated grid: memories, barriers, warps and their lanes."""

from __future__ import annotations

"""The order of accesses, and the reports of accesses that nothing orders."""

from __future__ import annotations

"""What orders two accesses, and the reports of those that nothing orders."""

from __future__ import annotations

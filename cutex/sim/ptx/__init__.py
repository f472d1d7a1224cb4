"""PTX text: its parser, its control flow, and typed access to the operands of an instruction."""

from __future__ import annotations

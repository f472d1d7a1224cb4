"""The instructions that the simulator defines, one function each, by section of the PTX ISA."""

from __future__ import annotations

"""Compile a kernel for any arch on any machine, keep it on disk, launch it on torch's stream."""

from __future__ import annotations

from cutex.cache import cache_dir
from cutex.compile.arguments import ALIGN, Argument, Bound, Operand, Scalar, Workspace
from cutex.compile.cache import FILES
from cutex.compile.compiled import Compiled
from cutex.compile.compiling import Kernel, compile, launched_smem

__all__ = [
    "ALIGN",
    "FILES",
    "Argument",
    "Bound",
    "Compiled",
    "Kernel",
    "Operand",
    "Scalar",
    "Workspace",
    "cache_dir",
    "compile",
    "launched_smem",
]  # fmt: skip

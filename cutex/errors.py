"""The base classes of cutex's own exceptions.

A caller's error is a ValueError or a TypeError, as everywhere in Python. An error of a kernel
(cutex.sim.SimError) or of this machine (Missing) is a CutexError.
"""

from __future__ import annotations


class CutexError(Exception):
    """An error of a kernel or of this machine that cutex reports."""


class Missing(CutexError):
    """Something that a run needs is not installed on this machine; the message names it."""


class NoCompiler(Missing):
    """There is no C compiler, which links the host half of a kernel for the simulator."""


class NoDisassembler(Missing):
    """There is no nvdisasm, which prints the SASS of a cubin."""


class NoCache(Missing):
    """The cache cannot be written, or another user can write to it."""

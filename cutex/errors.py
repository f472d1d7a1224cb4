"""The root of cutex's own exceptions.

What a caller got wrong is a ValueError or a TypeError, as everywhere in Python. What is wrong with
a kernel (cutex.sim.SimError) or with this machine (Missing) is a CutexError.
"""

from __future__ import annotations


class CutexError(Exception):
    """Anything that cutex reports of its own accord."""


class Missing(CutexError):
    """Something that a run needs is not installed on this machine; the message says what."""


class NoCompiler(Missing):
    """There is no C compiler, which links the host half of a kernel for the simulator."""


class NoDisassembler(Missing):
    """There is no nvdisasm, which prints the SASS that instructions are read from."""


class NoCache(Missing):
    """The cache cannot be written, or another user can write to it."""

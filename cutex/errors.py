"""The root of cutex's own exceptions.

What a caller got wrong is a ValueError or a TypeError, as everywhere in Python. What is wrong with
a kernel (cutex.sim.SimError), with this machine (Missing) or on a command line (BadOption) is a
CutexError.
"""

from __future__ import annotations


class CutexError(Exception):
    """Anything that cutex reports of its own accord."""


class BadOption(CutexError):
    """A command line's options make no sense, or name a file that cannot be; the message says it
    in one sentence."""


class Missing(CutexError):
    """Something that a run needs is not installed on this machine; the message says what."""


class NoCompiler(Missing):
    """There is no C compiler, which links the host half of a kernel for the simulator."""


class NoDisassembler(Missing):
    """There is no nvdisasm, which prints the SASS that instructions are read from."""


class NoCache(Missing):
    """The cache cannot be written, or another user can write to it."""

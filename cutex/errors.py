"""The base classes of cutex's own exceptions.

A caller's error is a ValueError or a TypeError, as everywhere in Python. An error of a kernel
(cutex.sim.SimError), of this machine (Missing) or of a command line (BadOption) is a CutexError.
"""

from __future__ import annotations


class CutexError(Exception):
    """An error of a kernel, of this machine or of a command line that cutex reports."""


class BadOption(CutexError):
    """A command line with options that do not fit each other, or with a file that cannot be; the
    message is one sentence."""


class Missing(CutexError):
    """Something that a run needs is not installed on this machine; the message names it."""


class NoCompiler(Missing):
    """There is no C compiler, which links the host half of a kernel for the simulator."""


class NoDisassembler(Missing):
    """There is no nvdisasm, which prints the SASS of a cubin."""


class NoCache(Missing):
    """The cache cannot be written, or another user can write to it."""

"""Kernels of one stream that overlap: one starts while the one before it ends."""

from __future__ import annotations

from cutlass import cute
from cutlass.base_dsl import BaseDSL


def may_overlap() -> bool:
    """Whether the arch that is compiled for has griddepcontrol (PTX ISA 9.7.13.13: sm_90 and
    later). A kernel that calls `wait_for_kernel_before` is launched with use_pdl=may_overlap()."""
    return BaseDSL._get_dsl().get_arch_enum().major >= 9


def let_next_kernel_start() -> None:
    """Let the next kernel of the stream, if it waits for this one, start where there is room."""
    if may_overlap():
        cute.arch.griddepcontrol_launch_dependents()


def await_kernel_before() -> None:
    """Wait until the kernel before has ended and what it wrote is visible."""
    if may_overlap():
        cute.arch.griddepcontrol_wait()


def wait_for_kernel_before() -> None:
    """Let the next kernel of the stream start, and wait until the one before has ended and what it
    wrote is visible. Called by all threads, before the first access of gmem.

    NOTE: what a kernel begins with, as its barriers, passes while the one before it ends: a launch
    among small ones takes some .7 us less (docs/facts/rows.md#rows-overlap)."""
    let_next_kernel_start()
    await_kernel_before()

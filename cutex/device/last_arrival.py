"""Which of several CTAs finishes last: a counter in global memory, instead of another launch."""

from __future__ import annotations

from cutlass import Boolean, Int32, cute


@cute.jit
def is_last_arrival(count: cute.Pointer, arrivals: Int32) -> Boolean:
    """Count an arrival; returns whether it is the last of `arrivals`, in which case the thread
    resets the counter to 0.

    One thread calls it, after a barrier of all threads that wrote: it releases their writes, and
    acquires what earlier arrivals released.
    """
    before = cute.arch.atomic_add(count, Int32(1), sem="acq_rel", scope="gpu")
    last = before == arrivals - 1
    if last:
        cute.arch.store(count, Int32(0), sem="relaxed", scope="gpu")
    return last

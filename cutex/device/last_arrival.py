"""Which of several CTAs ends last: a count in global memory, without a launch more."""

from __future__ import annotations

from cutlass import Boolean, Int32, cute


@cute.jit
def is_last_arrival(count: cute.Pointer, arrivals: Int32) -> Boolean:
    """Count an arrival; whether it is the last of `arrivals`, whose thread resets the count to 0.

    One thread calls it, after a barrier of all that wrote: it releases what they wrote, and
    acquires what those before it released.
    """
    before = cute.arch.atomic_add(count, Int32(1), sem="acq_rel", scope="gpu")
    last = before == arrivals - 1
    if last:
        cute.arch.store(count, Int32(0), sem="relaxed", scope="gpu")
    return last

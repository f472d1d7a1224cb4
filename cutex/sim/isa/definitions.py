"""Every instruction that the simulator defines: importing these modules registers them."""

from __future__ import annotations

from cutex.sim.isa import (
    atomics,
    bits,
    bulk,
    calls,
    clc,
    compare,
    convert,
    data,
    floating,
    fragments,
    integer,
    mma_sync,
    remote,
    sync,
    tcgen05,
    tcgen05_copy,
    tcgen05_mma,
    tensormap_replace,
    warp,
    wgmma,
)

ARITHMETIC = (bits, compare, convert, floating, integer)
MEMORY = (data, atomics, fragments, bulk, remote, tcgen05, tcgen05_copy)
CONTROL = (warp, sync, clc, calls, tensormap_replace)
MATRICES = (wgmma, tcgen05_mma, mma_sync)

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
    mbarrier,
    mma_sync,
    remote,
    sync,
    tcgen05,
    tcgen05_access,
    tcgen05_alloc,
    tcgen05_copy,
    tcgen05_mma,
    tensormap_replace,
    warp,
    wgmma,
)

ARITHMETIC = (bits, compare, convert, floating, integer)
MEMORY = (data, atomics, fragments, bulk, remote)
CONTROL = (warp, sync, mbarrier, clc, calls, tensormap_replace)
TENSOR_MEMORY = (tcgen05, tcgen05_access, tcgen05_alloc, tcgen05_copy)
MATRICES = (wgmma, tcgen05_mma, mma_sync)

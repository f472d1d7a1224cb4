"""Every instruction that the simulator defines: importing these modules registers them."""

from __future__ import annotations

from cutex.sim import (
    bits,
    clc,
    compare,
    convert,
    data,
    floating,
    integer,
    sync,
    tcgen05,
    tcgen05_mma,
    tma,
    warp,
    wgmma,
)

ARITHMETIC = (bits, compare, convert, floating, integer)
MEMORY = (data, tma, tcgen05)
CONTROL = (warp, sync, clc)
MATRICES = (wgmma, tcgen05_mma)

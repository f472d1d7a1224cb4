"""The cycles that the banks of an SM's memory take for an access of a warp: of shared memory, and
of L1, whose data lies in such banks, too (see machine/banks).
"""

from __future__ import annotations

import numpy as np

from cutex.sim.machine.banks import BANKS
from cutex.sim.machine.events import SharedBytes
from cutex.sim.machine.operation import WORD

# cycles of a warp's load of 16 bytes a lane where neighbouring lanes want the same, relative to
# others: 2.6 (one place for all lanes, or for each eight) and 4.1 (lane modulo 8), a probe, H200
ALIKE = 0.65


def port_cycles(at: SharedBytes) -> tuple[np.ndarray, np.ndarray]:
    """The warps of an access and for each the cycles of the smem port. Lanes whose bytes fill a row
    of the banks, as 8 lanes with 16 bytes each do, are a wavefront, which takes as long as the bank
    of which it wants the most words."""
    words = max(at.width // WORD, 1)
    wave = at.warps.astype(np.int64) * BANKS + at.lanes // (BANKS // words)
    word = (at.offset // WORD)[:, None] + np.arange(words)
    high = int(word.max()) // BANKS * BANKS + BANKS
    different = np.unique(wave[:, None] * high + word)
    bank, count = np.unique(different // high * BANKS + different % BANKS, return_counts=True)
    waves, first = np.unique(bank // BANKS, return_index=True)
    most = np.maximum.reduceat(count, first).astype(float)
    warps, first = np.unique(waves // BANKS, return_index=True)
    cycles = np.add.reduceat(most, first)
    if words == 4 and len(at.offset) == BANKS * len(warps):
        pairs = at.offset.reshape(-1, BANKS // 2, 2)
        cycles[(pairs[:, :, 0] == pairs[:, :, 1]).all(1)] *= ALIKE
    return warps, cycles


def l1_cycles(at: np.ndarray, lanes: np.ndarray, size: int) -> float:
    """The same of one warp's load of `size` bytes by each of these lanes: words a
    multiple of 128 bytes apart take one each."""
    nowhere = np.zeros(len(at), np.int64)
    first = int(at.min()) // (BANKS * WORD) * (BANKS * WORD)
    return float(port_cycles(SharedBytes(nowhere, lanes, nowhere, at - first, size))[1][0])

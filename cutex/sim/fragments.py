"""Matrix fragments between registers and shared memory (PTX ISA 9.7.14.5.15, 9.7.14.5.16)."""

from __future__ import annotations

import numpy as np

from cutex.sim.access import Access
from cutex.sim.data import elements
from cutex.sim.decode import Decoder, Execute, instruction
from cutex.sim.machine import Batch
from cutex.sim.memory import SHARED_WINDOW
from cutex.sim.sync import require_whole_warp


class _Matrices:
    """1, 2 or 4 matrices of 8 rows of 16 bytes: row r of matrix i lies where lane 8 i + r says."""

    def __init__(self, d: Decoder, operand: int) -> None:
        d.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "cta")
        if d.type != "b16":
            raise d.unknown()
        self.d, self.count = d, next(n for n in (1, 2, 4) if f"x{n}" in d.mods)
        self.transposed = "trans" in d.mods
        self.access = Access(d, operand, 16)

    def rows(self, b: Batch) -> Batch:
        """The warps of the batch that take part, whole."""
        require_whole_warp(self.d, b)
        return b if b.mask is None else Batch(b.idx[b.any_active()], None)

    def words(self, b: Batch, write: bool) -> np.ndarray:
        """(n, count, 8, 8): which 16-bit word of all shared memory each element is."""
        n, m = 8 * self.count, self.d.m
        addresses = np.broadcast_to(self.access.address(b), (b.n, 32))[:, :n]
        warps, lanes = np.repeat(b.idx, n), np.tile(np.arange(n), b.n)
        own = addresses.reshape(-1) & np.uint64(SHARED_WINDOW - 1)
        cta, offset = m.shared_location(warps, own)
        m.check_shared(warps, lanes, cta, offset, 16, self.d.ins)
        self.access.observe(warps, cta, offset, 16, write)
        if write:
            m.box_swizzle[cta, offset >> 4] = 0
        first = ((cta * m.smem_bytes + offset) // 2).reshape(b.n, self.count, 8, 1)
        return first + np.arange(8)


@instruction("ldmatrix")
def ldmatrix(d: Decoder) -> Execute:
    """8x8 matrices of 16-bit elements; lane t holds row t/4, columns 2(t%4)+{0,1}."""
    matrices = _Matrices(d, 1)
    writes = [d.write(t, "b32") for t in elements(d, 0, 4)]

    def execute(b: Batch) -> None:
        b = matrices.rows(b)
        if not b.n:
            return
        rows = d.m.smem_words(2)[matrices.words(b, False)]
        if matrices.transposed:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(b.n, -1, 32)
        for i, write in enumerate(writes):
            write(b, words[:, i])

    return execute


@instruction("stmatrix")
def stmatrix(d: Decoder) -> Execute:
    """The inverse of ldmatrix."""
    matrices = _Matrices(d, 0)
    reads = [d.read(s, "b32") for s in elements(d, 1, 4)]

    def execute(b: Batch) -> None:
        b = matrices.rows(b)
        if not b.n:
            return
        words = np.stack([np.broadcast_to(r(b), (b.n, 32)) for r in reads], 1)  # (n, count, 32)
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(b.n, -1, 8, 8)
        if matrices.transposed:
            rows = rows.swapaxes(2, 3)
        d.m.smem_words(2)[matrices.words(b, True)] = rows
        d.m.progress += 1

    return execute

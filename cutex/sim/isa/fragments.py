"""Matrix fragments between registers and shared memory, and transposed (PTX ISA 9.7.14.5.15-17).

The PTX ISA shows the fragments of 8-bit elements as figures; the layouts here are those of the
DSL's copy atoms (LdMatrix16x16x8bOp, StMatrix16x8x8bOp), on which CUTLASS's examples rely.
"""

from __future__ import annotations

import numpy as np

from cutex.sim.isa.access import Access
from cutex.sim.isa.matrices import PADDED, spread
from cutex.sim.isa.sync import require_whole_warp
from cutex.sim.machine.batch import Batch, Lanes
from cutex.sim.machine.memory import shared_addresses
from cutex.sim.machine.runs import lanes_of
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Operand, Vector


class _Matrices:
    """1, 2 or 4 matrices of 8 or 16 rows of 16 bytes each; the lanes, in order, give the rows'
    addresses.

    16-bit elements form 8x8 matrices, 8-bit ones the transposed ``narrow`` shape.
    """

    def __init__(self, d: Decoder, operand: int, narrow: str) -> None:
        self.padded = next((PADDED[p] for p in PADDED if p in d.mods and operand), None)
        unpacks = ("m8n16", "b8x16", *PADDED) if self.padded else ("m8n8", narrow)
        d.only("sync", "aligned", *unpacks, "x1", "x2", "x4", "trans", "shared", "cta")
        self.d, self.count = d, next(n for n in (1, 2, 4) if f"x{n}" in d.mods)
        self.transposed, self.narrow = "trans" in d.mods, narrow in d.mods
        self.lanes = self.count * (16 if narrow == "m16n16" and self.narrow else 8)
        kind = "b16" if self.padded else d.type
        wanted = ("b8", True) if self.narrow else ("b16", self.transposed and not self.padded)
        if (kind, self.transposed) != wanted or self.lanes > 32:
            raise d.unknown()
        self.access = Access(d, operand, 16)

    def registers(self, k: int, count: int) -> tuple[Operand, ...]:
        """The registers of the vector operand ``k``, which must be ``count``."""
        operand = self.d.ins.operands[k]
        items = operand.items if isinstance(operand, Vector) else ()
        if len(items) != count:
            raise self.d.unknown(f"{len(items)} registers, and {count} are wanted")
        return items

    def rows(self, b: Batch) -> Batch:
        """The warps of the batch that take part, with all lanes."""
        require_whole_warp(self.d, b)
        return b if b.mask is None else Batch(b.idx[b.any_active()], None)

    def elements(self, b: Batch, write: bool) -> np.ndarray:
        """The index of each element of each row in all shared memory, (n, lanes, 8 or 16)."""
        n, m = self.lanes, self.d.m
        addresses = b.lanes(self.access.address(b))[:, :n]
        warps, lanes = np.repeat(b.idx, n), lanes_of(b.n, n)
        own = shared_addresses(addresses.reshape(-1))
        cta, offset = m.grid.shared_location(warps, own)
        m.check_shared(warps, lanes, cta, offset, 16, self.d.ins)
        self.access.observe(Lanes(warps, lanes, own), cta, offset, 16, write)
        first = (cta * m.smem_bytes + offset).reshape(b.n, n, 1) // self.itemsize
        return first + np.arange(16 // self.itemsize)

    @property
    def itemsize(self) -> int:
        return 1 if self.narrow else 2


@instruction("ldmatrix")
def ldmatrix(d: Decoder) -> Execute:
    """ldmatrix: 8x8 matrices of 16-bit elements; lane t gets row t/4, columns 2(t%4)+{0,1}.

    8-bit elements form 16x16 matrices, transposed: lane t gets from the rows 4(t%4)+{0..3} the
    elements t/4 in one register, t/4 + 8 in the next. Of 4 or 6 bits, 16 of them padded to 16
    bytes, each becomes a byte, and a row of 16 is then as one of 8 elements of 16 bits.
    """
    matrices = _Matrices(d, 1, "m16n16")
    registers = matrices.count * (2 if matrices.narrow else 1)
    writes = [d.write(t, "b32") for t in matrices.registers(0, registers)]

    def execute(b: Batch) -> None:
        b = matrices.rows(b)
        if not b.n:
            return
        rows = d.m.smem_words(matrices.itemsize)[matrices.elements(b, False)]
        if matrices.narrow:  # rows are (t % 4, byte), columns (register, t / 4)
            rows = rows.reshape(b.n, -1, 4, 4, 2, 8).transpose(0, 1, 4, 5, 2, 3)
        else:
            if matrices.padded is not None:
                bits, shift = matrices.padded
                raw = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16)
                rows = np.ascontiguousarray(spread(raw, bits) << shift).view(np.uint16)
            rows = rows.reshape(b.n, -1, 8, 8)
            rows = rows.swapaxes(2, 3) if matrices.transposed else rows
        words = np.ascontiguousarray(rows).reshape(b.n, -1).view(np.uint32).reshape(b.n, -1, 32)
        for i, write in enumerate(writes):
            write(b, words[:, i])

    return execute


@instruction("stmatrix")
def stmatrix(d: Decoder) -> Execute:
    """stmatrix: the inverse of ldmatrix; 8-bit elements form 16x8 matrices, in rows
    2(t%4)+{0,1}."""
    matrices = _Matrices(d, 0, "m16n8")
    reads = [d.read(s, "b32") for s in matrices.registers(1, matrices.count)]

    def execute(b: Batch) -> None:
        b = matrices.rows(b)
        if not b.n:
            return
        words = np.stack([b.lanes(r(b)) for r in reads], 1)  # (n, count, 32)
        rows: np.ndarray = np.ascontiguousarray(words)
        if matrices.narrow:  # of (t / 4, t % 4, column's high bit, row's low bit)
            rows = rows.view(np.uint8).reshape(b.n, -1, 8, 4, 2, 2).transpose(0, 1, 3, 5, 4, 2)
        else:
            rows = rows.view(np.uint16).reshape(b.n, -1, 8, 8)
            rows = rows.swapaxes(2, 3) if matrices.transposed else rows
        where = matrices.elements(b, True)
        rows = np.ascontiguousarray(rows).reshape(where.shape)
        places = where[..., 0].reshape(-1) * matrices.itemsize
        lanes = lanes_of(b.n, matrices.lanes)
        stored = Lanes(np.repeat(b.idx, matrices.lanes), lanes, places)
        values = rows.view(np.uint8).reshape(len(places), 16)
        d.m.events.shared_stores(stored, places, values, d.ins)
        d.m.smem_words(matrices.itemsize)[where] = rows
        d.m.progress += 1

    return execute


@instruction("movmatrix")
def movmatrix(d: Decoder) -> Execute:
    """movmatrix (9.7.14.5.17): an 8x8 matrix of 16-bit elements, transposed across the warp's
    registers; lane t has row t/4, columns 2(t%4)+{0,1}.
    """
    read, write = d.src(1, "b32"), d.write(d.ins.operands[0], "b32")

    def execute(b: Batch) -> None:
        require_whole_warp(d, b)
        b = b if b.mask is None else Batch(b.idx[b.any_active()], None)
        if not b.n:
            return
        words = np.ascontiguousarray(b.lanes(read(b)), np.uint32)  # (n, 32)
        rows = words.view(np.uint16).reshape(b.n, 8, 8).swapaxes(1, 2)
        write(b, np.ascontiguousarray(rows).reshape(b.n, 64).view(np.uint32))

    return execute

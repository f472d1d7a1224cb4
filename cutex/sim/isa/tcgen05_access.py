"""tcgen05.ld and tcgen05.st: between tensor memory and registers (PTX ISA 9.7.16.8).

The PTX ISA gives the register fragments as figures; `fragment` is the layout of CUTLASS's atoms,
which the kernels use.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cutex.sim.errors import BadAddress
from cutex.sim.isa.sync import require_whole_warp, same_in_warp
from cutex.sim.machine.batch import Batch
from cutex.sim.machine.memory import POISON32
from cutex.sim.machine.operation import Rectangle
from cutex.sim.ptx.decode import Decoder, Execute, instruction
from cutex.sim.ptx.operands import Address, Operand, Vector


@lru_cache(maxsize=256)
def fragment(shape: str, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """The lane and the column of register i in thread t, relative to the address: two (registers,
    32) arrays.
    """
    t = np.arange(32)[None, :]
    if shape == "32x32b":
        i = np.arange(repeats)[:, None]
        return t + 0 * i, i + 0 * t
    if shape == "16x64b":
        i = np.arange(repeats)[:, None]
        return t // 4 + 8 * (t % 2) + 0 * i, t // 2 % 2 + 2 * i
    if shape == "16x128b":
        i = np.arange(2 * repeats)[:, None]
        return t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)
    if shape == "16x256b":
        i = np.arange(4 * repeats)[:, None]
        return t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)
    i = np.arange(repeats)[:, None]  # 16x32bx2: lanes 16.. add the immediate to their columns
    return t % 16 + 0 * i, i + 0 * t


_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")


class _TmemAccess:
    """The address operand and fragment of one ld or st."""

    def __init__(self, d: Decoder, address: int) -> None:
        d.only(
            "ld",
            "st",
            "sync",
            "aligned",
            *_SHAPES,
            *(f"x{1 << i}" for i in range(8)),
            "pack",
            "unpack",
            "16b",
        )
        self.d, self.m = d, d.m
        self.shape = next(s for s in _SHAPES if s in d.mods)
        repeats = next(int(p[1:]) for p in d.parts if p[0] == "x" and p[1:].isdigit())
        self.packed = "16b" in d.mods
        # only 16x32bx2 has an immediate, after the address
        split = d.immediate(address + 1) if self.shape == "16x32bx2" else 0
        self.lanes, self.columns = fragment(self.shape, repeats)
        if self.packed:
            # NOTE: the shape gives the registers of 16-bit elements, one per column: the two halves
            # of a register are neighbouring columns (CUTLASS's _16b atoms)
            self.lanes = np.repeat(self.lanes, 2, 0)
            self.columns = np.stack([2 * self.columns, 2 * self.columns + 1], 1).reshape(-1, 32)
        if split:
            self.columns = self.columns + split * (np.arange(32) // 16)
        operand = d.ins.operands[address]
        self.address = (
            d.address(address) if isinstance(operand, Address) else d.read(operand, "u32")
        )

    def registers(self, k: int) -> tuple[Operand, ...]:
        """The registers of operand ``k``, as many as the fragment has."""
        operand = self.d.ins.operands[k]
        items = operand.items if isinstance(operand, Vector) else (operand,)
        wanted = len(self.columns) // (2 if self.packed else 1)
        if len(items) != wanted:
            raise self.d.unknown(f"{len(items)} registers, and {wanted} are wanted")
        return items

    def places(self, b: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The rows of the batch that take part, and the cta, lane and column of every register,
        (rows, registers, 32).

        NOTE: hardware ignores the bits of an address that give a warp's quarter: DeepGEMM's kernels
        leave them zero (sm100_bf16_gemm.cuh, 54e2261), as does an example of CUTLASS
        (1cta_mma_a_from_tmem.py), and FlashInfer's MLA of fp8 gives that of another warp, and means
        its own. By the letter that is not defined (9.7.16.8).
        """
        require_whole_warp(self.d, b)
        rows = np.nonzero(b.any_active())[0]
        base = same_in_warp(self.d, b, self.address(b), "addresses")[rows].astype(np.int64)
        lane, column = base >> 16, base & 0xFFFF
        quarter = self.m.grid.warp_in_cta[b.idx[rows]] % 4 * 32
        other = (lane >= 32) & (lane // 32 * 32 != quarter)
        if other.any():
            k = int(other.argmax())
            self.m.findings.add(
                "tensor memory",
                f"{self.m.grid.name_warp(int(b.idx[rows[k]]))} names tensor memory lane {lane[k]}: "
                "hardware takes the warp's own quarter, lanes "
                f"{quarter[k]}..{quarter[k] + 31} (its number modulo 4), whatever an address says",
                self.d.ins,
                advisory=True,
            )
        lane = quarter + lane % 32
        high = int(self.lanes.max())
        bad = (lane + high >= quarter + 32) | (lane % 16 != 0)
        if bad.any():
            k = int(np.nonzero(bad)[0][0])
            raise BadAddress.at(
                self.d.ins,
                f"{self.m.grid.name_warp(int(b.idx[rows[k]]))} accesses tensor memory lanes "
                f"{lane[k]}..{lane[k] + high}, a warp may touch only lanes "
                f"{quarter[k]}..{quarter[k] + 31} (its number modulo 4)",
            )
        cta = self.m.grid.warp_cta[b.idx[rows]]
        width = int(self.columns.max()) + 1
        for k, row in enumerate(rows.tolist()):
            self.m.tmem.check(
                int(cta[k]),
                int(column[k]),
                width,
                self.m.grid.name_warp(int(b.idx[row])),
                self.d.ins,
            )
        return (
            rows,
            cta[:, None, None],
            lane[:, None, None] + self.lanes,
            column[:, None, None] + self.columns,
        )

    def conflicts(
        self,
        b: Batch,
        rows: np.ndarray,
        cta: np.ndarray,
        lane: np.ndarray,
        column: np.ndarray,
        write: bool,
    ) -> None:
        ends = (lane.min((1, 2)), lane.max((1, 2)) + 1, column.min((1, 2)), column.max((1, 2)) + 1)
        places = zip(cta[:, 0, 0].tolist(), *(end.tolist() for end in ends), strict=True)
        for warp, place in zip(b.idx[rows].tolist(), places, strict=True):
            self.m.events.tmem_accessed(warp, Rectangle(*place), write, self.d.ins)


@instruction("tcgen05.ld")
def ld(d: Decoder) -> Execute:
    """tcgen05.ld (9.7.16.8.1): each warp reads its quarter of the lanes."""
    access = _TmemAccess(d, 1)
    writes = [d.write(t, "b32") for t in access.registers(0)]

    def execute(b: Batch) -> None:
        rows, cta, lane, column = access.places(b)
        access.conflicts(b, rows, cta, lane, column, False)
        got = d.m.tmem.cells[cta, lane, column]  # (rows, registers, 32)
        unwritten = np.flatnonzero((got == POISON32).all((1, 2)))
        tells = [
            f"tcgen05.ld of {d.m.grid.name_warp(int(b.idx[rows[k]]))} reads tensor memory "
            f"columns {int(column[k].min())}..{int(column[k].max())}, of which nothing has "
            "written any in its lanes since they were allocated"
            for k in unwritten.tolist()
        ]
        if access.packed:
            got = got[:, ::2] & np.uint32(0xFFFF) | got[:, 1::2] << np.uint32(16)
        part = (
            b if len(rows) == b.n else Batch(b.idx[rows], None if b.mask is None else b.mask[rows])
        )
        for i, write in enumerate(writes):
            write(part, got[:, i])
        if tells:
            d.m.events.tmem_unwritten(b.idx[rows[unwritten]], tells, d.ins)

    return execute


@instruction("tcgen05.st")
def st(d: Decoder) -> Execute:
    """tcgen05.st (9.7.16.8.2): each warp writes its quarter of the lanes."""
    access = _TmemAccess(d, 0)
    reads = [d.read(s, "b32") for s in access.registers(len(d) - 1)]

    def execute(b: Batch) -> None:
        rows, cta, lane, column = access.places(b)
        access.conflicts(b, rows, cta, lane, column, True)
        values = np.stack([b.lanes(r(b)) for r in reads], 1)[rows]
        if access.packed:
            values = np.stack([values & np.uint32(0xFFFF), values >> np.uint32(16)], 2).reshape(
                len(rows), -1, 32
            )
        d.m.tmem.cells[cta, lane, column] = values
        d.m.progress += 1

    return execute

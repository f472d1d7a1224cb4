"""Block scaling of tcgen05.mma: scale factors in tensor memory (PTX ISA 9.7.16.10.7).

Row r of A, or of B, has its factors in lane r % 32 of column r / 32 of the operand, in 1, 2 or 4
bytes of the word, from the byte that the instruction descriptor gives; with K = 96 (sm_103a) 3 or
6, which go on in the word behind, a column for each 32 rows further. Each CTA of a pair has those
of its own rows of A, and all of B's. All four quarters of the lanes must hold the same factors; but
for a pair with M = 128, the first two quarters hold those of the first half of B, the others those
of the second, like the results (CUTLASS's 2cta_mma_blockscale_m128.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from cutex.sim.errors import BadOperand
from cutex.sim.isa.tcgen05_descriptor import InstructionDescriptor
from cutex.sim.machine.operation import Rectangle
from cutex.sim.ptx.decode import Decoder

if TYPE_CHECKING:
    from cutex.sim.isa.tcgen05 import Issuer

_DTYPES = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}
_COUNTS = {  # factors per row, by kind and modifier
    "mxf8f6f4": {"1X": 1, "block32": 1, "": 1},
    "mxf4": {"2X": 2, "block32": 2, "": 2},
    "mxf4nvf4": {"2X": 2, "block32": 2, "4X": 4, "block16": 4},
}  # fmt: skip
SIZES = ("scale_vec", "1X", "2X", "4X", "block16", "block32")


def factors_per_row(d: Decoder, kind: str) -> int:
    """The number of scale factors per row (table 56)."""
    said = next((s for s in SIZES[1:] if s in d.mods), "")
    count = _COUNTS.get(kind, {}).get(said)
    if count is None:
        raise d.unknown("scale vector size")
    return count


@dataclass
class BlockScales:
    """The scale factors of one multiplication, ``count`` for each row of A and of B."""

    issuer: Issuer
    desc: InstructionDescriptor
    count: int
    a: int  # addresses in tensor memory; their upper two bits may repeat the byte
    b: int

    def __post_init__(self) -> None:
        ins, step = self.issuer.ins, self.count
        if self.desc.half_more:
            self.count = step * 3 // 2
            step //= 2
        for byte in (self.desc.a_byte, self.desc.b_byte):
            if byte % step:
                raise BadOperand.at(ins, f"{step} scale factors per row from byte {byte} of a word")
        if self.desc.factors == "ue4m3" and self.count not in (4, 6):
            raise BadOperand.at(ins, f"{self.count} scale factors per row of type ue4m3: takes 4")
        for address in (self.a, self.b):
            if address >> 16 & 0x3FFF:
                raise BadOperand.at(ins, f"scale factors from lane {address >> 16 & 0x3FFF}")

    @property
    def halved(self) -> bool:
        """Whether the lanes hold the two halves of N one below the other."""
        return len(self.issuer.ctas) == 2 and self.desc.m == 128

    def places(self) -> list[Rectangle]:
        """The rectangles of tensor memory that are read; raises BadAddress where they are not
        allocated.
        """
        m, issuer, out = self.issuer.m, self.issuer, []
        for cta in issuer.ctas:
            bytes_of = self.desc.a_byte, self.desc.b_byte
            for (address, rows), byte in zip(self._rows, bytes_of, strict=True):
                first, width = address & 0xFFFF, -(-rows // 32) * -(-(byte + self.count) // 4)
                m.tmem.check(cta, first, width, m.grid.name_warp(issuer.warp), issuer.ins)
                out.append(Rectangle(cta, 0, 128, first, first + width))
        return out

    @property
    def _rows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The address, and the number of rows below each other, of A and of B."""
        if self.halved:
            return (self.a, 64), (self.b, self.desc.n // 2)
        return (self.a, 128), (self.b, self.desc.n)

    def of_a(self, cta: int, values: np.ndarray) -> np.ndarray:
        """``values`` (rows, K) of A, scaled."""
        return self._scaled(cta, values, self.a & 0xFFFF, self.desc.a_byte, len(values))

    def of_b(self, cta: int, values: np.ndarray) -> np.ndarray:
        return self._scaled(cta, values, self.b & 0xFFFF, self.desc.b_byte, self._rows[1][1])

    def _scaled(
        self, cta: int, values: np.ndarray, column: int, byte: int, below: int
    ) -> np.ndarray:
        """Multiply ``values`` by their scale factors; ``below``: rows stacked in one column of
        lanes, of twice as many in half the lanes.
        """
        rows, k = values.shape
        r = np.arange(rows)
        copies = 4 * below // rows
        lanes = r % below % 32 + r // below * 64 + 32 * np.arange(copies)[:, None]
        further = -(-below // 32) * np.arange(-(-(byte + self.count) // 4))  # (words of a row,)
        columns = column + (r % below // 32)[:, None] + further
        words = np.ascontiguousarray(self.issuer.m.tmem.cells[cta][lanes[..., None], columns])
        raw = words.view(np.uint8).reshape(copies, rows, -1)[:, :, byte : byte + self.count]
        if (raw != raw[0]).any():
            row = int(np.nonzero((raw != raw[0]).any((0, 2)))[0][0])
            self.issuer.m.findings.add(
                "scale factors",
                f"the scale factors of row {row}, in tensor memory column "
                f"{column + row % below // 32} of {self.issuer.m.grid.name_cta(cta)}, differ "
                f"between the {'four' if copies == 4 else 'two'} quarters of the lanes that hold "
                "them",
                self.issuer.ins,
            )
        factors = np.ascontiguousarray(raw[0]).view(_DTYPES[self.desc.factors]).astype(np.float32)
        return values * np.repeat(factors, k // self.count, 1)

"""The config of the quantization kernel. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cutex.dtypes import DTYPES
from cutex.problem.scaled.formats import FORMATS, Format

if TYPE_CHECKING:
    from cutex.arch import Arch

TILE = 128  # rows and columns of a CTA's tile: a tile of the swizzled layout, of each side
PLAIN_BLOCK = 32  # elements of a block that a thread reads of a column at once
NVFP4_BLOCK = 16
STAYING = 2, 2 * 132  # CTAs of an SM that take NVFP4's tiles in turn, and of all
WIDTH = 8  # elements of a row that a thread reads at once
# archs whose conversions to a type are instructions (PTX ISA, cvt); else integer operations
NATIVE = {
    "e4m3": ("sm_90a", "sm_100a", "sm_103a", "sm_120a"),
    "e5m2": ("sm_90a", "sm_100a", "sm_103a", "sm_120a"),
    "e2m1": ("sm_100a", "sm_103a", "sm_120a"),
}


@dataclass(frozen=True)
class QuantizeConfig:
    """What a launch computes of x (M, K): rows quantized along K, columns along M, or both."""

    format: str = "mxfp8"  # a name in cutex.problem.scaled.formats.FORMATS
    rows: bool = True
    columns: bool = False
    swizzled: bool = True  # factors in the 128x4 layout; else plain
    rounding: str = "floor"  # of E8M0 factors
    aligned: bool = True  # rows begin at, and have, whole vectors of WIDTH elements
    aligned_columns: bool = True  # so do the columns' results: M is a multiple of 32
    single: bool = False  # of 8 bits: rows have an odd number of vectors
    native: bool = True  # whether the arch has the conversion to the element
    native_e4m3: bool = True  # and that to e4m3, of NVFP4's factors
    resident: int = 0  # CTAs that an SM has registers for at least; 0: as many as the compiler says
    reuses: bool = False  # whether columns' results lie where x was in smem
    num_ctas: int = 0  # that stay, and take tiles in turn (QuantizeLoop); 0: one for each tile

    @property
    def of(self) -> Format:
        return FORMATS[self.format]

    @property
    def block(self) -> int:
        """The number of elements along a row that share a factor."""
        return self.of.block[1]

    @property
    def square(self) -> bool:
        """Whether a factor covers a whole tile."""
        return self.of.block == (TILE, TILE)

    @property
    def width(self) -> int:
        """The elements of a row per thread. For 4-bit results two vectors, which are stored at once
        and which NVFP4's factors cover, each computed by one thread; for 8-bit ones, too, where
        rows are whole pairs of vectors."""
        return WIDTH * (self.packed if self.single else 2)

    @property
    def compares_magnitudes(self) -> bool:
        """Whether the arch has an instruction for the larger magnitude of two halves (PTX ISA, max
        .xorsign.abs: sm_86)."""
        return self.native_e4m3

    @property
    def packed(self) -> int:
        """The number of elements in a byte."""
        return 8 // DTYPES[self.of.element].bits

    def why_not(self, problem: Any, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        if self.format not in FORMATS or self.block not in (16, 32, 128):
            return f"format={self.format}: takes blocks of 16, 32 or 128"
        if self.reuses and not (self.columns and self.block >= PLAIN_BLOCK):
            return f"reuses={self.reuses}: of columns in blocks of {PLAIN_BLOCK} and more"
        if not (self.rows or self.columns):
            return "rows, columns: at least one of them"
        if self.native and arch.name not in NATIVE[self.of.element]:
            return f"native: {arch.name} has no conversion to {self.of.element}"
        if self.native_e4m3 and arch.name not in NATIVE["e4m3"]:
            return f"native_e4m3: {arch.name} has no conversion to e4m3"
        if self.num_ctas and (not (self.columns and self.aligned) or self.square or self.reuses):
            return f"num_ctas={self.num_ctas}: of columns of aligned x, which have a slot of theirs"
        if self.swizzled and not self.of.swizzled:
            return f"swizzled: factors of {self.format} are fp32, which no tensor core reads"
        return None


def fitted(config: QuantizeConfig, bits: int, arch: str, mapped: bool = True) -> QuantizeConfig:
    """`config` with the measured fastest residency for x of this many bits, where one was timed
    (docs/facts/scaled.md#quantize-resident, #quantize-staying). mapped: whether x may have a tensor
    map."""
    if arch != "sm_90a" or bits != 16:
        return config
    if config.columns and config.aligned and mapped and config.block < PLAIN_BLOCK:
        return replace(config, resident=STAYING[0], num_ctas=STAYING[1])
    if not config.columns:
        resident = 4 if config.block < PLAIN_BLOCK else 3
    elif config.rows or config.block in (TILE, NVFP4_BLOCK):
        resident = 4
    else:
        resident = 5
    reuses = config.columns and config.block >= PLAIN_BLOCK
    return replace(config, resident=resident, reuses=reuses)

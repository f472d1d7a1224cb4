"""The config of the kernel of 4-bit weights by few rows. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cutex.kernels.gemm.config import ELEMENT, GemmConfig
from cutex.kernels.gemm.w4.tiles import WeightTiles
from cutex.problem.w4.layout import BLOCK_K, CODE_WORDS, PAIRS, STRIP, W4Format

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature

ROWS = 16  # of the weight, that one mma.sync computes
COLUMNS = 8  # rows of x, that one mma.sync computes
ALIGN = 128  # bytes that the weight's part of a slot is a multiple of
SYSTEM = 1024  # bytes of smem that the system takes of each CTA


@dataclass(frozen=True)
class W4DecodeConfig(WeightTiles, GemmConfig):
    """CTAs compute tile_m rows of the weight times all rows of x: 1, or more than half of tile_n
    up to tile_n. Each warp has a ring of num_stages slots, and takes K blocks round-robin."""

    arch = "sm_90a"
    mma_columns = 1

    tile_m: int = 32
    tile_n: int = 1
    k_bytes: int = BLOCK_K * ELEMENT
    format: W4Format = field(default_factory=W4Format)
    warps: int = 8
    resident: int = 2  # CTAs that share an SM
    # whether the next launch's CTAs may begin when all of this one's have begun to load, and so the
    # kernel before has ended: not as soon as all have begun
    next_behind: bool = False

    @property
    def num_threads(self) -> int:
        return 32 * self.warps

    @property
    def row_tiles(self) -> int:
        """The tiles of ROWS rows that a warp computes."""
        return self.tile_m // ROWS

    @property
    def code_words(self) -> int:
        """Words of codes in a slot."""
        return CODE_WORDS * self.tile_m // STRIP

    @property
    def factor_words(self) -> int:
        """Words of scales in a slot."""
        return PAIRS * self.format.groups * self.tile_m // STRIP

    @property
    def weight_bytes(self) -> int:
        return 4 * (self.code_words + self.factor_words * (2 if self.format.zeros else 1))

    @property
    def slot_words(self) -> int:
        """Words from one slot of weight to the next."""
        return -(-self.weight_bytes // ALIGN) * ALIGN // 4

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a slot."""
        return self.tile_n * self.k_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a slot of one warp."""
        return 4 * self.slot_words + self.x_bytes

    @property
    def sums_columns(self) -> int:
        """The columns of sums that warps leave in smem, plus one against bank conflicts."""
        return 1 if self.tile_n == 1 else self.tile_n + 1

    @property
    def smem_bytes(self) -> int:
        """Bytes of all rings."""
        return self.warps * self.num_stages * self.stage_bytes

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if reason := self.format.why_not():
            return reason
        if self.swap_ab or self.epi_n or self.epi_stages or self.split_k != 1:
            return "swap_ab, epi_n, epi_stages, split_k: a kernel of few rows has none"
        return None

    def _why_not_shape(self, arch: Arch) -> str | None:
        if self.tile_m not in (ROWS, 2 * ROWS, STRIP):
            return f"tile_m={self.tile_m}: {ROWS}, {2 * ROWS} or {STRIP} rows of a strip"
        if self.tile_n not in (1, 2, 4, COLUMNS):
            return f"tile_n={self.tile_n}: 1, 2, 4 or {COLUMNS} rows of x"
        if self.k_bytes != BLOCK_K * ELEMENT:
            return f"k_bytes={self.k_bytes}: a block of a packed weight has {BLOCK_K} of 16 bits"
        if self.warps not in (4, 8, 16) or not 1 <= self.resident <= 64 // self.warps:
            return f"warps={self.warps}, resident={self.resident}: 4, 8 or 16, of 64 of an SM"
        if not 2 <= self.num_stages <= 32:
            return f"num_stages={self.num_stages}: a ring has 2 to 32 slots"
        if self.tile_m * self.sums_columns > self.num_stages * self.slot_words:
            return f"num_stages={self.num_stages}: a warp's sums lie in its slots at the end"
        each = self.smem_bytes + 8 * self.warps * self.num_stages + SYSTEM
        if each * self.resident > arch.smem_per_cta + SYSTEM:
            return f"{self.smem_bytes} bytes of rings, {self.resident} times, are more than an SM's"
        return None

    def why_not_signature(self, signature: Signature) -> str | None:
        if signature.out.batched:
            return "a batch: a packed weight is one matrix"
        return None

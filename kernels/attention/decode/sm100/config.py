"""The config of the Blackwell decode kernel: the tiling, and when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutex.kernels.attention.decode.config import ELEMENT, DecodeConfig

ROWS = 128  # of one MMA: the lanes of tensor memory
TMEM_COLUMNS = 512
PART = 32  # columns of scores that become probabilities together


@dataclass(frozen=True)
class Sm100DecodeConfig(DecodeConfig):
    """The Blackwell tiling: 128 packed rows, tile_n keys at a time, two blocks of scores and O in
    tensor memory."""

    tile_n: int = 128
    num_stages: int = 3
    ctas_per_sm: int = 1
    num_sms: int = 148
    rescale_threshold: float = 30.0  # powers of two before sums and O are scaled; fp16: 15

    tile_m: ClassVar[int] = ROWS

    @property
    def copies_rows(self) -> bool:
        return False

    @property
    def q_in_smem(self) -> bool:
        return True

    @property
    def q_bytes(self) -> int:
        return ROWS * self.head_dim * ELEMENT

    @property
    def o_column(self) -> int:
        """The first column of tensor memory after S."""
        return 2 * self.tile_n

    @property
    def columns(self) -> int:
        """The columns of tensor memory: two blocks of S, with P over them, and O."""
        return self.o_column + self.head_dim_v

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if reason := self.why_not_computed(problem):
            return reason
        if self.fp8:
            return "fp8=True: caches of e4m3 have a kernel on Hopper only"
        if self.tile_n % PART or not 64 <= self.tile_n <= 128:
            return f"tile_n={self.tile_n}: a multiple of {PART} from 64 to 128"
        if self.columns * self.ctas_per_sm > TMEM_COLUMNS:
            return f"tile_n={self.tile_n}: {self.columns} columns of tensor memory a CTA, too many"
        return None if arch is None else self.why_no_room(arch)

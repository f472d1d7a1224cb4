"""The config of the Blackwell kernels. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import GemmConfig

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature


@dataclass(frozen=True)
class Sm100Config(GemmConfig):
    """A GemmConfig with Blackwell's fields: the CTAs that run one MMA, and the accumulators in
    tensor memory."""

    arch = "sm_100a"

    pair: bool = False  # two CTAs run one MMA together
    num_acc: int = 1  # accumulators in tensor memory

    @property
    def ctas(self) -> int:
        return 2 if self.pair else 1

    @property
    def num_blocks(self) -> int:
        """The number of accumulators of a pair's tile, 256 rows each."""
        return self.tile_m // 256

    @property
    def copy_cycles(self) -> float:
        """Cycles of a step of K in which the tensor core waits for copies to tensor memory."""
        return 0.0

    @property
    def shown_parts(self) -> int:
        """The sub-tiles of an accumulator that are read before the next tile's MMAs may start."""
        return 0

    @property
    def smem_bytes(self) -> int:
        """Bytes of one CTA's slots, and with split_k of a tile's fp32 sums."""
        sums = self.partial_bytes // self.ctas if self.split_k > 1 else 0
        return super().smem_bytes + sums

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if reason := self._why_not_pair() if self.pair else self._why_not_single():
            return reason
        if self.num_acc * self.tile_n > arch.tmem_columns:
            return (
                f"num_acc={self.num_acc}: {self.num_acc * self.tile_n} columns of tensor memory, "
                f"there are {arch.tmem_columns}"
            )
        if epi_parts > self.epi_stages and epi_parts % max(self.epi_stages, 1) == 1:
            return (
                f"epi_stages={self.epi_stages}: of {epi_parts} sub-tiles, two in turn share a slot"
            )
        if self.epi_n and self.epi_stages < 2:
            return f"epi_stages={self.epi_stages}: one is written while another is stored"
        return None

    def _why_not_single(self) -> str | None:
        if self.tile_m != 128:
            return f"tile_m={self.tile_m}: these kernels take 128 a CTA"
        if self.split_k > 1:
            return f"split_k={self.split_k}: takes pairs of CTAs"
        return None

    def _why_not_pair(self) -> str | None:
        if self.tile_m not in (256, 512):
            return f"tile_m={self.tile_m}: a pair takes 256 rows, or two times 256 that share B"
        if self.tile_n % 32:
            return f"tile_n={self.tile_n}: a pair's epilogue takes columns by 32"
        if self.num_acc % self.num_blocks:
            return f"num_acc={self.num_acc}: a tile of {self.tile_m} rows has {self.num_blocks}"
        if self.split_k not in (1, 2, 4):
            return f"split_k={self.split_k}: 1, 2 or 4 pairs of CTAs"
        if self.split_k > 1 and (self.tile_m, self.num_acc) != (256, 1):
            return f"split_k={self.split_k}: takes tile_m=256 and num_acc=1"
        return None

    def why_not_signature(self, signature: Signature) -> str | None:
        b = signature.a if self.swap_ab else signature.b
        _, k_major = signature.k_major
        row_bytes = self.tile_n // 2 * DTYPES[b.dtype].bits // 8
        least, rows = (128, "128") if b.dtype == "fp32" else (64, "64 or 128")
        if not k_major and row_bytes % least:
            return f"tile_n={self.tile_n}: {row_bytes} bytes of N, smem rows have {rows}"
        return None

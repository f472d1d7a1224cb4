"""The config of Blackwell's kernel of 4-bit weights. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.kernels.gemm.w4.tiles import WeightTiles
from cutex.problem.w4.layout import BLOCK_K, W4Format

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature


@dataclass(frozen=True)
class W4Sm100Config(WeightTiles, Sm100Config):
    """An Sm100Config of one CTA whose first operand, the rows of the product, is a packed
    weight."""

    format: W4Format = field(default_factory=W4Format)
    num_weights: int = 4  # slots of the ring of packed blocks

    @property
    def num_blocks(self) -> int:
        return 1

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + self.num_weights * self.weight_bytes

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if reason := self.format.why_not():
            return reason
        if self.k_of(16) != BLOCK_K:
            return f"k_bytes={self.k_bytes}: a block of a packed weight has {BLOCK_K} of 16 bits"
        if self.pair or not self.swap_ab or self.num_acc != 1:
            return "pair, swap_ab, num_acc: one CTA, whose rows are the weight's, has one tile"
        if epi_parts == 1:
            return f"epi_n={self.epi_n}: one sub-tile is written while another is stored"
        return super().why_not_arch(arch, epi_parts)

    def why_not_signature(self, signature: Signature) -> str | None:
        if signature.out.batched:
            return "a batch: a packed weight is one matrix"
        return super().why_not_signature(signature)

"""The config of the kernel of 4-bit weights. Imports neither torch nor the DSL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cutex.kernels.gemm.sm90.config import ACCUMULATORS, Registers, Sm90Config
from cutex.kernels.gemm.w4.tiles import WeightTiles
from cutex.problem.w4.layout import BLOCK_K, HALF_K, W4Format

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.kernels.gemm.layouts import Signature

FEW = 16  # columns that mma.sync may compute
BLOCK_DIGITS = 8 * BLOCK_K + 4  # bytes of the digits of a block of one row, and of its exponent
SHARED_COLUMNS, SHARED_SMEM = 64, 112 << 10  # of a CTA that shares an SM with another
EIGHT = 8  # that one mma.sync does
# of a CTA, and accumulators a thread that they leave registers for
MOST_WARPGROUPS, FEW_ACCUMULATORS = 4, 64


@dataclass(frozen=True)
class W4Config(WeightTiles, Sm90Config):
    """An Sm90Config whose first operand, the rows of the product, is a packed weight."""

    format: W4Format = field(default_factory=W4Format)
    few: bool = False  # columns so few that mma.sync computes them (widened_few)
    eight: bool = False  # of these, x has rows for the first eight alone
    turns: int = 1  # so many sets of warpgroups compute all rows of a tile, of blocks of K in turn
    digits: int = 0  # x has one row, of which a CTA writes up to so many blocks as digits (OneRow)

    @property
    def in_turn(self) -> bool:
        return self.turns > 1

    @property
    def row_warpgroups(self) -> int:
        return super().row_warpgroups // self.turns

    @property
    def storing_warpgroups(self) -> int:
        return self.row_warpgroups

    @property
    def registers(self) -> Registers | None:
        return Registers(24, 112) if self.mma_warpgroups == MOST_WARPGROUPS else super().registers

    @property
    def scales_sums(self) -> bool:
        """Whether scales multiply the sums of their group. Not for fp4, whose values are too small
        for fp32 sums before scaling."""
        return self.few and self.format.kind == "int4" and self.format.group >= HALF_K

    @property
    def columns_computed(self) -> int:
        """The columns of a tile that are computed."""
        return EIGHT if self.eight else self.tile_n

    @property
    def side_by_side(self) -> int:
        """The number of blocks of few columns that a warp computes side by side."""
        if self.in_turn:
            return 1
        # NOTE: with two warpgroups of one strip each two blocks are slower (#w4-two-blocks)
        return 1 if self.strips == self.mma_warpgroups == 2 else 2

    @property
    def may_share_sm(self) -> bool:
        """Whether two CTAs fit on an SM by registers: those with one warpgroup, which computes one
        tile."""
        return self.warpgroups == 1 and self.columns > 0 and self.tile_n <= SHARED_COLUMNS

    @property
    def shares_sm(self) -> bool:
        """Whether two CTAs fit on an SM."""
        return self.may_share_sm and self.smem_bytes <= SHARED_SMEM

    @property
    def x_bytes(self) -> int:
        return 0 if self.digits else super().x_bytes

    @property
    def a_bytes(self) -> int:
        """Bytes of the ring that may hold other CTAs' sums: those of x."""
        return self.num_stages * self.x_bytes

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.x_bytes

    @property
    def own_sums_bytes(self) -> int:
        """Bytes that the sums of other CTAs of a split have to themselves."""
        return self.sums_bytes(self.epi_parts) if self.split_k > 1 else 0

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + self.own_sums_bytes + self.digits * BLOCK_DIGITS

    def why_not_arch(self, arch: Arch, epi_parts: int) -> str | None:
        if reason := self.format.why_not():
            return reason
        if self.k_of(16) != BLOCK_K:
            return f"k_bytes={self.k_bytes}: a block of a packed weight has {BLOCK_K} of 16 bits"
        if not self.swap_ab or not self.warpgroups:
            return "swap_ab, warpgroups: the weight is the MMA's first operand, in registers"
        if self.few and self.tile_n > FEW:
            return f"few={self.few}: with up to {FEW} columns"
        if self.eight and not (self.few and self.columns in (0, 1)):
            return f"few={self.few}, columns={self.columns}: of one tile by mma.sync"
        if reason := self._why_not_turns():
            return reason
        if self.digits and not (self.eight and self.columns == 1):
            return f"digits={self.digits}: of one tile of the first eight columns"
        if self.digits and (self.format.kind, self.format.zeros) != ("int4", False):
            return f"digits={self.digits}: of integers without zeros"
        if self.digits and self.format.group not in (0, BLOCK_K):
            return f"digits={self.digits}: with a scale for each row of a block, or none"
        if self.pingpong or self.spread or self.cluster_n > 1:
            return "pingpong, spread, cluster_n: not with a packed weight"
        return super().why_not_arch(arch, epi_parts)

    def _why_not_turns(self) -> str | None:
        if not self.in_turn:
            return None
        if not self.columns or self.digits:
            return f"turns={self.turns}: of one tile a CTA, not of digits"
        # NOTE: each slot has one reader, who tells only odd phases from even ones, and releases it
        # when its next slot is full
        if self.num_stages % self.turns or self.num_stages < 2 * self.turns:
            return f"num_stages={self.num_stages}: a multiple of {self.turns}, at least twice"
        if (self.turns - 1) * self.partial_bytes > self.num_stages * self.weight_bytes:
            return f"turns={self.turns}: the weight's slots must hold other warpgroups' sums"
        return None

    def _why_not_warpgroups(self) -> str | None:
        if not self.in_turn and self.warpgroups < MOST_WARPGROUPS:
            return super()._why_not_warpgroups()
        if not 2 <= self.warpgroups <= MOST_WARPGROUPS or self.warpgroups % self.turns:
            return (
                f"warpgroups={self.warpgroups}, turns={self.turns}: 2 to {MOST_WARPGROUPS}, as "
                f"many in each turn"
            )
        if self.tile_m not in range(64 * self.row_warpgroups, 257, 64 * self.row_warpgroups):
            return f"tile_m={self.tile_m}: {self.row_warpgroups} warpgroups take 64 rows each"
        limit = {**ACCUMULATORS, MOST_WARPGROUPS: FEW_ACCUMULATORS}[self.warpgroups]
        if self.accumulators > limit:
            return f"tile_m={self.tile_m}, tile_n={self.tile_n}: too many accumulators a thread"
        return None

    def why_not_signature(self, signature: Signature) -> str | None:
        if signature.out.batched:
            return "a batch: a packed weight is one matrix"
        if self.odd_rows and signature.ops:
            return f"tile_n={self.tile_n}: odd multiples of 8 are timed for the product alone"
        return super().why_not_signature(signature)

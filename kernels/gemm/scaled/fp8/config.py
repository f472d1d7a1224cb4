"""The config of the fp8 kernels: Hopper's tiles, with a second set of accumulators. Imports neither
torch nor the DSL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from cutex.compile import Bound, Operand
from cutex.kernels.gemm.sm90.config import ACCUMULATORS, Sm90Config
from cutex.problem.scaled.formats import RECIPES, Format

if TYPE_CHECKING:
    from cutex.arch import Arch

FACTORS_ALIGN = 32  # TMA writes to multiples of 128 bytes: so many fp32 factors
BLOCK = 128  # rows, or elements of K, that share a factor
LANES = 32  # blocks of K whose shared factors a warp holds
# the recipe of operands whose factors, of tensors or of rows, an epilogue multiplies with
PROMOTED = "fp8_tensor"


@dataclass(frozen=True)
class Fp8Config(Sm90Config):
    """An Sm90Config whose sums are scaled and added up in fp32 after every 128 of K."""

    # the formats of A and B (cutex/problem/scaled/formats.py); with PROMOTED, sums of blocks have
    # no factors
    recipe: str = "fp8_block"
    alternating: bool = False  # two warpgroups compute all rows of the tile, of every second block
    # K is whole rounds of the ring: a block's slot is known when the kernel is traced
    rounds: bool = False

    @property
    def cluster(self) -> tuple[int, int, int] | None:
        # NOTE: clusters of one CTA are placed otherwise than CTAs without clusters, of which more
        # find their loads on the way to others (docs/facts/scaled.md#launch-without-clusters)
        shape = super().cluster
        return None if shape == (1, 1, 1) else shape

    @property
    def readers(self) -> int:
        """The warpgroups that read each slot of the ring."""
        return 1 if self.alternating else self.mma_warpgroups

    @property
    def announced(self) -> bool:
        """Whether a separate warp looks up tiles for all roles: where CTAs loop over tiles."""
        return not self.one_tile and self.split_k == 1

    @property
    def steps(self) -> int:
        """The number of K blocks from one that a warpgroup computes to its next."""
        return self.mma_warpgroups // self.readers

    @property
    def blocks_in_turn(self) -> int:
        """The number of K blocks from the start of one iteration of a warpgroup's loop to the
        next."""
        return self.num_stages if self.rounds else self.steps

    @property
    def warpgroup_rows(self) -> int:
        return self.tile_m if self.alternating else super().warpgroup_rows

    @property
    def parts_in_order(self) -> bool:
        return super().parts_in_order and not self.alternating

    @property
    def formats(self) -> tuple[Format, Format]:
        """The formats of the rows and of the columns of the MMA's product."""
        a, b = RECIPES[self.recipe]
        return (b, a) if self.swap_ab else (a, b)

    @property
    def vectors(self) -> tuple[bool, bool]:
        """Whether each row, and each column, of the MMA's product has its own factors."""
        rows, columns = self.formats
        return rows.block == (1, BLOCK), columns.block == (1, BLOCK)

    @property
    def shares(self) -> tuple[bool, bool]:
        """Whether 128 rows, and 128 columns, of the MMA's product share a factor."""
        rows, columns = self.formats
        return rows.block == (BLOCK, BLOCK), columns.block == (BLOCK, BLOCK)

    @property
    def column_group(self) -> int:
        """The columns of a tile that are guaranteed to share a factor where 128 do, wherever the
        tile is."""
        return math.gcd(self.tile_n, BLOCK)

    @property
    def touched_blocks(self) -> int:
        """The most blocks of 128 columns that a tile has columns of, wherever it is."""
        return (BLOCK - self.column_group + self.tile_n - 1) // BLOCK + 1

    @property
    def bounded(self) -> bool:
        """Whether a tile's code knows where its columns begin to share another factor, instead of
        looking up one for each `column_group`: where CTAs loop over tiles, and these are many
        (docs/facts/scaled.md#fp8-boundaries)."""
        groups = self.tile_n // self.column_group
        return self.shares[1] and self.announced and groups > 2

    @property
    def part_accumulators(self) -> int:
        """The registers per thread for the sums of one block of K, 64 rows at a time."""
        return 64 * self.tile_n // 128

    @property
    def accumulators(self) -> int:
        return super().accumulators + self.part_accumulators

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors that TMA loads into one slot."""
        return 4 * sum(
            size
            for size, vector in zip((self.tile_m, self.tile_n), self.vectors, strict=True)
            if vector
        )

    @property
    def stage_bytes(self) -> int:
        return super().stage_bytes + self.factor_bytes

    @property
    def smem_bytes(self) -> int:
        padding = 2 * 4 * FACTORS_ALIGN if self.recipe != PROMOTED else 0
        return super().smem_bytes + padding * self.num_stages + self.own_sums_bytes

    @property
    def own_sums_bytes(self) -> int:
        """Bytes that the sums of other CTAs of a split have to themselves."""
        if self.split_k == 1:
            return 0
        return self.sums_bytes(self.epi_parts) // self.split_k * (self.split_k - 1)

    def _why_not_shape(self, arch: Arch) -> str | None:
        blocks = self.recipe in RECIPES and all(f.block[1] == BLOCK for f in self.formats)
        if not blocks and self.recipe != PROMOTED:
            return f"recipe={self.recipe}: takes formats with a factor for each {BLOCK} of K"
        if self.k_bytes != BLOCK:
            return f"k_bytes={self.k_bytes}: a factor serves {BLOCK} bytes of K"
        if self.rounds and (not self.announced or self.alternating or LANES % self.num_stages):
            return f"rounds, num_stages={self.num_stages}: CTAs loop over tiles, and it divides 32"
        if self.pingpong or self.spread or self.stream_k:
            return "pingpong, spread, stream_k: sums are scaled by tiles of all warpgroups"
        return super()._why_not_shape(arch)

    def _why_not_warpgroups(self) -> str | None:
        if not self.alternating:
            return super()._why_not_warpgroups()
        if self.warpgroups != 2 or self.split_k > 1 or not self.one_tile:
            return "alternating: two warpgroups, one tile a CTA, not shared by CTAs along K"
        if self.partial_bytes > self.num_stages * self.stage_bytes:
            return f"alternating: the ring must hold {self.partial_bytes} bytes of sums"
        limit = ACCUMULATORS[self.warpgroups]
        if self.tile_m not in (64, 128) or self.tile_n < 64 or self.accumulators > limit:
            return (
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: alternating warpgroups take 64 or "
                f"128 rows, 64 columns and more, and have registers for {limit} accumulators a "
                "thread"
            )
        return None

    def of_rounds(self, a: Operand) -> Operand:
        """Operand A, whose K must be whole rounds of the ring if `rounds` is set."""
        return replace(a, bounds_by=partial(whole_rounds, self.num_stages)) if self.rounds else a

    def with_rounds(self, k: int) -> Self:
        """This config, with `rounds` if a product over `k` elements has whole rounds."""
        whole = LANES % self.num_stages == 0 and -(-k // BLOCK) % self.num_stages == 0
        return replace(self, rounds=whole and self.announced and not self.alternating)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Fp8Config:
        return super().from_row(row)  # type: ignore[return-value]


def whole_rounds(num_stages: int, sizes: Mapping[str, int]) -> tuple[Bound, ...]:
    """The bounds of K for kernels that need whole rounds of a ring with this many slots."""
    k, of_round = sizes["k"], BLOCK * num_stages
    fits = k if -(-k // BLOCK) % num_stages == 0 else -(-k // of_round) * of_round
    return (Bound("k", fits, fits),)

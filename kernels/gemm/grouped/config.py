"""The configs of the grouped kernels, and their signatures as the host sees them, on both archs.

GroupedConfig:  out[rows of e] = ops(A[rows of e] @ B[e]), with A (M, K), B (E, K, N), out (M, N).
GatheredConfig: the same with rows of A by an index.
ScatteredConfig: the same as the first, stored or added to rows of out by an index.
BlocksConfig:   the same with factors of A's rows and of blocks of B.
PromotedConfig: the first, of fp8 whose sums of each 128 of K are added up in fp32 registers.
SumsConfig:     out[e] = A[:, rows of e] @ B[rows of e], with A (M, K), B (K, N), out (E, M, N).

Modes are in torch's order. Both have edges (E): where the rows of each group end. A TMA store
writes whole units of 16 bytes, so out has as many columns as fill its rows with them; zeros, where
B has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cutex.compile import Argument, Bound, Operand
from cutex.device.epilogue.epilogue_ops import op_arguments
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.config import BARRIERS, GemmConfig
from cutex.kernels.gemm.grouped.choose import WARP, WITH_CHUNKS, WITH_PLAN, table_bytes
from cutex.kernels.gemm.grouped.fp8_config import RowBlocksConfig
from cutex.kernels.gemm.layouts import FactorLayout, OperandLayout
from cutex.kernels.gemm.scaled.fp8.config import PROMOTED
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.schedulers.level import Widths
from cutex.schedulers.ragged import Only

if TYPE_CHECKING:
    from cutex.arch import Arch

MOST_GROUPS = 1024
BLOCKS = FactorLayout(), FactorLayout(rows=128)  # of A and of B: 1x128 and 128x128


@dataclass(frozen=True)
class GroupedConfig:
    """The config of a grouped kernel: the general kernel's, for the product of a group's rows and
    one of a batch of b, and the groups that its tables have room for."""

    product: GeneralConfig
    most_groups: int = WARP
    padded: bool = False  # rows are those of (E, M_max, K), and edges counts each group's
    only: Only | None = None  # on Hopper: which groups; None: any

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a (M, K), b (E, K, N), out (M, N), edges (E), then those of the
        operations: vectors along N have one row for each group."""
        p = self.product
        return (
            p.a.argument("a", "m", "k", ""),
            p.b.argument("b", "k", "n", "e"),
            p.out.argument("out", "m", "columns", ""),
            edges(self.most_groups),
            *(of_groups(x) for x in op_arguments(p.ops)),
        )

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        p = self.product
        if reason := p.why_not(None, arch):
            return reason
        if p.a.batched or not p.b.batched or p.out.batched:
            return "a grouped product takes a (M, K), b (E, K, N) and out (M, N)"
        if p.gated and p.out.dtype == "fp32" and not arch.tmem_columns:
            return "out.dtype=fp32: a gate leaves single columns of it, which TMA does not store"
        if self.only is not None and (arch.tmem_columns or self.padded):
            return f"only={self.only}, padded={self.padded}: some groups alone by ends, on Hopper"
        if p.a.major != "row":
            return f"a.major={p.a.major}: TMA begins at multiples of 16 bytes, groups anywhere"
        if p.tiles.swap_ab or p.tiles.split_k > 1 or p.out.major != "row" or not self.stores:
            return (
                f"swap_ab={p.tiles.swap_ab}, split_k={p.tiles.split_k}: rows of a group are rows "
                "of a tile, and of out, which TMA stores"
            )
        return why_not_tables(p, self.most_groups, arch)

    @property
    def stores(self) -> bool:
        """Whether the kernel stores to out in its memory layout."""
        return self.product.out.tma


@dataclass(frozen=True)
class LevelConfig(GroupedConfig):
    """A GroupedConfig whose tiles have a group's rows as columns, all of one width within a group:
    multiples of `step`, or of `coarse` up to half of tile_n. halves: a gate's columns are the first
    half of b's, not the even ones."""

    step: int = 8
    coarse: int = 32
    halves: bool = False

    @property
    def widths(self) -> Widths:
        return Widths(self.product.tiles.tile_n, self.step, self.coarse)

    @property
    def tiles(self) -> Sm90Config:
        """The tiles, which `why_not` has found to be Hopper's."""
        tiles = self.product.tiles
        assert isinstance(tiles, Sm90Config)
        return tiles

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        p, tiles = self.product, self.product.tiles
        if not isinstance(tiles, Sm90Config) or not tiles.swap_ab or tiles.warpgroups != 2:
            return (
                f"tiles={tiles}: tiles of equal widths have swapped operands, and two warpgroups, "
                "on Hopper"
            )
        if reason := replace(p, ops=()).why_not(None, arch):
            return reason
        if p.a.batched or not p.b.batched or p.out.batched or p.a.major != "row" or not self.stores:
            return "a grouped product takes a (M, K), b (E, K, N) and out (M, N), by rows"
        if DTYPES[p.a.dtype].bits != 16 or p.out.dtype != p.a.dtype or self.padded:
            return f"a.dtype={p.a.dtype}, padded={self.padded}: rows of 16 bits, by their ends"
        if p.gated and len(p.ops) > 1:
            return f"ops={p.ops}: a gate, or others"
        if p.gated and (p.b.major != "column" or tiles.epi_n % 32):
            return f"b.major={p.b.major}, epi_n={tiles.epi_n}: a gate takes rows of K, 32 at a time"
        if self.halves and not p.gated:
            return f"halves={self.halves}, ops={p.ops}: of a gate"
        if tiles.one_tile or tiles.stream_k or tiles.box_rows or tiles.cluster_n > 1:
            return f"tiles={tiles}: loops over whole tiles, which share rows alone"
        if self.coarse % self.step or tiles.tile_n % self.step:
            return f"step={self.step}, coarse={self.coarse}: multiples, of which tile_n is one"
        wide = {w for w in self.widths.all if w > tiles.tile_n // 2}
        if not {w - self.step for w in wide} <= {0, *self.widths.all}:
            return f"step={self.step}, coarse={self.coarse}: a group's tiles have two widths"
        return why_not_tables(p, self.most_groups, arch, WITH_PLAN)


@dataclass(frozen=True)
class GatheredConfig(GroupedConfig):
    """A GroupedConfig whose rows of A are given by an index."""

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a (T, K), b, out (R, N), edges, index (R), and those of the
        operations. K is a multiple of 64."""
        _, b, out, edges, *rest = super().arguments()
        index = Operand("index", ("m",), "int32", aligned=False, whole=False)
        return (self.product.a.argument("a", "t", "k", ""), b, out, edges, index, *rest)

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        p, tiles = self.product, self.product.tiles
        if reason := super().why_not(arch):
            return reason
        if not isinstance(tiles, Sm90Config) or tiles.cluster_n > 1 or tiles.one_tile or self.only:
            return f"tiles={tiles}, only={self.only}: each CTA gathers its own rows, on Hopper"
        if tiles.k_bytes != 128 or tiles.tile_m > 128 or tiles.box_rows or tiles.stream_k:
            return f"tiles={tiles}: rows of 128 bytes are gathered, up to 128 of them"
        if DTYPES[p.a.dtype].bits != 16 or tiles.num_stages < 3:
            return f"a.dtype={p.a.dtype}, num_stages={tiles.num_stages}: 16 bits, 3 slots or more"
        return None


@dataclass(frozen=True)
class ScatteredConfig(GroupedConfig):
    """A GroupedConfig whose rows of out are given by an index: stored, or with `add` added to the
    existing values. Any strides; by 16 bytes where product.out is `whole`."""

    add: bool = False

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a (R, K), b, out (S, N), edges, index (R), and those of the
        operations."""
        a, b, _, edges, *rest = super().arguments()
        out = self.product.out.argument("out", "s", "half" if self.product.gated else "n", "")
        index = Operand("index", ("m",), "int32", aligned=False, whole=False)
        return (a, b, out, edges, index, *rest)

    @property
    def stores(self) -> bool:
        return self.product.out.tma == self.product.out.whole

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        p = self.product
        if p.gated and p.out.dtype == "fp32":
            return "out.dtype=fp32: a gate leaves columns that are moved between threads in pairs"
        return super().why_not(arch)


@dataclass(frozen=True)
class BlocksConfig(GroupedConfig):
    """A GroupedConfig of fp8 operands with fp32 factors of blocks, and RowBlocksConfig tiles."""

    @property
    def kind(self) -> str:
        """The kernel of such tiles."""
        assert isinstance(self.product.tiles, RowBlocksConfig)
        return "narrow" if self.product.tiles.narrow else "blocks"

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a, b, the factors scale_a (M, K / 128) with contiguous rows and
        scale_b (E, N / 128, K / 128) of any strides, out, edges, and those of the operations."""
        (a, b, *rest), p = super().arguments(), self.product
        assert isinstance(p.tiles, RowBlocksConfig) and isinstance(a, Operand)
        of_factors = *p.a.factors("a", "m", ""), *p.b.factors("b", "n", "e")
        return (p.tiles.of_rounds(a), b, *of_factors, *rest)

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        tiles = self.product.tiles
        if not isinstance(tiles, RowBlocksConfig) or tiles.recipe != "fp8_block":
            return f"tiles={tiles}: factors are of 1x128 of rows and 128x128 of matrices"
        if (self.product.a.scales, self.product.b.scales) != BLOCKS:
            return "a.scales, b.scales: factors are fp32, of single rows and of blocks of rows"
        if self.product.b.major != "column":
            return f"b.major={self.product.b.major}: wgmma reads fp8 along K"
        return super().why_not(arch)


@dataclass(frozen=True)
class PromotedConfig(GroupedConfig):
    """A GroupedConfig of fp8 operands whose factors the epilogue multiplies with, and
    RowBlocksConfig tiles, whose mainloop has none."""

    @property
    def kind(self) -> str:
        """The kernel of such tiles."""
        return "promoted"

    def arguments(self) -> tuple[Argument, ...]:
        (a, *rest), tiles = super().arguments(), self.product.tiles
        assert isinstance(tiles, RowBlocksConfig) and isinstance(a, Operand)
        return (tiles.of_rounds(a), *rest)

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        tiles = self.product.tiles
        if not isinstance(tiles, RowBlocksConfig) or tiles.recipe != PROMOTED or tiles.narrow:
            return f"tiles={tiles}: sums of blocks have no factors"
        if self.product.b.major != "column":
            return f"b.major={self.product.b.major}: wgmma reads fp8 along K"
        return super().why_not(arch)


@dataclass(frozen=True)
class ScaledRowsConfig(GroupedConfig):
    """A GroupedConfig of operands whose factors Blackwell's tensor cores read; its product is a
    ScaledConfig."""

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a, b and out; the factors of a, each group's from a chunk of its
        own on, and of b; edges, and those of the operations."""
        p = self.product
        return (
            p.a.argument("a", "m", "k", ""),
            p.b.argument("b", "k", "n", "e"),
            p.out.argument("out", "m", "columns", ""),
            *p.a.factors("a", "m", "one"),
            *p.b.factors("b", "n", "e"),
            edges(self.most_groups),
            *(of_groups(x) for x in op_arguments(p.ops)),
        )

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        tiles = self.product.tiles
        if not isinstance(tiles, ScaledTiles) or not tiles.pair:
            return f"tiles={tiles}: a pair computes products whose factors tensor cores read"
        tables = why_not_tables(self.product, self.most_groups, arch, WITH_CHUNKS)
        return tables or super().why_not(arch)


@dataclass(frozen=True)
class SumsConfig:
    """The config of a kernel that sums over the rows of each group, out[e] = A[:, rows of e] @
    B[rows of e]: the general kernel's for a batch, and the groups that its tables hold."""

    product: GeneralConfig
    most_groups: int = WARP
    padded: bool = False  # rows are those of (E, M_max), and edges counts each group's

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a (M, K), b (K, N), out (E, M, N), edges (E)."""
        p = self.product
        return (
            p.a.argument("a", "m", "k", ""),
            p.b.argument("b", "k", "n", ""),
            p.out.argument("out", "m", "columns", "e"),
            edges(self.most_groups),
        )

    def why_not(self, arch: Arch) -> str | None:
        """The reason why this config does not fit `arch`, or None."""
        p = self.product
        if reason := p.why_not(None, arch):
            return reason
        if p.a.batched or p.b.batched or not p.out.batched or not p.out.tma or p.ops:
            return "sums of groups take a (M, K), b (K, N) and out (E, M, N), and no operations"
        if p.a.major != "column" or p.b.major != "row" or p.tiles.swap_ab or p.tiles.split_k > 1:
            return f"swap_ab={p.tiles.swap_ab}, split_k={p.tiles.split_k}: K is contiguous nowhere"
        return why_not_tables(p, self.most_groups, arch)


def ladder(tiles: GemmConfig, most_groups: int) -> GroupedConfig:
    """The config of the ladder's product: rows of bf16, matrices (E, N, K) passed as (E, K, N)."""
    row, column = OperandLayout(), OperandLayout(major="column", batched=True)
    return GroupedConfig(GeneralConfig(tiles, row, column, row), most_groups)


def why_not_tables(
    product: GeneralConfig, most_groups: int, arch: Arch, number: int = 3
) -> str | None:
    """Why the tables of `number` groups do not fit, or None."""
    if most_groups % WARP or not WARP <= most_groups <= MOST_GROUPS:
        return f"most_groups={most_groups}: a multiple of {WARP} up to {MOST_GROUPS}"
    tables = table_bytes(most_groups, number)
    if product.tiles.smem_bytes + BARRIERS + tables > arch.smem_per_cta:
        return f"most_groups={most_groups}: no room for {tables} bytes beside the tiles"
    return None


def edges(most_groups: int) -> Operand:
    """The argument with the groups' ends, as many as the tables hold."""
    bounds = (Bound("e", 1, most_groups),)
    return Operand("edges", ("e",), "int32", aligned=False, whole=False, bounds=bounds)


def of_groups(argument: Argument) -> Argument:
    """An argument of an operation with one value per group: (N) becomes (E, N)."""
    if isinstance(argument, Operand) and argument.sizes == ("n",):
        return replace(argument, sizes=("e", "n"))
    return argument

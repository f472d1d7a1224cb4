"""The signature of the block-scaled GEMM, out = ops((A * scales) @ (B * scales)), as the host sees
it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutlass import Float4E2M1FN, cute

from cutex.compile import Argument
from cutex.device.epilogue.epilogue_ops import Scale, op_arguments
from cutex.dtypes import DTYPES
from cutex.kernels.gemm.layouts import FactorLayout, OperandLayout
from cutex.kernels.gemm.scaled.sm100.config import Kind, ScaledTiles
from cutex.kernels.gemm.scaled.sm100.roles import QuantizeRows
from cutex.kernels.gemm.signature import GeneralConfig

if TYPE_CHECKING:
    import cutlass

    from cutex.arch import Arch

NO_TILES = ScaledTiles()
SWIZZLED = FactorLayout(swizzled=True)


@dataclass(frozen=True)
class ScaledConfig(GeneralConfig):
    """A GeneralConfig whose operands have scale factors; its tiles are ScaledTiles."""

    tiles: ScaledTiles = NO_TILES

    @property
    def kind(self) -> Kind:
        return self.tiles.kind

    def why_not(self, problem: Any, arch: Arch) -> str | None:
        tiles, quantized = self.tiles, [op for op in self.ops if isinstance(op, QuantizeRows)]
        if any(x.scales != SWIZZLED for x in (self.a, self.b)):
            return "a.scales, b.scales: tensor cores read swizzled factors of both"
        if tiles.epi_n and tiles.tile_n % self.epi_columns:
            return f"tile_n={tiles.tile_n}: sub-tiles of out have {self.epi_columns} columns"
        columns = self.out_columns * (2 if any(op.halves for op in quantized) else 1)
        if quantized and (tiles.swap_ab or columns % quantized[0].block):
            return (
                f"swap_ab={tiles.swap_ab}, epi_n={tiles.epi_n}: {quantized[0].block} columns of a "
                "row of out share a factor"
            )
        return super().why_not(problem, arch)

    @property
    def k_elements(self) -> int:
        return self.tiles.k_elements

    @property
    def mma_operands(self) -> tuple[OperandLayout, OperandLayout]:
        """The operands in the order of the MMA."""
        return (self.b, self.a) if self.tiles.swap_ab else (self.a, self.b)

    @property
    def loaded_bytes(self) -> int:
        """The bytes of a step that TMA counts, over all CTAs of a tile: elements of 4 bits count
        packed, whatever they take in smem."""
        c = self.tiles
        a, b = (DTYPES[x.dtype].bits for x in self.mma_operands)
        return (c.tile_m * a + c.tile_n * b) * c.k_elements // 8 + c.ctas * c.factor_bytes

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: a (M, K), b (K, N), out (M, N), each with L first if batched;
        the factors of a and of b; those of the operations."""
        return (
            self.a.argument("a", "m", "k", "la"),
            self.b.argument("b", "k", "n", "lb"),
            self.out.argument("out", "m", "half" if self.gated else "n", "l"),
            *self.a.factors("a", "m", "lsa"),
            *self.b.factors("b", "n", "lsb"),
            *op_arguments(self.ops),
        )


def ladder(tiles: ScaledTiles) -> ScaledConfig:
    """The config of the ladder's product: row-major operands, B passed as (K, N), out in bf16; with
    the tensor scale factors that NVFP4 has."""
    of_tensor = tuple(Scale(f"tensor_scale_{x}") for x in "ab")
    return ScaledConfig(
        a=OperandLayout(tiles.a, whole=True, scales=SWIZZLED),
        b=OperandLayout(tiles.b, "column", whole=True, scales=SWIZZLED),
        out=OperandLayout("bf16", whole=True),
        ops=of_tensor if tiles.vector == 16 else (),
        tiles=tiles,
    )


def unpacked(mX: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """mX (rows, K) or (rows, K, L) of `dtype`, given as bytes if that has 4 bits."""
    return cute.recast_tensor(mX, Float4E2M1FN) if dtype.width == 4 else mX

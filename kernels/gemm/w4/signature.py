"""What a kernel with a packed weight of 4 bits computes, and its tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutex.compile import Argument, Operand
from cutex.device.epilogue.epilogue_ops import EpilogueOp
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.decode_config import W4DecodeConfig
from cutex.kernels.gemm.w4.sm100.config import W4Sm100Config
from cutex.problem.w4.layout import word_dtype


@dataclass(frozen=True)
class W4Signature:
    """What the kernel computes, and its tiles: x (M, K) row-major, a packed weight (N, K)."""

    tiles: W4Config | W4DecodeConfig | W4Sm100Config
    dtype: str = "bf16"
    out: OperandLayout = field(default_factory=lambda: OperandLayout(whole=True))
    ops: tuple[EpilogueOp, ...] = ()

    @property
    def general(self) -> GeneralConfig:
        """The config of the general kernel of the same operands."""
        x, w = (OperandLayout(self.dtype, major) for major in ("row", "column"))
        return GeneralConfig(self.tiles, x, w, self.out, self.ops)

    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: x, the packed weight, out, and those of the operations."""
        x, _, out, *rest = self.general.arguments()
        words = word_dtype(self.tiles.format, self.dtype)
        packed = Operand("weight", ("strips", "blocks", "words"), words)
        return (x, packed, out, *rest)

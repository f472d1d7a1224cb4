"""The host side that GEMM stages share: operands, tensor maps, grid, launch."""

from __future__ import annotations

from typing import Any, ClassVar

import cutlass
from cutlass import cute

from cutex.arch import arch as arch_named
from cutex.compile import Operand
from cutex.device.atoms import tma
from cutex.device.atoms.mma import slots_layout
from cutex.kernels.gemm.config import GemmConfig
from cutex.schedulers.one_tile import OneTilePerCta
from cutex.schedulers.order import TileCounts


def row_major(dtype: str) -> tuple[Operand, ...]:
    """The operands of every stage: mA (M, K), mB (N, K), mC (M, N), all row-major."""
    shapes = (("mA", ("m", "k")), ("mB", ("n", "k")), ("mC", ("m", "n")))
    return tuple(Operand(name, sizes, dtype) for name, sizes in shapes)


class Gemm:
    """C[M,N] = A[M,K] @ B[N,K]^T. A stage defines `kernel`, `num_threads` and what it changes."""

    arch: ClassVar[str]
    number: ClassVar[int]
    swizzle: ClassVar[int]  # width of the smem swizzle in bytes; 16: none
    min_stages: ClassVar[int] = 1  # slots that the ring needs
    config: GemmConfig
    kernel: Any  # the device function: (a: TmaInfo, b: TmaInfo, mC)

    def __init__(self, config: GemmConfig) -> None:
        if reason := config.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        if config.num_stages < self.min_stages:
            raise ValueError(
                f"num_stages={config.num_stages}: {self.name} needs at least {self.min_stages}"
            )
        self.config = config

    @property
    def num_threads(self) -> int:
        """The number of threads in a CTA."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return f"{self.arch.rstrip('a').replace('_', '')}_gemm_stage{self.number}"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return row_major(dtype)

    def slots(self, dtype: type[cutlass.Numeric], rows: int) -> cute.ComposedLayout:
        """The smem layout (bRows, bK, SLOT) of the ring of one operand's tiles."""
        c = self.config
        return slots_layout(dtype, rows, c.k_of(16), c.num_stages, self.swizzle)

    def counts(self, mC: cute.Tensor) -> TileCounts:
        """The numbers of tiles of a CTA that cover mC (M, N)."""
        return TileCounts.of(mC, (self.config.tile_m, self.config.tile_n))

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream) -> None:
        c = self.config
        a = tma.load_operand(mA, self.slots(mA.element_type, c.tile_m))
        b = tma.load_operand(mB, self.slots(mB.element_type, c.tile_n))
        grid = OneTilePerCta.grid(self.counts(mC))
        self.kernel(a, b, mC).launch(
            grid=grid, block=(self.num_threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

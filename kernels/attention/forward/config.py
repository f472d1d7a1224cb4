"""The config of a forward kernel: what it computes, and the tiling that all archs have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cutex.compile import Workspace
from cutex.kernels.attention.spec import AttentionSpec, Shape

if TYPE_CHECKING:
    from cutex.problem.attention import AttentionProblem

ELEMENT = 2  # bytes of bf16 and fp16
COUNTER = 2  # words of the dynamic scheduler's counter
BARRIERS = 1024  # bytes of smem kept for barriers and the like


@dataclass(frozen=True)
class ForwardConfig(AttentionSpec):
    """A spec and a Tiling, to which an arch's config adds its own."""

    pack: int = 1  # query heads of one head of K and V whose rows share a tile
    tile_n: int = 128  # keys of a block
    dispatch: str = "dynamic"  # how tiles are handed out
    num_ctas: int = 0  # CTAs of a persistent grid
    l2_bytes: int = 0  # bytes that the heads in work at one time should fit into

    in_waves: ClassVar[bool] = False  # whether heads come in groups with one tile for each CTA

    @property
    def tile_m(self) -> int:
        """The rows of O, of packed heads, of a tile."""
        raise NotImplementedError

    @property
    def ctas(self) -> int:
        """The number of CTAs that work on a tile together."""
        raise NotImplementedError

    @property
    def k_bytes(self) -> int:
        """Bytes of a block of K in one CTA."""
        raise NotImplementedError

    @property
    def v_bytes(self) -> int:
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Bytes of the tiles of a CTA."""
        raise NotImplementedError

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        raise NotImplementedError

    @property
    def is_cut(self) -> bool:
        """Whether some tiles are cut along their keys."""
        return False

    def uncut(self) -> Self:
        """The same config with whole tiles alone."""
        return self

    def workspace(self, shape: Shape) -> Workspace:
        """The global memory that a launch needs beside its operands."""
        return Workspace(0, COUNTER if self.dispatch == "dynamic" else 0)

    def key_blocks(self, problem: AttentionProblem) -> list[int]:
        """The number of key blocks of each tile of a problem, in the order in which CTAs take the
        tiles."""
        from cutex.kernels.attention.order import key_blocks

        return key_blocks(problem, self)

    def tile_flops(self, problem: AttentionProblem) -> list[float]:
        """The MMA FLOPs of each tile, in the same order."""
        block = 2.0 * self.tile_m * self.tile_n * (self.head_dim + self.head_dim_v)
        return [block * n for n in self.key_blocks(problem)]

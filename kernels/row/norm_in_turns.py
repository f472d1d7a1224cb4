"""Norms without a residual, whose threads process several rows one after another."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from cutex.kernels.row.norm import Norm, NormConfig


@dataclass(frozen=True)
class InTurnsConfig(NormConfig):
    """turns: the number of rows per thread; weights are loaded once for all of them."""

    turns: int = 1

    @property
    def meets_once(self) -> bool:
        return self.centred


class NormInTurns(Norm):
    """A norm of a tile of unaligned rows, `turns` times in each CTA."""

    def __init__(self, config: InTurnsConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if config.residual or config.out or tile.aligned or tile.ctas > 1:
            raise ValueError("rows in turns are plain, begin anywhere and have one CTA")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        c, tile = self.config, self.tile
        optional = dict(zip(c.optional, rest[:-2], strict=True))
        eps, stream = rest[-2:]
        blocks = cute.ceil_div(cute.size(mX, mode=[0]), tile.rows * c.turns)
        self.kernel(mX, mY, optional, eps).launch(
            grid=(blocks, 1, 1), block=(tile.num_threads, 1, 1), stream=stream
        )

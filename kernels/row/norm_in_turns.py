"""Norms of rows without a residual, whose threads have several rows one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import cute

from cutex.kernels.row.norm import Norm, NormConfig


@dataclass(frozen=True)
class InTurnsConfig(NormConfig):
    """turns: the rows that a thread has one after the other; their weights are loaded once."""

    turns: int = 1

    @property
    def meets_once(self) -> bool:
        return self.centred


class NormInTurns(Norm):
    """A norm of a tile's rows, `turns` times in each CTA, of plain rows that begin anywhere."""

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

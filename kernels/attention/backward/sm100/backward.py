"""The FlashAttention backward on Blackwell, in three launches: preprocess, main and convert."""

from __future__ import annotations

from typing import Any

from cutlass import cute

from cutex.compile import Argument
from cutex.kernels.attention.backward.signature import KernelArgs, Tensors, arguments
from cutex.kernels.attention.backward.sm100.config import Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.convert import Convert
from cutex.kernels.attention.backward.sm100.main import Main
from cutex.kernels.attention.backward.sm100.preprocess import Preprocess


class Backward:
    arch = "sm_100a"

    def __init__(self, config: Sm100BackwardConfig) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    @property
    def name(self) -> str:
        return "sm100_attention_backward"

    @property
    def kernels(self) -> dict[str, Any]:
        return {"preprocess": Preprocess.kernel, "main": Main.kernel, "convert": Convert.kernel}

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype)

    @cute.jit
    def __call__(self, mQ, *rest) -> None:
        c, count = self.config, len(Tensors._fields)
        tensors, stream = Tensors(mQ, *rest[: count - 1]), rest[-1]
        # NOTE: rows are padded to 128 in either case, and where a caller counts tiles of 64
        # queries, the two of a block follow each other
        stats = by_tiles(tensors.stats, c.row_stats * c.tile_m)
        tensors = tensors._replace(
            stats=stats, dq_sums=by_tiles(tensors.dq_sums, c.tile_m * c.head_dim)
        )
        args = KernelArgs.of(c, rest[count - 1 : -1])
        Preprocess(c).launch(tensors, args, stream)
        Main(c).launch(tensors, args, stream)
        Convert(c).launch(tensors, args, stream)


def by_tiles(mX: cute.Tensor, width: int) -> cute.Tensor:
    """The contiguous mX as (tiles, `width`)."""
    layout = cute.make_layout((cute.size(mX) // width, width), stride=(width, 1))
    return cute.make_tensor(mX.iterator, layout)

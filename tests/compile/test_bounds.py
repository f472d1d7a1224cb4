"""A kernel that is called directly refuses tensors that its memory has no room for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cutex.compile import Compiled, Operand
from cutex.kernels.gemm.grouped import choose
from cutex.kernels.gemm.grouped.config import BLOCKS, BlocksConfig, GroupedConfig, SumsConfig
from cutex.kernels.gemm.grouped.sm90.blocks import GroupedBlocks
from cutex.kernels.gemm.grouped.sm90.rows import GroupedRows
from cutex.kernels.gemm.grouped.sm90.sums import GroupedSums
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.mixture.combine import Combine, CombineConfig
from cutex.kernels.mixture.route import Route, RouteConfig

ROW, MATRICES = OperandLayout(), OperandLayout(major="column", batched=True)
OF_FP8 = (
    OperandLayout("e4m3", scales=BLOCKS[0]),
    OperandLayout("e4m3", "column", batched=True, scales=BLOCKS[1]),
    ROW,
)
OF_SUMS = OperandLayout(major="column"), ROW, OperandLayout(batched=True)
WIDE = choose.rows_tiles("sm_90a", 512, (512, 512), False)
FP8 = choose.blocks_tiles(512, (512, 512), False)
STREAMED = Sm90Config(
    tile_m=128, tile_n=128, num_stages=5, epi_n=64, epi_stages=2, warpgroups=2, stream_k=1
)
FULL = {"e": 32, "j": 4, "ctas": 8, "buckets": 64}

KERNELS: dict[str, Any] = {
    "rows": GroupedRows(GroupedConfig(GeneralConfig(WIDE, ROW, MATRICES, ROW))),
    "fp8": GroupedBlocks(BlocksConfig(GeneralConfig(FP8, *OF_FP8))),
    "sums": GroupedSums(SumsConfig(GeneralConfig(WIDE, *OF_SUMS))),
    "route": Route(RouteConfig(per_token=4, buckets=64)),
    "combine": Combine(CombineConfig(experts=4)),
    "stream-K": General(GeneralConfig(STREAMED, ROW, ROW, ROW)),
}
REFUSED = (
    ("rows", "edges", "e", 33, "edges has E=33, this kernel takes at most 32"),
    ("fp8", "edges", "e", 33, "edges has E=33, this kernel takes at most 32"),
    ("sums", "edges", "e", 64, "edges has E=64, this kernel takes at most 32"),
    ("route", "offs", "e", 64, "offs has E=64, this kernel takes at most 63"),
    ("route", "totals", "buckets", 32, "totals has BUCKETS=32, this kernel takes 64"),
    ("combine", "places", "j", 2, "places has J=2, this kernel takes 4"),
    ("stream-K", "flags", "flags", 64, "flags has FLAGS=64, this kernel takes at least 1056"),
)


def compiled(kernel: Any) -> Compiled:
    """A Compiled of `kernel` that cannot be launched."""

    def launch(*_: Any) -> None:
        pytest.fail("launched")

    operands = kernel.operands(getattr(kernel, "dtypes", ("bf16",))[0])
    return Compiled("f", "sm_90a", operands, "", b"", Path(), {}, "", 0.0, False, launch)


def tensors_of(given: Compiled, sizes: dict[str, int]) -> list[torch.Tensor]:
    """Tensors without memory, of sizes that the kernel takes but for `sizes`."""
    made = []
    for x in given.operands:
        assert isinstance(x, Operand)
        least = {b.size: b.least for b in x.bounds}
        shape = (sizes.get(s, FULL.get(s, least.get(s, 64))) for s in x.sizes)
        made.append(torch.empty(*shape, device="meta"))
    return made


@pytest.mark.parametrize(("name", "argument", "size", "number", "sentence"), REFUSED)
def test_what_a_kernel_has_no_room_for_is_refused_before_a_launch(
    name: str, argument: str, size: str, number: int, sentence: str
) -> None:
    kernel = compiled(KERNELS[name])
    kernel.check_bounds(tensors_of(kernel, {}))
    wrong = tensors_of(kernel, {size: number})
    assert argument in kernel.argument_names
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        kernel.check_bounds(wrong)
    with pytest.raises((ValueError, TypeError)):
        kernel(*wrong)

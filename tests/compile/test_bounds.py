"""A kernel that is called directly refuses tensors that its memory has no room for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cutex.compile import Compiled, Operand
from cutex.device.row.tile import RowTile
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.sm90.decode import Decode
from cutex.kernels.attention.decode.workspace import needed
from cutex.kernels.attention.mla.sm90.config import Sm90MlaConfig
from cutex.kernels.attention.mla.sm90.mla import Mla
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
from cutex.kernels.mixture.spread import Spread, SpreadConfig
from cutex.kernels.row.fold import Fold
from cutex.kernels.row.reduce import Reduce, ReduceConfig
from cutex.kernels.row.reduce_columns import ReduceColumns, ReduceColumnsConfig
from cutex.kernels.row.scan import Scan, ScanConfig

ROW, MATRICES = OperandLayout(), OperandLayout(major="column", batched=True)
OF_FP8 = (
    OperandLayout("e4m3", scales=BLOCKS[0]),
    OperandLayout("e4m3", "column", batched=True, scales=BLOCKS[1]),
    ROW,
)
OF_SUMS = OperandLayout(major="column"), ROW, OperandLayout(batched=True)
WIDE = choose.rows_tiles("sm_90a", 512, (512, 512), False)
FP8 = choose.blocks_tiles(512, (512, 4096), False)
STREAMED = Sm90Config(
    tile_m=128, tile_n=128, num_stages=5, epi_n=64, epi_stages=2, warpgroups=2, stream_k=1
)
FULL = {"e": 32, "j": 4, "ctas": 8, "buckets": 64, "k": 512}

KERNELS: dict[str, Any] = {
    "rows": GroupedRows(GroupedConfig(GeneralConfig(WIDE, ROW, MATRICES, ROW))),
    "fp8": GroupedBlocks(BlocksConfig(GeneralConfig(FP8, *OF_FP8))),
    "sums": GroupedSums(SumsConfig(GeneralConfig(WIDE, *OF_SUMS))),
    "route": Route(RouteConfig(per_token=4, buckets=64)),
    "combine": Combine(CombineConfig(experts=4)),
    "spread": Spread(SpreadConfig(experts=4)),
    "stream-K": General(GeneralConfig(STREAMED, ROW, ROW, ROW)),
}
REFUSED = (
    ("rows", "edges", "e", 33, "edges has E=33, this kernel takes at most 32"),
    ("fp8", "edges", "e", 33, "edges has E=33, this kernel takes at most 32"),
    ("fp8", "a", "k", 640, "a has K=640, this kernel takes 1024"),
    ("sums", "edges", "e", 64, "edges has E=64, this kernel takes at most 32"),
    ("route", "offs", "e", 64, "offs has E=64, this kernel takes at most 63"),
    ("route", "totals", "buckets", 32, "totals has BUCKETS=32, this kernel takes 64"),
    ("combine", "places", "j", 2, "places has J=2, this kernel takes 4"),
    ("spread", "places", "j", 2, "places has J=2, this kernel takes 4"),
    ("stream-K", "flags", "flags", 64, "flags has FLAGS=64, this kernel takes at least 1056"),
)


TILE, SUM = RowTile(1, 64, 1, 2, 8), Fold("sum")
# of launches whose sizes say what they need: eight sequences, 2 of 8 heads of K and V
SIZES = {"b": 8, "sq": 3, "h": 64, "hk": 8, "d": 128, "dv": 128}
OF_LAUNCHES: dict[str, tuple[Any, dict[str, int], str, int]] = {
    "by shares": (Decode(DecodeConfig()), {"num_splits": 0}, "sums", 264 * 64 * 129),
    "in three": (Decode(DecodeConfig()), {"num_splits": 3}, "sums", 3 * 64 * 64 * 129),
    "flags": (Decode(DecodeConfig()), {"num_splits": 0}, "flags", 64),
    "two blocks of rows": (Decode(DecodeConfig()), {"sq": 16}, "flags", 128),
    "combined": (Decode(DecodeConfig(combined=True)), {}, "sums", 256 + 264 * 64 * 129),
    "MLA": (Mla(Sm90MlaConfig(combined=False)), {"hk": 1, "d": 576, "dv": 512}, "flags", 24),
    "MLA's parts": (Mla(Sm90MlaConfig()), {"num_splits": 2}, "sums", 96 + 48 * 64 * 513),
    "a scan": (Scan(ScanConfig(TILE, SUM, "bf16", True)), {"parts": 33}, "words", 1 + 64 * 35),
    "rows": (Reduce(ReduceConfig(TILE, SUM, "bf16")), {"m": 70, "splits": 1}, "outs", 70),
    "columns": (ReduceColumns(ReduceColumnsConfig(SUM, "bf16")), {"a": 3}, "outs", 3 * 8),
}
TITLES = {"outs": "out"}  # of operands whose sizes have other names


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


@pytest.mark.parametrize("name", OF_LAUNCHES)
def test_a_workspace_that_is_too_small_for_a_launch_is_refused(name: str) -> None:
    made, changed, argument, least = OF_LAUNCHES[name]
    kernel, numbers = compiled(made), {**SIZES, "num_splits": 0, **changed}

    def values(count: int) -> list[Any]:
        sizes = {**numbers, "sums": 1 << 30, "flags": 1 << 20, argument: count}
        return [
            torch.empty(*(sizes.get(s, 64) for s in x.sizes), device="meta")
            if isinstance(x, Operand)
            else numbers.get(x.name, 1.0)
            for x in kernel.operands
        ]

    kernel.check_bounds(values(least))
    name = TITLES.get(argument, argument)
    sentence = f"{name} has {argument.upper()}={least - 1}, this kernel takes at least {least}"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        kernel.check_bounds(values(least - 1))


def test_units_that_are_not_cut_need_no_workspace() -> None:
    for config in (DecodeConfig(parts="one"), DecodeConfig(by_room=True, whole=True)):
        assert needed(config, 300, 0)[:2] == (0, 0)
    assert needed(DecodeConfig(), 300, 1)[:2] == (0, 0)
    assert needed(DecodeConfig(parts="even"), 66, 0)[:2] == (2 * 66 * 64 * 129, 66)

"""The general GEMM on Blackwell, config by config: exact on small integers, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cutlass import cute
from torch import Tensor

import cutex
from cutex import ops
from cutex.compile import compile
from cutex.compile.resources import resources
from cutex.device.epilogue.epilogue_ops import (
    Activation,
    Add,
    Alpha,
    Amax,
    Bias,
    EpilogueOp,
    Gate,
    Scale,
)
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm100 import cost_model
from cutex.kernels.gemm.sm100.general import General
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import Call
from cutex.problem.matmul import draw
from cutex.sim import Hazards

ORDERS = ["fifo", "eager", "starved", "peer-late", "random"]
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp32": torch.float32,
}
TILES = {  # tile_m, tile_n, split_k, swap_ab
    "two accumulators": (256, 128, 1, False),
    "one tile fills tensor memory": (512, 256, 1, False),
    "split": (256, 128, 2, False),
    "swapped": (256, 128, 1, True),
    "split and swapped": (256, 128, 4, True),
}
LAYOUTS = {
    "rows": ({}, {}, {}),
    "columns": ({"major": "column"}, {"major": "column"}, {"major": "column"}),
    "N contiguous": ({"dtype": "fp16"}, {"dtype": "fp16"}, {"dtype": "fp32"}),
    "fp8": ({"dtype": "e4m3"}, {"dtype": "e5m2", "major": "column"}, {"dtype": "fp32"}),
    "fp8, K strided": ({"dtype": "e5m2", "major": "column"}, {"dtype": "e4m3"}, {}),
    "tf32": ({"dtype": "fp32"}, {"dtype": "fp32", "major": "column"}, {"major": "column"}),
    "tf32, K strided": ({"dtype": "fp32", "major": "column"}, {"dtype": "fp32"}, {}),
    "batch": ({"batched": True}, {"batched": True}, {"batched": True}),
    "one B, by element": ({"batched": True}, {}, {"batched": True, "tma": False}),
}
EVERYTHING = (
    Scale("scale_a", "row"),
    Scale("scale_b", "column"),
    Alpha(),
    Add("c", "bf16", beta=True, whole=True),
    Bias("column", "bf16", whole=True),
    Activation("gelu"),
    Add("residual", "bf16", whole=True),
    Amax(),
)


def config(tile: str, ops: tuple[EpilogueOp, ...] = (), **layouts: OperandLayout) -> GeneralConfig:
    """The config that cutex.plan makes from a candidate with that tile."""
    m, n, split_k, swap_ab = TILES[tile]
    tiles = next(
        c
        for c in cost_model.configs("sm_100a")
        if (c.tile_m, c.tile_n, c.split_k, c.swap_ab) == (m, n, split_k, swap_ab)
    )
    if swap_ab and (ops or not layouts.get("out", OperandLayout()).tma):
        tiles = replace(tiles, epi_n=16)
    return GeneralConfig(tiles, **layouts, ops=ops)


def integers(layout: OperandLayout, batch: int, rows: int, columns: int, seed: int) -> Tensor:
    shape = (batch, rows, columns) if layout.batched else (rows, columns)
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=g).float().to(DTYPES[layout.dtype])
    return x.mT.contiguous().mT if layout.major == "column" else x


PAIRS = [  # each layout in one tile or two, each tile with three layouts; the rest with -m slow
    pytest.param(tile, layout, marks=[pytest.mark.slow] if (i + j) % 3 else [])
    for i, tile in enumerate(TILES)
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.sweep(36)
@pytest.mark.parametrize(("tile", "layout"), PAIRS)
def test_every_layout_is_exact_in_every_kind_of_tile(tile: str, layout: str) -> None:
    a, b, out = (OperandLayout(**fields) for fields in LAYOUTS[layout])
    kernel = compile(General(config(tile, a=a, b=b, out=out)), a.dtype, "sm_100a")
    x, y = integers(a, 3, 272, 144, seed=1), integers(b, 3, 144, 304, seed=2)
    want = (x.float() @ y.float()).to(DTYPES[out.dtype])
    z = torch.full_like(want, torch.nan)
    if out.major == "column":
        z = z.mT.contiguous().mT
    order = ORDERS[list(LAYOUTS).index(layout) % len(ORDERS)]
    cutex.simulate(kernel, x, y, z, order=order, seed=7)
    assert torch.equal(z, want)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", ["two accumulators", "one tile fills tensor memory"])
def test_gates_leave_by_tma_half_as_wide(tile: str, order: str) -> None:
    kernel = compile(General(config(tile, (Gate("relu"),))), "bf16", "sm_100a")
    x, y = (
        integers(OperandLayout(), 1, 600, 72, seed=1),
        integers(OperandLayout(), 1, 72, 560, seed=2),
    )
    product = x.float() @ y.float()
    want = (product[:, 0::2].relu() * product[:, 1::2]).bfloat16()
    z = torch.full_like(want, torch.nan)
    cutex.simulate(kernel, x, y, z, order=order, seed=3)
    assert torch.equal(z, want)


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
def test_no_epilogue_spills(tile: str) -> None:
    for out in (OperandLayout(), OperandLayout(tma=False)):
        r = resources(compile(General(config(tile, EVERYTHING, out=out)), "bf16", "sm_100a"))
        assert r.spill_bytes == 0


@pytest.mark.sweep(6)
@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_in_the_fused_epilogue_is_a_race(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMA then reads a slot of which other warps have yet to write their rows."""

    class WithoutBarrier:
        def __getattr__(self, name: str):
            return getattr(real, name) if name != "barrier" else lambda **_: None

    real, arch = cute.arch, WithoutBarrier()
    monkeypatch.setattr(cute, "arch", arch)
    ops = (Activation("relu"),)
    kernel = compile(General(config("two accumulators", ops)), "bf16", "sm_100a", cache=False)
    monkeypatch.undo()
    x, y = (
        integers(OperandLayout(), 1, 256, 64, seed=1),
        integers(OperandLayout(), 1, 64, 256, seed=2),
    )
    with pytest.raises(Hazards, match="race"):
        cutex.simulate(kernel, x, y, torch.zeros(256, 256).bfloat16(), order=order, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_randomized_problems_of_several_tiles_in_every_order(tenth: int) -> None:
    for seed in range(2000 + 15 * tenth, 2015 + 15 * tenth):
        problem = draw(seed, largest=9, most_work=2**24)
        with ops.simulated("sm_100a", order=ORDERS[seed % 5], seed=seed):
            wrong = problem.run("cpu", cutex.matmul)
        assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_what_k_lies_across_is_copied_on_hopper_unless_of_16_bits(
    arch: str, dtype: torch.dtype
) -> None:
    a, b = torch.zeros(64, 32).to(dtype).mT, torch.zeros(64, 96).to(dtype)  # K = 64
    notes = arrange(Call(a, b), torch.empty(32, 96).bfloat16(), arch).notes
    copied = arch == "sm_90a" and dtype is not torch.bfloat16
    assert ("a" in notes) == ("b" in notes) == copied


@pytest.mark.slow
@pytest.mark.parametrize("m, n", [(1, 256), (40, 8), (256, 72), (16, 516)])
def test_tf32_of_every_major_is_exact_on_small_tiles(m: int, n: int) -> None:
    """A tile of few columns has too few bytes of N for the swizzle, and is not proposed."""
    g = torch.Generator().manual_seed(m)
    a, b = (torch.randint(-8, 9, s, generator=g).float() for s in ((m, 44), (44, n)))
    with ops.simulated("sm_100a", order="random", seed=n):
        for x in (a, a.mT.contiguous().mT):
            for y in (b, b.mT.contiguous().mT):
                assert torch.equal(cutex.matmul(x, y), a @ b)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cutex.arch import ARCHS
from cutex.compile import Compiled, compile
from cutex.kernels.gemm import Stage, stage, stages
from cutex.kernels.gemm.config import GemmConfig
from cutex.kernels.gemm.sm100.config import Sm100Config
from cutex.problem.gemm import DTYPES, Check, GemmProblem

LADDERS = [s for name in ARCHS for s in stages(name)]
each_stage = pytest.mark.parametrize(
    "stage", LADDERS, ids=[f"{s.arch}-{s.number}" for s in LADDERS]
)


def launch(
    compiled: Compiled, device: str, *tensors: torch.Tensor, order: str = "fifo", seed: int = 0
) -> None:
    """Run on `device` and write the results to the CPU tensors given."""
    if device == "sim":
        from cutex.sim import simulate

        report = simulate(compiled, *tensors, order=order, seed=seed)
        assert not report.findings, "\n".join(str(finding) for finding in report.findings)
        return
    there = [x.untyped_storage().cuda() for x in tensors]
    views = [
        torch.empty(0, dtype=x.dtype, device="cuda").set_(
            storage, x.storage_offset(), x.shape, x.stride()
        )
        for x, storage in zip(tensors, there, strict=True)
    ]
    compiled(*views)
    for x, storage in zip(tensors, there, strict=True):
        x.untyped_storage().copy_(storage)


def check(
    stage: Stage, device: str, problem: GemmProblem, config: GemmConfig | None = None, **orders
) -> Check:
    config = config or stage.config()
    compiled = compile(stage.kernel(config), problem.dtype, stage.arch)
    a, b = problem.inputs()
    c = problem.output()
    launch(compiled, device, a, b, c, **orders)
    return problem.check(a, b, c, tile=(config.tile_m, config.tile_n))


EXACT = {
    "one tile": (128, 256, 64),
    "one tile, a ring and more of K": (128, 256, 64 * 6),
    "several tiles": (256, 512, 128),
    "odd in M, N and K": (200, 136, 72),
    "less than a tile": (72, 24, 40),
    "one row, eight columns": (1, 8, 8),
    "odd, several tiles, two rounds of the ring": (300, 520, 64 * 8 + 24),
}


WHOLE = [name for name in EXACT if "odd" not in name and not name.startswith(("less", "one row"))]
EVERY_SIZE = (0, 3, 5, 9)  # between them, whole tiles come out as those among odd ones do
EXACT_CASES = [
    pytest.param(
        s,
        mnk,
        id=f"{s.arch}-{s.number}-{name}",
        marks=pytest.mark.slow if name in WHOLE and s.number not in EVERY_SIZE else (),
    )
    for s in LADDERS
    for name, mnk in EXACT.items()
]


@pytest.mark.sweep(48)
@pytest.mark.parametrize(("stage", "mnk"), EXACT_CASES)
def test_integers_come_out_exact(stage: Stage, device: str, mnk: tuple[int, int, int]) -> None:
    found = check(stage, device, GemmProblem(*mnk, init="int"))
    assert found.ok, found.message


@pytest.mark.sweep(12)
@pytest.mark.parametrize("tile", [(16, 128, 8), (144, 128, 2), (240, 128, 4), (192, 256, 2)])
@pytest.mark.parametrize("arch", ARCHS)
def test_other_tiles_and_rings_are_as_exact(
    arch: str, device: str, tile: tuple[int, int, int]
) -> None:
    third = stage(arch, 3)
    tile_n, k_bytes, num_stages = tile
    config = replace(third.config(), tile_n=tile_n, k_bytes=k_bytes, num_stages=num_stages)
    found = check(third, device, GemmProblem(200, 264, 456, init="int"), config)
    assert found.ok, found.message


PERSISTENT = [s for s in LADDERS if isinstance(s.config(), Sm100Config) and s.config().num_acc > 1]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("mnk", [(392, 520, 72), (256, 1280, 64)], ids=["odd", "K of one tile"])
@pytest.mark.parametrize("stage", PERSISTENT, ids=[f"{s.arch}-{s.number}" for s in PERSISTENT])
def test_a_cta_may_work_through_many_tiles(
    stage: Stage, device: str, mnk: tuple[int, int, int]
) -> None:
    config = replace(stage.config(), num_ctas=4)
    found = check(stage, device, GemmProblem(*mnk, init="int"), config)
    assert found.ok, found.message


CHOICES = {
    "C transposed": {"swap_ab": True},
    "narrow": {"tile_m": 256, "tile_n": 64, "epi_stages": 2, "num_acc": 8},
    "slots that do not divide a tile": {"tile_m": 256, "tile_n": 224, "num_stages": 6},
    "two blocks, overlapped": {"tile_n": 96, "epi_stages": 3, "num_acc": 4},
    "K split in two": {"tile_m": 256, "tile_n": 96, "epi_stages": 3, "num_acc": 1, "split_k": 2},
    "K split in four, C transposed": {
        **{"tile_m": 256, "tile_n": 64, "epi_stages": 2, "num_acc": 1},
        **{"split_k": 4, "swap_ab": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES.keys())
def test_every_choice_of_stage_9_is_as_exact(changes: dict[str, int]) -> None:
    chosen = stage("sm_100a", 9)
    config = replace(chosen.config(), **changes)
    problem = GemmProblem(600, 296, 200, init="int")
    found = check(chosen, "sim", problem, config, order="random", seed=1)
    assert found.ok, found.message


@pytest.mark.slow
def test_a_split_of_k_gives_the_same_bits_in_any_order() -> None:
    chosen = stage("sm_100a", 9)
    config = replace(chosen.config(), **CHOICES["K split in two"])
    compiled = compile(chosen.kernel(config), "bf16", "sm_100a")
    problem = GemmProblem(200, 264, 328)
    a, b = problem.inputs()
    outputs = [problem.output() for _ in range(3)]
    for seed, c in enumerate(outputs):
        launch(compiled, "sim", a, b, c, order="random", seed=seed)
    assert all(torch.equal(c, outputs[0]) for c in outputs)


NORMAL = [  # of both types, the first and the last stage of each ladder
    pytest.param(
        s, x, id=f"{s.arch}-{s.number}-{x}", marks=() if s.number in (0, 9) else pytest.mark.slow
    )
    for s in LADDERS
    for x in DTYPES
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("stage", "dtype"), NORMAL)
def test_normal_data_is_within_twice_torchs_error(stage: Stage, device: str, dtype: str) -> None:
    found = check(stage, device, GemmProblem(200, 264, 328, dtype=dtype, init="normal"))
    assert found.ok, found.message


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("seed", SEEDS)
@each_stage
def test_the_order_of_events_does_not_matter(stage: Stage, seed: int) -> None:
    problem = GemmProblem(200, 136, 64 * 6 + 8, init="int")
    found = check(stage, "sim", problem, order="random", seed=seed)
    assert found.ok, found.message


@pytest.mark.sweep(16)
@each_stage
def test_rows_may_be_further_apart_than_they_are_long(stage: Stage, device: str) -> None:
    """A, B and C are parts of wider matrices, and nothing outside C is written."""
    problem = GemmProblem(200, 136, 72, init="int")
    a, b = problem.inputs()
    wide_a, wide_b = torch.full((200, 96), torch.nan), torch.full((136, 80), torch.nan)
    wide_a, wide_b = wide_a.to(a.dtype), wide_b.to(b.dtype)
    wide_a[:, 8:80], wide_b[:, :72] = a, b
    wide_c = torch.full((202, 160), 7.0, dtype=a.dtype)
    c = wide_c[1:201, 16:152]
    c.fill_(torch.nan)
    compiled = compile(stage.kernel(), problem.dtype, stage.arch)
    launch(compiled, device, wide_a[:, 8:80], wide_b[:, :72], c)
    found = problem.check(a, b, c)
    assert found.ok, found.message
    outside = wide_c.clone()
    outside[1:201, 16:152] = 7.0
    assert (outside == 7.0).all(), "the kernel wrote outside C"

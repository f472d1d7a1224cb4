"""The block-scaled GEMM on Blackwell: exact on small integers and factors, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scaled_subjects import KINDS, PAIR, TILES, Case

from cutex.arch import arch
from cutex.bench.run import Options, run
from cutex.compile import compile
from cutex.compile.resources import resources
from cutex.device.epilogue.epilogue_ops import Activation, Bias, Scale
from cutex.kernels.gemm.scaled import LADDERS
from cutex.kernels.gemm.scaled.sm100.config import ScaledTiles, kind_of
from cutex.kernels.gemm.scaled.sm100.general import Scaled
from cutex.kernels.gemm.scaled.sm100.roles import QuantizeRows
from cutex.problem.scaled import BlockScaledProblem
from cutex.problem.scaled.formats import BLOCK_SCALED

ORDERS = ["fifo", "eager", "starved", "peer-late", "random", "elected"]
B200 = arch("sm_100a")
PAIRS = [(tile, kind) for tile in TILES for kind in KINDS]


def order_of(*names: str) -> dict[str, object]:
    number = sum(map(len, names))
    return {"order": ORDERS[number % len(ORDERS)], "seed": number}


@pytest.mark.sweep(128)
@pytest.mark.parametrize(("tile", "kind"), PAIRS)
def test_every_kind_is_exact_in_every_tile(tile: str, kind: str) -> None:
    """M and N are no multiple of a tile; K ends within a step, and factors beyond it are NaN."""
    k = 384 if kind.count("fp") == 2 else 352
    case = Case(kind, TILES[tile], (272, 304, k), seed=len(tile))
    if kind in ("mxfp4", "nvfp4"):
        case.mnk = (272, 304, 320)
    assert case.run(**order_of(tile, kind)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("mxfp8", PAIR, (208, 272, 288), majors=(False, False)),
        Case("mxfp8", TILES["shared columns"], (136, 272, 160), batch=3),
        Case("mxfp8", PAIR, (37, 51, 48), out="bf16", by_element=True),
        Case("nvfp4", TILES["192 columns"], (130, 776, 1088), out="bf16", batch=2),
        Case("mxfp8", replace(PAIR, num_acc=1, split_k=4), (72, 144, 1184), majors=(True, False)),
    ],
    ids=["K strided", "batch", "by element", "many tiles", "a share beyond K"],
)
def test_layouts(case: Case) -> None:
    assert case.run(order="random", seed=5) is None


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", BLOCK_SCALED)
@pytest.mark.parametrize("number", range(5))
def test_every_stage_is_right_on_every_recipe(dtype: str, number: int) -> None:
    problem = BlockScaledProblem(264, 280, 384, dtype, "spread", seed=number)
    result = run(problem, LADDERS.stage("sm_100a", number), "sim", Options(order="random"))
    assert result.ok, result.message


@pytest.mark.slow
def test_a_blackwell_ultra_runs_the_same_stages() -> None:
    problem = BlockScaledProblem(256, 264, 320, "nvfp4", "spread")
    stage = LADDERS.stage("sm_103a", 4)
    assert stage.arch == "sm_103a"
    result = run(problem, stage, "sim", Options())
    assert result.ok, result.message


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tile"), [(k, t) for t in TILES for k in ("mxfp8", "nvfp4")])
def test_nothing_spills_on_either_blackwell(kind: str, tile: str) -> None:
    config = Case(kind, TILES[tile], (1, 1, 1), out="bf16").config
    for name in ("sm_100a", "sm_103a"):
        compiled = compile(Scaled(config), config.a.dtype, name)
        assert resources(compiled).spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["two accumulators", "192 columns", "shared columns"])
def test_a_quantized_epilogue_does_not_spill(tile: str) -> None:
    ops = (Scale("a"), Bias("column", "bf16", whole=True), Activation("gelu"), QuantizeRows())
    tiles = TILES[tile]
    if tile == "192 columns":  # three sub-tiles, of which no two in turn share a slot
        tiles = replace(tiles, epi_stages=3)
    config = replace(Case("nvfp4", tiles, (1, 1, 1), out="e4m3").config, ops=ops)
    for name in ("sm_100a", "sm_103a"):
        assert resources(compile(Scaled(config), "nvfp4", name)).spill_bytes == 0


def test_a_quantized_epilogue_takes_whole_blocks_of_a_row() -> None:
    config = Case("mxfp8", replace(PAIR, tile_n=224, num_stages=2), (1, 1, 1), out="e4m3").config
    assert "sub-tiles of out have 64 columns" in str(config.why_not(None, B200))
    swapped = Case("mxfp8", replace(PAIR, swap_ab=True), (1, 1, 1), out="e4m3").config
    why = replace(swapped, ops=(QuantizeRows(),)).why_not(None, B200)
    assert "32 columns of a row of out share a factor" in str(why)


def test_scale_columns_leave_room_for_two_accumulators_or_they_share() -> None:
    nvfp4 = TILES["224 columns"].of("e2m1", "e2m1", 16)
    assert (nvfp4.factor_columns, nvfp4.acc_columns, nvfp4.overlap) == (64, 448, 0)
    wide = TILES["shared columns"].of("e2m1", "e2m1", 16)
    assert (wide.factor_columns, wide.acc_columns, wide.overlap) == (48, 464, 48)
    mxfp8 = TILES["shared columns"].of("e4m3", "e4m3", 32)
    assert (mxfp8.factor_columns, mxfp8.overlap) == (12, 12)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("tiles", "sentence"),
    [
        (replace(PAIR, tile_n=80), "factors are addressed by 32 rows of B"),
        (replace(PAIR, tile_m=512, num_acc=2), "with factors 128 a CTA, 256 a pair"),
        (replace(PAIR, split_k=2), "split_k=2: takes num_acc=1"),
        (replace(PAIR, num_acc=4, tile_n=64), "num_acc=4: 1 or 2"),
        (replace(PAIR, tile_n=32), "a tile has two sub-tiles or more"),
        (replace(PAIR, num_stages=9, tile_n=256), "more than the"),
        (replace(PAIR, a="e2m1", vector=16), "no MMA takes e2m1 and e4m3"),
    ],
)
def test_tiles_that_do_not_fit_say_why(tiles: ScaledTiles, sentence: str) -> None:
    assert sentence in str(tiles.why_not(None, B200))


def test_fp4_beside_fp8_takes_k_by_128() -> None:
    problem = BlockScaledProblem(256, 256, 192, "mxfp8_mxfp4")
    stage = LADDERS.stage("sm_100a", 1).fitted(problem)
    assert "K=192: elements of 4 bits beside 8-bit ones" in str(
        stage.default.why_not(problem, B200)
    )


def test_kinds_by_operands() -> None:
    assert kind_of("e4m3", "e2m1", 32) == "mxf8f6f4"
    assert kind_of("e2m1", "e2m1", 32) == "mxf4"
    assert kind_of("e2m1", "e2m1", 16) == "mxf4nvf4"
    with pytest.raises(ValueError, match="no MMA takes e4m3 and e4m3 with a scale factor for 16"):
        kind_of("e4m3", "e4m3", 16)

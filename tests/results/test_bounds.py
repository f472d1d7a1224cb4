from __future__ import annotations

from dataclasses import replace

import pytest

from cutex.analysis import bounds
from cutex.arch import arch
from cutex.kernels.gemm import Stage, stages
from cutex.problem.gemm import GemmProblem
from cutex.sim.timing.gpus import B200, H200, Gpu

FACTS = arch(bounds.ARCH)
BOARD = bounds.BOARD
LADDER = stages(bounds.ARCH)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("stage", LADDER, ids=lambda s: str(s.number))
def test_the_code_does_what_the_config_says(stage: Stage) -> None:
    """The MMAs in PTX and SASS cover one tile by one step of K, and its loads read it once."""
    c, row = stage.config(), bounds.stage_row(stage)
    assert row.step_flops == 2 * c.tile_m * c.tile_n * c.k_of(16)
    assert row.step_bytes == c.stage_bytes
    assert row.ctas == c.ctas
    assert row.spill_bytes == 0
    assert c.smem_bytes <= row.smem_bytes <= FACTS.smem_per_cta


def test_the_page_is_what_the_rows_render(root) -> None:
    rows = bounds.in_order(bounds.read(root / bounds.FOLDER))
    assert (root / bounds.PAGE).read_text() == bounds.page(rows)


def test_the_model_is_never_above_a_bound(root) -> None:
    """Both at one clock rate, so that cycles of the simulator's clock compare with those of each
    unit."""
    model = bounds.predicted(bounds.PROBLEM, root / bounds.PREDICTED)
    rows = [r for r in bounds.read(root / bounds.FOLDER) if r.kernel in model]
    assert len(rows) == len(LADDER)
    for row in rows:
        most = max(row.bounds(bounds.PROBLEM, BOARD).values()) / BOARD.clock / 1e9
        assert model[row.kernel] <= bounds.PROBLEM.flops / most / 1e12, row.kernel


ROW = bounds.Row(
    kernel="a pair",
    title="by hand",
    registers=0,
    spill_bytes=0,
    smem_bytes=0,
    tmem_columns=256,
    tile=(256, 256),
    ctas=2,
    mma=(256, 256, 16),
    step_mmas=4,
    step_bytes=65536,
    ring_bytes=0,
)


def test_bounds_are_those_of_the_arithmetic() -> None:
    assert (ROW.mma_cycles, ROW.mma_smem_bytes, ROW.flops_per_byte) == (128, 8192, 128)
    assert ROW.smem_share == 0.5
    problem = GemmProblem(74 * 256, 256, 64)
    assert ROW.waves(problem, BOARD) == (1, 1.0)
    found = ROW.bounds(problem, BOARD)
    assert found["tensor"] == 4 * 128
    assert found["smem"] == 4 * 64
    assert found["L2"] == pytest.approx(74 * 65536 / BOARD.l2_bytes)


@pytest.mark.parametrize("board", [H200, B200], ids=lambda b: b.name)
def test_rates_that_others_take_from_the_arch_are_those_of_the_clock(board: Gpu) -> None:
    facts = arch(board.arch)
    assert board.sms == facts.num_sms
    assert board.mma_flops == facts.mma_flops
    assert board.smem_bytes == facts.smem_bytes_per_clock
    assert board.l2_bytes == facts.l2_bytes_per_clock


def test_a_tile_more_than_fits_is_a_second_wave() -> None:
    waves, used = ROW.waves(GemmProblem(75 * 256, 256, 64), BOARD)
    assert (waves, used) == (2, pytest.approx(75 / 148))


def test_a_narrow_mma_is_bound_by_shared_memory() -> None:
    narrow = replace(ROW, mma=(128, 64, 16), ctas=1, tile=(128, 64))
    assert (narrow.mma_cycles, narrow.mma_smem_bytes / BOARD.smem_bytes) == (32, 48)


def test_a_descriptor_may_be_put_together_from_constants() -> None:
    ptx = """
        mov.b32 %r1, 272630928;
        selp.b32 %r2, 16384, 0, %p1;
        or.b32 %r3, %r1, %r2;
        tcgen05.mma.cta_group::2.kind::f16 [%r9], %rd1, %rd2, %r3, {%r4}, %p2;
    """
    assert bounds.mma_shape(ptx) == (256, 256, 2)


def test_a_clone_without_the_example_is_refused_in_one_sentence(tmp_path, python) -> None:
    done = python("-m", "cutex.bounds", "--cutlass", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "takes a clone of CUTLASS" in done.stderr


def test_bounds_of_hopper_are_refused_in_one_sentence(python) -> None:
    done = python("-m", "cutex.gemm", "--stage", "3", "--arch", "sm_90a", "--emit", "bounds")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "sm_90a has not" in done.stderr

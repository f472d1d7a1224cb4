"""The fp32 ladder on CUDA cores: exact on integers of any sizes; what a stage asks of memory."""

from __future__ import annotations

import pytest
import torch
from cutlass import cute

from cutex.bench import cli
from cutex.compile import compile
from cutex.kernels.gemm.simt import ARCHS, LADDERS
from cutex.kernels.gemm.simt.config import TILES
from cutex.problem.gemm_fp32 import Fp32GemmProblem
from cutex.results import read
from cutex.sim import simulate

STAGES = LADDERS.stages("sm_90a")
TOP = STAGES[-1]
SIZES = ((1, 1, 1), (33, 70, 5), (129, 131, 37), (132, 136, 52))


def run(stage, problem, **options):
    """The report of a simulated run that was right."""
    stage = stage.fitted(problem)
    assert stage.config().why_not(problem, None) is None
    compiled = compile(stage.kernel(), "fp32", stage.arch)
    tensors = *problem.inputs(), *problem.outputs()
    report = simulate(compiled, *tensors, **options)
    found = problem.check(*tensors)
    assert found.ok, found.message
    return report


@pytest.mark.sweep(120)
@pytest.mark.parametrize("mnk", SIZES, ids=str)
@pytest.mark.parametrize("stage", STAGES, ids=lambda s: str(s.number))
def test_a_stage_is_exact_on_integers_of_any_sizes(stage, mnk):
    run(stage, Fp32GemmProblem(*mnk, init="int"))


def test_the_top_takes_the_tile_with_which_the_busiest_sm_is_done_first():
    """Those that were the faster on an H200, which has 132 SMs."""
    for size, n in {512: 64, 1024: 64, 1536: 64, 2048: 128, 3072: 64, 4096: 128}.items():
        assert TOP.fitted(Fp32GemmProblem(size, size, size)).config().tile_n == n


@pytest.mark.slow
def test_the_larger_tile_is_exact_too():
    config = next(c for c in TILES if c.tile_n == 128).fitted(problem := Fp32GemmProblem(
        129, 131, 37, init="int"))  # fmt: skip
    compiled = compile(TOP.kernel(config), "fp32", TOP.arch)
    tensors = *problem.inputs(), *problem.outputs()
    simulate(compiled, *tensors)
    assert problem.check(*tensors).ok


@pytest.mark.parametrize("init", ["normal", pytest.param("uniform", marks=pytest.mark.slow)])
def test_the_top_is_as_near_as_fp32_sums_are(init):
    run(TOP, Fp32GemmProblem(40, 52, 120, init=init, seed=5))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("arch", [x for x in ARCHS if x != "sm_90a"])
@pytest.mark.parametrize(
    "number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 8, 9))]
)
def test_it_runs_on_any_arch(number, arch):
    run(LADDERS.stage(arch, number), Fp32GemmProblem(20, 24, 40, init="int"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, order, seed",
    [
        (7, "random", 1),
        pytest.param(9, "random", 2, marks=pytest.mark.slow),
        pytest.param(8, "random", 3, marks=pytest.mark.slow),
        pytest.param(8, "starved", 0, marks=pytest.mark.slow),
        pytest.param(7, "eager", 0, marks=pytest.mark.slow),
    ],
)
def test_copies_under_way_race_with_nothing_in_any_order(number, order, seed):
    run(STAGES[number], Fp32GemmProblem(20, 130, 90, init="int"), order=order, seed=seed)


@pytest.mark.slow
def test_a_wait_that_lets_one_group_more_go_on_is_found(monkeypatch):
    problem = Fp32GemmProblem(8, 8, 64, init="int")
    wait = cute.arch.cp_async_wait_group
    monkeypatch.setattr(cute.arch, "cp_async_wait_group", lambda n: wait(n + 1))
    compiled = compile(STAGES[7].fitted(problem).kernel(), "fp32", "sm_90a", cache=False)
    report = simulate(compiled, *problem.inputs(), *problem.outputs(), raise_findings=False)
    assert any("cp.async" in str(finding) for finding in report.findings)


def counts(stage, *mnk):
    (kernel,) = run(stage, Fp32GemmProblem(*mnk, init="int"), resources=True).kernels.values()
    return kernel.counts


def test_lanes_along_k_ask_for_a_quarter_of_the_sectors():
    naive, coalesced = (counts(stage, 32, 32, 64) for stage in STAGES[:2])
    # 32 sectors of A, one of B for 32 FMAs, and 32 of C in the end; then 4 and 4, and one of C each
    assert naive["sectors"] == 32 * (64 * 33 + 32)
    assert coalesced["sectors"] == 32 * 32 * (2 * 8 + 1)


@pytest.mark.slow
def test_words_of_one_bank_take_32_wavefronts_until_rows_are_padded_or_swizzled():
    tiles, padded, swizzled = (counts(stage, 32, 32, 32) for stage in STAGES[2:5])
    loads = 32 * 8  # of 32 warps, of 16 bytes of each of 32 rows of B: the same four banks
    assert tiles["wavefronts"] - tiles["least_wavefronts"] == (32 - 4) * loads
    for found in (padded, swizzled):
        assert found["wavefronts"] == found["least_wavefronts"] == tiles["least_wavefronts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7, 8)), 9]
)
def test_register_tiles_are_read_and_written_without_conflicts(number):
    for mnk in ((128, 128, 16), (128, 127, 15)):
        found = counts(STAGES[number], *mnk)
        assert found["wavefronts"] == found["least_wavefronts"] > 0


@pytest.mark.parametrize(
    "stage",
    [pytest.param(s, marks=pytest.mark.slow) if s.number < 9 else s for s in STAGES],
    ids=lambda s: str(s.number),
)
def test_the_counts_of_the_ladders_table_are_those_of_today(stage, root):
    rows = read(root / "results" / "gemm_fp32-counts.jsonl")
    (row,) = (r for r in rows if r.stage == stage.number and r.arch == "sm_90a")
    assert row.sim_counts == counts(stage, *(row.problem[letter] for letter in "mnk"))


def test_what_tf32_gives_and_what_was_never_written_is_refused():
    problem = Fp32GemmProblem(64, 64, 512)
    a, b = problem.inputs()
    right = (a.double() @ b.double().T).float()
    assert problem.check(a, b, right).ok
    tf32 = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    assert not problem.check(a, b, tf32[0] @ tf32[1].T).ok
    right[3, 5] = torch.nan
    assert problem.check(a, b, right).message.startswith("C[3, 5] is nan")


def test_counts_are_columns_of_the_table(capsys, tmp_path):
    argv = ["--fp32", "--arch", "sm_80", "--device", "sim", "--stage", "0", "--count"]
    problem, args = cli.parsed(Fp32GemmProblem, [*argv, "--mnk", "3,5,7", "--out", str(tmp_path)])
    assert cli.run(cli.plan(problem, args), tmp_path, as_json=False) == 0
    head, line, *_ = capsys.readouterr().out.splitlines()
    column = head.index("sectors") + len("sectors")
    assert line[:column].split()[-1] == str(counts(LADDERS.stage("sm_80", 0), 3, 5, 7)["sectors"])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Fp32GemmProblem(0, 1, 1), "M=0: every size must be at least 1"),
        (lambda: Fp32GemmProblem(1, 1, 1, "bf16"), "dtype 'bf16' is not one of fp32"),
        (lambda: Fp32GemmProblem(1, 1, 1, init="ones"), "init 'ones' is not one of"),
    ],
)
def test_bad_problems_are_one_sentence(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_vectors_are_refused_where_rows_are_no_multiple_of_them():
    why = TOP.config().why_not(Fp32GemmProblem(4, 4, 6), None)
    assert why == "K=6: vectors take a multiple of 4"

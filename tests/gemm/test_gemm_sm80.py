"""GEMM by mma.sync: the ladder, and cutex.matmul on Ampere, Ada and RTX Blackwell."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cutlass import cute

import cutex
from cutex import ops
from cutex.arch import PORTABLE, arch
from cutex.bench.run import Options, run
from cutex.compile import compile
from cutex.kernels.gemm import stage, stages
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.sm80 import cost_model
from cutex.kernels.gemm.sm80.config import Sm80Config
from cutex.kernels.gemm.sm80.general import General
from cutex.problem.gemm import GemmProblem
from cutex.problem.matmul import draw

SMALL = Sm80Config(tile_m=64, tile_n=64)
LADDER = stages("sm_80")
bf16 = torch.bfloat16


def integers(rows: int, columns: int, major: str, batch: int = 0, seed: int = 0) -> torch.Tensor:
    """A matrix of small integers whose rows or columns begin at multiples of 16 bytes."""
    padded = (rows, -(-columns // 8) * 8) if major == "row" else (columns, -(-rows // 8) * 8)
    shape = ((batch,) if batch else ()) + padded
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, shape, generator=g).to(bf16)
    return x[..., :columns] if major == "row" else x[..., :rows].mT


@pytest.mark.sweep(12)
@pytest.mark.parametrize("mnk", [(136, 136, 72), (1, 8, 8), (200, 72, 200)], ids=str)
@pytest.mark.parametrize("stage", LADDER, ids=lambda s: str(s.number))
def test_a_stage_is_exact_on_integers(stage, mnk):
    result = run(GemmProblem(*mnk, init="int"), stage, "sim")
    assert result.ok, result.message


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [x for x in PORTABLE if x != "sm_80"])
def test_the_others_run_the_same_kernels_within_their_shared_memory(name):
    result = run(GemmProblem(72, 80, 72, "fp16"), stage(name, 3), "sim")
    assert result.ok, result.message
    for config in cost_model.configs(name):
        assert config.why_not(None, arch(name)) is None
        assert config.smem_bytes <= arch(name).smem_per_cta
    deep = replace(SMALL, tile_m=128, tile_n=128, num_stages=7)
    assert "114688 bytes of tiles are more than the 101376" in deep.why_not(None, arch(name))
    assert deep.why_not(None, arch("sm_80")) is None


@pytest.mark.slow
@pytest.mark.parametrize("order, seed", [("random", 1), ("starved", 0)])
def test_copies_under_way_race_with_nothing_in_any_order(order, seed):
    options = Options(order=order)
    result = run(GemmProblem(72, 72, 232, init="int", seed=seed), LADDER[3], "sim", options)
    assert result.ok, result.message


def test_a_wait_that_lets_one_group_more_go_on_is_found(monkeypatch):
    wait = cute.arch.cp_async_wait_group
    monkeypatch.setattr(cute.arch, "cp_async_wait_group", lambda n: wait(n + 1))
    compiled = compile(LADDER[2].kernel(SMALL), "bf16", "sm_80", cache=False)
    problem = GemmProblem(64, 64, 128, init="int")
    tensors = *problem.inputs(), *problem.outputs()
    report = cutex.simulate(compiled, *tensors, raise_findings=False)
    assert any("cp.async" in str(finding) for finding in report.findings)


def test_the_swizzle_takes_all_bank_conflicts_away():
    found = []
    for rung in LADDER[:2]:
        problem = GemmProblem(64, 64, 64, init="int")
        compiled = compile(rung.kernel(replace(SMALL, num_stages=1)), "bf16", "sm_80")
        tensors = *problem.inputs(), *problem.outputs()
        report = cutex.simulate(compiled, *tensors, resources=True)
        found += [kernel.counts for kernel in report.kernels.values()]
    plain, swizzled = found
    assert plain["wavefronts"] == 3 * plain["least_wavefronts"]
    assert swizzled["wavefronts"] == swizzled["least_wavefronts"] == plain["least_wavefronts"]


MAJORS = list(product(("row", "column"), repeat=3))


@pytest.mark.sweep(48)
@pytest.mark.parametrize("majors", MAJORS, ids="-".join)
@pytest.mark.parametrize("batch", [0, 2])
def test_any_majors_of_odd_sizes_are_exact(majors, batch):
    m, n, k = 72, 120, 99
    a, b = integers(m, k, majors[0], batch), integers(k, n, majors[1], batch, seed=1)
    out = torch.full((max(batch, 1), m, n), torch.nan, dtype=bf16)
    out = out if batch else out[0]
    out = out if majors[2] == "row" else torch.full_like(out.mT, torch.nan).contiguous().mT
    layouts = [OperandLayout(major=major, batched=bool(batch)) for major in majors]
    compiled = compile(General(GeneralConfig(SMALL, *layouts)), "bf16", "sm_80")
    cutex.simulate(compiled, a, b, out)
    assert torch.equal(out, (a.float() @ b.float()).to(bf16))


SEEDS = [s for s in range(60) if draw(s).dtype in (bf16, torch.float16)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_problems_are_within_twice_torchs_error(seed):
    problem = draw(seed)
    with ops.simulated(list(PORTABLE)[seed % len(PORTABLE)]):
        wrong = problem.run("cpu", cutex.matmul)
    assert wrong is None, f"{wrong}: {problem}"


@pytest.mark.slow
def test_a_residual_that_is_out_itself_and_beta_race_with_no_store():
    with ops.simulated("sm_80"):
        a, b = integers(20, 24, "row"), integers(24, 40, "row", seed=1)
        out = integers(20, 40, "row", seed=2).float()
        want = out + a.float() @ b.float()
        cutex.matmul(a, b, residual=out, out=out)
        assert torch.equal(out, want)
        cutex.matmul(a, b, out=out, beta=2.0)
        assert torch.equal(out, 2 * want + a.float() @ b.float())


def test_gates_and_the_largest_magnitude():
    with ops.simulated("sm_120a"):
        a, b = integers(20, 24, "row"), integers(24, 40, "row", seed=1)
        amax = torch.zeros(1)
        out = cutex.matmul(a, b, activation="gated_silu", out_dtype=torch.float32, amax=amax)
        product = a.float() @ b.float()
        want = F.silu(product[:, ::2]) * product[:, 1::2]
        assert torch.allclose(out, want, atol=1e-4, rtol=1e-5)
        assert amax.item() == out.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_in_one_sentence(dtype):
    x = torch.zeros(16, 16).to(dtype)
    with ops.simulated("sm_89"), pytest.raises(ValueError, match="on sm_89 cutex"):
        cutex.matmul(x, x)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"tile_m": 96}, "tile_m=96: a multiple of 64"),
        ({"tile_m": 256, "tile_n": 256}, "registers of a thread are more than 255"),
        ({"k_bytes": 96}, "k_bytes=96: rows of smem have 64 or 128"),
        ({"split_k": 2}, "split_k: mma.sync's kernels have none"),
        ({"num_stages": 0}, "num_stages=0: a ring has at least 1"),
    ],
)
def test_tiles_that_do_not_fit_say_why(fields, said):
    assert said in replace(SMALL, **fields).why_not(None, arch("sm_80"))

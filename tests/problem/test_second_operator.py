"""Adding an operator takes a Problem, a ladder, and an entry in OPS. Here: G = X @ X^T, and sums of
rows in two launches on any arch (row_sum)."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import pytest
import row_sum
import torch
from cutlass import cute
from row_sum.stage0 import Stage0

from cutex.analysis import roofline
from cutex.arch import KNOWN, kernels_of
from cutex.bench import cli
from cutex.cloud import rental
from cutex.compile import compile
from cutex.compile.resources import all_resources, count_instructions, resources, sass
from cutex.kernels import gemm
from cutex.problem import OPS, Check, Operator, PeerKernel, Problem, problem_class
from cutex.problem import stage as stage_of_any
from cutex.problem.stage import Ladders, Stage
from cutex.report import ladders, pictures
from cutex.report.page import page
from cutex.results import Timing, history, read, read_all

KERNELS = "cutex.kernels.gemm.gram"  # an operator may live below another


@dataclass(frozen=True)
class GramProblem(Problem):
    op = "gram"
    title = "Gram matrix"
    about = "the Gram ladder, G = X @ X^T"
    dtypes = ("bf16", "fp16")
    inits = ("int", "normal")
    size_options = ("--rows", "--columns")
    cases: ClassVar = {
        "cuda": ({"rows": 4096, "columns": 1024},),
        "sim": ({"rows": 128, "columns": 64},),
        "sweep": ({"rows": 1024, "columns": 1024},),
        "confirm": ({"rows": 4096, "columns": 1024},),
    }
    peers: ClassVar = {
        "mm": PeerKernel("torch.mm", lambda _: (lambda x, g: torch.mm(x, x.T, out=g), "1"))
    }
    wave_tile = (128, 128)

    rows: int
    columns: int
    dtype: str = "bf16"
    init: str = "normal"
    seed: int = 0

    def __post_init__(self):
        if self.rows < 1 or self.columns % 8:
            raise ValueError(f"rows={self.rows}, columns={self.columns}: no such matrix")

    @property
    def flops(self):
        return 2 * self.rows**2 * self.columns

    @property
    def bytes(self):
        return 2 * self.rows * (self.columns + self.rows)

    def grid(self, tile):
        return -(-self.rows // tile[0]) * -(-self.rows // tile[1])

    def steps(self, tile, step_flops):
        return -(-2 * tile[0] * tile[1] * self.columns // step_flops)

    def inputs(self, device="cpu", copy=0):
        g = torch.Generator(device).manual_seed(self.seed + copy)
        x = torch.empty(self.rows, self.columns, dtype=torch.bfloat16, device=device)
        return (x.random_(-2, 3, generator=g) if self.init == "int" else x.normal_(generator=g),)

    def outputs(self, device="cpu"):
        shape = self.rows, self.rows
        return (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device),)

    def check(self, *tensors, tile=None):
        x, g = tensors
        error = float((g.float() - (x.float() @ x.float().T).bfloat16().float()).abs().max())
        return Check(error <= 1.0, error, 1.0, f"off by {error:g}, tile {tile}")

    def reduced(self):
        return replace(self, rows=min(self.rows, 128), columns=min(self.columns, 64))

    def launcher(self, kernel, arguments):
        return lambda x, g: kernel(x, x, g)

    def tile(self, config):
        return config.tile_m, config.tile_n

    @classmethod
    def size_name(cls, sizes):
        return f"{sizes['rows']}r{sizes['columns']}c"

    @property
    def series(self):
        return {f"rows of {self.columns}": self.rows}

    @classmethod
    def add_options(cls, group):
        group.add_argument("--rows", type=int)
        group.add_argument("--columns", type=int)

    @classmethod
    def sizes_given(cls, args):
        given = {name: getattr(args, name) for name in ("rows", "columns")}
        return [{k: v or 64 for k, v in given.items()}] if any(given.values()) else []


class GramStage(Stage):
    op = "gram"

    def kernel(self, config=None):
        return gemm.stage(self.arch, self.number).kernel(config or self.default)


def fitting(config):
    """Return `config`, which fits any problem of this operator."""
    base = type(config)
    why_not = {"why_not": lambda self, problem, arch: base.why_not(self, None, arch)}
    return type("GramConfig", (base,), why_not)(**vars(config))


@pytest.fixture
def gram(monkeypatch) -> type[Problem]:
    """The operator, added to OPS."""
    rungs = [
        GramStage(s.number, s.arch, s.title, f"X twice: {s.idea}", fitting(s.default))
        for s in gemm.stages("sm_90a")[:2]
    ]
    module = ModuleType(KERNELS)
    module.LADDERS = Ladders("Gram", tuple(rungs))
    monkeypatch.setitem(sys.modules, KERNELS, module)
    problems = ModuleType("gram_problem")
    problems.GramProblem = GramProblem
    monkeypatch.setitem(sys.modules, "gram_problem", problems)
    monkeypatch.setitem(OPS, "gram", Operator("gram_problem:GramProblem", KERNELS))
    return problem_class("gram")


SIM = ["--arch", "sm_90a", "--device", "sim"]


def test_it_runs_in_the_simulator_and_has_its_own_ledger(gram, capsys, tmp_path):
    argv = [*SIM, "--stage", "1", "--rows", "136", "--columns", "72", "--out", str(tmp_path)]
    assert cli.main(gram, argv) == 0
    assert "136r72c bf16 normal" in capsys.readouterr().out
    (found,) = read(tmp_path / "gram-sim.jsonl")
    assert (found.op, found.stage, found.sizes) == ("gram", 1, (136, 72))
    assert found.case == GramProblem(136, 72)


def test_its_command_lists_emits_and_refuses_as_every_command(gram, capsys, tmp_path):
    assert cli.main(gram, ["--stage", "list"]) == 0
    out = capsys.readouterr().out
    assert "X twice" in out and "sm_100a" not in out
    assert cli.main(gram, ["--arch", "sm_90a", "--stage", "0", "--emit", "resources"]) == 0
    assert "registers" in capsys.readouterr().out
    for argv, says in (
        ([*SIM, "--columns", "7"], "columns=7: no such matrix"),
        ([*SIM, "--mnk", "8,8,8"], "--mnk"),
        (["--arch", "sm_100a", "--device", "sim"], "no Gram ladder, there are ladders for sm_90a"),
        ([*SIM, "--stage", "5"], "stage 5 is not in the ladder of sm_90a, which has 0 to 1"),
        ([*SIM, "--compare", "mm"], "--compare is for device cuda"),
    ):
        assert cli.main(gram, argv) == 2
        assert says in capsys.readouterr().err


def test_a_ladder_may_have_one_rung(gram, monkeypatch, capsys, tmp_path):
    module = sys.modules[KERNELS]
    (rung,) = alone = module.LADDERS.rungs[:1]
    monkeypatch.setattr(module, "LADDERS", Ladders("Gram", alone))
    assert rung.module == "cutex.kernels.gemm.gram.sm90.stage0"
    assert cli.main(gram, [*SIM, "--stage", "all", "--out", str(tmp_path)]) == 0
    (row,) = read(tmp_path / "gram-sim.jsonl")
    assert row.stage == 0
    capsys.readouterr()
    assert cli.main(gram, [*SIM, "--stage", "1"]) == 2
    assert "stage 1 is not in the ladder of sm_90a, which has 0\n" in capsys.readouterr().err
    timings = Timing(10.0, 9.0, 11.0, 50, 6, "cold", 3.0)
    facts = {"device": "cuda", "device_name": "NVIDIA H200", "timing": timings, "tflops": 0.2}
    rows = [replace(row, **facts)]
    assert "### Gram matrix on Hopper (sm_90a)" in ladders(rows)
    assert "ladder-gram-sm_90a.svg" in pictures(rows) and "Gram matrix" in page(rows)


def timed(folder, capsys, gram) -> list:
    argv = [*SIM, "--stage", "1", "--out", str(folder)]
    assert cli.main(gram, argv) == 0
    capsys.readouterr()
    (row,) = read(folder / "gram-sim.jsonl")
    took = Timing(10.0, 9.0, 11.0, 50, 6, "cold", 3.0)
    facts = {"device": "cuda", "device_name": "NVIDIA H200", "timing": took, "tflops": 0.2}
    return [replace(row, **facts)]


def test_its_results_are_reported_beside_the_others(gram, capsys, tmp_path, root):
    rows = [*read_all(root / "results"), *timed(tmp_path, capsys, gram)]
    text = ladders(rows)
    assert "### GEMM on Hopper (sm_90a)" in text and "### Gram matrix on Hopper (sm_90a)" in text
    assert "| 128r64c |" in text and "X twice" in text
    assert {"ladder-sm_90a.svg", "ladder-gram-sm_90a.svg"} <= set(pictures(rows))
    assert "128r64c" in page(rows) and "Gram matrix on Hopper" in page(rows)
    assert [r.op for r in history.best(rows)].count("gram") == 1


def test_its_rows_are_chosen_by_its_own_options(gram, capsys, tmp_path):
    assert cli.main(gram, [*SIM, "--stage", "1", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    for rows, lines in (("128", 2), ("256", 1)):
        argv = ["list", "--results", str(tmp_path), "--rows", rows, "--columns", "64"]
        assert history.main(argv) == 0
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_what_binds_it_is_known(gram, capsys):
    assert roofline.main(["--op", "gram", "--gpu", "h200", "--rows", "4096"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gram 4096r64c bf16 on H200")
    assert "1024 tiles of 128x128 on 132 SMs" in out


def test_a_gpu_is_rented_for_it(gram, capsys):
    argv = ["--op", "gram", "--gpu", "H200", "--compare", "mm", "--dry-run"]
    assert rental.main(argv, rent=None) == 0
    assert "stage 0,1 on 4096r1024c bf16 beside mm" in capsys.readouterr().out
    sweep = rental.plan(rental.parser().parse_args(["--op", "sweep", "--gpu", "H200"]))
    assert {r.op for r in sweep.requests} == {
        op for op in OPS if "sm_90a" in stage_of_any.ladders(op).archs
    }


# an operator of two launches, on any arch, without MMAs


@pytest.fixture
def rowsum(monkeypatch) -> type[Problem]:
    monkeypatch.setitem(OPS, "rowsum", Operator("row_sum:RowSumProblem", "row_sum"))
    return problem_class("rowsum")


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", KNOWN)
def test_two_launches_run_and_are_checked_on_any_arch(rowsum, name, capsys, tmp_path):
    for dtype in rowsum.dtypes:
        argv = ["--arch", name, "--device", "sim", "--stage", "0", "--out", str(tmp_path)]
        assert cli.main(rowsum, [*argv, "--dtype", dtype, "--rows", "131,1003"]) == 0
    rows = read(tmp_path / "rowsum-sim.jsonl")
    assert [(r.ok, r.arch, r.sizes) for r in rows] == [(True, name, (131, 1003))] * 3
    assert all(r.max_error > 0 for r in rows)


class LosesAPart(Stage0):
    @cute.kernel
    def combine(self, mParts: cute.Tensor, mSums: cute.Tensor):
        row = cute.arch.block_idx()[0] * self.config.threads + cute.arch.thread_idx()[0]
        if row < mSums.shape[0]:
            mSums[row] = mParts[row, 0] + mParts[row, 1]


def test_what_is_wrong_in_the_second_launch_is_found(rowsum, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(row_sum.RowSumStage, "kernel", lambda self: LosesAPart(self.default))
    argv = ["--arch", "sm_90a", "--device", "sim", "--stage", "0", "--out", str(tmp_path)]
    assert cli.main(rowsum, argv) == 1
    assert "off by" in capsys.readouterr().err


@pytest.mark.slow
def test_each_kernel_of_a_call_has_resources_of_its_own(rowsum, capsys):
    compiled = compile(Stage0(row_sum.Config(64)), "bf16", "sm_90a")
    first, second = all_resources(compiled)
    names = [f"sm90_rowsum_bf16_stage0_{role}" for role in ("partial_0", "combine_1")]
    assert [first.kernel, second.kernel] == names == list(compiled.dynamic_smem)
    assert (first.num_threads, first.smem_bytes, second.smem_bytes) == (64, 8, 0)
    assert first.registers > second.registers > 0
    assert first.instructions["barrier"] == 1 and second.instructions["barrier"] == 0
    total = first.instructions["total"] + second.instructions["total"]
    assert total == count_instructions(sass(compiled))["total"]
    with pytest.raises(ValueError, match=r"one kernel was due, .*combine_1.*partial_0"):
        resources(compiled)
    assert cli.main(rowsum, ["--arch", "sm_120a", "--stage", "0", "--emit", "resources"]) == 0
    out = capsys.readouterr().out
    assert "sm120_rowsum_fp32_stage0_partial_0" in out and "combine_1" in out


def test_a_device_function_that_a_kernel_does_not_name_is_refused():
    class Silent(Stage0):
        kernels: ClassVar = {"partial": Stage0.partial}

    Stage0.combine.set_name_prefix("")
    with pytest.raises(ValueError, match=r"launches .*combine.* not among its kernels: partial"):
        compile(Silent(row_sum.Config()), "fp32", "sm_90a", cache=False)


def test_a_kernel_for_several_archs_names_them_where_it_is_refused():
    class Two(Stage0):
        archs = ("sm_80", "sm_100a")

    with pytest.raises(ValueError, match="rowsum_stage0 is a kernel for sm_80, sm_100a, not for"):
        compile(Two(row_sum.Config()), "fp32", "sm_90a")
    assert kernels_of("sm_103a") == "sm_100a"
    assert compile(Two(row_sum.Config()), "fp32", "sm_103a").arch == "sm_103a"


def test_the_time_of_each_launch_is_predicted(rowsum, capsys, tmp_path):
    for name in ("sm_90a", "sm_100a"):
        argv = ["--arch", name, "--device", "sim", "--stage", "0", "--rows", "512,4096", "--time"]
        assert cli.main(rowsum, argv) == 0
        out = capsys.readouterr().out
        times = [float(x) for x in re.findall(r"^ +([\d.]+) us \(", out, re.M)]
        total = float(re.search(r"2 launches: ([\d.]+) us in all", out)[1])
        assert len(times) == 2 and total == pytest.approx(sum(times), abs=0.2)
        assert "partial_0" in out and "combine_1" in out
    assert cli.main(rowsum, ["--arch", "sm_80", *argv[2:]]) == 2
    assert "arch 'sm_80': there are constants for h200, " in capsys.readouterr().err


def test_two_launches_are_reported_and_rented_like_the_others(rowsum, capsys, tmp_path, root):
    argv = ["--arch", "sm_90a", "--device", "sim", "--stage", "0", "--out", str(tmp_path)]
    assert cli.main(rowsum, argv) == 0
    (row,) = read(tmp_path / "rowsum-sim.jsonl")
    took = Timing(10.0, 9.0, 11.0, 50, 6, "cold", 3.0)
    facts = {"device": "cuda", "device_name": "NVIDIA H200", "timing": took, "tflops": 0.2}
    rows = [*read_all(root / "results"), replace(row, **facts)]
    assert "### row sum on Hopper (sm_90a)" in ladders(rows)
    assert "ladder-rowsum-sm_90a.svg" in pictures(rows) and "row sum on Hopper" in page(rows)
    argv = ["--op", "rowsum", "--gpu", "B200", "--compare", "sum", "--preflight-only"]
    assert rental.main(argv, rent=None) == 0  # compiled and simulated first, as before any rental
    assert "stage 0 on 8192x4096 fp32 beside sum" in capsys.readouterr().out


def test_its_limits_are_memory_and_the_fma_pipes(rowsum, capsys):
    assert roofline.main(["--op", "rowsum", "--gpu", "h200", "--rows", "8192,4096"]) == 0
    out = capsys.readouterr().out
    assert "FMA pipes" in out and "tensor cores" not in out
    assert "bound by memory: at best 14.0 us" in out
    assert cli.main(rowsum, ["--arch", "sm_100a", "--stage", "0", "--emit", "bounds"]) == 2
    assert "MMAs of one kind, this code has none" in capsys.readouterr().err

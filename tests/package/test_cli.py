from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

import cutex.bench.run
import cutex.sim
from cutex import attention
from cutex.bench.run import Options
from cutex.gemm import main
from cutex.kernels.attention.forward import stages as of_attention
from cutex.kernels.gemm import stages
from cutex.problem import PeerKernel
from cutex.problem.gemm import GemmProblem
from cutex.results import read

BARE_SECONDS = 0.05  # of `python -c pass` where the half second was set; machines differ


@pytest.mark.parametrize(
    "argv",
    [
        ["-c", "import cutex"],
        ["-m", "cutex.gemm", "--help"],
        ["-m", "cutex.gemm", "--stage", "list"],
    ],
)
def test_it_starts_fast_and_without_torch(python, argv):
    def timed(*args):
        start = time.perf_counter()
        ran = python(*args)
        return time.perf_counter() - start, ran

    for _ in range(9):  # until nothing else was in its way
        bare, _ = timed("-c", "pass")
        seconds, ran = timed("-X", "importtime", *argv)
        took = seconds / max(1.0, bare / BARE_SECONDS)
        assert ran.returncode == 0, ran.stderr
        if took < 0.5:
            break
    assert took < 0.5
    loaded = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "cutex" in loaded
    assert not loaded & {"torch", "cutlass", "numpy", "rich"}


def test_the_list_names_every_stage_of_every_arch(capsys):
    assert main(["--stage", "list"]) == 0
    out = capsys.readouterr().out
    for name in ("sm_90a", "sm_100a"):
        assert name in out
        for stage in stages(name):
            assert stage.idea in out


def test_an_arch_that_runs_anothers_kernels_has_its_ladder_where_the_operator_says_so(capsys):
    assert attention.main(["--arch", "sm_103a", "--stage", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "sm_103a  Blackwell Ultra (B300)"
    ladder = of_attention("sm_103a")
    assert [replace(s, arch="sm_100a") for s in ladder] == of_attention("sm_100a")
    assert {s.module for s in ladder} == {s.module for s in of_attention("sm_100a")}
    assert main(["--arch", "sm_103a", "--stage", "list"]) == 2
    assert "no GEMM ladder, there are ladders for sm_80, sm_86" in capsys.readouterr().err


def test_the_list_can_be_of_one_arch(capsys):
    assert main(["--stage", "list", "--arch", "sm_90a"]) == 0
    assert "sm_100a" not in capsys.readouterr().out


@dataclass
class Kernel:
    """The stand-in for a compiled stage: torch computes, and `fault` changes the result."""

    name: str
    us: float
    launch_on: object = None
    fault: object = None
    compile_seconds: float = 1.0
    from_cache: bool = False
    argument_names: tuple[str, ...] = ("a", "b", "c")

    def __call__(self, a, b, c) -> None:
        def work() -> None:
            c.copy_(a.float() @ b.T.float())  # NOTE: torch.mm of bf16 is slow on CPUs
            if self.fault is not None:
                self.fault(c)

        if self.launch_on is None:
            work()
        else:
            self.launch_on.launch(self.name, self.us, work)


@pytest.fixture
def kernels(monkeypatch):
    """Stages compile to torch's product; the dict has the faults by stage number."""
    faults: dict[int, object] = {}
    gpu = SimpleNamespace(device=None)

    def compile_stage(stage, dtype):
        return Kernel(f"stage{stage.number}", 100.0, gpu.device, faults.get(stage.number))

    def simulate(compiled, a, b, c, order, seed, jobs):
        compiled(a, b, c)
        return SimpleNamespace(
            seconds=0.5, instructions=1000, findings=[], unwrapped=[], unwatched=[]
        )

    monkeypatch.setattr(cutex.bench.run, "compile_stage", compile_stage)
    monkeypatch.setattr(cutex.sim, "simulate", simulate)
    return SimpleNamespace(faults=faults, gpu=gpu)


def spoil(c) -> None:
    c[0, 1] += 8


@pytest.mark.parametrize(
    ("what", "holds"),
    [
        ("ptx", [".target sm_90a", "wgmma.mma_async"]),
        ("sass", ["HGMMA"]),
        ("resources", ["registers", "spills", "smem", "tmem", "tma load"]),
    ],
)
def test_what_was_compiled_can_be_printed(what, holds, capsys):
    assert main(["--arch", "sm_90a", "--stage", "3", "--emit", what]) == 0
    out = capsys.readouterr().out
    assert out.startswith("// stage 3 of sm_90a, bf16: sm90_gemm_bf16")
    assert all(word in out for word in holds)


SIM = ["--device", "sim", "--mnk", "64,32,16"]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_a_simulated_run_prints_one_aligned_line_per_result(kernels, capsys, tmp_path):
    sizes = ["--mnk", "64,32,16", "--mnk", "128,256,512"]
    argv = ["--device", "sim", "--stage", "0", *sizes, "--out", str(tmp_path)]
    assert main(argv) == 0
    head, first, second, note = lines(capsys.readouterr().out)
    for title in (
        "stage",
        "arch",
        "device",
        "problem",
        "ok",
        "max error",
        "tolerance",
        "orders",
        "time s",
        "TFLOPS",
    ):
        assert title in head
    assert "64x32x16 bf16 normal" in first
    assert "128x256x512 bf16 normal" in second
    assert first.index("none: simulated") == second.index("none: simulated") == head.index("TFLOPS")
    assert "no TFLOPS" in note


def test_a_run_is_appended_to_the_ledger(kernels, tmp_path):
    for _ in range(2):
        assert main([*SIM, "--stage", "0", "--out", str(tmp_path), "--seed", "7"]) == 0
    found = read(tmp_path / "gemm-sim.jsonl")
    assert len(found) == 2
    assert found[0].problem["seed"] == 7
    assert found[0].tflops is None
    assert found[0].environment["torch"] == torch.__version__


def test_json_lines_can_be_printed(kernels, capsys, tmp_path):
    assert main([*SIM, "--stage", "0", "--out", str(tmp_path), "--json"]) == 0
    (line,) = lines(capsys.readouterr().out)
    assert json.loads(line)["arch"] == "sm_100a"


def test_random_orders_are_run_and_recorded(kernels, tmp_path):
    assert main([*SIM, "--stage", "0", "--out", str(tmp_path), "--seeds", "3", "--seed", "5"]) == 0
    (found,) = read(tmp_path / "gemm-sim.jsonl")
    assert found.sim_orders == ["random:5", "random:6", "random:7"]


def test_what_no_races_were_looked_for_in_is_said(kernels, capsys, tmp_path, monkeypatch):
    def simulate(compiled, a, b, c, order, seed, jobs):
        compiled(a, b, c)
        return SimpleNamespace(
            seconds=0.5, instructions=9, findings=[], unwrapped=[], unwatched=["in part only"]
        )

    monkeypatch.setattr(cutex.sim, "simulate", simulate)
    assert main([*SIM, "--stage", "0", "--out", str(tmp_path)]) == 0
    (found,) = read(tmp_path / "gemm-sim.jsonl")
    assert "in part only" in found.message and "in part only" in "".join(capsys.readouterr())


def test_a_wrong_result_is_exit_code_1_and_named(kernels, capsys, tmp_path):
    kernels.faults[0] = spoil
    assert main([*SIM, "--stage", "0", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "WRONG" in captured.out
    assert "C[0, 1] (tile 0, 0)" in captured.err


def test_a_finding_is_exit_code_1_even_with_the_right_numbers(
    kernels, capsys, tmp_path, monkeypatch
):
    def simulate(compiled, a, b, c, order, seed, jobs):
        compiled(a, b, c)
        return SimpleNamespace(
            seconds=0.5,
            instructions=1000,
            findings=["race: two writers"],
            unwrapped=[],
            unwatched=[],
        )

    monkeypatch.setattr(cutex.sim, "simulate", simulate)
    assert main([*SIM, "--stage", "0", "--out", str(tmp_path)]) == 1
    assert "race: two writers" in capsys.readouterr().err


def test_an_error_of_the_simulator_is_exit_code_1_with_its_report(
    kernels, capsys, tmp_path, monkeypatch
):
    def simulate(*_, **__):
        raise cutex.sim.Deadlock("warp 3 waits for full[0]")

    monkeypatch.setattr(cutex.sim, "simulate", simulate)
    assert main([*SIM, "--stage", "0", "--out", str(tmp_path)]) == 1
    assert "warp 3 waits for full[0]" in capsys.readouterr().err


# ---- on a GPU, which the fake one stands in for


@pytest.fixture
def gpu_run(kernels, fake_gpu, monkeypatch):
    """Run stage 0 through the CUDA path on CPU tensors."""
    inputs, outputs = GemmProblem.inputs, GemmProblem.outputs
    monkeypatch.setattr(GemmProblem, "inputs", lambda p, device="", copy=0: inputs(p, "cpu", copy))
    monkeypatch.setattr(GemmProblem, "outputs", lambda p, device="": outputs(p))

    def cublas(problem):
        return Kernel("cublas", 80.0, fake_gpu), "torch 0"

    def absent(problem):
        raise ModuleNotFoundError("No module named 'quack'")

    peers = {"cublas": PeerKernel("cuBLAS", cublas), "quack": PeerKernel("quack", absent)}
    monkeypatch.setattr(GemmProblem, "peers", peers)
    kernels.gpu.device = fake_gpu
    kernels.timed = fake_gpu
    return kernels


BIG = ["--arch", "sm_90a", "--device", "cuda", "--mnk", "2048,1024,8", "--stage", "0"]


def test_a_timed_run_compares_with_the_peers_that_are_there(gpu_run, capsys, tmp_path):
    assert main([*BIG, "--compare", "cublas,quack", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "peer quack is skipped" in captured.err
    head, ours, peer = lines(captured.out)
    assert head.split()[-4:] == ["x", "cublas", "x", "quack"]
    assert ours.split()[-2:] == ["0.800", "-"]
    assert peer.startswith("cublas")
    (found,) = read(tmp_path / "gemm-nvidia-h200.jsonl")
    assert found.timing.median_us == pytest.approx(100.0)
    assert found.timing.cache_state == "cold"
    assert found.tflops == pytest.approx(2 * 2048 * 1024 * 8 / 100e-6 / 1e12)
    assert found.percent_of_peak == pytest.approx(100 * found.tflops / 989)
    assert found.ratio("cublas") == pytest.approx(0.8)
    assert found.gpu_before == {"clock_mhz": 1980.0}


def test_a_wrong_kernel_is_not_timed(gpu_run, capsys, tmp_path):
    gpu_run.faults[0] = spoil
    assert main([*BIG, "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "on small integers: C[0, 1]" in captured.err
    assert "sleep" not in gpu_run.timed.log
    (found,) = read(tmp_path / "gemm-nvidia-h200.jsonl")
    assert found.timing is None


def test_a_kernel_that_goes_wrong_while_timed_gets_no_figure(gpu_run, capsys, tmp_path):
    calls = []

    def later(c) -> None:
        calls.append(c)
        if len(calls) > 2:  # the two checks before timing
            spoil(c)

    gpu_run.faults[0] = later
    assert main([*BIG, "--out", str(tmp_path)]) == 1
    assert "after timing: C[0, 1]" in capsys.readouterr().err
    (found,) = read(tmp_path / "gemm-nvidia-h200.jsonl")
    assert found.timing is None


def test_the_stages_of_one_problem_take_turns_and_a_wrong_one_stays_out(gpu_run, capsys, tmp_path):
    gpu_run.faults[1] = spoil
    argv = ["--arch", "sm_90a", "--mnk", "64,64,8", "--mnk", "128,64,8", "--cache-state", "hot"]
    assert main([*argv, "--out", str(tmp_path)]) == 1
    found = read(tmp_path / "gemm-nvidia-h200.jsonl")
    ladder = stages("sm_90a")
    assert [r.stage for r in found] == 2 * [s.number for s in ladder]
    assert [r.ok for r in found] == 2 * [s.number != 1 for s in ladder]
    timed = {r.stage for r in found if r.timing is not None}
    assert timed == {s.number for s in ladder} - {1}
    assert {r.timing.cache_state for r in found if r.timing is not None} == {"hot"}
    assert len({r.run for r in found}) == 1


def test_a_run_can_only_check(gpu_run, capsys, tmp_path):
    argv = ["--arch", "sm_90a", "--stage", "0", "--mnk", "8,8,8", "--check-only"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    assert "sleep" not in gpu_run.timed.log
    (found,) = read(tmp_path / "gemm-nvidia-h200.jsonl")
    assert (found.ok, found.timing) == (True, None)


def test_stages_of_two_archs_do_not_run_together():
    mixed = [stages("sm_90a")[0], stages("sm_100a")[0]]
    with pytest.raises(ValueError, match="cannot run together"):
        cutex.bench.run.admit(GemmProblem(64, 64, 64), mixed, "sim", Options())


def test_a_config_that_does_not_fit_is_refused():
    stage = stages("sm_90a")[0]
    deep = replace(stage, default=replace(stage.config(), num_stages=100))
    with pytest.raises(ValueError, match="stage 0 of sm_90a cannot run this: num_stages=100"):
        cutex.bench.run.admit(GemmProblem(64, 64, 64), [deep], "sim", Options())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_main_command_compiles_simulates_and_checks(arch, capsys, tmp_path):
    argv = ["--arch", arch, "--stage", "3", "--device", "sim", "--mnk", "200,136,72"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    assert f"{arch:8}  simulator" in capsys.readouterr().out
    (found,) = read(tmp_path / "gemm-sim.jsonl")
    assert found.sim_instructions > 100
    assert 0 < found.max_error <= found.tolerance

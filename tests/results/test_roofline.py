from __future__ import annotations

import pytest

from cutex.analysis.roofline import binding, gpu, limits, main, of_device, reached
from cutex.problem.gemm import GemmProblem
from cutex.results import Result, Timing, append


def result(us: float, mnk=(8192, 8192, 4096), init: str = "normal") -> Result:
    m, n, k = mnk
    return Result(
        op="gemm",
        stage=7,
        title="",
        arch="sm_90a",
        device="cuda",
        device_name="NVIDIA H200",
        problem={"m": m, "n": n, "k": k, "dtype": "bf16", "init": init, "seed": 0},
        config={},
        ok=True,
        max_error=0.0,
        tolerance=1.0,
        message="",
        run="2026-01-01",
        environment={"commit": "abc1234"},
        timing=Timing(us, us, us, 50, 6, "cold", 3.0),
        tflops=2 * m * n * k / us / 1e6,
    )


def test_a_large_square_is_bound_by_the_tensor_cores():
    problem = GemmProblem(8192, 8192, 4096)
    bound = binding([x for x in limits(problem, gpu("b200")) if x.stated])
    assert bound.resource == "tensor cores"
    assert bound.us == pytest.approx(2 * 8192 * 8192 * 4096 / 2250e6)


def test_a_thin_problem_is_bound_by_memory():
    problem = GemmProblem(16, 8192, 8192)
    bound = binding([x for x in limits(problem, gpu("B200")) if x.stated])
    assert bound.resource == "memory"
    assert bound.us == pytest.approx(problem.bytes / 8e6)


def test_what_the_ledger_saw_counts_as_reached_if_the_data_were_gaussian():
    on = gpu("h200")
    slow, fast, zeros = result(800.0), result(700.0), result(600.0, init="zeros")
    best = reached(on, [slow, fast, zeros])
    assert best is not None
    assert best.rate == pytest.approx(fast.tflops)
    assert "stage 7" in best.how
    assert reached(gpu("b200"), [fast]) == gpu("b200").reached_tflops


def test_a_gpu_is_known_by_its_drivers_name():
    assert of_device("NVIDIA H200") == gpu("H200")
    assert of_device("NVIDIA H100 80GB HBM3") == gpu("h100!")
    assert of_device("NVIDIA L4") is None


def test_a_problem_too_large_for_any_gpu_is_described_at_once(capsys):
    assert main(["--op", "attention", "--size", f"1,{10**15},1,128"]) == 0
    assert "bound by tensor cores" in capsys.readouterr().out


def test_the_command_says_what_binds_and_what_was_measured(capsys, tmp_path):
    append(tmp_path / "gemm-nvidia-h200.jsonl", result(700.0))
    argv = ["--op", "gemm", "--mnk", "8192,8192,4096", "--gpu", "h200", "--results", str(tmp_path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "bound by tensor cores: at best 555.9 us, 989 TFLOPS" in out
    assert "measured: stage 7, 700.0 us, 79 % of the limit" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpu", "a100"], "--gpu 'a100' is not one of B200, H200, H100"),
        (["--mnk", "1,2"], "--mnk 1,2: three whole numbers"),
        (["--mnk", "16,16,12"], "K=12: must be a multiple of 8"),
        (["--dtype", "fp8"], "dtype 'fp8' is not one of"),
        (["--results", "nowhere"], "--results nowhere: there is no such folder"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(argv, says, capsys):
    assert main(argv) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert says in sentence

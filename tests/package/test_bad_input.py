from __future__ import annotations

import pytest
import torch

from cutex.gemm import main

SIM = ["--device", "sim"]


def refused(capsys, argv: list[str]) -> str:
    """The one sentence that the command prints for `argv`."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    assert sentence.startswith("cutex: ")
    return sentence


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--stage", "99"], "stage 99 is not in the ladder of sm_100a"),
        (["--stage", "-1"], "stage -1 is not in the ladder"),
        (["--stage", "fast"], "--stage 'fast' is neither a number nor all nor list"),
        (["--stage", "2,fast"], "--stage '2,fast' is neither a number nor all nor list; several"),
        (["--stage", "2,,5"], "--stage '2,,5' is neither a number nor all nor list; several are"),
        (["--stage", "2,99"], "stage 99 is not in the ladder of sm_100a"),
        (
            ["--arch", "sm_103a"],
            "arch 'sm_103a' has no GEMM ladder, there are ladders for sm_80, sm_86, sm_89, sm_90a",
        ),
        (["--arch", "sm_70", "--stage", "list"], "arch 'sm_70' is not one of"),
        (["--mnk", "128,128,100"], "K=100: must be a multiple of 8"),
        (["--mnk", "128,100,128"], "N=100: must be a multiple of 8"),
        (["--mnk", "0,128,128"], "M=0: every size must be at least 1"),
        (["--mnk", "128,128,0"], "K=0: every size must be at least 1"),
        (["--mnk", "-128,128,128"], "M=-128: every size must be at least 1"),
        (["--mnk", "128,-128,128"], "N=-128: every size must be at least 1"),
        (["--mnk", "128,128"], "--mnk 128,128: three whole numbers"),
        (["--mnk", "128,128,x"], "--mnk 128,128,x: three whole numbers"),
        (["--mnk", "128,128,1.5"], "three whole numbers"),
        (["--mnk", "99999999999,8,8"], "M=99999999999"),
        (["--dtype", "fp8"], "dtype 'fp8' is not one of bf16, fp16"),
        (["--init", "ones"], "init 'ones' is not one of int, normal, uniform, zeros"),
        (["--data", "normal,ones"], "init 'ones' is not one of int, normal, uniform, zeros"),
        (["--order", "lifo"], "--order"),
        (["--seeds", "0"], "--seeds 0"),
        (["--seeds", "3", "--order", "fifo"], "--seeds 3"),
        (["--seed", "x"], "--seed"),
        (["--compare", "cublas"], "--compare is for device cuda, and this runs on sim"),
        (["--cache-state", "hot"], "--cache-state is for device cuda"),
        (["--check-only"], "--check-only is for device cuda"),
        (["--emit", "llvm"], "--emit"),
        (["--fast"], "--fast"),
        (["--arch", ""], "arch '' is not one of sm_90a, sm_100a"),
        (["--mnk", "99992,99992,99992"], "simulated and checked, this takes some"),
        (["--time", "--order", "random"], "--order does not go with --time"),
        (["--time", "--jobs", "2"], "--jobs does not go with --time"),
        (["--time", "--gpu", "b200,clock=nan"], "--gpu 'clock=nan': takes a number above 0"),
        (["--time", "--gpu", "b200,clock=inf"], "--gpu 'clock=inf': takes a number above 0"),
        (
            ["--time", "--stage", "3", "--trace", "/nowhere/t.json"],
            "/nowhere/t.json: No such",
        ),
        (["--time", "--trace", "/dev/null"], "--trace keeps one run, these are 10 stages"),
        (["--emit", "ptx", "--time"], "--time does not go with --emit ptx"),
        (["--emit", "ptx", "--seeds", "2"], "--seeds does not go with --emit ptx"),
        (
            ["--emit", "ptx", "--mnk", "64,64,64", "--mnk", "128,128,64"],
            "--emit ptx prints what one size takes, these are 2",
        ),
        (["--stage", "list", "--arch", "sm_103a"], "arch 'sm_103a' has no GEMM ladder"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(capsys, argv, says):
    assert says in refused(capsys, [*SIM, *argv])


def test_an_unknown_device_is_refused(capsys):
    assert "'tpu' is not one of auto, cuda, sim" in refused(capsys, ["--device", "tpu"])


def test_device_cuda_without_a_gpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = refused(capsys, ["--device", "cuda"])
    assert "there is no GPU here that cutex knows; use device sim" in sentence


def test_an_arch_that_this_gpu_is_not_is_refused(capsys, fake_gpu):
    sentence = refused(capsys, ["--device", "cuda", "--arch", "sm_100a"])
    assert "device cuda cannot run sm_100a: the GPU here is sm_90a; use device sim" in sentence


@pytest.mark.parametrize("option", [["--order", "random"], ["--seeds", "2"]])
def test_simulator_options_are_refused_on_a_gpu(capsys, fake_gpu, option):
    sentence = refused(capsys, ["--device", "cuda", "--arch", "sm_90a", *option])
    assert f"{option[0]} is for device sim, and this runs on cuda" in sentence


def test_a_problem_too_small_to_be_timed_cold_is_refused(capsys, fake_gpu):
    sentence = refused(capsys, ["--arch", "sm_90a", "--mnk", "8,8,8"])
    assert "cache state cold needs operands of at least 46080 bytes" in sentence


def test_an_unknown_peer_is_refused(capsys, fake_gpu):
    sentence = refused(capsys, ["--arch", "sm_90a", "--compare", "cublas,mkl"])
    assert "--compare 'mkl' is not one of cublas, quack" in sentence


@pytest.mark.slow
def test_no_c_compiler_is_one_sentence(python, tmp_path):
    ran = python(
        *("-m", "cutex.gemm", "--stage", "0", "--device", "sim", "--mnk", "64,64,64"),
        *("--out", str(tmp_path / "out")),
        PATH=str(tmp_path),
        CC="",
        CUTEX_CACHE=str(tmp_path / "cache"),  # where no shim is ready
    )
    assert ran.returncode == 2, ran.stderr
    sentence = ran.stderr.splitlines()[-1]  # progress comes before it on a slow machine
    assert "compiler" in sentence
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out").exists()


def test_no_traceback_reaches_a_shell(python):
    ran = python("-m", "cutex.gemm", "--mnk", "8,8,7", "--device", "sim")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, "is in the ladder, but cutex/kernels/gemm/sm90/mine.py is not there"),
        (
            "class Other: pass\nclass Third: pass",
            "mine.py has no class Stage3, but Other and Third",
        ),
        ("", "mine.py has no class Stage3, but none at all"),
        ("class Stage3\n", "mine.py:1 is no Python: expected ':'"),
    ],
)
def test_a_stage_file_of_another_name_or_class_is_one_sentence(
    capsys, monkeypatch, tmp_path, code, says
):
    from cutex.kernels import gemm
    from cutex.kernels.gemm import sm90

    monkeypatch.setattr(sm90, "__path__", [*sm90.__path__, str(tmp_path)])
    monkeypatch.setattr(gemm.Stage, "module", "cutex.kernels.gemm.sm90.mine")
    if code is not None:
        (tmp_path / "mine.py").write_text(code)
    sentence = refused(capsys, [*SIM, "--arch", "sm_90a", "--stage", "3"])
    assert sentence.startswith("cutex: stage 3 of sm_90a (warp roles)") and says in sentence
    with pytest.raises(ValueError, match="stage 3 of sm_90a"):
        gemm.stage("sm_90a", 3).kernel()


def test_several_stages_can_be_asked_for():
    from cutex.arch import arch
    from cutex.bench.cli import choose_stages
    from cutex.problem.gemm import GemmProblem

    for text, numbers in (("2,5,9", [2, 5, 9]), ("9,2", [9, 2]), ("3,3,03", [3]), ("4", [4])):
        found = choose_stages(GemmProblem, text, arch("sm_90a"))
        assert [stage.number for stage in found] == numbers

"""The clock's reports, pictures and command line."""

from __future__ import annotations

import json

import pytest
import torch
from cutlass import Float32, cute

from cutex.gemm import main as gemm_main
from cutex.sim import simulate
from cutex.sim.__main__ import main as script_main


@cute.kernel
def add_one(mX: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    mX[block * 128 + thread] = mX[block * 128 + thread] + Float32(1.0)


@cute.jit
def add_one_to_all(mX: cute.Tensor):
    add_one(mX).launch(grid=[4, 1, 1], block=[128, 1, 1])


def test_a_timed_run_still_computes_each_element_once():
    x = torch.zeros(512)
    report = simulate(add_one_to_all, x, arch="sm_90a", time=True)
    assert (x == 1).all()
    (timed,) = report.times
    assert timed.gpu == "H200"
    assert timed.us_band[0] < timed.us < timed.us_band[1]


def test_the_command_line_predicts_and_draws(capsys, tmp_path):
    file = tmp_path / "trace.json"
    options = "--device sim --arch sm_90a --stage 3 --mnk 512,512,256 --time --trace"
    assert gemm_main([*options.split(), str(file), "--gpu", "h200,clock=1.5"]) == 0
    told = capsys.readouterr().out
    assert "1.50 GHz" in told
    assert "load" in told
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"tensor core", "TMA in"} <= tracks
    starts = {e["id"] for e in events if e["ph"] == "s"}
    assert starts
    assert starts == {e["id"] for e in events if e["ph"] == "f"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


@pytest.mark.parametrize(
    "options, says",
    [
        ("--time --gpu h200,clock=-1", "takes a number above 0"),
        ("--time --gpu h300", "there are constants for h200, h100, b200"),
        ("--time --gpu b200", "is no GPU of sm_90a"),
        ("--time --gpu h200,colour=3", "takes clock, l2, hbm, sms or one of"),
        ("--gpu h200", "goes with --time"),
        ("--trace x.json", "goes with --time"),
    ],
)
def test_bad_input_is_one_sentence(capsys, options, says):
    common = "--device sim --arch sm_90a --stage 3 --mnk 512,512,256"
    assert gemm_main([*common.split(), *options.split()]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_bad_input_to_a_script_is_one_sentence(capsys, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    for options, says in (
        (["--gpu", "b200"], "goes with --time"),
        (["--time", "--gpu", "h200"], "the script runs for sm_100a"),
    ):
        assert script_main([*options, str(script)]) == 2
        assert says in capsys.readouterr().err

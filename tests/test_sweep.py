"""The corpus of models' layers, the sweep over it, and its summary and pictures."""

from __future__ import annotations

from ast import literal_eval
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cutex.bench import sweep
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.ops import building, simulated
from cutex.ops.arrange import arrange
from cutex.ops.checks import Call, check
from cutex.ops.plan import config_for
from cutex.ops.warming import build_ahead, tiles_of
from cutex.problem.layer import PASSES, LayerProblem
from cutex.problem.models import DTYPES, MODELS, corpus
from cutex.report import sweeps
from cutex.results import sweep as rows
from cutex.results.sweep import Summary, SweepRow

ROW = SweepRow(
    name="a", source="s", layer="l", mnk=(16, 4096, 1024), direction="forward", dtype="bf16",
    fits=False, ok=True, message="", us=10.0, peers={"cublas": 11.0, "quack": 12.0}, tuned=False,
    device_name="NVIDIA H200", run="2026-11-22T20:00:00+00:00",
)  # fmt: skip


def test_the_corpus_is_what_it_says():
    entries = corpus()
    assert len(entries) >= 300 and len({e.name for e in entries}) == len(entries)
    assert len({e.source for e in entries}) == len(MODELS) >= 12
    assert {e.problem.direction for e in entries} == set(PASSES)
    rows_of = {e.problem.mnk[0] for e in entries}
    assert min(rows_of) == 1 and 16384 in rows_of
    share = sum(e.fits for e in entries) / len(entries)
    assert 0.4 < share < 0.6
    hidden = {e.problem.in_features for e in entries}
    assert any(k & (k - 1) for k in hidden) and min(hidden) <= 512 and max(hidden) >= 28672


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_is_one_that_a_model_has(dtype: str):
    weights = {(x.out_features, x.in_features) for model in MODELS for x in model.layers}
    for e in corpus(dtype):
        assert (e.problem.out_features, e.problem.in_features) in weights


@pytest.mark.parametrize("direction", PASSES)
def test_the_passes_are_those_of_autograd(direction: str):
    """Shapes and contiguous modes of the products in torch's backward of a layer."""
    problem = LayerProblem(24, 40, 16, direction)
    a, b = problem.inputs()
    (out,) = problem.outputs()
    assert (*a.shape, b.shape[1]) == (problem.mnk[0], problem.mnk[2], problem.mnk[1])
    assert out.shape == (a @ b).shape
    assert (a.stride(-1) == 1, b.stride(-2) == 1) == problem.k_contiguous
    expected = {"forward": (24, 40, 16), "dgrad": (24, 16, 40), "wgrad": (40, 16, 24)}
    assert problem.mnk == expected[direction]


def test_a_check_finds_one_wrong_element():
    problem = LayerProblem(16, 64, 512)
    a, b = problem.inputs()
    out = (a.float() @ b.float()).bfloat16()
    assert problem.check(a, b, out).ok
    out[3, 5] += 2
    assert "out[3, 5]" in problem.check(a, b, out).message
    assert not problem.check(a, b, *problem.outputs()).ok


def test_a_row_is_read_as_it_was_written_and_the_newest_counts(tmp_path: Path):
    file = tmp_path / "sweep" / "x.jsonl"
    rows.append(file, ROW)
    rows.append(file, replace(ROW, us=8.0))
    rows.append(file, replace(ROW, tuned=True, us=5.0))
    with file.open("a") as out:
        out.write(ROW.to_json()[:50])  # cut off
    assert rows.read(file) == [replace(ROW, us=8.0), replace(ROW, tuned=True, us=5.0)]


def test_a_summary_is_of_the_best_of_the_others():
    assert ROW.ratio == pytest.approx(1.1)
    slow = replace(ROW, name="b", us=20.0, mnk=(5000, 512, 20000))
    summary = Summary.of([ROW, slow, replace(ROW, us=None)])
    assert (summary.count, summary.worst, summary.below) == (2, pytest.approx(0.55), 0.5)
    assert summary.mean == pytest.approx((1.1 * 0.55) ** 0.5)
    classes = {(title, name) for title, name, _ in rows.by_class([ROW, slow])}
    assert {("M", "1-16"), ("M", "over 1024"), ("N", "1-2048"), ("K", "over 8192")} <= classes
    assert rows.worst([ROW, slow], 1) == [slow]
    assert "0.550  b" in rows.text([ROW, slow])


def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    entries = corpus()[:5]
    measured = []

    def measure(entry, *_):
        measured.append(entry.name)
        return replace(ROW, name=entry.name, environment={"commit": "c"})

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "local_arch", lambda: type("Arch", (), {"l2_bytes": 1})())
    monkeypatch.setattr(sweep, "environment", lambda: {"commit": "c"})
    file = tmp_path / "rows.jsonl"
    built = []

    def build(operands, dtype):
        built.append((len(operands), dtype))
        return 1

    ours = sweep.Ours(torch.mm, nullcontext, build, lambda *_: "")
    sweep.sweep(entries[:2], ours, file, ["cublas"])
    assert len(sweep.sweep(entries, ours, file, ["cublas"])) == 5
    assert sorted(measured) == sorted(e.name for e in entries)
    assert built == [(2, torch.bfloat16), (3, torch.bfloat16)]  # the rest, and only that
    monkeypatch.setattr(sweep, "environment", lambda: {"commit": "another"})
    sweep.sweep(entries[:1], ours, file, ["cublas"], seconds=0)
    assert len(measured) == 5


def test_only_what_was_slow_untuned_is_taken(tmp_path):
    fast, slow, healed, alone, never = corpus()[:5]
    file = tmp_path / "rows.jsonl"
    rows.append(file, replace(ROW, name=fast.name, us=10.0))  # 1.1 times the best of the others
    rows.append(file, replace(ROW, name=slow.name, us=20.0))
    rows.append(file, replace(ROW, name=healed.name, us=10.0))
    rows.append(file, replace(ROW, name=healed.name, us=20.0, tuned=True))
    rows.append(file, replace(ROW, name=alone.name, us=20.0, peers={}))
    assert sweep.timed_below(0.97, [fast, slow, healed, alone, never], file) == [slow]
    assert sweep.timed_below(0.97, [slow], tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_built_ahead_is_what_the_calls_take(dtype, monkeypatch):
    """A sweep compiles its kernels in parallel before its first problem, and no others."""
    jobs = []
    monkeypatch.setattr(building, "build", jobs.extend)
    problems = [e.problem for e in corpus(dtype) if e.problem.bytes < 1 << 22][:6]
    with simulated("sm_90a"):
        built = build_ahead([p.inputs("meta") for p in problems], torch.bfloat16)
        taken = {plan_for(p.inputs(), p.outputs()[0]) for p in problems}
        said = {tiles_of(*p.inputs("meta"), torch.bfloat16) for p in problems}
    assert built == len(jobs) == len(taken) and {config for config, _ in jobs} == taken
    assert {read_back(x) for x in said} == {config.tiles for config in taken}


def read_back(said):
    """The config from the fields in a row of a sweep."""
    fields = dict(field.split("=") for field in said.split())
    return Sm90Config(**{name: literal_eval(value) for name, value in fields.items()})


def plan_for(operands, out):
    """The config that `cutex.matmul(*operands, out=out)` uses."""
    call = Call(*operands, out=out)
    check(call)
    arranged = arrange(call, out, "sm_90a")
    return config_for(arranged.sizes, (arranged.a, arranged.b, arranged.out), (), "sm_90a")


def test_nothing_timed_is_said_in_a_sentence():
    bad = replace(ROW, ok=False, us=None, message="NaN")
    assert rows.text([]) == "no problem was timed beside others"
    assert rows.text([bad]).endswith("WRONG: a: NaN")


def test_bad_input_is_one_sentence(capsys):
    assert sweep.main(lambda: pytest.fail("loaded"), ["--compare", "mkl"]) == 2
    assert "mkl" in capsys.readouterr().err


def test_the_report_draws_what_was_only_for_reporting(tmp_path):
    file = tmp_path / "sweep" / "nvidia-h200.jsonl"
    for i in range(4):
        rows.append(file, replace(ROW, name=f"p{i}", fits=i == 3, us=9.0 + i))
    found = sweeps.read_sweeps(tmp_path)
    ((device, kept),) = found.items()
    assert device == "NVIDIA H200" and [r.name for r in kept] == ["p0", "p1", "p2"]
    (svg,) = sweeps.pictures(found).values()
    assert svg.count("<circle") == 3 + 1  # the problems, and the name of their class
    text = "\n".join(sweeps.markdown(found, "docs"))
    assert "docs/sweep-nvidia-h200.svg" in text and "| M 1-16 | 3 |" in text

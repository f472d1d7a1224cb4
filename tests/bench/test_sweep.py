"""The corpus of models' layers, the sweep over it, and its summary and pictures."""

from __future__ import annotations

import json
from ast import literal_eval
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cutex.bench import sweep
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.ops import building, simulated
from cutex.ops.matmul import warming
from cutex.ops.matmul.arrange import arrange
from cutex.ops.matmul.checks import Call, check
from cutex.ops.matmul.plan import config_for
from cutex.ops.matmul.warming import build_ahead, tiles_of
from cutex.problem.layer import PASSES, LayerProblem
from cutex.problem.models import DTYPES, MODELS, corpus, hash_below
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
    assert str(summary).endswith("worst 0.55, 50% below 0.97, 1 below 0.90")
    assert summary.mean == pytest.approx((1.1 * 0.55) ** 0.5)
    classes = {(title, name) for title, name, _ in rows.by_class([ROW, slow])}
    assert {("M", "1-16"), ("M", "over 1024"), ("N", "1-2048"), ("K", "over 8192")} <= classes
    assert ("layout", "TN (forward)") in classes
    assert rows.worst([ROW, slow], 1) == [slow]
    assert "0.550  b" in rows.text([ROW, slow])


def test_a_layout_is_named_as_blas_names_it():
    """T: a matrix stored with K contiguous; BLAS's two operands are our b and a."""
    for direction in PASSES:
        a_by_k, b_by_k = LayerProblem(24, 40, 16, direction).k_contiguous
        name = ("T" if b_by_k else "N") + ("N" if a_by_k else "T")
        assert rows.LAYOUTS[direction] == name


def test_the_sorted_ratios_are_summed_up_by_tenths():
    many = [replace(ROW, name=str(i), us=1000.0, peers={"cublas": 500.0 + i}) for i in range(1001)]
    expected = [0.5 + i / 10 for i in range(11)]
    assert rows.spread(reversed(many)) == pytest.approx(expected)
    assert rows.spread([ROW]) == pytest.approx([1.1] * 11)
    assert "sorted, by tenths: 0.50 0.60 " in rows.text(many)


def test_each_device_is_summed_up_for_itself():
    text = rows.text_by_device([ROW, replace(ROW, device_name="NVIDIA B200", us=20.0)])
    assert [line for line in text.splitlines() if "NVIDIA" in line] == [
        *("NVIDIA B200: 1 at unknown", "NVIDIA H200: 1 at unknown")
    ]
    assert text.count("all 1: ") == 2


def test_a_row_that_was_cut_off_costs_no_other(tmp_path: Path):
    file = rows.file_of(tmp_path, "NVIDIA H100 80GB HBM3")
    assert file == tmp_path / "sweep" / "nvidia-h100-80gb-hbm3.jsonl"
    rows.append(file, ROW)
    with file.open("a") as out:
        out.write(ROW.to_json()[:50])  # the sweep was killed here
    rows.append(file, replace(ROW, name="b"))
    assert [r.name for r in rows.read(file)] == ["a", "b"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "line",
    [
        '"a row"',
        b"\xff".decode(errors="surrogateescape"),
        *(
            json.dumps(json.loads(ROW.to_json()) | changed)
            for changed in (
                {"us": 0}, {"us": "10"}, {"us": float("nan")}, {"peers": {"cublas": None}},
                {"peers": {"cublas": 0}}, {"mnk": [0, 1, 1]}, {"mnk": [1]}, {"direction": "x"},
                {"dtype": "fp1"}, {"environment": None}, {"device_name": None}, {"run": None},
                {"name": ["a"]},
            )
        ),
    ],
    ids=lambda line: line[-40:],
)  # fmt: skip
def test_a_row_from_elsewhere_costs_no_other(line: str, tmp_path: Path):
    file = rows.file_of(tmp_path, "NVIDIA H200")
    rows.append(file, ROW)
    with file.open("a", errors="surrogateescape") as out:
        out.write(line + "\n")
    assert rows.read(file) == [ROW]


def test_a_problem_is_timed_again_beside_a_peer_that_was_not_asked_for():
    alone = replace(ROW, environment={"commit": "c"}, peers={"cublas": 9.0}, asked=("cublas",))
    failed = replace(alone, name="b", asked=("cublas", "quack"))  # quack did not do it
    timed = partial(rows.timed, [alone, failed])
    assert timed("c", False, ["cublas"]) == {"a", "b"}
    assert timed("c", False, ["quack", "cublas"]) == {"b"}
    assert timed("c", True, ["cublas"]) == timed("d", False, []) == set()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which every problem takes as long as ROW; `measured` has the names, in order."""
    gpu = SimpleNamespace(measured=[], raises={}, commit="c", works=True)

    def measure(entry, *_):
        gpu.measured.append(entry.name)
        if entry.name in gpu.raises:
            raise gpu.raises[entry.name]
        return replace(ROW, name=entry.name, environment=sweep.environment())

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep, "gpu_works", lambda: gpu.works)
    monkeypatch.setattr(sweep, "local_arch", lambda: SimpleNamespace(l2_bytes=1))
    monkeypatch.setattr(sweep, "environment", lambda: {"commit": gpu.commit})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    return gpu


def asked(entries):
    return sweep.SweepRequest(list(entries), ("cublas",))


def ours(built):
    """The functions that a sweep times; `built` gets the builds."""

    def build(operands, dtype):
        built.append((len(operands), dtype))
        return [Path("kernel")]

    return sweep.Ours(torch.mm, nullcontext, build, lambda *_: "", nullcontext)


def test_a_sweep_goes_on_where_it_was_cut_off(gpu, tmp_path):
    entries = corpus()[:5]
    file = tmp_path / "rows.jsonl"
    built = []
    sweep.sweep(asked(entries[:2]), ours(built), file)
    assert len(sweep.sweep(asked(entries), ours(built), file)) == 5
    assert sorted(gpu.measured) == sorted(e.name for e in entries)
    assert built == [(2, torch.bfloat16), (3, torch.bfloat16)]  # the rest, and only that
    gpu.commit = "another"
    sweep.sweep(asked(entries[:1]), ours(built), file, seconds=0)
    assert len(gpu.measured) == 5


def test_a_sweep_says_how_far_it_is_and_what_is_left(gpu, tmp_path, capsys, monkeypatch):
    entries = corpus()[:4]
    sweep.sweep(asked(entries), ours([]), tmp_path / "rows.jsonl")
    out, err = capsys.readouterr()
    assert [line[:5] for line in out.splitlines()] == [f"[{i}/4]" for i in (1, 2, 3, 4)]
    assert "1.100x, 0 min left" in out and "1 kernels built in 0 s" in err
    gpu.commit = "another"
    sweep.sweep(asked(entries), ours([]), tmp_path / "rows.jsonl", seconds=0)
    assert "stopped after 0 s; 4 problems are left" in capsys.readouterr().err


def test_a_problem_that_raises_costs_no_other_and_is_not_tried_again(gpu, tmp_path):
    entries = corpus()[:4]
    file = tmp_path / "rows.jsonl"
    bad = min(entries, key=lambda e: hash_below(e.name, 1 << 32))  # the first to be measured
    gpu.raises[bad.name] = MemoryError("out of memory")
    found = sweep.sweep(asked(entries), ours([]), file)
    assert len(found) == 4
    (wrong,) = (r for r in found if not r.ok)
    assert (wrong.name, wrong.message) == (bad.name, "MemoryError: out of memory")
    assert f"WRONG: {bad.name}: MemoryError" in rows.text(found)
    sweep.sweep(asked(entries), ours([]), file)
    assert gpu.measured.count(bad.name) == 1


def test_a_sweep_ends_where_the_gpu_does(gpu, tmp_path, capsys):
    entries = corpus()[:4]
    first = min(entries, key=lambda e: hash_below(e.name, 1 << 32))
    gpu.raises[first.name], gpu.works = RuntimeError("illegal address"), False
    found = sweep.sweep(asked(entries), ours([]), tmp_path / "rows.jsonl")
    assert [r.name for r in found] == gpu.measured == [first.name]
    assert f"{first.name} left the GPU unusable" in capsys.readouterr().err


def test_the_command_times_sums_up_and_goes_on(gpu, tmp_path, capsys):
    todo = tmp_path / "todo"
    todo.write_text("".join(f"{e.name}   {e.source}\n" for e in corpus() if not e.fits)[:3000])
    todo.write_text("\n".join(todo.read_text().splitlines()[:12]))
    command = ["--only", str(todo), "--compare", "cublas", "--out", str(tmp_path)]
    assert sweep.main(lambda: ours([]), command) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200: 12 at c\nall 12: 1.100x" in out
    assert out.partition("lowest:")[2].count("1.100") == 10
    assert sweep.main(lambda: ours([]), command) == 0
    assert "12 problems are in" in capsys.readouterr().err and len(gpu.measured) == 12
    assert sweep.main(lambda: pytest.fail("loaded"), ["--summary", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out in out


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

    def build(asked, ended):
        jobs.extend(asked)
        return [ended() is None for _ in asked]

    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(warming, "kernel_for", lambda config, arch: kernel_in(f"of {config}"))
    problems = [e.problem for e in corpus(dtype) if e.problem.bytes < 1 << 22][:6]
    with simulated("sm_90a"):
        built = build_ahead([p.inputs("meta") for p in problems], torch.bfloat16)
        taken = {plan_for(p.inputs(), p.outputs()[0]) for p in problems}
        said = {tiles_of(*p.inputs("meta"), torch.bfloat16) for p in problems}
    assert built == [Path(f"of {job.there.config}") for job in jobs] and len(jobs) == len(taken)
    assert {job.there.config for job in jobs} == taken
    assert {read_back(x) for x in said} == {config.tiles for config in taken}


def kernel_in(folder):
    return SimpleNamespace(object_path=Path(folder) / "object")


def test_a_kernel_that_does_not_compile_has_no_folder(monkeypatch):
    monkeypatch.setattr(building, "build", lambda asked, ended: [False] * len(asked))
    monkeypatch.setattr(warming, "kernel_for", lambda *_: pytest.fail("compiled here"))
    with simulated("sm_90a"):
        assert build_ahead([LayerProblem(24, 40, 16).inputs("meta")], torch.bfloat16) == []


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


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--compare", "mkl"], "--compare 'mkl' is not one of cublas, quack"),
        (["--seconds", "0"], "--seconds 0: a number above 0 is needed"),
        (["--below", "nan"], "--below nan: a number above 0 is needed"),
        (["--below", "0.9", "--list"], "--below takes problems to time, and this times none"),
        (["--list", "--summary"], "not allowed with argument --list"),
        (["--only", "no-such-file"], "--only no-such-file: No such file or directory"),
        (["--only", "{bad}"], "'1x1x1 forward bf16' is none of the problems that --list prints"),
        (["--only", "{empty}"], "it names no problem"),
        (["--out", "{bad}", "--summary"], "sweep has no untuned row of --half report in bf16"),
        (["--out", "{bad}/x"], "cannot keep results"),
    ],
)
def test_bad_input_is_one_sentence(argv, says, gpu, tmp_path, capsys):
    bad, empty = tmp_path / "bad", tmp_path / "empty"
    bad.write_text("1x1x1 forward bf16 model\n")
    empty.touch()
    argv = [word.format(bad=bad, empty=empty) for word in argv]
    assert sweep.main(lambda: pytest.fail("loaded"), argv) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_preflight_checks_each_layout_in_the_simulator(dtype, monkeypatch, tmp_path, capsys):
    """It also prints the folders of the kernels, all of which it compiles."""
    todo = tmp_path / "todo"
    entries = [e for e in corpus(dtype) if not e.fits][:2]
    todo.write_text("\n".join(e.name for e in entries))
    built, on = [], []

    def build(operands, out_dtype):
        built.extend((*a.shape, b.shape[1]) for a, b in operands)
        return [tmp_path / "kernel"]

    def right(a, b, out):
        assert on == ["sm_90a"]
        out.copy_(a.float() @ b.float())

    loaded = sweep.Ours(
        right, nullcontext, build, tiles_of, lambda arch: nullcontext(on.append(arch))
    )
    command = ["--preflight", "sm_90a", "--dtype", dtype, "--only", str(todo)]
    assert sweep.main(lambda: loaded, command) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'kernel'}\n"
    assert built == [(m, k, n) for m, n, k in (e.problem.mnk for e in entries)]
    wrong = replace(loaded, matmul=lambda a, b, out: out.zero_())
    assert sweep.main(lambda: wrong, command) == 1
    assert "forward is wrong in the simulator: out[0, " in capsys.readouterr().err


def test_the_report_draws_what_was_only_for_reporting(tmp_path):
    file = tmp_path / "sweep" / "nvidia-h200.jsonl"
    for i in range(4):
        rows.append(file, replace(ROW, name=f"p{i}", fits=i == 3, us=9.0 + i))
    found = sweeps.read_sweeps(tmp_path)
    ((device, kept),) = found.items()
    assert device == "NVIDIA H200" and [r.name for r in kept] == ["p0", "p1", "p2"]
    ((name, svg),) = sweeps.pictures(found).items()
    assert name == "sweep-nvidia-h200-bf16.svg"
    assert svg.count("<circle") == 3 + 1  # the problems, and the name of their class
    text = "\n".join(sweeps.markdown(found, "docs/"))
    assert f"docs/{name}" in text and "| M 1-16 | 3 |" in text

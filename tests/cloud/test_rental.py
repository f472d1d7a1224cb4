"""Renting, from a stand-in for Modal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stand_in_cloud import Cloud

from cutex import results
from cutex.bench import sweep
from cutex.bench.run import commit
from cutex.cloud import calls, preflight, prices, remote, rental, replies
from cutex.kernels.gemm import stages
from cutex.problem import OPS
from cutex.problem.gemm import GemmProblem
from cutex.problem.models import corpus
from cutex.problem.stage import ladders
from cutex.results import Result
from cutex.results import sweep as sweep_rows
from cutex.results.sweep import SweepRow

BIG = ["--mnk", "8192,8192,4096"]


def args(*argv: str):
    return rental.parser().parse_args(argv)


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def run(cloud, tmp_path, capsys):
    def run(*argv: str, preflight: bool = False) -> SimpleNamespace:
        more = [] if preflight else ["--no-preflight"]
        code = rental.main([*more, "--out", str(tmp_path / "results"), *argv], cloud.rent)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run


def rows(tmp_path) -> list[Result]:
    return results.read_all(tmp_path / "results")


def test_a_run_is_recorded_with_its_note_and_its_share_of_the_cost(cloud, run, tmp_path):
    assert run("--gpu", "H200", *BIG, "--expect", "faster").code == 0
    found = rows(tmp_path)
    assert [r.stage for r in found] == [s.number for s in stages("sm_90a")]
    assert {r.expect for r in found} == {"faster"}
    total = sum(r.cost_usd for r in found)
    assert total == pytest.approx(prices.RENTALS["H200"].usd(36.0), rel=1e-4)


def test_a_reply_that_arrives_twice_is_recorded_once(cloud, run, tmp_path):
    cloud.times = 2
    assert run("--stage", "0", *BIG).code == 0
    assert len(rows(tmp_path)) == 1


def test_two_runs_are_two(cloud, run, tmp_path):
    for _ in range(2):
        assert run("--stage", "0", *BIG).code == 0
    assert len(rows(tmp_path)) == 2


def test_each_problem_is_a_call_of_its_own(cloud, run):
    assert run("--stage", "0", *BIG, "--mnk", "4096,4096,4096", "--compare", "cublas").code == 0
    assert [(gpu, r["problem"]["m"]) for gpu, r, _ in cloud.asked] == [
        ("B200", 8192),
        ("B200", 4096),
    ]
    assert {r["options"]["compare"] for _, r, _ in cloud.asked} == {("cublas",)}


def test_what_fails_does_not_take_the_others_with_it(cloud, run, tmp_path):
    cloud.error = TimeoutError("the call ran into its limit")
    ran = run("--stage", "0", *BIG)
    assert ran.code == 1
    assert "a call on B200 failed: TimeoutError: the call ran into its limit" in ran.err
    assert rows(tmp_path) == []


def test_the_sweep_has_its_own_problems_on_every_gpu(cloud, run):
    assert run("--op", "sweep", "--gpu", "B200,H200,B200", "--stage", "9").code == 0
    asked = [(gpu, r["op"], *r["problem"].values()) for gpu, r, _ in cloud.asked]
    assert len(asked) == len(set(asked))
    for kind in rental.kinds():
        archs = {"B200": "sm_100a", "H200": "sm_90a"}
        of_op = ladders(kind.op)
        gpus = [
            gpu
            for gpu, arch in archs.items()
            if arch in of_op.archs and 9 in [s.number for s in of_op.stages(arch)]
        ]
        of_kind = [gpu for gpu, op, *_ in asked if op == kind.op]
        assert of_kind.count("H200") == len(kind.cases["sweep"]) * ("H200" in gpus)
        assert set(of_kind) == set(gpus) and len(of_kind) == len(gpus) * len(kind.cases["sweep"])


def test_confirm_asks_for_both_ladders_beside_their_peers_and_for_the_probes(cloud, run):
    assert run("--op", "confirm").code == 0
    probes, *rest = sorted((r for _, r, _ in cloud.asked), key=lambda r: not r["probes"])
    assert probes["probes"] and not any(r["probes"] for r in rest)
    peers = {"gemm": ("cublas",), "attention": ("cudnn", "fa4"), "gemm_scaled": ("torch",)}
    peers["attention_backward"] = peers["attention"]
    asked = {r["op"]: r["options"]["compare"] for r in rest}
    assert {op: asked[op] for op in peers} == peers
    assert {*asked} == {op for op in OPS if "sm_100a" in ladders(op).archs}
    for r in rest:
        assert r["stages"] == [s.number for s in ladders(r["op"]).stages("sm_100a")]
    causal = [r["problem"]["causal"] for r in rest if r["op"] == "attention"]
    assert sorted(causal) == [False, True]
    scaled = [r["problem"]["dtype"] for r in rest if r["op"] == "gemm_scaled"]
    assert sorted(scaled) == ["mxfp8", "mxfp8", "nvfp4", "nvfp4"]


# ---- preflight


def test_a_wrong_preflight_rents_nothing(cloud, run, monkeypatch):
    honest = preflight.run_stages

    def wrong(*given):
        return [replace(r, ok=False, message="C[0, 0] is NaN") for r in honest(*given)]

    monkeypatch.setattr(preflight, "run_stages", wrong)
    ran = run("--stage", "0", "--mnk", "64,64,64", "--check-only", preflight=True)
    assert ran.code == 1
    assert "preflight: stage 0 of sm_100a on 64x64x64: C[0, 0] is NaN" in ran.out
    assert "nothing was rented" in ran.out
    assert cloud.asked == []


def test_compiled_kernels_travel_and_are_found_there(cloud, run, monkeypatch, tmp_path):
    assert run("--stage", "0", "--mnk", "64,64,64", "--check-only", preflight=True).code == 0
    ((_, request, _),) = cloud.asked
    assert len(request["kernels"]) > 1000
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "container"))
    monkeypatch.setattr("cutex.compile.compiling._in_process", {})
    remote.unpack(request["kernels"])
    stage = stages("sm_100a")[0]
    assert preflight.compile_stage(stage, "bf16").from_cache
    remote.unpack(request["kernels"])  # again, as on a container that is kept warm


def test_what_one_container_made_the_next_one_finds(monkeypatch, tmp_path):
    volume, stage = tmp_path / "volume", stages("sm_100a")[0]
    volume.mkdir()
    for container in ("first", "second"):
        monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / container))
        monkeypatch.setattr("cutex.compile.compiling._in_process", {})
        with remote.Volume("digest of the sources", str(volume)):
            assert preflight.compile_stage(stage, "bf16").from_cache == (container == "second")
            choice = tmp_path / container / "tuned" / "choice.json"
            assert choice.exists() == (container == "second")
            choice.parent.mkdir(exist_ok=True)
            choice.write_text("{}")


def test_all_that_a_choosing_stage_may_run_travels(cloud, run):
    (stage,) = (s for s in stages("sm_90a") if s.chooses)
    made = rental.plan(args("--gpu", "H200", "--stage", str(stage.number), *BIG))
    configs = preflight._configs(stage, GemmProblem(8192, 8192, 4096))
    assert len(configs) == len(set(configs)) > 4
    assert made.requests[0].seconds > rental.TUNE


def test_the_simulator_is_given_a_few_tiles_with_the_same_remainders():
    small = GemmProblem(8200, 1000, 4104, init="normal").reduced()
    assert small.mnk == (512 + 8200 % 512, 512 + 1000 % 512, 256 + 4104 % 256)
    assert small.init == "int"
    assert GemmProblem(16, 8192, 64).reduced().mnk == (16, 512, 64)


# ---- plan and price


def test_the_plan_tells_what_it_costs_and_rents_nothing(cloud, run):
    ran = run("--dry-run", "--stage", "3", *BIG, "--compare", "cublas", "--rate", "B200=3600")
    assert ran.code == 0
    assert "stage 3 on 8192x8192x4096 bf16 beside cublas" in ran.out
    assert f"at ${3600 + 4 * 0.047 + 32 * 0.008:.2f} an hour" in ran.out
    assert cloud.asked == []


@pytest.mark.parametrize(
    "asked",
    [
        ["--op", "sweep", "--gpu", "B200,H200,H100!", "--compare", "cublas"],
        ["--op", "confirm"],
        ["--op", "layers", "--gpu", "H200,B200", "--compare", "cublas,quack"],
        ["--op", "tests"],
    ],
)
def test_a_dry_run_compiles_nothing(cloud, run, monkeypatch, asked):
    monkeypatch.setattr(rental, "preflight", None)
    ran = run(*asked, "--dry-run", preflight=True)
    assert ran.code == 0 and "in all about $" in ran.out and not ran.err
    assert cloud.asked == []


def test_a_preflight_alone_rents_nothing(cloud, run, tmp_path):
    ran = run(
        "--stage", "0", "--mnk", "64,64,64", "--check-only", "--preflight-only", preflight=True
    )
    assert ran.code == 0 and "preflight: right in the simulator" in ran.out
    assert cloud.asked == [] and not (tmp_path / "results").exists()


def test_the_limits_of_all_calls_stay_within_the_most_that_it_may_cost():
    asked = ("--op", "sweep", "--gpu", "B200,H200")
    free = rental.plan(args(*asked))
    allowed = round(0.9 * free.max_usd, 2)
    made = rental.plan(args(*asked, "--max-cost", str(allowed)))
    assert made.usd < allowed
    assert made.max_usd <= allowed * 1.001
    for r in made.rentals:
        assert made.limit(r) >= calls.LEAST_LIMIT
    with pytest.raises(ValueError, match=r"about \$\d.\d+, but up to \$\d+.\d+ if containers"):
        rental.plan(args(*asked, "--max-cost", f"{1.1 * made.usd:.2f}"))
    assert free.max_usd > made.max_usd


def test_a_call_that_fails_is_paid_for_as_long_as_it_ran(cloud, run, monkeypatch):
    now = iter(range(0, 100_000, 25))
    monkeypatch.setattr(replies, "time", SimpleNamespace(monotonic=lambda: next(now)))
    cloud.error = TimeoutError("the call ran into its limit")
    ran = run("--stage", "0", *BIG)
    assert "B200: 25 s measured, about $0.0" in ran.out


def test_what_is_not_counted_is_said(cloud, run):
    assert "not counted: a second preemption" in run("--dry-run", "--stage", "0", *BIG).out


def test_the_ladder_of_a_gpu_can_be_listed(cloud, run):
    ran = run("--gpu", "H200", "--stage", "list")
    assert ran.code == 0
    assert ran.out.startswith("sm_90a")
    assert cloud.asked == []


def test_a_name_may_be_written_small():
    assert rental.plan(args("--gpu", "h100!", *BIG)).rentals == [prices.RENTALS["H100!"]]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpu", "A100"], "--gpu 'A100' is not one of B200, H200, H100!"),
        (["--gpu", "h100"], "--gpu 'h100' may be answered with an H200; take H100! or H200"),
        (["--gpu", "B200+"], "may be answered with a B300"),
        (["--gpu", "B200:2"], "--gpu 'B200:2' is not one of"),
        (["--gpu", ""], "--gpu '' is not one of"),
        (["--gpu", "B200,H200"], "--op gemm takes one GPU; sweep and layers take several"),
        (["--op", "confirm", "--gpu", "H200"], "asks what only a B200 can answer"),
        (["--op", "convolution"], "--op"),
        (["--max-cost", "0.001"], "--max-cost 0.001: this would cost about $0."),
        (["--max-cost", "-1"], "--max-cost -1.0: dollars above 0"),
        (["--max-cost", "nan"], "--max-cost nan: dollars above 0"),
        (["--rate", "B200"], "--rate 'B200': GPU=dollars per hour"),
        (["--rate", "A100=1"], "--rate 'A100=1'"),
        (["--stage", "99"], "stage 99 is not in the ladder of sm_100a"),
        (["--stage", "fast"], "neither a number nor all"),
        (["--mnk", "8,8,7"], "K=7: must be a multiple of 8"),
        (["--mnk", "8,8,8"], "cache state cold needs operands"),
        (["--compare", "mkl"], "--compare 'mkl' is not one of"),
        (["--preflight-only", "--dry-run"], "compiles and simulates, and --dry-run does not"),
        (["--preflight-only"], "compiles and simulates, and --no-preflight does not"),
        (["--op", "layers", "--compare", "cudnn"], "'cudnn' is not one of cublas, quack"),
        (["--op", "layers", "--dtype", "fp16"], "--dtype fp16: the corpus models has bf16, e4m3"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(cloud, run, argv, says):
    ran = run(*argv)
    assert ran.code == 2
    (sentence,) = ran.err.splitlines()
    assert sentence.startswith("cutex: ")
    assert says in sentence
    assert cloud.asked == []


# ---- layers of public models

LAYERS = ["--op", "layers", "--gpu", "H200", "--compare", "cublas"]


def swept(tmp_path) -> list[SweepRow]:
    return sweep_rows.read(tmp_path / "results" / "sweep" / "nvidia-h200.jsonl")


@pytest.fixture
def container(monkeypatch):
    """A container in this process, with a `python -m cutex.sweep` that takes no time.

    broken: names of problems with a wrong result.
    """
    container = SimpleNamespace(calls=[], broken=set())

    def run(command, cwd, check):
        python, dash_m, module, *argv = map(str, command)
        assert (python, dash_m, module) == (sys.executable, "-m", "cutex.sweep")
        assert (cwd / "cutex" / "sweep.py").exists()
        given = sweep.parser().parse_args(argv)
        asked = sweep.asked(given)
        container.calls.append(asked)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        for entry in asked.entries:
            row = sweep.row_of(entry, asked.compare, given.tuned, "illegal address")
            if entry.name not in container.broken:
                row = replace(row, ok=True, us=10.0, peers={"cublas": 11.0}, message="")
            sweep_rows.append(sweep_rows.file_of(Path(given.out), row.device_name), row)
        return SimpleNamespace(returncode=int(bool(container.broken)))

    monkeypatch.setattr(remote, "subprocess", SimpleNamespace(run=run))
    return container


def test_layers_of_models_are_swept_in_parts_and_recorded_as_they_come(
    cloud, run, container, tmp_path
):
    cloud.rent = there
    ran = run(*LAYERS)
    assert ran.code == 0, ran.err
    half = [e for e in corpus() if not e.fits]
    assert len(container.calls) == -(-len(half) // rental.BATCH)
    assert sorted(r.name for r in swept(tmp_path)) == sorted(e.name for e in half)
    (where,) = {(r.environment["rented"], r.environment["commit"]) for r in swept(tmp_path)}
    assert where == ("H200", commit())
    assert f"NVIDIA H200: {len(half)} at {commit()}\nall {len(half)}: 1.100x" in ran.out
    assert f"NVIDIA H200: {half[0].name}: 1.100x" in ran.out


def test_layers_that_are_there_already_are_not_rented_for(cloud, run, container, tmp_path):
    cloud.rent = there
    assert run(*LAYERS, "--dtype", "e4m3").code == 0
    file = tmp_path / "results" / "sweep" / "nvidia-h200.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]) + lines[-2][:99])  # as if it had been cut off
    asked = container.calls.copy()
    ran = run(*LAYERS, "--dtype", "e4m3")
    assert ran.code == 0, ran.err
    (again,) = container.calls[len(asked) :]
    assert len(again.entries) == 2
    assert f"all {len(lines)}: 1.100x" in ran.out  # with those that were there
    ran = run(*LAYERS, "--dtype", "e4m3")
    assert ran.code == 2 and "has all of these from this commit already" in ran.err
    assert run(*LAYERS, "--dtype", "e4m3", "--tuned", "--dry-run").code == 0


def test_a_layer_that_is_wrong_there_fails_the_command(cloud, run, container, tmp_path):
    cloud.rent = there
    container.broken = {next(e.name for e in corpus("e4m3") if not e.fits)}
    ran = run(*LAYERS, "--dtype", "e4m3")
    assert ran.code == 1
    assert [r.name for r in swept(tmp_path) if not r.ok] == [*container.broken]
    assert f"WRONG: {next(iter(container.broken))}: illegal address" in ran.out


def test_layers_are_compiled_here_in_one_go(monkeypatch, tmp_path):
    """All of an arch are compiled by one process, which prints the folders of the kernels."""
    made = rental.plan(args(*LAYERS, "--gpu", "H200,B200,H100!", "--out", str(tmp_path)))
    calls = []

    def run(command, check, stdout, text, encoding):
        given = sweep.parser().parse_args(command[3:])
        calls.append((given.preflight, len(sweep.asked(given).entries)))
        return SimpleNamespace(returncode=0, stdout=f"{tmp_path}\n")

    monkeypatch.setattr(preflight, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    packed = []
    monkeypatch.setattr(remote, "pack", lambda folders: packed.append(folders) or b"")
    right, _ = preflight.preflight(made, print)
    half = sum(not e.fits for e in corpus())
    assert right and calls == [("sm_90a", half), ("sm_100a", half)]
    assert packed == [{tmp_path}] * 2


# ---- a script of the user's


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys, torch\nx = torch.ones(3, device='cuda')\nprint('sum', x.sum().item())\n"
        "print(sys.argv[1:], file=sys.stderr)\nsys.exit(int(sys.argv[1]))\n"
    )
    return str(file)


async def there(gpu, requests, timeout):
    """The remote part in this process; its GPU is torch's CPU."""
    for request in requests:
        source = request["source"].replace(b"cuda", b"cpu")
        yield remote.execute({**request, "source": source})


@pytest.mark.slow
def test_a_script_runs_here_in_the_simulator_and_then_there(cloud, run, script, tmp_path):
    cloud.rent = there
    ran = run("--op", "script", script, "--", "0", "--verbose", preflight=True)
    assert ran.code == 0, ran.err
    assert "preflight: right in the simulator" in ran.out
    assert "sum 3.0\nexit code 0" in ran.out
    assert "['0', '--verbose']" in ran.err
    assert "s measured, about $" in ran.out


@pytest.mark.slow
def test_the_exit_code_of_a_script_comes_back(cloud, run, script):
    cloud.rent = there
    assert run("--op", "script", script, "--", "7").code == 7


@pytest.mark.slow
def test_a_script_that_fails_here_rents_nothing(cloud, run, script):
    ran = run("--op", "script", script, "--", "3", preflight=True)
    assert ran.code == 1
    assert "exit code 3 in the simulator" in ran.out and "nothing was rented" in ran.out
    assert cloud.asked == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--op", "script"], "the path of a Python file is needed"),
        (["--op", "script", "nowhere.py"], "--op script nowhere.py: No such file"),
        (["mine.py"], "'mine.py': --op script runs a file, and this is --op gemm"),
        (["--op", "tests", "mine.py"], "and this is --op tests"),
    ],
)
def test_a_script_is_asked_for_by_its_op(cloud, run, argv, says):
    ran = run(*argv)
    assert ran.code == 2 and says in ran.err
    assert cloud.asked == []


def test_what_calls_that_were_cut_off_may_cost_is_told(tmp_path, monkeypatch):
    """As when a user interrupts a minute of work, of which nothing was measured."""
    made = rental.plan(args("--gpu", "B200", "--stage", "3", "--out", str(tmp_path)))
    said = []
    now = [100.0]
    monkeypatch.setattr("cutex.cloud.replies.time.monotonic", lambda: now[0])
    ledger = rental.Ledger(made, args("--out", str(tmp_path)), said.append)
    now[0] += 60
    ledger.account()
    usd = made.rentals[0].usd(60)
    count = len(made.requests)
    calls = "1 call" if count == 1 else f"{count} calls"
    assert f"; {calls} cut off, 60 s or ${usd:.2f} more at most" in said[-1]
    for request in made.requests:
        ledger.take(made.rentals[0], {"index": request.index, "seconds": 2.0, "results": []})
    ledger.account()
    assert "cut off" not in said[-1]

"""`modal run` itself, the stock client, against a control plane on this machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cutex.bench.run
from cutex import results
from cutex.cache import cache_dir
from cutex.cloud import remote
from cutex.kernels.gemm import stages
from cutex.problem import Check
from cutex.problem.models import corpus
from cutex.results import sweep

modal = pytest.importorskip("modal", reason="modal is not installed: pip install -e '.[modal]'")
if modal.__version__.split(".")[:2] != ["1", "6"]:
    pytest.skip(
        f"modal {modal.__version__}: the control plane offline speaks the protocol of 1.6",
        allow_module_level=True,
    )
pytestmark = [
    pytest.mark.modal,
    pytest.mark.filterwarnings("ignore:The run function is executing locally"),
]
# a kernel in the simulator, and pytest with the arguments, in one process: torch is imported once
BOTH = """
import sys, pytest
from cutex.gemm import main
options = "--stage 0 --device sim --mnk 64,64,64"
sys.exit(main(options.split()) or pytest.main(sys.argv[1:]))
"""
SMALL = ("--mnk", "64,64,64", "--check-only")
SHARED = cache_dir()  # where other tests leave the same kernels


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modal_app():
    return load(Path(__file__).resolve().parents[2] / "modal_app.py")


@pytest.fixture
def cloud(root, modal_app, monkeypatch, tmp_path):
    """Modal for `modal run`: its GPUs are the simulator, its disk is `tmp_path`."""
    offline = load(root / "tests" / "cloud" / "modal_offline.py")
    monkeypatch.setattr(cutex.bench.run, "choose_device", lambda name, target: "sim")
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path / "container"))
    monkeypatch.setenv("CUTEX_COMMIT", "")
    monkeypatch.setattr("cutex.compile.compiling._in_process", {})
    with offline.ControlPlane({"run": modal_app.run.local}) as plane:
        plane.faults = monkeypatch
        yield plane


def heed_ctrl_c() -> None:
    """Restore Ctrl-C, which tests and their children ignore if a shell starts them in the
    background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def modal_run(cloud, root, tmp_path):
    """Run `modal run modal_app.py` with these options to its end."""

    def start(
        *args: str,
        via: tuple[str, ...] = ("-m", "modal", "run"),
        own: tuple[str, ...] = (),
        **env: str,
    ) -> subprocess.Popen[str]:
        mine = {
            "MODAL_SERVER_URL": f"http://127.0.0.1:{cloud.port}",
            "MODAL_TOKEN_ID": "ak-offline",
            "MODAL_TOKEN_SECRET": "as-offline",
            "MODAL_CONFIG_PATH": os.devnull,
            "CUTEX_CACHE": str(compile_cache),
            "CUTEX_COMMIT": "abc1234",
            **env,
        }
        out = ("--out", str(tmp_path / "results"))
        return subprocess.Popen(
            [sys.executable, *via, "modal_app.py", *args, *out, *(("--", *own) if own else ())],
            cwd=root,
            env={k: v for k, v in {**os.environ, **mine}.items() if v},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        )

    def run(*args: str, **more) -> SimpleNamespace:
        process = start(*args, **more)
        out, err = process.communicate(timeout=550)
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    compile_cache = Path(os.environ.get("CUTEX_TEST_CACHE") or tmp_path / "here")
    run.start = start
    return run


def rows(tmp_path: Path) -> list[results.Result]:
    return results.read_all(tmp_path / "results")


# ---- end to end


def test_gemm_is_preflighted_priced_run_and_recorded_once(cloud, modal_run, tmp_path):
    cloud.preempt = 1  # the first input runs twice, as on a preempted container
    ran = modal_run("--gpu", "b200", "--stage", "3", *SMALL, "--expect", "right: it was simulated")
    assert ran.code == 0, ran.out + ran.err
    assert "preflight: right in the simulator" in ran.out
    assert re.search(r"in all about \$\d+\.\d\d, at most \$\d+\.\d\d", ran.out)
    assert re.search(r"B200: \d+ s measured, about \$", ran.out)
    assert [gpu for gpu, _ in cloud.runs] == ["B200", "B200"]
    (row,) = rows(tmp_path)
    assert (row.ok, row.stage, row.arch, row.sizes) == (True, 3, "sm_100a", (64, 64, 64))
    assert row.expect == "right: it was simulated"
    assert row.environment["commit"] == "abc1234"
    assert row.environment["rented"] == "B200"
    assert row.from_cache, "the kernel travelled with the request, and was compiled all the same"
    assert row.cost_usd > 0
    assert row.id == cloud.runs[0][1][0]["options"]["id"]


@pytest.mark.slow
def test_python_can_run_it_too(cloud, modal_run, tmp_path):
    ran = modal_run("--stage", "0", *SMALL, "--no-preflight", via=())
    assert ran.code == 0, ran.out + ran.err
    assert [r.ok for r in rows(tmp_path)] == [True]


@pytest.mark.slow
def test_sweep_goes_over_problems_and_gpus(cloud, modal_run, tmp_path):
    sizes = ("--mnk", "64,64,64", "--mnk", "64,128,64", "--check-only")
    gpus = ("--gpu", "B200,H200,H100!")
    ran = modal_run("--op", "sweep", *gpus, "--stage", "0", *sizes, "--no-preflight")
    assert ran.code == 0, ran.out + ran.err
    assert sorted(gpu for gpu, _ in cloud.runs) == 2 * ["B200"] + 2 * ["H100!"] + 2 * ["H200"]
    bound = cloud.asked("FunctionBindParams")
    assert {r.function_options.resources.gpu_config.gpu_type for r in bound} == {
        *("B200", "H200", "H100!")
    }
    found = {(r.environment["rented"], r.sizes[1]) for r in rows(tmp_path)}
    assert found == {(gpu, n) for gpu in ("B200", "H200", "H100!") for n in (64, 128)}


@pytest.mark.slow
def test_layers_of_models_come_back_as_rows_of_a_sweep(cloud, modal_run, root, tmp_path):
    (row, *_) = sweep.read(root / "results" / "sweep" / "nvidia-h200.jsonl")

    def swept(command, **_):  # as python -m cutex.sweep ... --only FILE --out DIR on an H200
        only, out = Path(command[-3]), Path(command[-1])
        for name in only.read_text().splitlines():
            sweep.append(sweep.file_of(out, "NVIDIA H200"), replace(row, name=name))
        return SimpleNamespace(returncode=0)

    cloud.faults.setattr(remote, "subprocess", SimpleNamespace(run=swept))
    asked = ("--op", "layers", "--gpu", "H200", "--dtype", "e4m3", "--compare", "cublas")
    ran = modal_run(*asked, "--no-preflight")
    assert ran.code == 0, ran.out + ran.err
    found = sweep.read(tmp_path / "results" / "sweep" / "nvidia-h200.jsonl")
    assert {r.name for r in found} == {e.name for e in corpus("e4m3") if not e.fits}
    assert {(r.environment["commit"], r.environment["rented"]) for r in found} == {
        ("abc1234", "H200")
    }
    assert f"all {len(found)}: " in ran.out


@pytest.mark.slow
def test_tests_bring_back_the_report_and_the_exit_code(cloud, modal_run, tmp_path):
    # --noconftest, which would import torch
    alone = "tests/problem/test_arch.py -q -p no:cacheprovider --noconftest"
    ran = modal_run("--op", "tests", "--tests", alone)
    assert ran.code == 0, ran.out + ran.err
    (report,) = (tmp_path / "results").glob("junit-*.xml")
    assert 'failures="0"' in report.read_text()
    none = modal_run("--op", "tests", "--tests", f"{alone} -k no_such_test")
    assert none.code == 5  # pytest's: no tests were run
    assert len(cloud.runs) == 2


@pytest.mark.slow
def test_confirm_checks_every_blackwell_stage_and_measures_what_is_open(cloud, modal_run, tmp_path):
    cloud.faults.setenv("CUTEX_CACHE", str(SHARED))
    ran = modal_run("--op", "confirm", *SMALL, "--no-preflight")
    assert ran.code == 0, ran.out + ran.err
    gemms = [r for r in rows(tmp_path) if r.op == "gemm"]
    assert [r.stage for r in gemms] == [s.number for s in stages("sm_100a")]
    assert all(r.ok for r in gemms)
    assert "tcgen05.ld" in ran.out
    (path,) = (tmp_path / "results").glob("probes-*.json")
    assert all(row["ok"] for row in json.loads(path.read_text()))


@pytest.mark.slow
def test_confirm_runs_attention(cloud, modal_run, tmp_path):
    size = ("--size", "1,200,1,128", "--stage", "9")
    ran = modal_run("--op", "confirm", *size, "--check-only", "--no-preflight")
    assert ran.code == 0, ran.out + ran.err
    assert [(r.op, r.stage, r.ok) for r in rows(tmp_path)] == [("attention", 9, True)]


@pytest.mark.slow
def test_a_script_of_ones_own_runs_there(cloud, modal_run, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import sys; print('said', sys.argv[1:]); sys.exit(7)")
    where = ("--op", "script", str(script), "--gpu", "H200", "--no-preflight")
    ran = modal_run(*where, own=("--its", "own"))
    assert ran.code == 7, ran.out + ran.err
    assert "said ['--its', 'own']\nexit code 7" in ran.out
    assert [gpu for gpu, _ in cloud.runs] == ["H200"]


@pytest.mark.slow
def test_a_wrong_result_there_is_exit_code_1_here(cloud, modal_run, tmp_path):
    def wrong(problem, *_, **__):
        return Check(False, 1.0, 0.0, "C[0, 0] is 1, exactly 0 was due")

    cloud.faults.setattr(cutex.problem.gemm.GemmProblem, "check", wrong)
    ran = modal_run("--stage", "0", *SMALL, "--no-preflight")
    assert ran.code == 1
    assert "WRONG" in ran.out
    assert "C[0, 0] is 1, exactly 0 was due" in ran.err
    assert [r.ok for r in rows(tmp_path)] == [False]


@pytest.mark.slow
def test_an_exception_there_is_told_here(cloud, modal_run, tmp_path):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cloud.faults.setattr(cutex.bench.run, "compile_stage", broken)
    ran = modal_run("--stage", "0", *SMALL, "--no-preflight")
    assert ran.code == 1
    assert "cutex: a call on B200 failed: RuntimeError: CUDA error: an illegal memory" in ran.err
    assert rows(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_ends_the_remote_call(cloud, modal_run, tmp_path):
    began, go_on = threading.Event(), threading.Event()

    def slow(*_):
        began.set()
        go_on.wait(60)
        raise RuntimeError("too late")

    cloud.faults.setattr(cutex.bench.run, "compile_stage", slow)
    process = modal_run.start("--stage", "0", *SMALL, "--no-preflight")
    assert began.wait(60)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    took = time.monotonic() - pressed
    go_on.set()
    assert process.returncode == 130
    assert took < 20
    assert len(cloud.asked("AppClientDisconnect")) == 1  # which ends an app that is not detached
    assert "cutex: interrupted; what runs remotely is ended" in err
    assert "Traceback" not in err
    assert rows(tmp_path) == []


def test_everything_that_runs_there_is_sent(cloud, modal_run, modal_app, root, tmp_path):
    ran = modal_run("--op", "tests", "--tests=--version")
    assert ran.code == 0, ran.out + ran.err
    sent = {f.filename for r in cloud.asked("MountGetOrCreate") for f in r.files}
    package = root / "cutex"
    needed = {"tests/conftest.py", "pyproject.toml"}
    for folder in (package, *(p for p in package.iterdir() if p.is_symlink())):
        needed |= {str(p.relative_to(root)) for p in folder.rglob("*") if p.is_file()}
    needed = {path for path in needed if "__pycache__" not in path}
    assert {
        "cutex/sim/host/shim.c",
        "cutex/kernels/gemm/sm100/stage3.py",
        "cutex/py.typed",
    } <= needed
    assert {f"{modal_app.THERE}/{path}" for path in needed} <= sent
    assert not [path for path in sent if "__pycache__" in path]
    tree = tmp_path / "there"
    for path in sent:
        place = tree / Path(path).relative_to(modal_app.THERE)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((root / place.relative_to(tree)).read_bytes())
    there = image_python(modal_app.PYTHON)
    commands = [
        (python, "-c", BOTH, *modal_app.rental.DEFAULT_TESTS.split(), "--collect-only")
        for python in {sys.executable, there if there and has_wheels(there) else sys.executable}
    ]
    if there:  # it reads every file, even without their imports
        commands.append((there, "-m", "compileall", "-q", "."))
    for command in commands:
        ran = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "CUTEX_CACHE": str(tmp_path / "c")},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def image_python(version: str) -> str | None:
    """The Python of the image's version on this machine: this one, or one on the path."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    found = shutil.which(f"python{version}")  # NOTE: a shim may stand for none
    runs = found and subprocess.run([found, "--version"], capture_output=True).returncode == 0
    return found if runs else None


def has_wheels(python: str) -> bool:
    """Whether the image's packages are installed there."""
    code = "import cutlass, pytest, torch"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


@pytest.mark.slow
def test_the_tree_is_written_for_the_python_of_the_image(root, modal_app):
    """Where that version is not installed, at least its grammar and its library are checked."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11" and modal_app.PYTHON >= "3.11"
    gone = {"asynchat", "asyncore", "distutils", "imp", "smtpd"}  # with Python 3.12
    version = tuple(map(int, modal_app.PYTHON.split(".")))
    for file in [*(root / "cutex").rglob("*.py"), *(root / "kernels").rglob("*.py")]:
        tree = ast.parse(file.read_text(), feature_version=version)
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not gone & {name.partition(".")[0] for name in names}, file


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpu", "A100"], "--gpu 'A100' is not one of B200, H200, H100!"),
        (["--gpu", "H100"], "may be answered with an H200"),
        (["--max-cost", "0.01"], "--max-cost 0.01: this would cost about $0."),
    ],
)
def test_bad_input_rents_nothing(cloud, modal_run, argv, says):
    ran = modal_run(*argv)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err
    assert cloud.runs == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("via", [("-m", "modal", "run"), ()], ids=["modal run", "python"])
def test_without_a_token_the_message_says_what_to_do(cloud, modal_run, via):
    none = {"MODAL_TOKEN_ID": "", "MODAL_TOKEN_SECRET": ""}
    ran = modal_run("--no-preflight", via=via, **none)
    assert ran.code == 1
    assert "modal token new" in re.sub(r"\s+", " ", ran.out + ran.err)
    assert "Traceback" not in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("via", [("-m", "modal", "run"), ()], ids=["modal run", "python"])
def test_without_a_server_one_sentence_says_so_at_once(modal_run, via):
    """Modal's client tries for a minute, and `modal run` prints nothing meanwhile."""
    began = time.monotonic()
    ran = modal_run("--no-preflight", via=via, MODAL_SERVER_URL="http://127.0.0.1:9")
    assert ran.code == 2 and time.monotonic() - began < 45
    says = "Modal's server http://127.0.0.1:9 cannot be reached: Connection refused"
    assert ran.err == f"cutex: {says}\n"


def test_what_needs_no_server_asks_for_none(modal_app):
    asks = modal_app.is_modal_run
    assert asks(["/venv/bin/modal", "run", "modal_app.py", "--op", "tests"])
    assert asks(["/site/modal/__main__.py", "run", "modal_app.py"])
    assert not asks(["/venv/bin/modal", "run", "modal_app.py", "--help"])
    assert not asks(["modal_app.py", "--op", "tests"])
    assert not asks(["/pkg/modal/_container_entrypoint.py"])


# ---- without the client


@pytest.mark.slow
def test_the_plan_needs_no_token(root):
    ran = subprocess.run(
        [sys.executable, "modal_app.py", "--dry-run", "--compare", "cublas"],
        cwd=root,
        env={k: v for k, v in os.environ.items() if not k.startswith("MODAL_")}
        | {"MODAL_CONFIG_PATH": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "8192x8192x4096 bf16 beside cublas" in ran.stdout
    assert "in all about $" in ran.stdout


def test_the_function_asks_for_what_is_priced(modal_app):
    info = modal_app.run.info()
    assert info.gpus == [("B200", 1)]
    assert info.timeout == 600


def test_the_image_holds_what_the_constraints_pin(root, modal_app):
    pinned = set((root / "constraints.txt").read_text().splitlines())
    assert {re.sub(r"\[.*]", "", wheel) for wheel in modal_app.WHEELS} <= pinned

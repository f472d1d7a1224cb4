from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from cutex.results import Peer, Result, Timing, append, ledger, parse, read


def timing(median: float) -> Timing:
    return Timing(median, median - 1, median + 1, 50, 6, "cold", 3.5)


RESULT = Result(
    op="gemm",
    stage=3,
    title="warp specialisation",
    arch="sm_90a",
    device="cuda",
    device_name="NVIDIA H200",
    problem={"m": 512, "n": 256, "k": 64, "dtype": "bf16", "init": "normal", "seed": 0},
    config={"tile_m": 128},
    ok=True,
    max_error=0.25,
    tolerance=0.5,
    message="within 0.5",
    run="2026-01-01T00:00:00+00:00",
    environment={"commit": "abc"},
    timing=timing(100.0),
    peers=[Peer("cublas", "torch 2", timing(90.0))],
    gpu_before={"clock_mhz": 1980.0},
)


def test_a_result_survives_its_line():
    line = RESULT.to_json()
    assert "\n" not in line
    assert parse(line) == RESULT


def test_a_line_is_strict_json_even_with_nan():
    line = replace(RESULT, max_error=math.nan).to_json()
    assert "NaN" not in line
    assert parse(line).max_error is None


def test_a_field_of_a_later_version_is_passed_over():
    data = {**json.loads(RESULT.to_json()), "later": 1}
    assert parse(json.dumps(data)) == RESULT


def test_the_ratio_is_above_one_where_the_peer_is_slower():
    assert RESULT.ratio("cublas") == 0.9
    assert RESULT.ratio("quack") is None


def test_appending_keeps_what_was_there(tmp_path):
    path = tmp_path / "deep" / "gemm.jsonl"
    for stage in range(3):
        append(path, replace(RESULT, stage=stage))
    assert [r.stage for r in read(path)] == [0, 1, 2]


def test_a_torn_last_line_costs_only_itself(tmp_path):
    path = tmp_path / "gemm.jsonl"
    append(path, replace(RESULT, stage=0))
    append(path, replace(RESULT, stage=1))
    path.write_text(path.read_text()[:-40])
    assert [r.stage for r in read(path)] == [0]
    append(path, replace(RESULT, stage=2))
    assert [r.stage for r in read(path)] == [0, 2]


def test_a_ledger_is_named_for_the_device(tmp_path):
    assert ledger(tmp_path, RESULT).name == "gemm-nvidia-h200.jsonl"
    simulated = replace(RESULT, device="sim", device_name="simulator")
    assert ledger(tmp_path, simulated).name == "gemm-sim.jsonl"


@pytest.fixture
def clone(root, tmp_path):
    if not (root / ".git").exists():
        pytest.skip("not a git clone, so it cannot be cloned")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", root, clone], check=True)
    return clone


def commit_of(clone) -> str:
    return commits_of(clone, [])[0]


def commits_of(clone, edited) -> list[str]:
    """The commit of `clone` as it is, and with each of the files `edited`, one at a time."""
    code = """
import sys
from pathlib import Path
from cutex.bench.run import commit
print(commit())
for file in map(Path, sys.argv[1:]):
    before = file.read_text()
    file.write_text(before + "# edited\\n")
    print(commit())
    file.write_text(before)
"""
    env = {**os.environ, "PYTHONPATH": str(clone), "CUTEX_COMMIT": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code, *edited], cwd=clone, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_an_edit_anywhere_in_the_package_marks_the_commit_and_one_beside_it_does_not(clone):
    clean = commit_of(clone)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (clone / "README.md").write_text("edited")
    (clone / "results" / "gemm-nvidia-h200.jsonl").write_text("")
    assert commit_of(clone) == clean
    package = (clone / "cutex").resolve()
    folders = sorted({p.parent for p in package.rglob("*.py")})
    folders += [p for name in ("kernels", "schedulers") for p in (clone / name).glob("**/")]
    assert {"cutex/sim", "schedulers", "kernels/gemm/sm90"} <= {
        str(f.relative_to(clone)) for f in folders
    }
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))[:1]]
    assert commits_of(clone, files) == [clean, *[f"{clean}+edited"] * len(files)]
    assert commit_of(clone) == clean
    (clone / "schedulers" / "new.py").write_text("")
    assert commit_of(clone) == f"{clean}+edited"

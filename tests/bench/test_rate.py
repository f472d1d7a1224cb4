"""The unit of a problem's speed follows from its limit: TFLOPS, or GB/s and microseconds."""

from __future__ import annotations

import sys
import time

import pytest
from test_page import ledger

from cutex.bench import progress, timing
from cutex.bench.cli import Lines
from cutex.bench.run import environment
from cutex.problem.gemm import GemmProblem
from cutex.report import ladders
from cutex.report.page import page
from cutex.report.rows import ladder_bars
from cutex.results.history import _best_table, best, main
from cutex.results.rate import rate

WIDE, SLIM = GemmProblem(8192, 8192, 4096), GemmProblem(16, 8192, 8192)


def test_memory_binds_where_bytes_take_longer_than_flops():
    assert rate(WIDE, "sm_90a", 800).unit == "TFLOPS"
    slim = rate(SLIM, "sm_90a", 32.0)
    assert (slim.unit, slim.peak) == ("GB/s", 4800)
    assert slim.value == pytest.approx(SLIM.bytes / 32e-6 / 1e9)
    assert str(slim) == f"{slim.value:.0f} GB/s, 32.0 us"
    assert slim.percent == pytest.approx(100 * slim.value / 4800)


def test_no_table_says_0_tflops_of_a_memory_bound_problem(capsys):
    rows = ledger()
    text = ladders(rows)
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| 9 ")]
    head = next(line.split("|") for line in text.splitlines() if line.startswith("| stage"))
    slim = next(i for i, title in enumerate(head) if "16x8192x8192" in title)
    assert "GB/s, " in cells[0][slim] and " us (" in cells[0][slim]
    assert "GB/s" not in cells[0][next(i for i, t in enumerate(head) if "8192x8192x4096" in t)]
    assert "GB/s and microseconds where memory binds" in text
    slim_rows = [r for r in rows if r.problem["m"] == 16]
    assert all("GB/s, " in bar.text for bar in ladder_bars([], slim_rows, slim_rows[0].sizes))
    table = _best_table(best(rows))
    of = next(row for row in table if "16x8192x8192" in row[1])
    assert of[table[0].index("TFLOPS, GB/s")].endswith(" GB/s")
    assert "GB/s" in page(rows)
    Lines("cuda", (), False).result(slim_rows[0])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[-4:] == ["GB/s", "TFLOPS", "%", "peak"]
    assert line.split()[-2] == "-" and 0 < float(line.split()[-1]) <= 100


def test_progress_is_a_line_every_few_seconds_where_stderr_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.progress("tuning", 3) as step:
        step()
        time.sleep(0.2)
    told = capsys.readouterr().err.splitlines()
    assert len(told) >= 2
    assert all(line == "cutex: tuning, 1 of 3, 0 s" for line in told)
    with progress.progress("quick"):
        pass
    assert capsys.readouterr().err == ""
    assert progress.EVERY < 10 and not sys.stderr.isatty()


def test_the_driver_is_kept_with_a_result(monkeypatch):
    monkeypatch.setattr(timing, "driver_version", lambda: "580.65.06")
    assert environment.__wrapped__()["driver"] == "580.65.06"  # not the remembered one


def test_a_list_of_fewer_rows_than_one_is_refused(tmp_path, capsys):
    assert main(["list", "--results", str(tmp_path), "--last", "-5"]) == 2
    assert capsys.readouterr().err == "cutex: --last -5: takes a number from 1\n"

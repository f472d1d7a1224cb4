from __future__ import annotations

import dataclasses
import re
import resource

import pytest

from cutex.kernels.gemm import stages
from cutex.report import BEGIN, END, ladders, main, results_page, rewrite
from cutex.report.page import all_ladders
from cutex.report.predictions import predicted
from cutex.report.rows import heading, peak, peer_title
from cutex.results import Peer, Result, Timing, append, read_all
from cutex.results.rate import Rate

FIRST = stages("sm_90a")[0].idea
README = f"before\n{BEGIN}\nold\n{END}\nafter\n"


def result(us: float, *, stage: int = 0, run: str = "2026-01-01", m: int = 8192, ok: bool = True):
    def took(us: float) -> Timing:
        return Timing(us, us, us, 50, 6, "cold", 3.0)

    return Result(
        op="gemm",
        stage=stage,
        title="",
        arch="sm_90a",
        device="cuda",
        device_name="NVIDIA H200",
        problem={"m": m, "n": 8192, "k": 4096, "dtype": "bf16", "init": "normal", "seed": 0},
        config={},
        ok=ok,
        max_error=0.0,
        tolerance=1.0,
        message="",
        run=run,
        environment={},
        timing=took(us) if ok else None,
        tflops=2 * m * 8192 * 4096 / us / 1e6 if ok else None,
        peers=[Peer("cublas", "torch 2", took(800.0))] if ok else [],
    )


def row(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line


def test_without_results_the_ladder_says_that_it_is_untimed():
    text = ladders([])
    assert text.count("Not timed yet") == len(list(all_ladders()))
    for name in ("sm_90a", "sm_100a"):
        assert all(s.idea in text for s in stages(name))


def test_a_peer_timed_beside_an_earlier_stage_alone_keeps_its_row():
    last = dataclasses.replace(result(900.0, stage=1, run="2026-01-02"), peers=[])
    text = ladders([result(1000.0), last])
    assert row(text, "|  | cuBLAS").endswith("| cuBLAS (torch 2) | 687 |")


def test_a_peer_is_called_what_its_operator_calls_it():
    assert peer_title("torch", "softmax") == "torch.softmax"
    assert peer_title("torch", "reduce") == "torch.sum"
    assert peer_title("torch") == "torch"  # beside several
    assert peer_title("fa4") == "FlashAttention-4"  # all call it so


def test_a_timed_stage_shows_tflops_and_its_ratio_to_cublas():
    text = ladders([result(1000.0)])
    assert row(text, f"| 0 | {FIRST}").endswith("| 550 (0.80) |")
    assert row(text, "|  | cuBLAS").endswith("| 687 |")
    assert "one NVIDIA H200: bf16, Gaussian data, cold L2, 2026-01-01" in text
    assert text.count("Not timed yet") == len(list(all_ladders())) - 1


def test_a_peak_is_that_of_the_problem_s_own_units(root):
    rows = {
        r.op: r for r in read_all(root / "results") if r.known and r.timing and r.device != "sim"
    }
    assert {"gemm", "gemm_fp8", "gemm_fp32"} <= set(rows)
    assert [round(peak(rows[op])) for op in ("gemm", "gemm_fp8", "gemm_fp32")] == [989, 1994, 67]
    assert all("Stated dense peak" in ladders([r]) for r in rows.values())


def test_a_rate_below_ten_has_a_decimal():
    assert (
        str(Rate(6.25, "TFLOPS", 1.0, 67.0)) == "6.2"
        and str(Rate(47.4, "TFLOPS", 1.0, 67.0)) == "47"
    )


def test_the_newest_run_counts_whatever_the_order_of_lines():
    text = ladders([result(500.0, run="2026-01-02"), result(1000.0)])
    assert row(text, f"| 0 | {FIRST}").endswith("| 1100 (1.60) |")


def test_a_wrong_result_is_no_figure():
    assert ladders([result(0.0, ok=False)]) == ladders([])


def test_each_size_has_its_column():
    text = ladders([result(1000.0), result(500.0, m=4096)])
    assert "| 8192x8192x4096 | 4096x8192x4096 |" in text


def test_a_readme_has_the_main_sizes_and_the_page_of_tables_has_all():
    rows = [result(1000.0), result(500.0, m=4000)]
    assert "| 8192x8192x4096 | 4000x8192x4096 |" in results_page(rows)
    text = rewrite(README, rows)
    assert "| 8192x8192x4096 |" in text and "4000x" not in text
    assert "(docs/results.md)" in text and "(docs/results.md)" not in results_page(rows)


def test_a_readme_names_ladders_without_figures_and_the_page_of_tables_shows_their_stages():
    text = rewrite(README, [result(1000.0)])
    (bare,) = (line for line in text.splitlines() if line.startswith("Ladders without figures"))
    bare = bare.partition(": ")[2].rstrip(".").split(", ")
    for op, target, ladder in all_ladders():
        of_page, name = f"### {heading(op, target)} ({target.name})", heading(op, target)
        brief = f"| {name} ({target.name}) |" in text
        assert [name in bare, of_page in text, brief].count(True) == 1
        assert ladder[0].idea in results_page([])
        assert name not in bare or not predicted(op, target.name)


def test_links_of_both_pages_lead_to_files(root):
    for page, base in ((rewrite(README, []), root), (results_page([]), root / "docs")):
        named = re.findall(r"\]\(([^)#]+)", page)
        assert named and all((base / name).is_file() for name in named)


def test_only_what_stands_between_the_marks_is_rewritten():
    text = rewrite(README, [])
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert rewrite(text, []) == text


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="to write between"):
        rewrite("nothing here", [])


def test_the_command_writes_the_file(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    append(tmp_path / "results" / "gemm.jsonl", result(1000.0))
    argv = ["--results", str(tmp_path / "results"), "--readme", str(readme)]
    assert main(argv) == 0
    assert "550 (0.80)" in readme.read_text()
    assert "550 (0.80)" in (tmp_path / "docs" / "results.md").read_text()
    readme.write_text("nothing here")
    assert main(argv) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    assert main(["--results", str(tmp_path / "nowhere"), "--readme", str(readme)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "nowhere: there is no such folder" in sentence
    assert readme.read_text() == f"{BEGIN}\n{END}\n"


@pytest.mark.parametrize("name", ["README.md", "results/gemm.jsonl", "a folder", "nowhere/x"])
def test_where_no_page_can_be_written_nothing_is(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    for folder in ("results", "a folder"):
        (tmp_path / folder).mkdir()
    append(tmp_path / "results" / "gemm.jsonl", result(1000.0))
    (tmp_path / "README.md").write_text(README)
    before = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(["--html", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_readme_is_written_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "there.md").write_text(README + 20_000 * "kept\n")
    (tmp_path / "README.md").symlink_to("there.md")
    before = (tmp_path / "there.md").read_text()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, most[1]))  # as a disk that is full there
    try:
        assert main(["--html", "page.html"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "there.md").read_text() == before
    assert main(["--html", "page.html"]) == 0
    assert (tmp_path / "README.md").is_symlink()
    assert (tmp_path / "there.md").read_text() != before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("line", ['{"op": "ge', "[1]", '{"op": "gemm"}'])
def test_damaged_predictions_are_one_sentence(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "timing").mkdir(parents=True)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "results" / "timing" / "predicted-sm_100a.jsonl").write_text(line)
    assert main([]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "predicted-sm_100a.jsonl is damaged: python -m cutex.clock --predict" in sentence
    assert (tmp_path / "README.md").read_text() == README


def test_a_page_takes_the_place_of_an_older_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(README)
    assert main([]) == main([]) == 0

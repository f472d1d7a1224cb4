"""python -m cutex.fit.measuring: configs timed for the fit of Hopper's cost model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cutex.errors import BadOption
from cutex.fit import costs as fit
from cutex.fit import measuring, proposals
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.measured.nearby import CAUTION
from cutex.ops import simulated
from cutex.problem.models import corpus

NARROW = {"tile_m": 64, "tile_n": 16, "k_bytes": 256, "num_stages": 3, "epi_n": 16,
          "epi_stages": 1, "swap_ab": True, "warpgroups": 1}  # fmt: skip
WIDE = {"tile_n": 64, "num_stages": 3, "epi_n": 64, "epi_stages": 1, "warpgroups": 2}
LINE = f"16x128x96 forward bf16 {json.dumps([NARROW, WIDE])}"


def written(folder: Path, *lines: str) -> Path:
    file = folder / "problems.txt"
    file.write_text("\n".join(lines))
    return file


def test_a_line_names_a_problem_and_maybe_its_configs(tmp_path: Path):
    file = written(tmp_path, LINE, "", "512x96x64 wgrad bf16", "8x32x64 forward e4m3")
    first, second, third = measuring.asked(file)
    assert first.configs == (Sm90Config.from_row(NARROW), Sm90Config.from_row(WIDE))
    assert second.problem.mnk == (512, 96, 64) and not second.configs
    assert (second.problem.tokens, second.problem.out_features) == (64, 512)
    assert third.row == {"m": 8, "n": 32, "k": 64, "pass": "forward", "dtype": "e4m3"}
    chosen, *ranked = measuring.configs_of(third, 3)
    assert 2 <= len(ranked) <= 3 and chosen not in ranked


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("16x128 forward bf16", "is no 'MxNxK pass dtype'"),
        ("16x128x96 sideways bf16", "is no 'MxNxK pass dtype'"),
        ("0x128x96 forward bf16", "every size must be at least 1"),
        ('16x128x96 forward bf16 [{"tile_x": 3}]', "tile_x"),
        ("16x128x96 forward bf16 [{]", "line 1"),
        ("", "names no problem"),
        (next(e.name for e in corpus() if not e.fits), "is of the half that is for reporting"),
    ],
)
def test_a_line_that_cannot_be_taken_is_one_sentence(tmp_path, capsys, line, says):
    file = written(tmp_path, line)
    with pytest.raises(BadOption, match=r"problems\.txt"):
        measuring.asked(file)
    assert measuring.main([str(file), "--preflight"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert says in told


def test_a_file_that_is_not_there_and_a_machine_without_a_gpu(tmp_path, capsys, monkeypatch):
    assert measuring.main([str(tmp_path / "none.txt")]) == 2
    assert "none.txt: No such file" in capsys.readouterr().err
    monkeypatch.setattr(measuring, "local_arch", lambda: None)
    file, out = written(tmp_path, LINE), tmp_path / "out.jsonl"
    assert measuring.main([str(file), "--out", str(out)]) == 2
    assert "no Hopper GPU" in capsys.readouterr().err and not out.exists()


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A row from kernels that ran in the simulator; its times are of no clock."""
    (one,) = measuring.asked(written(tmp_path_factory.mktemp("measuring"), LINE))

    def timer(launches, operands, sampling):
        assert list(launches) == ["cublas", "0", "1"] and len(operands) > 1
        assert all(out.isnan().all() for *_, out in operands[1:])
        return {"cublas": 4.0, "0": 3.0004, "1": 5.0}

    with simulated("sm_90a"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring.timing, "copies_to_rotate", lambda *_: 2)
        return measuring.measured(one, measuring.configs_of(one, 0), "cpu", timer)


@pytest.mark.slow
def test_a_row_says_what_was_timed(row: dict):
    assert row == {
        **{"m": 16, "n": 128, "k": 96, "pass": "forward"},
        "others": {"cublas": 4.0},
        "us": {"0": 3.0, "1": 5.0},
        "configs": [NARROW, WIDE],
    }


def test_a_wrong_result_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (one,) = measuring.asked(written(tmp_path, LINE))
    monkeypatch.setattr(measuring.timing, "copies_to_rotate", lambda *_: 2)
    made = []

    def launcher(compiled, tensors, workspace):
        made.append(compiled)
        scale = len(made)  # the second kernel's result is twice as large
        return lambda a, b, out: out.copy_((scale * (a.float() @ b.float())).to(out.dtype))

    monkeypatch.setattr(measuring, "launcher", launcher)
    with pytest.raises(RuntimeError, match="another result than the first"):
        measuring.measured(one, measuring.configs_of(one, 0), "cpu", lambda *_: {})
    monkeypatch.setattr(measuring, "launcher", lambda *_: lambda a, b, out: None)
    with pytest.raises(RuntimeError, match="NaN"):
        measuring.measured(one, measuring.configs_of(one, 0), "cpu", lambda *_: {})


def test_rows_are_merged_as_those_of_a_further_card(tmp_path: Path, row: dict):
    times = tmp_path / "times.jsonl"
    head = {"about": "a test", "configs": [{**WIDE, "num_stages": 5}]}
    first = {"card": 3, "m": 8, "n": 8, "k": 8, "pass": "forward", "us": {"0": 1.0}}
    times.write_text("".join(json.dumps(x) + "\n" for x in (head, first)))
    file = tmp_path / "timed.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert measuring.merge(file, times) == 1
    head, *rows = map(json.loads, times.read_text().splitlines())
    assert rows[0] == first and rows[1]["card"] == 4
    assert rows[1]["us"] == {"0": 5.0, "1": 3.0}, "a ring's depth makes no other config"
    assert head["configs"] == [{**WIDE, "num_stages": 5}, NARROW]
    configs, _ = fit.measured_rows(times)
    assert configs[1] == Sm90Config.from_row(NARROW)
    before = times.read_text()
    with pytest.raises(BadOption, match=r"16x128x96 forward bf16 is in times\.jsonl already"):
        measuring.merge(file, times)
    for wrong in ("no json", "{}", "[]", json.dumps(row | {"us": {"0": 3.0}}),
                  json.dumps(row | {"us": {"0": 3.0, "1": 0}}), json.dumps(row | {"m": "16"}),
                  json.dumps(row | {"configs": [{"tile_x": 1}, {}]})):  # fmt: skip
        file.write_text(wrong)
        with pytest.raises(BadOption, match=r"timed.jsonl line 1 is no row of a timed problem"):
            measuring.merge(file, times)
    assert times.read_text() == before and not list(tmp_path.glob("*.tmp"))


def test_rows_of_another_board_have_a_file_of_their_own(tmp_path, monkeypatch, row: dict):
    usual = tmp_path / "gemm-nvidia-h200.jsonl"
    usual.write_text(json.dumps({"about": "a test", "configs": []}) + "\n")
    monkeypatch.setattr(fit, "FOLDER", tmp_path)
    monkeypatch.setattr(measuring, "FOLDER", tmp_path)
    file = tmp_path / "timed.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert measuring.times_of(file) == usual
    file.write_text(json.dumps(row | {"board": "H100 PCIe"}) + "\n")
    with pytest.raises(BadOption, match="times on H100 PCIe do not belong in gemm-nvidia-h200"):
        measuring.merge(file, usual)
    times = measuring.times_of(file)
    assert times.name == "gemm-nvidia-h100-pcie.jsonl" and times == measuring.times_of(file)
    assert measuring.merge(file, times) == 1
    assert fit.board_of(times).num_sms == 114 and fit.board_of(usual).board == "H200"
    _, (merged,) = fit.measured_rows(times)
    assert "board" not in merged and merged["card"] == 1


def test_the_builders_compile_what_is_asked_for(tmp_path, monkeypatch, capsys):
    jobs = []

    def build(given, ended):
        jobs.extend(given)
        return [False] * len(jobs)

    monkeypatch.setattr(measuring.building, "build", build)
    assert measuring.main([str(written(tmp_path, LINE)), "--preflight"]) == 0
    assert [job.there.config.tiles for job in jobs] == [
        Sm90Config.from_row(NARROW), Sm90Config.from_row(WIDE)
    ]  # fmt: skip
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_what_is_drawn_may_be_faster_than_the_choice_and_was_not_timed(tmp_path, capsys):
    assert measuring.main(["--propose", "4", "--first", "3", "--seed", "5"]) == 0
    told = capsys.readouterr().out
    drawn = measuring.asked(written(tmp_path, told))  # none of the reporting half
    assert len(drawn) == 4 and {x.problem.dtype for x in drawn} == {"bf16", "e4m3"}
    known = proposals.timed()
    assert sum(map(len, known.values())) > 5000
    for one in drawn:
        choice, *others = (c.tiles for c in measuring.configs_of(one, 3))
        assert 1 <= len(others) <= 2
        assert not {fit.geometry(c) for c in others} & known[one.name]
        call = proposals.arranged(*one.problem.inputs("meta"), *one.problem.outputs("meta"))[1]
        hoped, feared = (proposals.predicted(call, x) for x in (-CAUTION, CAUTION))
        alike = [c for c in feared if fit.tiling(c) == fit.tiling(choice)] or list(feared)
        assert hoped[others[0]] <= 1.01 * min(feared[c] for c in alike)
        assert all(hoped[c] <= feared[c] for c in alike)
    assert measuring.main(["--propose", "4", "--first", "3", "--seed", "5"]) == 0
    assert capsys.readouterr().out == told
    assert measuring.main(["--propose", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_problem_that_fails_does_not_cost_those_behind_it(tmp_path, monkeypatch, capsys):
    file, out = written(tmp_path, LINE, "8x32x64 forward e4m3"), tmp_path / "out.jsonl"

    def measured(one, configs):
        if one.problem.dtype == "bf16":
            raise RuntimeError("another result")
        return one.row

    monkeypatch.setattr(measuring, "local_arch", lambda: SimpleNamespace(name="sm_90a"))
    monkeypatch.setattr(measuring, "build", lambda configs: [])
    monkeypatch.setattr(measuring, "measured", measured)
    assert measuring.main([str(file), "--out", str(out)]) == 1
    assert [json.loads(line)["dtype"] for line in out.read_text().splitlines()] == ["e4m3"]
    told = capsys.readouterr().err
    assert "16x128x96 forward bf16: RuntimeError: another result" in told
    assert measuring.main([str(file), "--seconds", "-1"]) == 2
    assert "--seconds -1: a number above 0" in capsys.readouterr().err


def test_what_needs_the_clone_says_so_without(tmp_path, monkeypatch, capsys):
    """As installed from a wheel, which has no results."""
    monkeypatch.setattr(measuring, "TIMES", tmp_path / "results" / "configs" / "times.jsonl")
    for options in (["--propose", "3"], ["--merge", "timed.jsonl"]):
        assert measuring.main(options) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert "clone" in told

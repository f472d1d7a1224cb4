"""The results of a rental are kept, with any reply and any failure of the disk."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_ledger import row
from test_rental import BIG, Cloud

from cutex import results
from cutex.cloud import rental
from cutex.results import history, recorder


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def run(cloud, tmp_path, capsys, monkeypatch):
    """Rent with `cloud` into tmp_path/results; rescue files go to tmp_path/rescue."""
    (tmp_path / "rescue").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "rescue"))

    def run(*argv: str):
        given = [*argv, "--no-preflight", "--out", str(tmp_path / "results")]
        code = rental.main(given, cloud.rent)
        return code, capsys.readouterr()

    return run


def stages_kept(tmp_path) -> list[int]:
    return [r.stage for r in results.read_all(tmp_path / "results")]


def rescued(tmp_path) -> list[str]:
    return [line for file in (tmp_path / "rescue").iterdir() for line in file.open()]


def change_replies(cloud, change):
    """Replace each reply by `change(reply, number)`."""
    honest = cloud.rent

    async def rent(*given):
        number = 0
        async for reply in honest(*given):
            yield change(reply, number)
            number += 1

    cloud.rent = rent


THREE = ("--stage", "0", *BIG, "--mnk", "4096,4096,4096", "--mnk", "2048,2048,2048")


def test_a_write_that_fails_costs_no_other_row(cloud, run, tmp_path, monkeypatch):
    honest, calls = recorder.append, []

    def full(path, result):
        calls.append(result)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return honest(path, result)

    monkeypatch.setattr(recorder, "append", full)
    code, told = run(*THREE)
    assert code != 0
    assert len(stages_kept(tmp_path)) == 2
    assert "8192x8192x4096" in told.out, "a row is printed before it is recorded"
    assert "a row was not recorded" in told.err and "No space left on device" in told.err
    (line,) = rescued(tmp_path)
    assert results.parse(line).sizes == (8192, 8192, 4096)
    (file,) = (tmp_path / "rescue").iterdir()
    assert history.main(["merge", str(file), "--results", str(tmp_path / "results")]) == 0
    assert len(stages_kept(tmp_path)) == 3


def test_where_no_file_can_be_written_the_row_is_printed(cloud, run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "append", full)
    monkeypatch.setattr(recorder.tempfile, "mkstemp", full)
    code, told = run(*THREE)
    assert code != 0
    lines = [line for line in told.out.splitlines() if line.startswith("{")]
    assert [results.parse(line).sizes[0] for line in lines] == [8192, 4096, 2048]


FOREIGN = [
    None,
    "a reply",
    {},
    {"index": 0},
    {"index": 7, "seconds": 1.0, "results": [], "notices": []},
    {"index": 0, "seconds": "x", "results": [], "notices": []},
    {"index": 0, "seconds": float("nan"), "results": [], "notices": []},
    {"index": 0, "seconds": 1.0, "results": 5, "notices": []},
    {"index": 0, "seconds": 1.0, "results": [b"\xff"], "notices": None},
    {"index": 0, "seconds": 1.0, "results": ["{}", "[" * 99999, '{"op": NaN}'], "notices": []},
    {"index": 0, "seconds": 1.0, "results": [], "notices": 5},
    {"index": 0, "seconds": 1.0, "results": [], "notices": [], "probes": "none"},
    {"index": 0, "seconds": 1.0, "results": [], "notices": [], "junit": 5},
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_reply_costs_no_other(foreign, cloud, run, tmp_path):
    change_replies(cloud, lambda reply, number: foreign if number == 0 else reply)
    code, told = run(*THREE)
    assert code != 0
    assert len(stages_kept(tmp_path)) == 2
    assert rescued(tmp_path)
    assert "a reply is not as it should be" in told.err or "was not written" in told.err


def test_a_notice_of_characters_that_no_terminal_has_is_printed(cloud, run, tmp_path):
    change_replies(cloud, lambda reply, number: {**reply, "notices": ["\ud800"]})
    code, told = run(*THREE)
    assert code == 0 and len(stages_kept(tmp_path)) == 3
    assert "cutex: \\ud800" in told.err


def test_the_right_rows_of_a_reply_with_a_wrong_one_are_kept(cloud, run, tmp_path):
    def spoil(reply, number):
        lines = reply["results"]
        return {**reply, "results": [lines[0], lines[1][:-30], *lines[2:]]} if not number else reply

    change_replies(cloud, spoil)
    code, _ = run("--gpu", "H200", *BIG)
    assert code != 0
    assert 0 in stages_kept(tmp_path) and 1 not in stages_kept(tmp_path)
    assert 9 in stages_kept(tmp_path)


def test_a_call_without_an_answer_is_told(cloud, run):
    honest = cloud.rent

    async def two(*given):
        async for reply in honest(*given):
            if reply["index"] != 1:
                yield reply

    cloud.rent = two
    code, told = run(*THREE)
    assert code != 0
    assert "1 of 3 calls were not answered" in told.err


def test_a_reply_that_arrives_twice_is_priced_once(cloud, run):
    cloud.times = 2
    code, told = run(*THREE)
    assert code == 0
    assert "B200: 108 s measured" in told.out  # three calls of 36 s


def test_a_row_names_no_path(cloud, run, tmp_path):
    def elsewhere(reply, number):
        data = json.loads(reply["results"][0])
        return {**reply, "results": [json.dumps({**data, "op": "../../x"})]}

    change_replies(cloud, elsewhere)
    code, _ = run(*THREE)
    assert code != 0
    assert {p.name for p in tmp_path.iterdir()} <= {"results", "rescue"}
    with pytest.raises(ValueError, match="names no ledger"):
        results.ledger(tmp_path, replace(row(), op="../../x"))


def test_the_ledger_is_tried_before_anything_is_rented(cloud, run, tmp_path):
    (tmp_path / "results").write_text("a file, where a folder belongs")
    code, told = run(*THREE)
    assert code == 2
    (sentence,) = told.err.splitlines()
    assert "--out" in sentence and "cannot keep results" in sentence
    assert cloud.asked == []


def test_a_ledger_that_is_a_folder_is_told_before(cloud, run, tmp_path):
    (tmp_path / "results" / "gemm-nvidia-b200.jsonl").mkdir(parents=True)
    code, told = run(*THREE)
    assert code == 2 and cloud.asked == []
    assert "gemm-nvidia-b200.jsonl: Is a directory" in told.err


# ---- the ledger


def test_a_byte_that_is_no_utf8_costs_only_its_line(tmp_path, capsys):
    path = tmp_path / "gemm-nvidia-h200.jsonl"
    results.append(path, row())
    with path.open("ab") as file:
        file.write(b'{"id":"0123456789ab"\xff}\n')
    assert results.append(path, row(stage=4))
    assert not results.append(path, row(stage=4))
    assert history.main(["list", "--results", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 3
    assert "gemm-nvidia-h200.jsonl line 2 is no row, and is passed over" in told.err


def test_a_short_write_is_finished(tmp_path, monkeypatch):
    path = tmp_path / "gemm.jsonl"
    honest = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: honest(fd, data[:100]))
    results.append(path, row())
    assert [r.stage for r in results.read(path)] == [3]


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "gemm.jsonl"
    results.append(path, row())
    before, honest, calls = path.read_bytes(), os.write, []

    def full(fd, data):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(fd, data[:100])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        results.append(path, row(stage=4))
    assert path.read_bytes() == before


def test_two_branches_of_a_ledger_merge_and_each_row_counts_once(root, tmp_path):
    def git(*args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (tmp_path / ".gitattributes").write_text((root / ".gitattributes").read_text())
    path = tmp_path / "results" / "gemm-nvidia-h200.jsonl"

    def add(message: str, *ids: str) -> None:
        for name in ids:
            results.append(path, row(id=name))
        git("add", "-A")
        git("commit", "-q", "-m", message)

    add("base", "0")
    git("checkout", "-q", "-b", "other")
    add("theirs", "both", "theirs")
    git("checkout", "-q", "main")
    add("ours", "ours", "both")
    git("merge", "-q", "other")
    assert sorted(r.id for r in results.read(path)) == ["0", "both", "ours", "theirs"]


WORDS = [None, True, -1, 0, 1 << 63, 1e308, float("nan"), "", "\x1b[2J", "../..", [], {}, [[]]]


def spoiled(choose: random.Random) -> str:
    """A row with an error somewhere."""
    data = json.loads(row(peers=[results.Peer("cublas", "torch 2", row().timing)]).to_json())
    place = data
    while True:
        name = choose.choice(list(place))
        if isinstance(place[name], dict) and place[name] and choose.random() < 0.7:
            place = place[name]
            continue
        if choose.random() < 0.3:
            del place[name]
        else:
            place[name] = choose.choice(WORDS)
        break
    line = json.dumps(data, separators=choose.choice([(",", ":"), (", ", ": ")]))
    match choose.randrange(8):
        case 0:
            return line[: choose.randrange(len(line))]
        case 1:
            return "[" * 100_000
        case 2:
            return line.replace("3", choose.choice(["9" * 400, "-", "1e999"]), 1)
    return line


def test_no_row_from_elsewhere_breaks_what_reads_the_ledger(tmp_path, capsys, root):
    choose = random.Random(15)
    path = tmp_path / "gemm-nvidia-h200.jsonl"
    path.write_text("\n".join(spoiled(choose) for _ in range(600)) + "\n")
    results.append(path, row(commit="bbbb222", id="last"))
    results.append(path, row(id="first", run="2025"))
    where = ["--results", str(tmp_path)]
    assert history.main(["list", *where, "--last", "9999"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert history.main(["best", *where]) == 0
    assert history.main(["compare", *where, "aaaa111", "bbbb222"]) in (0, 1)
    assert "more lines" in capsys.readouterr().err
    from cutex import report
    from cutex.analysis import roofline

    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    to = ["--readme", str(readme), "--html", str(tmp_path / "report.html")]
    assert report.main([*where, *to]) == 0
    assert roofline.main(["--op", "gemm", "--mnk", "512,256,64", "--gpu", "h200", *where]) == 0


# ---- the local command


def test_the_local_command_keeps_what_it_measured(tmp_path, capsys, monkeypatch):
    from cutex.gemm import main

    def full(path, result):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(recorder, "append", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sizes = ("--mnk", "64,64,64", "--stage", "0", "--device", "sim")
    assert main([*sizes, "--out", str(tmp_path / "results")]) == 2
    told = capsys.readouterr()
    assert "64x64x64" in told.out
    assert "No space left on device" in told.err
    (file,) = tmp_path.glob("cutex-rescue-*")
    assert results.parse(file.read_text()).ok


def test_the_local_command_tries_the_ledger_first(tmp_path, capsys):
    from cutex.gemm import main

    (tmp_path / "file").touch()
    assert main(["--device", "sim", "--out", str(tmp_path / "file" / "deeper")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Not a directory" in told.err


@pytest.mark.slow
def test_a_reader_that_leaves_early_costs_no_row(tmp_path):
    code = (
        "import sys; from test_rental import Cloud, BIG; from cutex.cloud import rental;"
        "sys.exit(rental.main(['--gpu', 'H200', *BIG, '--no-preflight', '--out', sys.argv[1]],"
        " Cloud().rent))"
    )
    here = str(Path(__file__).parent)
    ran = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "results")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, str(Path(here).parent)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ran.stdout.close()
    err = ran.stderr.read()
    assert ran.wait(120) == 0, err
    assert "Traceback" not in err and "BrokenPipe" not in err
    assert stages_kept(tmp_path)[-1] == 9

"""docs/tutorial.md and examples/: every command, output, picture and claim about PTX, repeated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from test_readme import parse
from tutorial_page import PAGE, PICTURES, PREDICTIONS, commands, in_process, plain, steps, written

from cutex.arch import local_arch
from cutex.sim.host import dsl_stand_in

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / PAGE).read_text()
BLOCKS = commands(TEXT)
SHOWN = [block for block in BLOCKS if block[-1].output is not None]
DRAWN = [c for block in BLOCKS for c in block if c.picture]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ONLY = {"5_gemm_hopper": "sm_90a", "6_gemm_blackwell": "sm_100a"}  # the others run on both
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A writable folder that looks like the clone to a command."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / PICTURES).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cutex"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUTE_DSL_ARCH", "")
    return tmp_path


@pytest.mark.sweep(2)
@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block[0].line)
def test_a_command_prints_what_the_page_shows(block, clone):
    for command in block:
        assert plain(in_process(command.line)) == plain(command.output)


def test_no_report_speaks_of_the_simulators_own_files():
    assert "cutex/device/" in TEXT and "cutex/sim/" not in TEXT


def test_no_more_is_left_out_of_that_than_seconds_addresses_and_the_place_of_the_clone():
    said = f"cutex: 3 launches, 0.7 s, loads 0x7f12345678 of 0x400 ({ROOT}/examples/a.py:3)"
    assert (
        plain(said) == "cutex: 3 launches, 0.1 s, loads 0x7f0000000000 of 0x400 (examples/a.py:3)"
    )


@pytest.mark.parametrize("command", [c for c in DRAWN if "--trace" not in c.line], ids=str)
def test_a_layout_is_drawn_by_the_command_below_it(command, clone):
    in_process(command.line)
    assert (clone / command.picture).read_text() == (ROOT / command.picture).read_text()


TIMELINES = [c for c in DRAWN if "--trace" in c.line]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.slow if i else ()) for i, c in enumerate(TIMELINES)],
    ids=str,
)
def test_a_timeline_is_drawn_by_the_command_below_it(command, clone):
    """The clock is fitted again at times, so lengths may differ a little."""
    in_process(command.line)
    drawn, shown = (busy((folder / command.picture).read_text()) for folder in (clone, ROOT))
    assert list(drawn) == list(shown)
    for track in shown:
        assert drawn[track] == pytest.approx(shown[track], abs=0.15), track


def busy(svg: str) -> dict[str, float]:
    """The share of the picture's width in which each track works."""
    filled: dict[str, float] = defaultdict(float)
    names: dict[float, str] = {}
    for mark in ElementTree.fromstring(svg):
        if mark.tag == SVG + "text" and mark.get("x") == "4.0":
            names[float(mark.get("y")) - 13] = mark.text
        elif mark.tag == SVG + "rect" and "--grid" not in mark.get("fill"):
            filled[float(mark.get("y")) - 2] += float(mark.get("width"))
    return {names[y]: part / 768 for y, part in filled.items() if y in names}


def test_each_example_is_short_and_told_of():
    assert len(EXAMPLES) == 6
    for file in EXAMPLES:
        assert len(file.read_text().splitlines()) <= 60, file
        assert f"](../examples/{file.name})" in TEXT
        broken = [b for b in SHOWN if file.name in b[0].line and "broken.py" in b[-1].line]
        reports = "".join(block[-1].output for block in broken)
        assert re.search(r"^cutex: .*\b(race|deadlock|bad address): ", reports, re.MULTILINE), file


OWN_STAGE, OWN_OUTPUT = re.findall(r"```(?:python|text)\n(.*?)```", TEXT, re.DOTALL)


def run_own_stage(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "mine.py"
    file.write_text(code)
    return subprocess.run(
        [sys.executable, file], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_stage_of_ones_own_is_right_and_takes_what_the_page_says(tmp_path):
    """The clock is fitted anew at times, so cycles may differ a little."""
    ran = run_own_stage(OWN_STAGE, tmp_path)
    assert ran.returncode == 0, ran.stderr
    for told, shown in zip(ran.stdout.splitlines(), OWN_OUTPUT.splitlines(), strict=True):
        *words, cycles, unit = told.split()
        *due, cycles_due, _ = shown.split()
        assert (words, unit) == (due, "cycles")
        assert number(cycles) == pytest.approx(number(cycles_due), rel=0.03)


@pytest.mark.slow
def test_its_deadlock_is_told_by_its_own_lines_and_the_name_of_the_slot(tmp_path):
    code = OWN_STAGE.replace("ab.release(take)", "pass").replace("(Stage2, InOrder)", "(InOrder,)")
    code = code.replace(", time=True", "")
    ran = run_own_stage(code, tmp_path)
    line = 1 + next(i for i, x in enumerate(code.splitlines()) if "load(k_tile + ab" in x)
    found = [text for text in ran.stderr.splitlines() if ": deadlock: " in text]
    assert len(found) == 1, ran.stdout + ran.stderr
    first = found[0]
    assert "Deadlock: cutex/device/pipeline.py:" in first and f"called at mine.py:{line}:" in first
    assert "of mbarrier barriers.ab.empty[0] (" in first


def test_each_picture_is_drawn_and_shown():
    there = {f"{PICTURES}{file.name}" for file in (ROOT / PICTURES).iterdir()}
    assert there == {command.picture for command in DRAWN}
    assert there == {f"docs/{name}" for name in re.findall(r"!\[.*?\]\((tutorial/.*?)\)", TEXT)}


def test_each_link_leads_somewhere():
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)]*)\)", TEXT):
        file, _, anchor = link.partition("#")
        assert (ROOT / PAGE).parent.joinpath(file).exists(), link
        assert not anchor or anchor in anchors, link


def test_each_other_command_is_one_that_its_parser_takes():
    others = [c.line for block in BLOCKS for c in block if c.line.startswith("python -m")]
    assert len(others) > 10
    for line in others:
        parse(line.partition(" 2>&1")[0])


def test_the_gains_are_those_of_the_readme():
    assert steps((ROOT / "README.md").read_text()) in TEXT


# -- the page's statements on PTX ------------------------------------------------------------------

PTX = {
    "1_vector_add": [r"ld\.global\.v2\.b64"],
    "4_softmax": [r"(?s)(shfl\.sync\.bfly.*){5}", r"fence\.proxy\.async\.shared"],
    "5_gemm_hopper": [rf", {0x4000_0040_0001_0000 + 2 * k};" for k in range(4)],  # descriptors
    "6_gemm_blackwell": [
        r"tcgen05\.alloc", r"tcgen05\.commit\S*mbarrier::arrive", r"tcgen05\.wait::ld",
        r"tcgen05\.ld\.sync\.aligned\.32x32b\.x64", r"tcgen05\.fence::after_thread_sync",
    ],
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PTX)
def test_the_ptx_is_as_the_page_says(name, clone, monkeypatch):
    text = ptx(f"examples/{name}.py", ONLY.get(name, "sm_100a"), monkeypatch)
    for pattern in PTX[name]:
        assert re.search(pattern, text), pattern


def test_without_the_promise_of_alignment_loads_are_of_4_bytes(clone, monkeypatch):
    code = Path("examples/1_vector_add.py").read_text()
    Path("broken.py").write_text(code.replace(", assumed_align=16", ""))
    text = ptx("broken.py", "sm_100a", monkeypatch)
    assert set(re.findall(r"ld\.global\S*", text)) == {"ld.global.b32"}


def ptx(script: str, arch: str, monkeypatch) -> str:
    """The PTX of the one function that the script compiles."""
    seen = []

    class Seen(dsl_stand_in.Simulated):
        def __call__(self, *arguments, **named):
            seen.append(self.ptx)
            raise SystemExit

    monkeypatch.setattr(dsl_stand_in, "Simulated", Seen)
    in_process(f"python -m cutex.sim --arch {arch} {script}")
    (text,) = seen
    return text


def test_the_tensor_of_a_tma_load_holds_coordinates():
    from cutlass import cute

    from cutex.analysis.traced import traced

    def body() -> str:
        coordinates = cute.make_identity_tensor((100, 200))
        return str(cute.local_tile(coordinates, (32, 64), (1, 2)))

    assert "(32,128) o (32,64):(1@0,1@1)" in traced("sm_90a", body)
    assert "`(32,128) o (32,64):(1@0,1@1)`" in TEXT


# -- elsewhere -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_each_example_runs_on_a_gpu_as_it_is(file):
    here = local_arch()
    if ONLY.get(file.stem, here) != here:
        pytest.skip(f"for {ONLY[file.stem]}")
    ran = subprocess.run([sys.executable, file], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(r"\d+ .* (right|copied)\n", ran.stdout)


@pytest.mark.slow
def test_the_page_is_what_a_shell_gives(clone):
    """One interpreter for each command, as for a reader."""
    Path("README.md").write_text((ROOT / "README.md").read_text())
    assert plain(written(TEXT)) == plain(TEXT)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("prediction", PREDICTIONS, ids=lambda p: p.script)
def test_the_numbers_of_the_clock_are_those_that_it_prints(clone, prediction):
    """`python tests/tutorial_page.py` writes them."""
    shown = [number(x) for x in prediction.shown(TEXT).groups()]
    told = [number(x) for x in prediction.told()]
    assert told == pytest.approx(shown, rel=0.03, abs=1)


def test_every_number_of_cycles_on_the_page_is_written_by_a_command():
    """Or is of the arithmetic that a sentence makes, about 1024 cycles of an MMA."""
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    known = {x for p in PREDICTIONS for x in p.shown(TEXT).groups()} | {"1024"}
    assert set(re.findall(r"([\d,]*\d)(?: predicted)?\s+cycles", prose)) <= known


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_an_error_of_the_simulator_is_told_with_a_prediction_too(clone):
    code = Path("examples/3_reduction.py").read_text()
    Path("broken.py").write_text(code.replace("PART * 4", "PART * 2"))
    assert "ended by Deadlock" in in_process("python -m cutex.sim --time broken.py")

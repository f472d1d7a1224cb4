"""The page that python -m cutex.report writes, also in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from cutex.kernels.gemm import stages
from cutex.problem import OPS, problem_class
from cutex.problem.gemm import GemmProblem
from cutex.report import pictures
from cutex.report.page import all_ladders, page
from cutex.report.predictions import predicted
from cutex.report.rows import peer_hue
from cutex.results import Peer, Result, Timing
from cutex.svg import HUES

SIZES = (
    *((size, size, size) for size in (1024, 2048, 4096, 8192)),
    *((m, 8192, 8192) for m in (16, 64, 256, 1024)),
    (8192, 8192, 4096),
)


def took(us: float) -> Timing:
    return Timing(us, us * 0.97, us * 1.04, 50, 6, "cold", 3.5)


def ledger(runs: int = 1) -> list[Result]:
    """A made-up history of the Hopper ladder: every stage at every size, beside two peers."""
    rows = []
    for run in range(runs):
        for mnk in SIZES:
            problem = GemmProblem(*mnk)
            ideal = max(problem.flops / 740e6, problem.bytes / 4.2e6)
            peers = [
                Peer("cublas", "torch 2.13.0", took(1.1 * ideal + 2)),
                Peer("quack", "quack-kernels 0.6.5", took(1.05 * ideal + 3)),
            ]
            ladder = stages("sm_90a")
            for i, stage in enumerate(ladder):
                us = ideal * (1 + 3 * (1 - (i + 1) / len(ladder))) + 2
                rows.append(
                    Result(
                        op="gemm",
                        stage=stage.number,
                        title=stage.title,
                        arch="sm_90a",
                        device="cuda",
                        device_name="NVIDIA H200",
                        problem={
                            **dict(zip("mnk", mnk, strict=True)),
                            "dtype": "bf16",
                            "init": "normal",
                            "seed": 0,
                        },
                        config={},
                        ok=not (run == 0 and mnk == SIZES[0] and i == 1),
                        max_error=0.5,
                        tolerance=1.0,
                        message="",
                        run=f"2026-01-{1 + run % 28:02}T12:00:00+00:00",
                        environment={"commit": f"{run:07x}", "torch": "2.13.0", "python": "3.12"},
                        timing=took(us),
                        tflops=problem.flops / us / 1e6,
                        gbs=problem.bytes / us / 1e3,
                        percent_of_peak=100 * problem.flops / us / 1e6 / 989,
                        peers=peers,
                        gpu_before={"clock_mhz": 1620.0, "power_w": 698.0},
                        id=f"{run:012x}",
                        expect="1.05x: <raster> saves L2" if i == 2 else "",
                        cost_usd=0.0123,
                    )
                )
    return rows


class Reader(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self.fetched += [given[name] for name in ("src", "srcset") if name in given]
        if tag not in ("meta", "link", "input", "br", "line", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag not in ("line", "path", "rect", "circle"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing():
    text = page(ledger(2))
    reader = Reader(text)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {f"#{name}" for name in reader.ids} >= set(reader.links)
    assert len(reader.links) == 6
    assert reader.fetched == []
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert "url(" not in text


def test_it_stays_light_however_long_the_history():
    assert len(page(ledger(40)).encode()) < 1_000_000


def test_it_tells_ideas_notes_ratios_and_wrong_results():
    text = page(ledger())
    for stage in [*stages("sm_90a"), *stages("sm_100a")]:
        assert escape(stage.idea) in text
    assert "1.05x: &lt;raster&gt; saves L2" in text
    assert "WRONG" in text
    assert "Geometric means: " in text
    assert "Predicted, not measured: no B200 has run it." in text


def test_ladders_that_no_gpu_has_run_show_what_is_predicted():
    rows = predicted("attention", "sm_100a")
    text = page([])
    assert rows
    for row in rows:
        assert str(row) in text


def test_an_empty_ledger_makes_a_page_too():
    text = page([])
    Reader(text)
    untimed = text.count("Not timed yet"), text.count("Predicted, not measured")
    ladders = [bool(predicted(op, target.name)) for op, target, _ in all_ladders()]
    assert untimed == (ladders.count(False), ladders.count(True))
    assert "No sweep yet" in text


def test_a_picture_stands_alone_in_light_and_dark():
    (name, svg), *rest = pictures(ledger()).items()
    assert (name, rest) == ("ladder-sm_90a.svg", [])
    assert svg.startswith("<svg ")
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert "prefers-color-scheme:dark" in svg
    assert all(stage.title in svg for stage in stages("sm_90a"))


# ---- in a browser

HEIGHT = 5000

TRIAL = """
<script>
window.problems = [];
window.addEventListener("error", e => window.problems.push(String(e.message)));
const complain = console.error;
console.error = (...words) => { window.problems.push(words.join(" ")); complain(...words); };
</script>
"""
CHECKS = """
<script>
window.addEventListener("load", () => {
  const done = {};
  const column = (id, i) => [...document.getElementById(id).tBodies[0].rows]
    .filter(r => !r.hidden).map(r => r.cells[i].dataset.v);
  const sorted = (values, sign) => values.every((v, i) => !i || sign * (v - values[i - 1]) >= 0);
  const head = document.getElementById("best").tHead.rows[0].cells[4].firstChild;
  head.click();
  done.up = sorted(column("best", 4).map(Number), 1);
  head.click();
  done.down = sorted(column("best", 4).map(Number), -1);
  const names = document.getElementById("rows").tHead.rows[0].cells[1].firstChild;
  names.click();
  const commits = column("rows", 1);
  done.text = commits.every((v, i) => !i || commits[i - 1].localeCompare(v) <= 0);
  const filter = document.querySelector("input[data-filters]");
  const all = column("rows", 0).length;
  filter.value = "wrong";
  filter.dispatchEvent(new Event("input"));
  done.filtered = [all, column("rows", 0).length];
  filter.value = "";
  filter.dispatchEvent(new Event("input"));
  const choice = document.querySelector(".ladder select");
  const shown = () => [...document.querySelectorAll(".ladder [data-size]")]
    .filter(b => !b.hidden).map(b => b.dataset.size);
  choice.value = choice.options[2].value;
  choice.dispatchEvent(new Event("change"));
  done.size = [choice.value, ...shown()];
  done.links = [...document.querySelectorAll("nav a")].map(a => {
    a.click();
    return location.hash === a.getAttribute("href") && !!document.querySelector(a.hash);
  });
  const colour = () => getComputedStyle(document.body).backgroundColor;
  const before = colour();
  document.getElementById("theme").click();
  done.theme = [before, colour()];
  document.getElementById("theme").click();
  done.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  done.tables = [...document.querySelectorAll(".scroll")].map(x => x.scrollWidth - x.clientWidth);
  done.problems = window.problems;
  const note = document.createElement("pre");
  note.id = "done";
  note.textContent = JSON.stringify(done);
  parent.document.body.append(note);
});
</script>
"""


@pytest.fixture
def browse(tmp_path):
    """Open a page in headless Chromium at `width` pixels; its DOM at the end, and a screenshot."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install chromium")

    def open_page(text: str, width: int, dark: bool = False) -> tuple[str, Path]:
        picture = tmp_path / f"page-{width}.png"
        # NOTE: no window is narrower than 500 px, so that pages are looked at in a frame
        (tmp_path / "page.html").write_text(text)
        frame = f'<iframe src="page.html" width="{width}" height="{HEIGHT}" style="border:0">'
        (tmp_path / "frame.html").write_text(f'<body style="margin:0">{frame}</iframe>')
        shared = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                  f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files",
                  "--enable-logging=stderr", "--v=0", "--virtual-time-budget=3000"]  # fmt: skip
        if dark:
            shared.append("--blink-settings=preferredColorScheme=0")
        shared += [f"--window-size={max(width, 500)},{HEIGHT}", "--dump-dom"]
        ran = subprocess.run(
            [*shared, f"--screenshot={picture}", (tmp_path / "frame.html").as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in ran.stderr, ran.stderr
        return ran.stdout, picture

    return open_page


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 400])
def test_in_a_browser_it_sorts_filters_and_links_without_an_error(browse, width):
    text = page(ledger(3)).replace("<style>", TRIAL + "<style>", 1)
    dom, picture = browse(text.replace("</body>", CHECKS + "</body>"), width)
    told = re.search(r'<pre id="done">(.*?)</pre>', dom, re.DOTALL)
    assert told, dom[-2000:]
    done = json.loads(told[1])
    assert done["problems"] == []
    assert done["up"] and done["down"] and done["text"]
    all_rows, wrong = done["filtered"]
    assert 0 < wrong < all_rows
    chosen, *shown = done["size"]
    assert shown == [chosen]
    assert done["links"] == [True] * 6
    light, dark = done["theme"]
    assert light != dark
    assert done["overflow"] <= 0
    assert width < 1200 or max(done["tables"]) <= 0, "a table is wider than its box"
    assert picture.stat().st_size > 10_000


def test_every_chart_has_a_title_that_can_be_seen_and_a_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[page.__module__], "TIMELINES", tmp_path)
    text = page(ledger()) + "".join(pictures(ledger()).values())
    charts = [svg for svg in re.findall(r"<svg.*?</svg>", text) if "font-weight" in svg]
    assert len(charts) == len(re.findall(r'<svg[^>]*role="img"', text)) > 4
    for svg in charts:
        (title,) = re.findall(r"<title>([^<]*)</title>(?!</circle>)", svg)[:1]
        seen = re.search(r'<text [^>]*font-weight="600">([^<]*)</text>', svg)
        assert seen and title.startswith(seen[1].rstrip("\u2026")), title
        assert re.search("TFLOPS|GB/s|Speed", seen[1]), seen[1]


def test_no_two_peers_of_an_operator_have_one_colour():
    for op in OPS:
        hues = [peer_hue(name) % HUES for name in ("ours", *problem_class(op).peers)]
        assert len(set(hues)) == len(hues)

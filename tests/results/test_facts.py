"""docs/facts: one line for each fact, whose anchor code and pages may cite."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "facts").glob("*.md"))}
CITED = r"facts/(\w+)\.md(?:#([\w-]+))?"


def facts(page: Path) -> list[str]:
    """The lines of the page's tables below their heads."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [line for line in rows if not line.startswith(("| fact |", "|---"))]


def anchors(page: Path) -> list[str]:
    return re.findall(r'<a id="([\w-]+)"></a>', page.read_text())


def test_every_fact_has_an_anchor_of_its_own():
    without = [
        f"{name}: {row[:60]}"
        for name, page in PAGES.items()
        for row in facts(page)
        if not re.match(r'\| <a id="[\w-]+"></a>\S', row)
    ]
    assert without == [], 'begin the line with `| <a id="its-name"></a>`'
    counts = Counter(f"{name}#{a}" for name, page in PAGES.items() for a in anchors(page))
    assert [a for a, count in counts.items() if count > 1] == []


def test_a_verdict_is_adopted_or_rejected():
    for page in PAGES.values():
        for row in facts(page):
            _, fact, figure, _how, *verdict = re.split(r"(?<!\\)\|", row.rstrip().rstrip("|"))
            assert all(x.strip() for x in (fact, figure)), row[:80]
            assert [v.strip() for v in verdict] in ([], [""], ["adopted"], ["rejected"]), row[-80:]


def cells(row: str) -> list[str]:
    return [x.strip() for x in re.split(r"(?<!\\)\|", row.rstrip())[1:-1]]


def test_a_fact_is_one_whole_line_that_its_table_shows():
    """A cell that the head has no column for is not shown, and a line that is broken in two is no
    row any more."""
    broken = []
    for name, page in PAGES.items():
        lines, wide = page.read_text().splitlines(), 0
        for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1):
            if not line.startswith("|"):
                wide = 0
                broken += [f"{name}:{number}"] if line.strip() and before[:1] == "|" else []
                continue
            wide = wide or len(cells(line))
            whole = line.rstrip().endswith("|") and wide - 1 <= len(cells(line)) <= wide
            broken += [] if whole else [f"{name}:{number}"]
    assert broken == []


def test_how_a_fact_is_known_is_said_by_its_line_or_its_page():
    silent = [
        f"{name}: {row[:60]}"
        for name, page in PAGES.items()
        if "\nHow known, unless" not in page.read_text()
        for row in facts(page)
        if not cells(row)[2]
    ]
    assert silent == []


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "facts.md").read_text()
    assert {*re.findall(r"\(facts/(\w+)\.md\)", index)} == PAGES.keys()


def test_every_fact_that_is_cited_is_there():
    ran = subprocess.run(
        ["git", "grep", "-hoE", r"facts/[a-z_]+\.md(#[a-z0-9-]+)?"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode == 128:
        pytest.skip("not a clone")
    cited = ran.stdout.split()
    assert len(cited) > 10
    for name, anchor in (re.fullmatch(CITED, cite).groups() for cite in {*cited}):
        assert name in PAGES, f"docs/facts/{name}.md"
        assert not anchor or anchor in anchors(PAGES[name]), f"docs/facts/{name}.md#{anchor}"

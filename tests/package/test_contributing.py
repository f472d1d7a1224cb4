"""CONTRIBUTING.md names what there is: each folder of tests, and no file that is not there."""

from __future__ import annotations

import re


def page(root):
    return (root / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_each_folder_of_tests_has_a_row_and_each_row_a_folder(root):
    rows = re.findall(r"^\| .* \| `pytest tests/(\w+)` \| [\d.]+ \|$", page(root), re.MULTILINE)
    folders = {file.parent.name for file in (root / "tests").glob("*/test_*.py")}
    assert sorted(rows) == sorted(folders)


def test_each_path_that_it_names_is_there(root):
    named = re.findall(r"`((?:cutex|kernels|tests|docs|schedulers)/[\w./]*)`", page(root))
    named += re.findall(r"\]\(([\w./]+)\)", page(root))
    assert len(named) > 10
    assert [path for path in named if not (root / path).exists()] == []

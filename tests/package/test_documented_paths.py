"""Documentation and docstrings name files that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PARTS = "cutex", "kernels", "schedulers", "tests", "docs"
PATH = re.compile(rf"(?<![\w/.])((?:{'|'.join(PARTS)})/[\w./-]+\.(?:py|md|json|npz|svg))\b")
OF_OTHERS = "docs/found.md"  # findings in others' repositories, by their paths


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """The documentation and the sources, each with its path."""
    files = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    files += [
        file for part in ("cutex", "kernels", "schedulers") for file in root.glob(f"{part}/**/*.py")
    ]
    for file in files:
        name = file.relative_to(root).as_posix()
        if name not in (OF_OTHERS, "CHANGELOG.md"):
            yield name, file.read_text(encoding="utf-8")


def test_each_path_that_is_named_is_there(root):
    named = [(path, name) for name, text in texts(root) for path in PATH.findall(text)]
    assert len(named) > 100
    assert [(path, name) for path, name in named if not (root / path).exists()] == []


def test_each_module_that_a_kernel_names_in_brackets_is_there(root):
    there = {file.name for part in PARTS for file in root.glob(f"{part}/**/*.py")}
    named = [
        (module, name)
        for name, text in texts(root)
        if name.startswith("kernels/")
        for module in re.findall(r"\((\w+\.py)\)", text)
    ]
    assert len(named) > 30
    assert [(module, name) for module, name in named if module not in there] == []

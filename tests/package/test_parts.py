"""The part of a sweep's cases that always runs."""

from __future__ import annotations

import pytest
from conftest import in_part


@pytest.mark.parametrize("part", [2, 3, 4])
def test_a_part_is_as_large_as_it_says_and_has_every_value_of_every_parameter(part):
    kept = [place for place in range(120) if in_part(place, part)]
    assert kept[0] == 0 and abs(len(kept) - 120 / part) <= 1
    for values in range(2, 9):
        assert {place % values for place in kept} == set(range(values))
        assert {place // values % values for place in kept} == set(range(values))


@pytest.mark.slow
def test_of_a_sweep_the_others_are_slow(python, tmp_path, root):
    file = tmp_path / "test_sweep.py"
    file.write_text(
        "import pytest\n"
        '@pytest.mark.sweep(3)\n@pytest.mark.parametrize("x", range(30))\n'
        "def test_x(x): assert x >= 0\n"
    )
    run = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(root)]
    run += ["-c", str(root / "pyproject.toml"), "-p", "conftest", str(file)]
    kept = sum(in_part(place, 3) for place in range(30))
    for marked, passed in (("not slow", kept), ("slow", 30 - kept)):
        done = python(*run, "-m", marked, PYTHONPATH=f"{root / 'tests'}:{root}")
        assert f"{passed} passed" in done.stdout, done.stdout + done.stderr

"""Predictions side by side: results in order, what a job raises, and records as they are needed."""

from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest

from cutex.clock_errors.processes import in_groups, results
from cutex.sim.timing import stored
from cutex.sim.timing.events import Load, Record, Work
from cutex.sim.timing.trace import Traced


def test_results_of_groups_are_in_order():
    groups = ([partial(divmod, n, 3) for n in range(5)], [], [partial(int, "7")])
    assert in_groups("numbers", groups) == [[divmod(n, 3) for n in range(5)], [], [7]]
    assert results("numbers", []) == []


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_job_raises_is_raised(count):
    with pytest.raises(ValueError, match="invalid literal"):
        results("numbers", [partial(int, "x")] * count)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no other processes")
def test_a_process_that_ends_is_told():
    """As one that takes too much memory; whoever waited for it would wait for ever."""
    with pytest.raises(BrokenProcessPool):
        results("numbers", [partial(os._exit, 3), partial(divmod, 3, 2)] * 2)


def test_records_of_several_files_are_decoded_when_asked_for(tmp_path):
    load = Load(((0, 8),), 64, (1, 0), 2)
    program = [Work(*range(8)), load]
    files = [tmp_path / name for name in ("a.json.gz", "b.json.gz")]
    for name, file in zip("ab", files, strict=True):
        record = Record({0: program, 1: program}, {}, {0: 0, 1: 0}, {0: 0, 1: 1}, 1, 1, 2, True)
        stored.save({name: Traced(record, (1, 1, 1), 1, {}, name)}, file)
    found = stored.load(*files)
    assert list(found) == ["a", "b"] and "c" not in found and len(found) == 2
    programs = found["b"].record.programs
    assert programs[0] == program and programs[0] is programs[1]
    assert found["b"] is found["b"]
    assert found.get("c") is None

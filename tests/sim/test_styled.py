"""Small kernels in styles that are rare in the ladders and public examples: each is right without a
finding, and with a planted fault the report names the line at fault.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import styled_kernels
import torch
from test_planted import load

from cutex.sim import SimError, simulate

SOURCE = Path(styled_kernels.__file__)


class Plant(NamedTuple):
    """``old``, a part of a kernel's text, is replaced by ``new``. ``fault``: a part of the line
    that the report must name; ``says``: a part of its first line.
    """

    old: str
    new: str
    fault: str
    says: str


PLANTS = {
    "add": Plant(
        "if at * 4 < cute.size(mX)", "if at * 4 <= cute.size(mX)", "x.load()", "past the end"
    ),
    "norm": Plant(
        "    cute.arch.sync_threads()  # before the buffer is used again\n", "",
        "sums[thread // 32] = value", "race",
    ),
    "histogram": Plant(
        "cute.arch.atomic_add(bins.iterator + value, Int32(1), scope=\"cta\")",
        "bins[value] += 1", "bins[value] += 1", "race",
    ),
    "prefix": Plant(
        "sX[thread, (i + 1) % 2] = value", "sX[thread, i % 2] = value", "value", "race"
    ),
    "transpose": Plant("cute.arch.sync_threads()  # of the tile", "pass", "tile[column", "race"),
    "stencil": Plant("group(1 if tile < tiles else 0)", "group(1)", "total += sX", "race"),
    "last": Plant('sem="acq_rel"', 'sem="relaxed"', "mPartial[thread]", "race"),
    "cluster": Plant(
        "        cute.arch.mbarrier_wait(arrived, 0)  # for all four\n", "", "parts[i]", "race"
    ),
    "pipe": Plant(
        "            cute.arch.mbarrier_wait(empty + slot, turn ^ 1)  # for room\n", "",
        "mbarrier_arrive_and_expect_tx(full", "barrier misuse",
    ),
    "dependent": Plant("cute.arch.griddepcontrol_wait()", "pass", "mBetween[at] * 3", "race"),
}  # fmt: skip


def run(module, kernel: str):
    arguments, expected = module.operands(kernel)
    report = simulate(getattr(module, kernel), *arguments, arch="sm_90a")
    return report, arguments[-1], expected


SAMPLE = ("norm", "last", "pipe")  # the others are behind the slow marker
EACH = [pytest.param(k, marks=[] if k in SAMPLE else [pytest.mark.slow]) for k in PLANTS]


@pytest.mark.parametrize("kernel", EACH)
def test_it_is_right_and_nothing_is_found(kernel):
    report, result, expected = run(styled_kernels, kernel)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)
    assert not report.findings
    # NOTE: of a slot that is loaded again, by the letter, as CUTLASS does it
    assert len(report.advisories) == (kernel == "pipe")


@pytest.mark.parametrize("kernel", EACH)
def test_its_planted_fault_is_found_and_the_line_named(kernel, tmp_path):
    plant, text = PLANTS[kernel], SOURCE.read_text()
    assert text.count(plant.old) == 1, "a plant changes one place"
    text = text.replace(plant.old, plant.new)
    module, file = load(text, tmp_path)
    with pytest.raises(SimError) as raised:
        run(module, kernel)
    report = str(raised.value)
    head = re.sub(r"^\d+ hazards? found\n", "", report).partition("\n")[0]
    named = {int(n) for n in re.findall(rf"{re.escape(str(file))}:(\d+)", head)}
    lines = {n for n, line in enumerate(text.splitlines(), 1) if plant.fault in line}
    assert named & lines and plant.says in head, report

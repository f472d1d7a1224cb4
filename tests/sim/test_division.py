"""Faster runs: a grid whose clusters several processes simulate gives the same numbers, counts and
reports; a run without checks gives the same numbers.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ptx_kernel import Shape, simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import Hazards, SimError, division, simulate

EIGHT = Shape(grid=8, block=32)


@pytest.fixture
def divided(monkeypatch) -> list[bool]:
    """A list that gets, for each launch to be divided, whether all of its parts were kept."""
    kept: list[bool] = []
    run_parts = division.run_parts

    def told(*arguments):
        parts = run_parts(*arguments)
        kept.append(parts is not None)
        return parts

    monkeypatch.setattr(division, "run_parts", told)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("arch, number", [("sm_90a", 6), ("sm_100a", 5)])
def test_numbers_and_counts_are_those_of_one_process(arch: str, number: int, divided) -> None:
    problem, ours = GemmProblem(512, 512, 128, dtype="bf16"), stage(arch, number)
    kernel = compile(ours.kernel(), "bf16", arch)
    a, b = problem.inputs()
    alone, together = problem.output(), problem.output()
    one = simulate(kernel, a, b, alone)
    three = simulate(kernel, a, b, together, jobs=3)
    assert divided == [True]
    assert torch.equal(alone.view(torch.int16), together.view(torch.int16))
    assert (one.counts, one.ctas, one.launches) == (three.counts, three.ctas, three.launches)
    assert one.rings and one.rings == three.rings


def found(
    body: str, jobs: int | None, order: str = "fifo", **more: np.ndarray
) -> tuple[str, list[int]]:
    """The reports of a snippet, and the values that it wrote."""
    x = np.zeros(64, np.uint32)
    try:
        report = simulate_ptx(body, {"x": x, **more}, EIGHT, order=order, jobs=jobs)
    except SimError as error:
        return re.sub("0x[0-9a-f]+", "an address", str(error)), x.tolist()
    return "\n".join(map(str, report.advisories)), x.tolist()


ONE_EACH = "mad.wide.u32 %d0, %cta, 4, %x; "
BROKEN = {
    "CTAs of two processes write a word": "st.global.u32 [%x], %cta;",
    "one reads what another writes": ONE_EACH
    + "ld.global.u32 %r0, [%x+28]; st.global.u32 [%d0], 5;",
    "one writes out of bounds": "mad.wide.u32 %d0, %cta, 40, %x; st.global.u32 [%d0], 1;",
    "an instruction that none reaches": ONE_EACH
    + "bra END; tex.2d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%d0, {%r5, %r6}]; "
    "END: st.global.u32 [%d0], 3;",
    "one never ends": ONE_EACH + "st.global.u32 [%d0], 3; setp.eq.u32 %p0, %cta, 6; @%p0 trap;",
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_found_is_told_as_by_one_process(name: str, divided) -> None:
    told, left = found(BROKEN[name], 2)
    assert divided == [False]
    assert told and (told, left) == found(BROKEN[name], 1)


@pytest.mark.parametrize(
    "body, order",
    [
        ("red.global.add.u32 [%x], 1;", "fifo"),
        (ONE_EACH + "mov.u64 %d1, %clock64; st.global.u32 [%d0], 1;", "fifo"),
        (ONE_EACH + "st.global.u32 [%d0], %cta;", "random"),
    ],
    ids=["atomics", "clocks", "a seeded order"],
)
def test_one_process_simulates_what_clusters_may_order(body: str, order: str, divided) -> None:
    assert found(body, 2, order)[1] == found(body, 1, order)[1]
    assert not divided


def test_words_of_its_own_are_written_by_each(divided) -> None:
    assert found(ONE_EACH + "st.global.u32 [%d0], %cta;", 3)[1][:8] == list(range(8))
    assert divided == [True]


def test_as_many_processes_as_pay(monkeypatch, divided) -> None:
    """None, the default of command lines: none for small grids, at most one a core."""
    monkeypatch.setattr(division, "cores", lambda: 4)
    program = SimpleNamespace(code=[None] * 1000)

    def paying(clusters: int, size: int = 2) -> int:
        what = SimpleNamespace(block=(128, 3, 1), cluster_size=size)
        return division.paying(program, what, clusters)

    assert [paying(n) for n in (1, 15, 17, 33, 1000)] == [1, 1, 2, 3, 4]
    assert paying(2, 64) == 2  # clusters are not divided
    assert found(ONE_EACH + "st.global.u32 [%d0], %cta;", None)[1][:8] == list(range(8))
    assert not divided


def test_clusters_are_shared_out_in_order() -> None:
    assert division.shares(range(7), 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert division.shares(range(2), 8) == [[0], [1]]


RACES = {
    "shared memory": "mov.u32 %r0, smem; st.shared.u32 [%r0], 7; ld.shared.u32 %r1, [%r0]; "
    + ONE_EACH
    + "st.global.u32 [%d0], %r1;",
    "global memory": "st.global.u32 [%x], %cta;",
}


@pytest.mark.parametrize("where", RACES)
def test_races_are_looked_for_unless_it_is_said_otherwise(where: str) -> None:
    shape, body = Shape(grid=8, block=64, smem=16), RACES[where]
    with pytest.raises(Hazards, match="race"):
        simulate_ptx(body, {"x": np.zeros(64, np.uint32)}, shape)
    x = np.zeros(64, np.uint32)
    simulate_ptx(body, {"x": x}, shape, checks=False)
    assert x[:8].tolist() == ([7] * 8 if where == "shared memory" else [7, *[0] * 7])


def test_a_number_of_jobs_is_checked() -> None:
    with pytest.raises(ValueError, match="jobs 0: takes 1 to"):
        simulate(None, jobs=0)

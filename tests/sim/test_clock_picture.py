"""The pictures of the ladders: the overlap of tracks, from the stored records."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from cutex.clock_errors.picture import BARRIER, MMA, WARPS, WORK, kind, svg, tile_end
from cutex.clock_errors.rows import traces_file
from cutex.problem import problem_class
from cutex.problem.stage import stage
from cutex.sim.timing import stored
from cutex.sim.timing.gpus import gpu, of_arch
from cutex.sim.timing.picture import Bar
from cutex.sim.timing.predict import predict
from cutex.sim.timing.timed import Whole
from cutex.sim.timing.units import Interval

PROBLEM = problem_class("gemm").of({"m": 4096, "n": 4096, "k": 4096})


@cache
def records(arch: str) -> dict:
    return stored.load(traces_file("gemm", arch))


@cache
def intervals(arch: str, number: int) -> list[Interval]:
    one = stage("gemm", arch, number)
    whole = Whole(*PROBLEM.work(one.config()))
    traced = records(arch)[f"gemm/{arch}/{number}/{PROBLEM.size}"]
    return predict(traced, gpu(of_arch(arch)), whole, log=True, most_rounds=2).intervals


def share(arch: str, number: int, a: str, b: str) -> float:
    """The share of the cycles in which tracks of `a` work that tracks of `b` work in, too."""
    mine = [i for i in intervals(arch, number) if i.cta == 0 and i.kind != "wait"]
    grid = np.zeros((2, int(max(i.end for i in mine)) + 1), bool)
    for i in mine:
        for row, name in enumerate((a, b)):
            if i.track.startswith(name):
                grid[row, int(i.start) : int(i.end)] = True
    return float((grid[0] & grid[1]).sum() / max(1, grid[0].sum()))


@pytest.mark.slow
def test_a_ring_puts_loads_under_mmas():
    assert share("sm_90a", 1, "tensor core", "TMA in") < 0.15
    assert share("sm_90a", 2, "tensor core", "TMA in") > 0.6


def test_warp_roles_issue_loads_beside_mmas():
    """In stage 2 one warp does both, in turn; in stage 3 the warps of both are busy at once."""
    assert not any(i.track.startswith(("load", "mma")) for i in intervals("sm_100a", 2))
    assert share("sm_100a", 3, "mma", "load") > 0.02


def test_two_accumulators_put_stores_under_mmas():
    assert share("sm_100a", 5, "TMA out", "tensor core") < 0.02
    assert share("sm_100a", 6, "TMA out", "tensor core") > 0.6  # all but the last tile's


@pytest.mark.slow
def test_ping_pong_puts_stores_under_mmas():
    assert share("sm_90a", 7, "TMA out", "tensor core") < 0.5
    assert share("sm_90a", 8, "TMA out", "tensor core") > 0.9


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch, number", [("sm_90a", 0), ("sm_100a", 0), ("sm_100a", 6)])
def test_a_warp_does_one_thing_at_a_time(arch, number):
    """Stage 0 has several CTAs on an SM, of which the picture shows one."""
    tracks: dict[tuple[int, str], list[Interval]] = {}
    for i in intervals(arch, number):
        if i.kind != "unit":
            tracks.setdefault((i.cta, i.track), []).append(i)
    for track, mine in tracks.items():
        for a, b in pairwise(sorted(mine, key=lambda i: i.start)):
            assert b.start >= a.end - 1e-6, (track, a, b)


@pytest.mark.parametrize("arch, number", [("sm_90a", 8), ("sm_100a", 8)])
def test_each_wait_has_the_colour_of_what_it_is_for(arch, number):
    waits = {i.name for i in intervals(arch, number) if i.kind == "wait"}
    kinds = {kind(Bar(0.0, 1.0, "wait", name)) for name in waits}
    assert {MMA, BARRIER, WARPS} <= kinds
    assert WORK not in kinds
    drawn = svg(intervals(arch, number), tile_end(intervals(arch, number)), "a stage")
    for role in ("load", "compute_tiles", "tensor core", "TMA in", "TMA out"):
        assert f">{role}" in drawn, role

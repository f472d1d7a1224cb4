"""Some clusters of a grid may be simulated instead of all: they compute the same as among all, and
the report lists those that did not run and the elements that may be compared.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_kernel import Shape, simulate_ptx

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import sampling, simulate

PROBLEM = GemmProblem(512, 512, 64, dtype="bf16")
EIGHT = Shape(grid=8, block=32)
ONE_EACH = "mad.wide.u32 %d0, %cta, 4, %x; "


@pytest.mark.sweep(4)
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("arch", "number", "clusters", "share"),
    [("sm_90a", 6, 3, 3 / 4), ("sm_100a", 5, 2, 2 / 4), ("sm_100a", 8, 2, 2 / 4)],
)
def test_what_is_written_is_what_the_whole_grid_writes(
    arch: str, number: int, clusters: int, share: float, jobs: int
) -> None:
    kernel = compile(stage(arch, number).kernel(), "bf16", arch)
    a, b = PROBLEM.inputs()
    whole, some = PROBLEM.output(), torch.full_like(PROBLEM.output(), 7.0)
    simulate(kernel, a, b, whole)
    report = simulate(kernel, a, b, some, clusters=clusters, jobs=jobs)
    (sampled,) = report.sampled
    written = torch.from_numpy(report.written["mC"])
    assert (sampled.clusters, sampled.of) == (clusters, 4)
    assert written.float().mean() == share
    assert torch.equal(some[written], whole[written])
    assert (some[~written] == 7.0).all()


def test_a_sample_is_spread_from_the_first_cluster_to_the_last(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "orders_clusters", lambda program: False)

    class Launch:
        kernel, num_ctas, cluster_size = "gemm", 20, 2

    assert sampling.pick(None, Launch, 4) == [0, 3, 6, 9]
    assert sampling.pick(None, Launch, 1) == [0]
    assert sampling.pick(None, Launch, 10) == sampling.pick(None, Launch, None) == list(range(10))


def test_the_report_says_what_was_not_run() -> None:
    x = np.zeros(64, np.uint32)
    report = simulate_ptx(ONE_EACH + "st.global.u32 [%d0], 5;", {"x": x}, EIGHT, clusters=3)
    assert str(report.sampled[0]).startswith("3 of the 8 clusters of")
    assert str(report.sampled[0]).endswith("5 were not run")
    assert report.ctas == 3
    assert np.flatnonzero(x).tolist() == np.flatnonzero(report.written["x"]).tolist() == [0, 3, 7]


def test_clusters_that_may_wait_for_each_other_run_all() -> None:
    x = np.zeros(64, np.uint32)
    report = simulate_ptx("red.global.add.u32 [%x], 1;", {"x": x}, EIGHT, clusters=3)
    assert x[0] == 32 * 8
    assert not report.sampled


def test_a_kernel_behind_a_sampled_one_is_refused() -> None:
    class Launch:
        kernel = "reduce"

    with pytest.raises(ValueError, match="reduce may read what the clusters of gemm that were not"):
        sampling.refuse_more([sampling.Sampled("gemm", 2, 8)], Launch)
    sampling.refuse_more([], Launch)


def test_a_number_of_clusters_is_checked() -> None:
    with pytest.raises(ValueError, match="clusters 0: takes a number from 1"):
        simulate(None, clusters=0)
    with pytest.raises(ValueError, match="clusters 2: takes a number from 1, and checks"):
        simulate(None, clusters=2, checks=False)

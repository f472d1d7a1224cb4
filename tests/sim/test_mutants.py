"""Every mutant of a kernel that can go wrong is found, in the default order and in the one in which
all operations are complete at once.

Mutants of a stage are found at every place, except those of HARMLESS: the PTX ISA does not require
these instructions there, or no later instruction needs them at this size.
"""

from __future__ import annotations

import pytest
from mutants import sites
from mutation_score import mutants, run
from subjects import SUBJECTS

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import SimError, simulate

PROBLEM = GemmProblem(300, 264, 520, dtype="bf16", init="int")
SAMPLE = [("sm_90a", 3), ("sm_100a", 3)]
LADDERS = [("sm_90a", n) for n in (5, 6, 8)] + [("sm_100a", n) for n in (4, 6, 8)]
# places, of all, at which a mutant of the sample does no harm, and why
HARMLESS = {
    ("sm_90a", 3, "a fence of wgmma"): (1, "no register is accessed between two wgmmas"),
    ("sm_100a", 3, "a fence of tcgen05"): (1, "dealloc is synchronous (PTX ISA 9.7.16.6.1)"),
}


LEFT_OUT = (
    "an mbarrier's wait", "an mbarrier's arrival", "an mbarrier's initialisation",
    "an arrival less", "a wait for wgmma", "a wait for one wgmma group more", "a group of wgmma",
    "a fence of wgmma", "a commit of tcgen05", "a wait for tcgen05.ld", "a wait for tcgen05.st",
    "a fence of tcgen05", "a dealloc", "a fence of proxies", "a named barrier",
    "a cluster's arrival", "a cluster's wait", "a wait for bulk stores",
    "a wait for one bulk store more", "a group of bulk stores",
)  # fmt: skip


def survivors(arch: str, number: int, operator: str, order: str) -> tuple[list[str], int]:
    """The mutants without any report, even an advisory; and the number of all mutants."""
    kernel = compile(stage(arch, number).kernel(), "bf16", arch)
    left, count = [], 0
    for site in sites(kernel, operator):
        a, b = PROBLEM.inputs("cpu")
        c = PROBLEM.output("cpu")
        count += 1
        try:
            report = simulate(site.mutant, a, b, c, order=order)
        except SimError:
            continue
        if not report.advisories and PROBLEM.check(a, b, c).ok:
            left.append(f"PTX line {site.line}: {site.text}")
    return left, count


@pytest.mark.sweep(24)
@pytest.mark.parametrize("order", ["fifo", "eager"])
@pytest.mark.parametrize("operator", LEFT_OUT)
@pytest.mark.parametrize("key", SAMPLE, ids=lambda key: f"{key[0]}-{key[1]}")
def test_every_harmful_mutant_is_found(key, operator, order):
    left, _ = survivors(*key, operator, order)
    allowed, _ = HARMLESS.get((*key, operator), (0, ""))
    assert len(left) == allowed, "\n".join(left)


# of a ladder's later stages: those that matter only with more tiles, or more stores, than here
REPEATED = (
    "an mbarrier's wait", "an mbarrier's arrival", "an mbarrier's initialisation",
    "an arrival less", "a wait for bulk stores", "a wait for one bulk store more",
    "a group of bulk stores", "a named barrier", "a fence of tcgen05", "a fence of wgmma",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("operator", LEFT_OUT)
@pytest.mark.parametrize("key", LADDERS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_mutants_of_the_ladders_are_found(key, operator):
    left, count = survivors(*key, operator, "fifo")
    if operator in REPEATED:
        assert count == 0 or len(left) < count, "\n".join(left)
    else:
        assert not left, "\n".join(left)


OTHERS = (  # a fixed sample of weakened or moved instructions
    ("gemm sm_90a 3", "another parity"),
    ("gemm sm_100a 3", "half the bytes"),
    ("gemm sm_100a 3", "a commit of tcgen05, earlier"),
    ("gemm sm_90a 5", "a fence of proxies, earlier"),
    ("gemm sm_100a 5", "a commit to one CTA less"),
    ("gemm sm_100a 5", "a cluster's arrival, relaxed"),
    ("gemm sm_90a 9", "a wait for the grid before"),
)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("subject", "operator"), OTHERS, ids=" - ".join)
def test_what_is_weakened_or_moved_is_told(subject, operator):
    site = next(sites(SUBJECTS[subject].kernel, operator))
    assert run(SUBJECTS[subject], site)["kind"] in ("found", "advisory")


# operators without a report, at places for which docs/simulator.md gives the reason
MAY_BE_HARMLESS = {
    "a wait for tcgen05.ld or st, later", "another fence",
    "every lane elected", "a barrier of a warp", "a wait for bulk stores",
    "a wait for one bulk store more", "a wait for bulk stores, later", "a group of bulk stores",
    "a group of bulk stores, earlier", "a named barrier", "a named barrier, later",
    "a named barrier, earlier", "a named barrier only arrived at", "an mbarrier's wait",
    "an arrival in another CTA", "a fence of wgmma", "a fence of wgmma, later",
    "a commit of tcgen05", "a commit of tcgen05, earlier", "a commit to one CTA less",
    "a fence of tcgen05", "an arrival less", "an atomic that is none",
    "an mbarrier's arrival, earlier", "a wait for the grid before", "a cluster's arrival, relaxed",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(7200)  # a minute at most for attention alone, more beside others
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=lambda s: s.name)
def test_mutants_of_every_kind_are_told(subject):
    rows = [run(subject, site) for site in mutants(subject, at_most=2)]
    missed = [r for r in rows if r["kind"] == "nothing" and r["operator"] not in MAY_BE_HARMLESS]
    assert rows and not missed, missed

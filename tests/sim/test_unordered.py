"""Accesses that need not know of each other, atomics and stores of one value, and one after them
that must come after all: not only after the last, which may be its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim import SimError
from cutex.sim.finding import Finding

WARPS, CTAS = Shape(block=96, smem=1024), Shape(grid=3, block=32, smem=1024)
CLUSTER = Shape(grid=2, block=32, cluster=2, smem=1024)
START = """.reg .b32 at, who; mov.u32 at, smem; mov.u32 who, %tid.x; shr.u32 who, who, 5;
    add.u32 who, who, %cta; setp.eq.u32 %p0, %lane, 0; setp.eq.and.u32 %p1, who, {who}, %p0;
    @%p0 st.shared.u32 [at+64], 1; {zero} fence.proxy.async.shared::cta; bar.sync 0; {first}
    {between} {then}"""
FIRST = {
    "red": "@%p0 red.{space}.add.u32 {at}, 1;",
    "one value": "@%p0 st.{space}.u32 {at}, 1;",
    "bulk sum": "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 {at}, [at+64], 16;"
    "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;",
}
THEN = {
    "load": "@%p1 ld.{space}.u32 %r1, {at}; @%p1 st.global.u32 [%out+64], %r1;",
    "store": "@%p1 st.{space}.u32 {at}, 7;",
}
AT = {"global": "[%out]", "shared": "[at]"}


def told(
    first: str, then: str, who: int, shape: Shape, space: str = "global", between: str = ""
) -> list[Finding]:
    zero = "setp.eq.u32 %p2, %i, 0; @%p2 st.shared.u32 [at], 0;" * (space == "shared")
    parts = {"first": FIRST[first], "then": THEN.get(then, then)}
    text = START.format(
        who=who, zero=zero, between=between,
        **{k: v.format(space=space, at=AT[space]) for k, v in parts.items()},
    )  # fmt: skip
    x = aligned(np.zeros(64, np.uint32))
    try:
        report = simulate_ptx(text, {"out": x}, shape)
    except SimError as error:
        return error.findings
    return report.advisories


@pytest.mark.sweep(2)
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(("who", "shape"), [(0, CTAS), (2, CTAS), (2, WARPS), (1, CLUSTER)],
                         ids=["first CTA", "last CTA", "last warp", "last in cluster"])  # fmt: skip
def test_whoever_comes_last_races_with_those_before_its_own(first, then, who, shape):
    found = told(first, then, who, shape)
    assert found[0].rule == "race" and "PTX line" in str(found[0]) and not found[0].advisory


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("first", ["red", "one value"])
def test_in_shared_memory_too(first, then):
    found = told(first, then, 2, WARPS, "shared")
    assert found[0].rule == "race" and "no barrier orders the two" in str(found[0])
    assert not told(first, then, 2, WARPS, "shared", "bar.sync 0;")


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("first", ["red", "one value"])
def test_behind_a_barrier_of_all_it_is_right(first, then):
    assert not told(first, then, 2, WARPS, between="bar.sync 0;")
    assert not told(first, then, 1, CLUSTER, between=CLUSTER_SYNC)


def test_an_atomic_comes_after_all_stores_of_one_value():
    for space in AT:
        found = told("one value", "@%p1 red.{space}.add.u32 {at}, 4;", 2, WARPS, space)
        assert found[0].rule == "race"


def test_a_value_that_is_there_already_is_no_excuse_beside_sums():
    """Which comes first decides; of a maximum it does not."""
    text = START.format(who=2, zero="", between="", then="@%p1 st.global.u32 [%out], {value};",
                        first="@%p0 red.global.{op}.u32 [%out], {by};")  # fmt: skip
    for op, by, value, races in (("add", 1, 3, True), ("max", 7, 7, False)):
        body, out = text.format(op=op, by=by, value=value), np.zeros(64, np.uint32)
        if races:
            with pytest.raises(SimError, match="changes it by atomics"):
                simulate_ptx(body, {"out": out}, CTAS)
        else:
            assert not simulate_ptx(body, {"out": out}, CTAS).advisories


RELAXED = """.reg .b32 at, peer, far; mov.u32 at, %tid.x; shl.b32 at, at, 2; mov.u32 %r2, smem;
    add.u32 at, at, %r2; st.shared.u32 [at], %i; {before}
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    mov.u32 peer, %cluster_ctarank; xor.b32 peer, peer, 1; mapa.shared::cluster.u32 far, at, peer;
    ld.shared::cluster.u32 %r1, [far]; st.global.u32 [%out_i], %r1; {sync}"""


@pytest.mark.parametrize(("before", "right"), [
    ("", False), ("bar.sync 0;", False), ("fence.proxy.async;", False),
    ("fence.acq_rel.cta; bar.sync 0;", False), ("fence.acq_rel.cluster;", True),
])  # fmt: skip
@pytest.mark.parametrize("block", [32, 64])
def test_a_barrier_of_the_cta_does_not_release_to_the_cluster(before, right, block):
    """Warps that have met in their CTA knew of each other's stores, and passed that on by a barrier
    of the cluster that releases no memory."""
    text, out = RELAXED.format(before=before, sync=CLUSTER_SYNC), np.zeros(128, np.uint32)
    shape = Shape(grid=2, block=block, cluster=2, smem=1024)
    if right:
        simulate_ptx(text, {"out": out}, shape)
        assert (out[: 2 * block] == (np.arange(2 * block) + block) % (2 * block)).all()
    else:
        with pytest.raises(SimError, match=r"race: .* reads shared memory"):
            simulate_ptx(text, {"out": out}, shape)

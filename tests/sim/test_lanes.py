"""Lanes of a warp are separate threads: the order between them is by the letter of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, EVERY_ORDER, init, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

each_order = pytest.mark.parametrize(
    "order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values()))
)
TWO_WARPS = Shape(block=64, smem=1024)
WHO = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p2, %lane, 0;"
# the first warp fills 128 bytes, one lane arrives; the second waits, and reads
HAND_OVER = f"""
    {init(1)} {WHO} @!%p1 bra reader;
    .reg .b32 mine; mad.lo.u32 mine, %lane, 4, bar; st.shared.b32 [mine+128], %lane;
    SYNC @%p2 mbarrier.arrive.shared.b64 _, [bar]; bra done;
    reader: {wait("bar", 0, "W")}
    mad.lo.u32 mine, %lane, 4, bar; ld.shared.b32 %r2, [mine+128]; st.global.b32 [%out_i], %r2;
    done:
"""


def advisories(body: str, shape: Shape, **order) -> list[str]:
    out = np.zeros(256, np.uint32)
    report = simulate_ptx(body, {"out": out}, shape, **order)
    return [a.message for a in report.advisories]


@pytest.mark.sweep(2)
@each_order
def test_one_lane_arrives_for_all_only_behind_a_barrier_of_the_warp(order) -> None:
    assert not advisories(HAND_OVER.replace("SYNC", "bar.warp.sync -1;"), TWO_WARPS, **order)
    (told,) = advisories(HAND_OVER.replace("SYNC", ""), TWO_WARPS, **order)
    assert "one lane's arrival does not tell of the others' stores" in told


def test_lanes_that_all_arrive_need_none() -> None:
    every = HAND_OVER.replace(init(1), init(32)).replace("SYNC @%p2", "")
    assert not advisories(every, TWO_WARPS)


def test_what_the_elected_lane_itself_stored_it_tells_of() -> None:
    own = HAND_OVER.replace("st.shared.b32 [mine+128]", "@%p2 st.shared.b32 [mine+128]")
    own = own.replace("mad.lo.u32 mine, %lane, 4, bar; ld", "mov.u32 mine, bar; ld")
    assert not advisories(own.replace("SYNC", ""), TWO_WARPS)


ONE_LANE = f"""{init(1)} mov.u32 %r9, smem; @%p0 st.shared.u32 [%r9+64], 5; SYNC
    @%p3 ld.shared.u32 %r4, [%r9+64]; @%p3 st.global.u32 [%out_i], %r4;"""
HALVES = """setp.lt.u32 %p0, %lane, 16; mov.u32 %r9, smem; mad.lo.u32 %r8, %lane, 4, %r9;
    @!%p0 bra OTHERS; st.shared.u32 [%r8], 5; SYNC bra END;
    OTHERS: SYNC ld.shared.u32 %r4, [%r8+-64]; st.global.u32 [%out_i], %r4; END:"""


@pytest.mark.parametrize("text", [
    ONE_LANE.replace("@%p3 ", ""), HALVES,
    ONE_LANE.replace("@%p3 ", "").replace("SYNC", "shfl.sync.idx.b32 %r5, %r6, 0, 31, -1;"),
], ids=["one lane stores", "halves", "a shuffle between"])  # fmt: skip
def test_lanes_that_have_diverged_race(text: str) -> None:
    """What a part of a warp stores is not ordered before another part's loads."""
    with pytest.raises(
        Hazards, match=r"race: .*lane \d+ wrote .*: no bar.warp.sync orders the two"
    ):
        advisories(text.replace("SYNC", ""), Shape(smem=128))


@pytest.mark.parametrize("text", [
    ONE_LANE.replace("@%p3 ", "").replace("SYNC", "bar.warp.sync -1;"),
    ONE_LANE.replace("@%p3 ", "@%p0 ").replace("SYNC", ""),
    ONE_LANE.replace("@%p3 ", "").replace(
        "SYNC", f"@%p0 mbarrier.arrive.shared.b64 _, [bar]; {wait('bar', 0, 'W')}"
    ),
    HALVES.replace("SYNC", "bar.warp.sync -1;"),
], ids=["one lane stores", "and loads", "and arrives", "halves"])  # fmt: skip
def test_lanes_that_are_ordered_are_clean(text: str) -> None:
    assert not advisories(text, Shape(smem=128))


# each half of a warp meets, and reads what its first lane has stored
HALF = """.reg .b32 at; mov.u32 at, smem; and.b32 %r1, %lane, 15; setp.eq.u32 %p0, %r1, 0;
    setp.lt.u32 %p1, %lane, 16; shr.u32 %r2, %lane, 4; mad.lo.u32 %r3, %r2, 4, at;
    @%p0 st.shared.u32 [%r3], %i; @!%p1 bra HIGH; LOW bra ON; HIGH: bar.warp.sync 0xffff0000;
    ON: ld.shared.u32 %r4, [%r3]; st.global.u32 [%out_i], %r4;"""


def test_some_lanes_of_a_warp_meet() -> None:
    """As groups of 16 threads do."""
    assert not advisories(HALF.replace("LOW", "bar.warp.sync 0xffff;"), Shape(smem=128))


@pytest.mark.parametrize("low", ["bar.warp.sync 0xff;", ""])
def test_only_the_lanes_that_meet_are_ordered(low: str) -> None:
    text = HALF.replace("LOW", f"setp.lt.u32 %p2, %lane, 8; @!%p2 bra ON; {low}")
    with pytest.raises(Hazards, match=r"lane 0 wrote .*: no bar.warp.sync orders the two"):
        advisories(text, Shape(smem=128))


@pytest.mark.parametrize("sync", ["", "bar.warp.sync -1;", "bar.sync 0;"])
def test_lanes_of_a_warp_read_each_others_stores_behind_a_barrier(sync: str) -> None:
    body = f"""
    .reg .b32 at, mine; mov.u32 at, smem; mad.lo.u32 mine, %lane, 4, at; st.shared.b32 [mine], %i;
    {sync} xor.b32 %r1, %lane, 1; mad.lo.u32 mine, %r1, 4, at; ld.shared.b32 %r2, [mine];
    st.global.b32 [%out_i], %r2;
    """
    told = advisories(body, Shape(smem=128))
    assert len(told) == (not sync) and all("between these lanes" in t for t in told)


def test_a_lane_reads_its_own_store() -> None:
    body = """
    .reg .b32 mine; mov.u32 mine, smem; mad.lo.u32 mine, %lane, 4, mine; st.shared.b32 [mine], %i;
    ld.shared.b32 %r2, [mine]; st.global.b32 [%out_i], %r2; st.shared.b32 [mine], %r2;
    """
    assert not advisories(body, Shape(smem=128))


# a CTA stores into the other, and arrives there
REMOTE = f"""
    {init(32)} .reg .b32 rank, far; mov.u32 rank, %cluster_ctarank; {CLUSTER_SYNC}
    setp.eq.u32 %p1, rank, 0; @!%p1 bra reader; mapa.shared::cluster.u32 far, bar, 1;
    mad.lo.u32 %r1, %lane, 4, far; st.shared::cluster.b32 [%r1+128], %lane;
    mbarrier.arriveSCOPE.shared::cluster.b64 _, [far]; bra done;
    reader: {wait("bar", 0, "W", "WAITshared::cta")} mad.lo.u32 %r1, %lane, 4, bar;
    ld.shared.b32 %r2, [%r1+128]; st.global.b32 [%out_i], %r2;
    done: {CLUSTER_SYNC}
""".replace("%i, 0", "%lane, 0")


@pytest.mark.parametrize("arrival", ["", ".release.cluster"])
@pytest.mark.parametrize("wait", ["", "acquire.cluster."])
def test_what_a_cta_stores_in_another_is_handed_over_in_the_clusters_scope(arrival, wait) -> None:
    text = REMOTE.replace("SCOPE", arrival).replace("WAIT", wait)
    told = advisories(text, Shape(grid=2, cluster=2, smem=1024))
    assert len(told) == (not (arrival and wait))
    assert all("has to be .release.cluster, and the wait for it .acquire" in t for t in told)


# -- other reports ---------------------------------------------------------------------------------


def test_a_barrier_that_only_some_have_arrived_on_at_the_end_is_told() -> None:
    body = f"{init(2)} @%p0 mbarrier.arrive.shared.b64 _, [bar];"
    (told,) = advisories(body, Shape(smem=64))
    assert "1 of 2 arrivals pending" in told


@pytest.mark.parametrize("cluster", [2, 4])
def test_a_try_wait_for_another_cta_of_a_large_cluster_is_told(cluster: int) -> None:
    body = f"""
    {init(1)} .reg .b32 rank, far; mov.u32 rank, %cluster_ctarank; {CLUSTER_SYNC}
    setp.eq.u32 %p1, rank, 0; @!%p1 bra other; {wait("bar", 0, "W")} bra done;
    other: setp.eq.u32 %p2, rank, 1; setp.eq.and.u32 %p2, %lane, 0, %p2;
    mapa.shared::cluster.u32 far, bar, 0; @%p2 mbarrier.arrive.shared::cluster.b64 _, [far];
    done: {CLUSTER_SYNC}
    """.replace("%i, 0", "%lane, 0")
    report = simulate_ptx(body, {"out": np.zeros(256, np.uint32)},
                          Shape(grid=cluster, cluster=cluster, smem=64))  # fmt: skip
    told = [a for a in report.advisories if a.rule == "parked wait"]
    assert len(told) == (cluster > 2) and all("try_wait" in a.where for a in told)

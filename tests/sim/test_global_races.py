"""Clusters that write, or write and read, one word of global memory without an order between
them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from barriers import copy, wait
from mutations import mutate
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.compile import compile
from cutex.kernels.gemm import stage
from cutex.problem.gemm import GemmProblem
from cutex.sim import Hazards, simulate
from cutex.sim.hazards import sparse_marks
from cutex.sim.hazards.cluster_order import ClusterOrder

ORDERS = ["fifo", "eager", "starved", "peer-late", "random"]
FOUR = Shape(grid=4)
ANOTHER = r"race: .* writes .* wrote another value there .* nothing orders the two"


def run(body: str, order: str = "fifo", **shape) -> np.ndarray:
    x = np.zeros(64, np.uint32)
    simulate_ptx(body, {"x": x}, replace(FOUR, **shape), order=order)
    return x


@pytest.mark.parametrize("order", ORDERS)
def test_different_values_are_a_race(order: str) -> None:
    """All CTAs write to the same words lane by lane, in one step or in several."""
    with pytest.raises(Hazards, match=ANOTHER):
        run("mad.wide.u32 %d0, %lane, 4, %x; st.global.u32 [%d0], %cta;", order)


ADDED = "ld.global.u32 %r0, [%x]; add.u32 %r0, %r0, 1; st.global.u32 [%x], %r0;"


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_without_atomics_is_a_race(order: str) -> None:
    """All CTAs add to one word by a load and a store, so one reads a word that another writes."""
    with pytest.raises(Hazards, match=r"race: .*(reads x\[0\]|which .* read .*: nothing orders)"):
        run(f"setp.ne.u32 %p0, %lane, 0; @%p0 ret; {ADDED}", order)
    with_atomics = "setp.ne.u32 %p0, %lane, 0; @%p0 ret; red.global.add.u32 [%x], 1;"
    assert run(with_atomics, order)[0] == 4


@pytest.mark.parametrize("order", ORDERS)
def test_what_only_one_cluster_reads_and_writes_is_its_own(order: str) -> None:
    """No race either where all clusters read and none writes."""
    own = "mad.wide.u32 %d0, %cta, 4, %x; ld.global.u32 %r0, [%d0]; st.global.u32 [%d0], %cta;"
    run(f"{own} ld.global.u32 %r1, [%x+128];", order)


def test_the_same_value_from_all_is_none() -> None:
    assert (run("mad.wide.u32 %d0, %lane, 4, %x; st.global.u32 [%d0], 7;")[:32] == 7).all()


def test_neither_are_places_of_ones_own_nor_two_writes_of_one_cluster() -> None:
    run("mad.wide.u32 %d0, %cta, 4, %x; st.global.u32 [%d0], %cta; st.global.u32 [%d0], 9;")
    run("st.global.u32 [%x], 7;", cluster=4)


# -- order between clusters ------------------------------------------------------------------------

# x[0] is data, x[8] the flag: warp 1 of CTA 0 writes, its warp 0 sets; CTA 1's warp 0 waits for
# that, and its warp 1 reads into x[16].
HANDED_OVER = """
    shr.u32 %r5, %i, 5; setp.ne.u32 %p1, %lane, 0; setp.ne.u32 %p0, %cta, 0; @%p0 bra OTHER;
    setp.ne.u32 %p2, %r5, 1; or.pred %p2, %p2, %p1; @!%p2 st.global.u32 [%x], 7;
    bar.sync 0; setp.ne.u32 %p2, %r5, 0; or.pred %p2, %p2, %p1; @%p2 bra END; TELL bra END;
    OTHER: setp.ne.u32 %p2, %r5, 2; or.pred %p2, %p2, %p1; @%p2 bra READ;
    WAIT: LOOK setp.eq.u32 %p3, %r1, 0; @%p3 bra WAIT; AFTER
    READ: bar.sync 0; setp.ne.u32 %p2, %r5, 3; or.pred %p2, %p2, %p1; @%p2 bra END;
    ld.global.u32 %r2, [%x]; st.global.u32 [%x+64], %r2;
    END:
"""
TELLS = {
    "release": "st.release.gpu.global.u32 [%x+32], 1;",
    "fence": "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%x+32], 1;",
    "membar": "membar.gl; st.volatile.global.u32 [%x+32], 1;",
    "atomic": "red.release.gpu.global.add.u32 [%x+32], 1;",
}
LOOKS = {
    "acquire": ("ld.acquire.gpu.global.u32 %r1, [%x+32];", ""),
    "fence": ("ld.relaxed.gpu.global.u32 %r1, [%x+32];", "fence.acq_rel.gpu;"),
    "atomic": ("atom.acquire.gpu.global.add.u32 %r1, [%x+32], 0;", ""),
}
NO_TELLS = {
    "relaxed": "st.relaxed.gpu.global.u32 [%x+32], 1;",
    "atomic": "red.global.add.u32 [%x+32], 1;",
    "narrow": "fence.acq_rel.cluster; st.relaxed.gpu.global.u32 [%x+32], 1;",
}
READ_TOO_EARLY = r"race: CTA \(1,0,0\) reads x\[0\] .* CTA \(0,0,0\) wrote it .* nothing orders"


def handed_over(tell: str, look: tuple[str, str], order: str) -> None:
    body = HANDED_OVER.replace("TELL", tell).replace("LOOK", look[0]).replace("AFTER", look[1])
    assert run(body, order, grid=2, block=64)[16] == 7


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("tell", TELLS)
def test_a_release_that_is_acquired_orders_clusters(tell: str, look: str, order: str) -> None:
    """PTX ISA 8.8: it also orders the other warps of both, through barriers."""
    handed_over(TELLS[tell], LOOKS[look], order)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize("tell", NO_TELLS)
def test_what_does_not_release_orders_nothing(tell: str, order: str) -> None:
    with pytest.raises(Hazards, match=READ_TOO_EARLY):
        handed_over(NO_TELLS[tell], LOOKS["acquire"], order)


@pytest.mark.parametrize("order", ORDERS)
def test_what_does_not_acquire_is_not_ordered(order: str) -> None:
    with pytest.raises(Hazards, match=READ_TOO_EARLY):
        handed_over(TELLS["release"], ("ld.relaxed.gpu.global.u32 %r1, [%x+32];", ""), order)


TICKETS = """
    setp.ne.u32 %p0, %lane, 0; @%p0 ret; atom.global.add.u32 %r0, [%x], 1;
    mad.wide.u32 %d0, %r0, 4, %x; st.global.u32 [%d0+16], %cta;
    setp.ne.u32 %p1, %r0, 3; @%p1 ret; st.global.u32 [%x], 0;
"""


@pytest.mark.parametrize("order", ORDERS)
def test_who_drew_the_last_ticket_may_set_the_counter_back(order: str) -> None:
    """Its store comes after its own atomic on the place, and that after all others."""
    assert sorted(run(TICKETS, order)[4:8]) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_an_atomic_elsewhere_orders_nothing(order: str) -> None:
    with pytest.raises(Hazards, match=ANOTHER):
        run("st.global.u32 [%x], %cta; red.global.add.u32 [%x+4], 1;", order)


@pytest.mark.parametrize("order", ORDERS)
def test_an_atomic_and_an_ordinary_store_race(order: str) -> None:
    """CTA 0 adds with a load and a store, the others with atomics: their sums may be lost."""
    body = f"""setp.ne.u32 %p0, %lane, 0; @%p0 ret; setp.ne.u32 %p1, %cta, 0; @%p1 bra REST;
        {ADDED} bra END; REST: red.global.add.u32 [%x], 1; END:"""
    with pytest.raises(Hazards, match=r"race: .*(by an atomic, and|wrote|changes it by atomics)"):
        run(body, order)


def test_a_load_beside_atomics_is_an_advisory() -> None:
    """By the letter (8.7.1): a look at a maximum before it is raised."""
    body = """setp.ne.u32 %p0, %lane, 0; @%p0 ret; ld.global.u32 %r0, [%x];
        setp.ge.u32 %p1, %r0, %cta; @%p1 ret; red.global.max.u32 [%x], %cta;"""
    x = np.zeros(64, np.uint32)
    report = simulate_ptx(body, {"x": x}, FOUR)
    assert x[0] == 3 and "only one of them is an atomic" in report.advisories[0].message


TURNS = """
    setp.ne.u32 %p1, %lane, 0; @%p1 bra END; add.u32 %r2, %cta, 1;
    TURN: ld.acquire.gpu.global.u32 %r1, [%x+32]; setp.ne.u32 %p3, %r1, %cta; @%p3 bra TURN;
    ld.global.u32 %r3, [%x]; mad.lo.u32 %r3, %r3, 2, %cta; st.global.u32 [%x], %r3;
    st.release.gpu.global.u32 [%x+32], %r2;
    END:
"""


@pytest.mark.parametrize("order", ["fifo", "random"])
def test_a_cluster_that_spins_acquires_each_release_once(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clusters take turns; those that wait read the same release many times."""
    acquired, acquire = {False: 0, True: 0}, ClusterOrder._acquire

    def counted(self: ClusterOrder, *given: Any) -> None:
        acquired[self.lenient] += 1
        acquire(self, *given)

    monkeypatch.setattr(ClusterOrder, "_acquire", counted)
    clusters = 12
    x = run(TURNS, order, grid=clusters)
    assert x[0] == sum(n << (clusters - 1 - n) for n in range(clusters))
    assert 0 < acquired[False] <= clusters * clusters / 2


STORED_IN_BULK = """
    setp.ne.u32 %p1, %lane, 0; setp.ne.u32 %p0, %cta, 0; @%p0 bra OTHER;
    @%p1 bra END; mov.u32 %r0, smem; st.shared.u32 [%r0], 7; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%x], [%r0], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; WRITTEN
    st.release.gpu.global.u32 [%x+32], 1; bra END;
    OTHER: ld.acquire.gpu.global.u32 %r1, [%x+32]; setp.eq.u32 %p3, %r1, 0; @%p3 bra OTHER;
    ld.global.u32 %r2, [%x]; st.global.u32 [%x+64], %r2;
    END:
"""


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_bulk_store_has_read_it_may_not_have_written(order: str) -> None:
    """PTX ISA 9.7.9.25.4.6: wait_group.read does not cover global memory."""
    written = STORED_IN_BULK.replace("WRITTEN", "cp.async.bulk.wait_group 0;")
    assert run(written, order, grid=2, smem=16)[16] == 7
    with pytest.raises(Hazards, match=READ_TOO_EARLY):
        run(STORED_IN_BULK.replace("WRITTEN", ""), order, grid=2, smem=16)


def test_bulk_stores_are_watched() -> None:
    body = """
    mov.u32 %r0, smem; st.shared.u32 [%r0], %cta; fence.proxy.async.shared::cta;
    setp.ne.u32 %p0, %lane, 0; @%p0 bra done;
    cp.async.bulk.global.shared::cta.bulk_group [%x], [%r0], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    done:
    """
    with pytest.raises(Hazards, match=ANOTHER):
        run(body, block=1, smem=16)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("arch, number", [("sm_90a", 5), ("sm_100a", 4)])
def test_tiles_stored_over_each_other_are_found(arch: str, number: int, order: str) -> None:
    """As if the store did not count the tiles of M: every row of tiles goes to the first."""
    kernel = compile(stage(arch, number).kernel(), "bf16", arch)
    problem = GemmProblem(512, 256, 64, dtype="bf16", init="int")
    a, b = problem.inputs("cpu")
    simulate(kernel, a, b, problem.output("cpu"), order=order)
    wrong = mutate(
        kernel,
        r"(cp\.async\.bulk\.tensor\.2d\.global\.shared::cta[^\[]*\[%rd\d+, \{%r\d+, )%r\d+(\}\])",
        r"\g<1>0\2",
    )
    with pytest.raises(Hazards, match=ANOTHER):
        simulate(wrong, a, b, torch.zeros(512, 256).bfloat16(), order=order, seed=1)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_product_written_over_its_operand_is_found(arch: str, order: str) -> None:
    """Other CTAs load by TMA the words that one stores, in either order."""
    kernel = compile(stage(arch, 5).kernel(), "bf16", arch)
    problem = GemmProblem(512, 512, 512, dtype="bf16", init="int")
    a, b = problem.inputs("cpu")
    with pytest.raises(Hazards, match=r"race: a TMA load of .* reads .* writes"):
        simulate(kernel, a, b, a, order=order, seed=1)


SIZES = """setp.eq.u32 %p2, %cta, 0;
    @%p2 bra A;
    FIRST
    bra E;
    A: SECOND
    E:"""


@pytest.mark.parametrize("first, second, told", [
    ("atom.global.add.u32 %r1, [%out+4], 1;", "atom.global.add.u64 %d6, [%out], 1;", True),
    ("atom.global.add.u32 %r1, [%out+8], 1;", "atom.global.add.u64 %d6, [%out], 1;", False),
    ("st.release.gpu.global.u64 [%out], 1;", "ld.acquire.gpu.global.u32 %r1, [%out];", True),
    ("mov.b16 %h0, 0; red.global.add.noftz.f16 [%out], %h0;",
     "mov.b32 %r1, 0; red.global.add.noftz.f16x2 [%out], %r1;", False),
    ("red.global.add.f32 [%out+4], 1.0;",
     "mov.b32 %r1, 0; red.global.add.v2.f32 [%out], {%r1, %r1};", False),
])  # fmt: skip
def test_strong_accesses_that_overlap_in_part_are_told(first, second, told):
    """By the letter (PTX ISA 8.7.1); a vector is its elements, a pair its halves."""
    for a, b in ((first, second), (second, first)):  # whichever comes first
        body = SIZES.replace("FIRST", a).replace("SECOND", b)
        report = simulate_ptx(body, {"out": np.zeros(64, np.uint32)}, Shape(grid=2))
        found = [str(a) for a in report.advisories if "overlap in part" in str(a)]
        assert len(found) == told, report.advisories
        assert all(" as 64" in text and " as 32" in text for text in found), report.advisories


# -- bulk copies -----------------------------------------------------------------------------------

BULK = """.reg .b32 bar; mov.u32 bar, smem; mov.u32 %r2, %tid.x; setp.eq.u32 %p0, %r2, 0;
    setp.eq.u32 %p1, %cta, WRITER;
    @%p1 bra STORE;
    @%p0 mbarrier.init.shared.b64 [bar], 1;
    bar.sync 0; add.u32 %r9, bar, 16;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%x], 64, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0;
    @!%p2 bra W;
    bra END;
    STORE: @%p0 st.global.u32 [%x+PLACE], 7;
    END:"""


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_bulk_copy_of_what_another_cta_stores_is_found(writer, jobs):
    """Whichever of the two comes first, and whether or not processes share the grid."""
    body = BULK.replace("WRITER", str(writer))
    how = {"shape": Shape(grid=2, smem=128), "jobs": jobs}
    simulate_ptx(body.replace("PLACE", "64"), {"x": aligned(np.zeros(64, np.uint32))}, **how)
    with pytest.raises(Hazards, match=r"race: a bulk copy of CTA .* reads byte 60 of x"):
        simulate_ptx(body.replace("PLACE", "60"), {"x": aligned(np.zeros(64, np.uint32))}, **how)


BEFORE = """.reg .b32 bar, at; mov.u32 bar, smem; setp.eq.u32 %p0, %lane, 0;
    setp.eq.u32 %p1, %cta, 0; mad.lo.u32 at, %lane, 4, bar; mad.wide.u32 %d2, %lane, 4, %x;
    @!%p1 bra READ; COPY WAITS bar.warp.sync -1; @%p0 st.release.gpu.global.u32 [%x+512], 1; LATE
    bra END; READ: P: ld.acquire.gpu.global.u32 %r1, [%x+512]; setp.eq.u32 %p2, %r1, 0; @%p2 bra P;
    bar.warp.sync -1; WRITE [%d2], 5; END:"""
COPIES = {
    "cp.async": (
        "cp.async.ca.shared.global [at], [%d2], 4; cp.async.commit_group;", "cp.async.wait_all;"),
    "bulk": (
        f"""@%p0 mbarrier.init.shared.b64 [bar], 1; bar.warp.sync -1;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        @%p0 {copy("bar+128", "%x", 128)}""", wait("bar", 0, "W")),
}  # fmt: skip


@pytest.mark.parametrize("write", ["st.global.u32", "red.global.add.u32"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_flag_set_while_a_copy_reads_says_nothing_of_its_end(kind, write):
    """The next CTA writes what the copy of another, before it sets the flag, still reads."""
    body = BEFORE.replace("COPY", COPIES[kind][0]).replace("WRITE", write)
    wait_for = COPIES[kind][1]
    for right in (True, False):
        text = body.replace("WAITS", wait_for if right else "")
        text = text.replace("LATE", "" if right else wait_for)
        x, shape = {"x": aligned(np.zeros(256, np.uint32))}, Shape(grid=2, smem=512)
        if right:
            assert not simulate_ptx(text, x, shape).advisories
        else:
            with pytest.raises(Hazards, match=r"CTA \(1,0,0\) warp 0 writes x\[0\].*, which the"):
                simulate_ptx(text, x, shape)


# eight CTAs read a row and count, but for one; the ninth writes the row
READERS = """setp.eq.u32 %p0, %lane, 0; setp.eq.u32 %p1, %cta, 8; mad.wide.u32 %d2, %lane, 4, %x;
    @%p1 bra WRITE; ld.global.u32 %r1, [%d2]; bar.warp.sync -1; setp.eq.u32 %p2, %cta, WITHOUT;
    @%p2 bra END; @%p0 red.release.gpu.global.add.u32 [%x+512], 1; bra END;
    WRITE: P: ld.acquire.gpu.global.u32 %r2, [%x+512]; setp.lt.u32 %p3, %r2, COUNT; @%p3 bra P;
    bar.warp.sync -1; st.global.u32 [%d2], 5; END:"""


@pytest.mark.parametrize("order", ["fifo", "peer-late", "random"])
@pytest.mark.parametrize("without", [0, 3, 7])
def test_a_write_that_comes_after_all_readers_but_one_is_found(without, order):
    """Also in a tensor that has no marks of all its bytes."""
    how = {"shape": Shape(grid=9), "order": order, "seed": without}
    sizes = (256, 1 << 25) if without == 3 else (256,)
    for x in (aligned(np.zeros(words, np.uint32)) for words in sizes):
        right = READERS.replace("WITHOUT", "8").replace("COUNT", "8")
        assert not simulate_ptx(right, {"x": x}, **how).advisories
        x[:256] = 0
        wrong = READERS.replace("WITHOUT", str(without)).replace("COUNT", "7")
        with pytest.raises(Hazards, match=rf"which CTA \({without},0,0\) has read"):
            simulate_ptx(wrong, {"x": x}, **how)


IN_LARGE = {
    "writes": "st.global.u32 [%x+134000000], %cta;",
    "atomic beside a store": """setp.eq.u32 %p0, %cta, 0; @%p0 st.global.u32 [%x+134000000], 5;
        @!%p0 red.global.add.u32 [%x+134000000], 1;""",
    "read and written": """setp.eq.u32 %p0, %cta, 0; @%p0 ld.global.u32 %r1, [%x+134000000];
        @!%p0 st.global.u32 [%x+134000000], 5;""",
    "lanes of one store": "st.global.u32 [%x+134000000], %lane;",
    "clean": "mad.wide.u32 %d1, %i, 4, %x; st.global.u32 [%d1+134000000], %i;",
}


@pytest.mark.parametrize("kind", IN_LARGE)
def test_races_on_large_tensors_are_looked_for_where_they_are_touched(kind):
    x = np.zeros((1 << 25) + 1024, np.uint32)
    with nullcontext() if kind == "clean" else pytest.raises(Hazards, match=r"x\[33500000\]"):
        assert not simulate_ptx(IN_LARGE[kind], {"x": x}, Shape(grid=2)).unwatched


def test_a_run_says_where_it_has_looked_for_no_races(monkeypatch):
    monkeypatch.setattr("cutex.sim.hazards.sparse_marks.MOST_PAGES", 1)
    body = "mad.wide.u32 %d1, %cta, 65536, %x; st.global.u32 [%d1], 5;"
    report = simulate_ptx(body, {"x": np.zeros(1 << 25, np.uint32)}, Shape(grid=4))
    (said,) = report.unwatched
    assert "races on x (33554432 uint32) were looked for in part" in said and said in str(report)


def test_marks_of_large_tensors_are_those_of_small_ones():
    rng, pages = np.random.default_rng(3), sparse_marks.Pages()
    dense, sparse = np.zeros(1 << 18, np.uint32), sparse_marks.SparseMarks(1 << 18, pages)
    for step in range(60):
        at = rng.integers(0, 1 << 18, (rng.integers(1, 40), 4))
        new = rng.integers(0, 3, (len(at), 1)).astype(np.uint32) * step
        dense[at] = sparse[at] = new
        dense[at[:2]] = sparse[at[:2]] = 0
        assert (dense[at] == sparse[at]).all() and (dense[5:9000] == sparse[5:9000]).all()
    assert (sparse.marked() == (dense != 0)).all()
    assert pages.left == sparse_marks.MOST_PAGES - sparse.used + 1

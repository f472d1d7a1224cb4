"""A kernel that waits for one asynchronous operation and uses another is found in the default
order.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, EVERY_ORDER, copy, init, rows, wait
from multiplications import B_AT, SMEM, Mma, kernel, operand
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim import BarrierMisuse, Hazards, SimError

each_order = pytest.mark.parametrize(
    "order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values()))
)

# -- copies ----------------------------------------------------------------------------------------

TWO_LOADS = f"""{init(1)}
    .reg .b32 other, data, mine; add.u32 other, bar, 8; add.u32 data, bar, 128;
    @%p0 mbarrier.init.shared.b64 [other], 1; bar.sync 0; FIRST SECOND
    {wait("WAITED", 0, "W0")}
    add.u32 mine, data, 256; mad.lo.u32 mine, %lane, 4, mine;
    ld.shared.b32 %r0, [mine]; st.global.b32 [%out_i], %r0;
    {wait("bar", 0, "W1")} {wait("other", 0, "W2")}
"""


def two_loads(waited: str, second_by: str, **order) -> np.ndarray:
    """Load rows 0 and 1 on two barriers, by one thread or by two of different warps; row 1 is
    read."""
    a, out = rows(2, 64), np.zeros(64, np.uint32)
    load = "@{p} mbarrier.arrive.expect_tx.shared.b64 _, [{bar}], 256; @{p} "
    first = load.format(p="%p0", bar="bar") + copy("data", "%a", 256)
    second = load.format(p=second_by, bar="other") + copy("data+256", "%a+256", 256)
    second = second.replace("[bar];", "[other];").replace("[%a+256]", "[%d9]")
    second = f"add.u64 %d9, %a, 256; setp.eq.u32 %p7, %i, 32; {second}"
    body = TWO_LOADS.replace("FIRST", first).replace("SECOND", second).replace("WAITED", waited)
    simulate_ptx(body, {"a": a, "out": out}, Shape(block=64, smem=1024), **order)
    assert (out == np.tile(a[1, :32], 2)).all()
    return out


@pytest.mark.sweep(3)
@each_order
@pytest.mark.parametrize("second_by", ["%p0", "%p7"], ids=["one thread", "two warps"])
def test_a_wait_for_one_copy_is_none_for_the_next(second_by, order):
    """It is found also where the other copy happens to be complete."""
    two_loads("other", second_by, **order)
    with pytest.raises(Hazards, match=r"the bulk copy .* on which this warp never waited"):
        two_loads("bar", second_by, **order)


@pytest.mark.parametrize("between", ["global", "shared"])
def test_two_copies_of_the_same_bytes_to_one_place_break_the_letter_only(between):
    """As where the elected thread of each warp issues one, and all are counted."""
    body = f"""{init(2)} setp.eq.u32 %p1, %lane, 0; .reg .b32 from; add.u32 from, bar, 1024;
        mad.lo.u32 %r21, %i, 4, from; st.shared.u32 [%r21], %i; st.shared.u32 [%r21+256], 1;
        fence.proxy.async.shared::cta; bar.sync 0;
        mul.lo.u32 %r2, %i, OTHER; add.u32 from, from, %r2; mad.wide.u32 %d2, %r2, 1, %x;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; COPY
        {wait("bar", 0, "W")} ld.shared.u32 %r1, [bar+128]; st.global.u32 [%out_i], %r1;"""
    load = "@%p1 " + copy("bar+128", "%d2", 128)
    own = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    text = load if between == "global" else f"@%p1 {own} [bar+128], [from], 128, [bar];"
    arrays = {"x": rows(1, 512).reshape(-1), "out": np.zeros(64, np.uint32)}
    body, shape = body.replace("COPY", text), Shape(block=64, smem=4096)
    report = simulate_ptx(body.replace("OTHER", "0"), arrays, shape)
    assert "both copy the same bytes to the same place" in str(report.advisories[0])
    with pytest.raises(Hazards, match="while it is still being written by the bulk copy"):
        simulate_ptx(body.replace("OTHER", "8"), arrays, shape)


# -- tcgen05.commit --------------------------------------------------------------------------------


def run(case: Mma, text: str, **order) -> None:
    tensors = {"s": aligned(case.shared()), "t": aligned(case.tensor_memory())}
    tensors["t"] = tensors["t"].reshape(-1, case.width)
    shape = Shape(grid=case.group, block=128, cluster=case.group, smem=SMEM + 64)
    simulate_ptx(kernel(text, case.group, case.width), tensors, shape, arch="sm_100a", **order)


def multiplication(group: int) -> Mma:
    m = 128 * group
    return Mma(operand("f16"), operand("f16", start=B_AT), m, 64, group, steps=4)


# in flight still, or complete by chance
UNWAITED = r"tensor memory .*(still being written by|which) the tcgen05.mma"
COMMITTERS = {  # predicates of the thread that commits
    "another lane": "setp.eq.u32 %p5, %r10, 1;",
    "another warp": "setp.eq.u32 %p5, %r10, 32;",
}


@pytest.mark.sweep(12)
@each_order
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("committer", COMMITTERS)
def test_a_commit_does_not_wait_for_what_another_thread_issued(committer, group, order):
    """PTX ISA 9.7.16.12.1: it tracks what the executing thread has initiated."""
    case = multiplication(group)
    text = case.text()
    run(case, text, **order)
    commit = text[text.index("@%p3 tcgen05.commit") :]
    mine = "setp.eq.u32 %p6, %r14, 0; and.pred %p5, %p5, %p6;"
    by_other = COMMITTERS[committer] + mine + commit.replace("@%p3", "@%p5")
    by_other = "bar.sync 0;" + by_other  # ordered, but that is not enough
    text = text.replace(commit, "")
    head, _, tail = commit.partition("@%p3")
    assert not head and tail
    setup = "mov.u16 %h0, 3;" if group == 2 else ""
    with pytest.raises(Hazards, match=UNWAITED):
        run(case, text + setup + by_other, **order)


def test_a_commit_does_not_wait_for_another_threads_later_work():
    """The committer has issued an MMA of its own before; the other's come after it."""
    case = multiplication(1)
    text = case.text()
    places = [m.start() for m in re.finditer("@%p3 tcgen05.mma", text)]
    at = places[0]
    first = text[at : text.index(";", at) + 1]
    other = "setp.eq.u32 %p5, %r10, 1;" + first.replace("@%p3", "@%p5")
    commit = text[text.index("@%p3 tcgen05.commit") :]
    text = text[:at] + other + text[at:].replace(commit, commit.replace("@%p3", "@%p5"))
    with pytest.raises(Hazards, match=r"still being written by the tcgen05.mma"):
        run(case, text)


# -- pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_either_cta_of_a_pair_may_issue_for_both(rank):
    """PTX ISA 9.7.16.5: a single thread of the pair issues; A, B and D are the same ones."""
    case = multiplication(2)
    text = f"setp.eq.u32 %p3, %r14, {rank}; and.pred %p3, %p3, %p0;" + case.text()
    case.text = lambda: text  # type: ignore[method-assign]
    case.check()
    case.check(order="peer-late", seed=1)


def test_a_pair_cannot_multiply_when_one_has_gone():
    case = multiplication(2)
    gone = "setp.eq.u32 %p5, %r14, 1; @%p5 ret; nanosleep.u32 100; bar.sync 0;"
    with pytest.raises(
        BarrierMisuse, match=r"tcgen05.mma.* but CTA \(1,0,0\), its peer, has exited"
    ):
        run(case, gone + case.text(), order="peer-late", seed=1)


def test_pairs_need_clusters_of_even_size():
    text = "mov.u16 %h0, 1; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    body = f"""{init(1)} {CLUSTER_SYNC} @%p0 {text}.multicast::cluster.b64 [bar], %h0;"""
    with pytest.raises(SimError, match=r"clusters of 1 have no pairs"):
        simulate_ptx(body, {}, Shape(smem=64), arch="sm_100a")


# -- tensor memory between warps -------------------------------------------------------------------


# in orders that start the MMA first
MET = r"tcgen05\.(st|ld) of .* while it is still being (written|read)"


def simulate_text(case: Mma, text: str, **order) -> None:
    tensors = {"s": aligned(case.shared()), "t": aligned(case.tensor_memory())}
    tensors["t"] = tensors["t"].reshape(-1, case.width)
    simulate_ptx(text, tensors, Shape(block=128, smem=SMEM + 64), arch="sm_100a", **order)


@pytest.mark.sweep(4)
@each_order
@pytest.mark.parametrize("a", ["shared", "tensor"])
def test_an_mma_comes_after_the_stores_of_other_warps(a, order):
    """Stores to its accumulator, or to A: in every order of events, a barrier must order them."""
    source = operand("f16") if a == "shared" else "f16"
    case = Mma(source, operand("f16", start=B_AT), 128, 64, column=32, a_column=8)
    text = kernel(case.text(), 1, case.width)
    simulate_text(case, text, **order)
    barrier = re.compile(r"(tcgen05\.fence::before_thread_sync;\s*)bar\.sync 0;")
    without, count = barrier.subn(r"\1", text)
    assert count == 1
    race = r"tcgen05\.mma of .* tensor memory column \d+, which .* stored at PTX line \d+: no barr"
    with pytest.raises(Hazards, match=f"{race}|{MET}"):
        simulate_text(case, without, **order)


@pytest.mark.sweep(2)
@each_order
def test_an_mma_comes_after_the_loads_of_other_warps(order):
    """For instance, loads of an accumulator that the epilogue still reads."""
    case = Mma(operand("f16"), operand("f16", start=B_AT), 128, 64)
    text = kernel(case.text(), 1, case.width)
    again = case.text() + wait("%r1", 1, "AGAIN")
    loaded = re.compile(r"(tcgen05\.wait::ld\.sync\.aligned;\s*)bar\.sync 0;")

    def with_another(before: str) -> str:
        changed, count = loaded.subn(rf"\1{before}{again} bar.sync 0;", text)
        assert count == 1
        return changed

    simulate_text(case, with_another("bar.sync 0;"), **order)
    race = r"tcgen05\.mma of .* overwrites tensor memory .* loaded at PTX line \d+: no barrier"
    with pytest.raises(Hazards, match=f"{race}|{MET}"):
        simulate_text(case, with_another(""), **order)


@pytest.mark.sweep(2)
@each_order
def test_columns_that_were_given_back_are_nobodys(order):
    """Another warp may store to them at once where they are allocated again."""
    body = """
        .reg .b32 at, t; mov.u32 at, smem; setp.lt.u32 %p1, %i, 32; @!%p1 bra OTHER;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at], 32; ld.shared.b32 t, [at];
        tcgen05.st.sync.aligned.32x32b.x1.b32 [t], {%lane}; tcgen05.wait::st.sync.aligned;
        tcgen05.dealloc.cta_group::1.sync.aligned.b32 t, 32; bar.sync 0; bra END;
        OTHER: bar.sync 0;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at], 32; ld.shared.b32 t, [at];
        add.u32 t, t, 2097152; tcgen05.st.sync.aligned.32x32b.x1.b32 [t], {%lane};
        tcgen05.wait::st.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 t, 32;
        END:
    """
    simulate_ptx(body, {}, Shape(block=64, smem=64), arch="sm_100a", **order)


@pytest.mark.sweep(2)
@each_order
def test_stores_to_tensor_memory_are_waited_for_before_others_use_them(order):
    """PTX ISA 9.7.16.6.4.4: by wait::st, before the barrier."""
    case = Mma("f16", operand("f16", start=B_AT), 128, 64, column=32, a_column=8)
    text = kernel(case.text(), 1, case.width)
    simulate_text(case, text, **order)
    without, count = re.subn(r"tcgen05\.wait::st\S*;", "", text)
    assert count
    race = (
        r"stored at PTX line \d+: .*(no tcgen05.wait::st stands|not waited with tcgen05.wait::st)"
    )
    with pytest.raises(Hazards, match=race):
        simulate_text(case, without, **order)


LOADS = """
    .reg .b32 at, t, mine; mov.u32 at, smem;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [at], 32; ld.shared.b32 t, [at];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [t], {%lane}; BETWEEN
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {mine}, [t]; tcgen05.wait::ld.sync.aligned;
    st.global.b32 [%out_i], mine; tcgen05.dealloc.cta_group::1.sync.aligned.b32 t, 32;
"""


@pytest.mark.sweep(2)
@each_order
def test_a_warp_waits_for_its_own_stores_before_it_loads(order):
    """PTX ISA 9.7.16.6.4.2, example 1"""
    out = np.zeros(32, np.uint32)
    wait_st = "tcgen05.wait::st.sync.aligned;"
    for between in (wait_st, ""):
        body, shape = LOADS.replace("BETWEEN", between), Shape(smem=64)
        if between:
            simulate_ptx(body, {"out": out}, shape, arch="sm_100a", **order)
            assert (out == np.arange(32)).all()
            continue
        with pytest.raises(Hazards, match=r"no tcgen05.wait::st stands in between"):
            simulate_ptx(body, {"out": out}, shape, arch="sm_100a", **order)

"""Non-bulk cp.async: the data in shared memory, the time from which others may read it, and
arrivals.
"""

from __future__ import annotations

import numpy as np
import pytest
from barriers import EVERY_ORDER, init, rows, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BadAddress, BadOperand, Deadlock, Hazards
from cutex.sim.errors import SimError

each_order = pytest.mark.parametrize(
    "order", EVERY_ORDER, ids=lambda o: "-".join(map(str, o.values()))
)
# each thread of 64 copies `size` bytes of its row of 16 to its place; then it reads its neighbour's
COPY = """
    .reg .b32 base, mine, other, n; .reg .b64 from; mov.u32 base, smem;
    mad.lo.u32 mine, %i, 16, base; add.u32 other, %i, 33; and.b32 other, other, 63;
    mad.lo.u32 other, other, 16, base; mad.wide.u32 from, %i, 16, %a; and.b32 n, %i, N;
    mov.b32 %r0, -1; st.shared.v4.b32 [mine], {%r0, %r0, %r0, %r0};
    setp.ge.u32 %p1, %i, 32; BODY
    ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [other];
    st.global.v4.b32 [%out_i], {%r0, %r1, %r2, %r3};
"""
UNWAITED = (
    "which a cp.async of .* wrote at .*: nothing that this warp has waited for says that it is"
)
WAIT_ALL = "cp.async.wait_all; bar.sync 0;"
SHAPE = Shape(block=64, smem=2048)


def source() -> np.ndarray:
    return rows(64, 4)


def copied(execute, text: str, mask: int = 0, shape: Shape = SHAPE, **how) -> np.ndarray:
    """The threads' data, (64, 4), in the order of the threads that copied it."""
    out = np.zeros((64, 4), np.uint32)
    body = COPY.replace("BODY", text).replace("N;", f"{mask};")
    execute(body, {"a": source(), "out": out}, shape, **how)
    return np.roll(out, 33, 0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("space", ["shared.global", "shared::cta.global.L2::128B"])
@pytest.mark.parametrize(("form", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_a_copy_moves_its_bytes_and_no_others(execute, form, size, space):
    text = f"cp.async.{form}.{space} [mine], [from], {size}; {WAIT_ALL}"
    got = copied(execute, text).view(np.uint8)
    want = np.full((64, 16), 0xFF, np.uint8)
    want[:, :size] = source().view(np.uint8)[:, :size]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_what_src_size_leaves_out_is_zero(execute, size):
    text = f"cp.async.ca.shared.global [mine], [from], {size}, n; {WAIT_ALL}"
    got = copied(execute, text, mask=size - 1).view(np.uint8)
    want = np.full((64, 16), 0xFF, np.uint8)
    for i, row in enumerate(source().view(np.uint8)):
        n = i & (size - 1)
        want[i, :size] = 0
        want[i, :n] = row[:n]
    np.testing.assert_array_equal(got, want)


def test_a_source_that_is_ignored_is_zero(execute):
    text = f"cp.async.cg.shared.global [mine], [from], 16, %p1; {WAIT_ALL}"
    want = source()
    want[32:] = 0
    np.testing.assert_array_equal(copied(execute, text), want)


def test_a_cache_policy_changes_nothing(execute):
    policy = "createpolicy.fractional.L2::evict_last.b64 %d5, 1.0;"
    for more in ("", "n, "):
        text = f"{policy} cp.async.ca.shared.global.L2::cache_hint [mine], [from], 4, {more}%d5;"
        got = copied(execute, text + WAIT_ALL, mask=0)
        assert (got[:, 0] == (0 if more else source()[:, 0])).all()


def test_nothing_is_read_where_nothing_is_taken(execute):
    """Both ways to omit the source also omit its address."""
    far = "add.u64 from, from, 1073741824; "
    for last in ("n", "%p2"):
        text = f"setp.eq.u32 %p2, n, 0; {far}cp.async.cg.shared.global [mine], [from], 16, {last};"
        assert not copied(execute, text + WAIT_ALL).any()


@pytest.mark.sweep(2)
@each_order
def test_two_warps_may_fill_neighbouring_words(order):
    body = """
    .reg .b32 mine, w; .reg .b64 from; shr.u32 w, %i, 5; mad.lo.u32 w, %lane, 2, w;
    mov.u32 mine, smem; mad.lo.u32 mine, w, 4, mine; mad.wide.u32 from, w, 4, %a;
    cp.async.ca.shared.global [mine], [from], 4; cp.async.wait_all; ld.shared.b32 %r0, [mine];
    mad.wide.u32 from, w, 4, %out; st.global.b32 [from], %r0;
    """
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    simulate_ptx(body, {"a": a, "out": out}, Shape(block=64, smem=512), **order)
    assert (out == a[0]).all()


# -- groups ----------------------------------------------------------------------------------------

# a ring of slots of 512 bytes: each thread copies 16 bytes of a row and reads its own
RING = """
    .reg .b32 base, mine, slot, n, v; .reg .b64 from; mov.u32 base, smem; mov.b32 n, 0;
    mad.lo.u32 base, %i, 16, base; mad.wide.u32 from, %i, 16, %a; mov.b32 v, 0;
    cp.async.cg.shared.global [base], [from], 16; cp.async.commit_group; add.u64 from, from, 512;
    cp.async.cg.shared.global [base+512], [from], 16; cp.async.commit_group;
    ROUND:
      add.u64 from, from, 512; add.u32 mine, n, 2; rem.u32 mine, mine, 3;
      mad.lo.u32 mine, mine, 512, base; setp.lt.u32 %p1, n, 4;
      @%p1 cp.async.cg.shared.global [mine], [from], 16; cp.async.commit_group;
      cp.async.wait_group ALLOWED; rem.u32 slot, n, 3; mad.lo.u32 slot, slot, 512, base;
      ld.shared.b32 %r0, [slot]; mad.lo.u32 v, v, 3, %r0;
      add.u32 n, n, 1; setp.lt.u32 %p1, n, 6; @%p1 bra ROUND;
    st.global.b32 [%out_i], v;
"""


def ring(execute, allowed: int, **how) -> None:
    a, out = rows(6, 128), np.zeros(32, np.uint32)
    body = RING.replace("ALLOWED", str(allowed))
    execute(body, {"a": a, "out": out}, Shape(smem=2048), **how)
    want = np.zeros(32, np.uint32)
    for row in a:
        want = want * np.uint32(3) + row[::4]
    assert (out == want).all()


def test_a_ring_waits_for_all_but_its_last_groups(execute):
    ring(execute, 2)


@pytest.mark.sweep(2)
@each_order
def test_a_ring_in_any_order(order):
    for allowed in (0, 1, 2):
        ring(simulate_ptx, allowed, **order)


def test_a_wait_for_one_group_too_few_is_found():
    with pytest.raises(Hazards, match=UNWAITED):
        ring(simulate_ptx, 3)


@pytest.mark.parametrize("text", ["bar.sync 0;", "cp.async.commit_group; bar.sync 0;"])
def test_no_wait_is_found(text):
    with pytest.raises(Hazards, match=UNWAITED):
        copied(simulate_ptx, f"cp.async.cg.shared.global [mine], [from], 16; {text}")


@pytest.mark.sweep(2)
@each_order
def test_other_warps_need_a_barrier_too(order):
    text = "cp.async.cg.shared.global [mine], [from], 16; cp.async.wait_all;"
    with pytest.raises(Hazards, match="race"):
        copied(simulate_ptx, text, **order)


def test_the_barrier_stands_after_the_wait():
    text = "cp.async.cg.shared.global [mine], [from], 16; bar.sync 0; cp.async.wait_all;"
    with pytest.raises(
        Hazards, match=r"reads shared memory .*: no barrier orders the two|says that it is complete"
    ):
        copied(simulate_ptx, text)


@pytest.mark.sweep(2)
@each_order
def test_a_copy_onto_what_others_read_is_found(order):
    text = f"""
    cp.async.cg.shared.global [mine], [from], 16; {WAIT_ALL} ld.shared.b32 %r4, [other];
    cp.async.cg.shared.global [mine], [from], 16; {WAIT_ALL}"""
    with pytest.raises(Hazards, match=r"overwrites shared memory .*: no barrier orders the two"):
        copied(simulate_ptx, text, **order)
    ordered = text.replace("[other];", "[other]; bar.sync 0;")
    assert (copied(simulate_ptx, ordered, **order) == source()).all()


# -- mbarriers -------------------------------------------------------------------------------------

# warp 0 copies, warp 1 waits for the mbarrier and reads
HANDOVER = """
    .reg .b32 data; .reg .b64 from; add.u32 data, bar, 128; mad.lo.u32 data, %lane, 16, data;
    mad.wide.u32 from, %lane, 16, %a; setp.lt.u32 %p1, %i, 32; @!%p1 bra READ;
    cp.async.cg.shared.global [data], [from], 16; ARRIVE bra END;
    READ: WAIT
    ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [data];
    mad.wide.u32 from, %lane, 16, %out; st.global.v4.b32 [from], {%r0, %r1, %r2, %r3};
    END:
"""
NOINC = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];"
ONE_MORE = "cp.async.mbarrier.arrive.shared.b64 [bar];"
OWN = "mbarrier.arrive.shared.b64 _, [bar];"
ARRIVALS = {
    "noinc": (32, NOINC),
    "one more, and an arrival of its own": (32, ONE_MORE + OWN),
    "noinc, and an arrival of its own": (64, NOINC + OWN),
    "twice": (64, NOINC + NOINC),
    "by one thread": (
        1,
        f"cp.async.wait_all; bar.warp.sync -1; elect.sync _|%p2, -1; @%p2 {NOINC}",
    ),
}


def handed_over(execute, count: int, arrive: str, **how) -> None:
    a, out = rows(32, 4), np.zeros((32, 4), np.uint32)
    body = init(count) + HANDOVER.replace("ARRIVE", arrive).replace("WAIT", wait("bar", 0, "W"))
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024), **how)
    assert (out == a).all()


@pytest.mark.parametrize(("count", "arrive"), ARRIVALS.values(), ids=ARRIVALS)
def test_an_mbarrier_tells_that_copies_are_complete(execute, count, arrive):
    handed_over(execute, count, arrive)
    if execute is simulate_ptx:
        for order in EVERY_ORDER:
            handed_over(execute, count, arrive, **order)


def test_an_arrival_that_is_expected_in_addition_fills_no_phase():
    told = r"none of 32 arrivals came besides those of cp\.async without \.noinc"
    with pytest.raises(Deadlock, match=told):
        handed_over(simulate_ptx, 32, ONE_MORE)


def test_an_ordinary_arrival_does_not_wait_for_copies():
    with pytest.raises(Hazards, match=UNWAITED):
        handed_over(simulate_ptx, 32, OWN)


def test_an_arrival_waits_for_the_copies_before_it_only():
    """Each slot has its barrier: that of slot 0 does not cover slot 1."""
    body = f"""{init(32)} .reg .b32 next, data; .reg .b64 from; add.u32 next, bar, 8;
    @%p0 mbarrier.init.shared.b64 [next], 32; bar.sync 0; add.u32 data, bar, 128;
    mad.lo.u32 data, %lane, 16, data; mad.wide.u32 from, %lane, 16, %a; setp.lt.u32 %p1, %i, 32;
    @!%p1 bra READ; cp.async.cg.shared.global [data], [from], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [bar]; add.u64 from, from, 512;
    cp.async.cg.shared.global [data+512], [from], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [next]; bra END;
    READ: {wait("WAITED", 0, "W")} ld.shared.b32 %r0, [data+512];
    mad.wide.u32 from, %lane, 4, %out; st.global.b32 [from], %r0; END:
    """
    a, out = rows(64, 4), np.zeros(32, np.uint32)
    shape = Shape(block=64, smem=2048)
    simulate_ptx(body.replace("WAITED", "next"), {"a": a, "out": out}, shape)
    assert (out == a[32:, 0]).all()
    with pytest.raises(Hazards, match=UNWAITED):
        simulate_ptx(body.replace("WAITED", "bar"), {"a": a, "out": out}, shape)


# -- refused operands ------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("cp.async.cg.shared.global [mine], [from], 8;", BadOperand, "of 8 bytes"),
        ("mov.b32 n, 9; cp.async.ca.shared.global [mine], [from], 8, n;", BadOperand,
         "src-size 9 of a copy of 8 bytes"),
        ("add.u64 from, from, 16; cp.async.cg.shared.global [mine], [from], 16;", BadAddress,
         r"warp 1 lane 31 loads 0x\w+, 0 bytes past the end of a"),
        ("add.u64 from, from, 4; cp.async.ca.shared.global [mine], [from], 8;", BadAddress,
         "not aligned to 8 bytes"),
        ("add.u32 mine, mine, 4; cp.async.cg.shared.global [mine], [from], 16;", BadAddress,
         "not aligned"),
        ("add.u32 mine, mine, 2048; cp.async.cg.shared.global [mine], [from], 16;", BadAddress,
         "outside the CTA's shared memory"),
    ],
)  # fmt: skip
def test_what_hardware_does_not_take(text, error, sentence):
    with pytest.raises(error, match=sentence) as report:
        copied(simulate_ptx, text + WAIT_ALL, assembles=False)
    assert isinstance(report.value, SimError)


# -- the async proxy -------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@each_order
def test_a_bulk_store_of_what_was_copied_is_told_without_a_fence(order):
    """cp.async is of the generic proxy; kernels of NVIDIA have no fence there: an advisory."""
    a, out = source(), np.zeros((64, 4), np.uint32)
    text = f"""cp.async.cg.shared.global [mine], [from], 16; {WAIT_ALL} setp.eq.u32 %p2, %i, 0;
        FENCE @%p2 cp.async.bulk.global.shared::cta.bulk_group [%out], [base], 1024;
        @%p2 cp.async.bulk.commit_group; @%p2 cp.async.bulk.wait_group 0; ret;"""
    for fence, count in (("", 1), ("fence.proxy.async.shared::cta;", 0)):
        body = COPY.replace("BODY", text.replace("FENCE", fence)).replace("N;", "0;")
        report = simulate_ptx(body, {"a": a, "out": rows_like(out)}, SHAPE, **order)
        told = [f.message for f in report.advisories]
        assert len(told) == count and all("which a cp.async wrote" in t for t in told)


def rows_like(array: np.ndarray) -> np.ndarray:
    """Rows of the same shape, at a multiple of 16 bytes."""
    return rows(*array.shape)


NEIGHBOUR = """.reg .b32 at; mov.u32 at, smem; mad.lo.u32 at, %lane, 16, at;
    mad.wide.u32 %d1, %lane, 16, %a;
    cp.async.cg.shared.global [at], [%d1], 16; cp.async.commit_group; cp.async.wait_group 0; SYNC
    xor.b32 at, at, 16; ld.shared.u32 %r2, [at]; st.global.u32 [%out_i], %r2;"""


@pytest.mark.parametrize("sync", ["", "bar.warp.sync -1;", "bar.sync 0;"])
def test_a_lane_waits_for_its_own_copies_only(sync):
    arrays = {"a": rows(32, 4), "out": np.zeros(32, np.uint32)}
    report = simulate_ptx(NEIGHBOUR.replace("SYNC", sync), arrays, Shape(smem=512))
    assert (arrays["out"] == arrays["a"][np.arange(32) ^ 1, 0]).all()
    said = [a.message for a in report.advisories]
    assert not said if sync else "bar.warp.sync is missing" in said[0]

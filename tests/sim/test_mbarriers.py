"""mbarriers: phases, transaction counts, and the bulk copies that complete them."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import INIT, START, again, copy, each_order, init, rows, wait
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BarrierMisuse, Hazards


def test_a_phase_ends_with_the_last_arrival(execute):
    """Tests of both parities after each of 3 arrivals, over three phases."""
    out = np.zeros((9, 2), np.uint32)
    tests = ""
    for i in range(9):
        tests += "mbarrier.arrive.shared.b64 _, [bar];"
        for p in (0, 1):
            tests += (
                f"mbarrier.test_wait.parity.shared.b64 %p1, [bar], {p}; selp.b32 %r0, 1, 0, %p1;"
            )
            tests += f"st.global.b32 [%out+{8 * i + 4 * p}], %r0;"
    execute(f"{init(3)} {tests}", {"out": out}, Shape(block=1, smem=64))
    phases = [(i + 1) // 3 for i in range(9)]
    assert out.tolist() == [[n % 2 == 1, n % 2 == 0] for n in phases]


def test_arrival_tokens_name_their_phase(execute):
    out = np.zeros(4, np.uint32)

    def look(token: str, place: int) -> str:
        test = f"mbarrier.test_wait.shared.b64 %p1, [bar], {token}; selp.b32 %r0, 1, 0, %p1;"
        return f"{test} st.global.b32 [%out+{place}], %r0;"

    body = f"""{init(2)} .reg .b64 first, second;
    mbarrier.arrive.shared.b64 first, [bar]; {look("first", 0)}
    mbarrier.arrive.shared.b64 second, [bar]; {look("first", 4)} {look("second", 8)}
    mbarrier.arrive.shared.b64 second, [bar]; {look("second", 12)}
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out.tolist() == [0, 1, 1, 0]


def test_arrivals_with_a_count_and_arrive_drop(execute):
    """5 expected: 2 + 1 dropped + 2 end the first phase; 4 are expected from then on."""
    out = np.zeros(3, np.uint32)

    def test(parity: int, place: int) -> str:
        wait = f"mbarrier.test_wait.parity.shared.b64 %p1, [bar], {parity};"
        return f"{wait} selp.b32 %r0, 1, 0, %p1; st.global.b32 [%out+{place}], %r0;"

    body = f"""{init(5)}
    mbarrier.arrive.shared.b64 _, [bar], 2; mbarrier.arrive_drop.shared.b64 _, [bar];
    mbarrier.arrive.shared.b64 _, [bar], 2; {test(0, 0)}
    mbarrier.arrive.shared.b64 _, [bar], 3; {test(1, 4)}
    mbarrier.arrive.shared.b64 _, [bar], 1; {test(1, 8)}
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out.tolist() == [1, 0, 1]


RING = f"""
    .reg .b32 full, empty, n, ring, place, parity, v, k; .reg .b64 from;
    mov.u32 ring, smem; add.u32 full, ring, 1024; add.u32 empty, full, 16; setp.eq.u32 %p0, %i, 0;
    @%p0 mbarrier.init.shared.b64 [full], 1; @%p0 mbarrier.init.shared.b64 [full+8], 1;
    @%p0 mbarrier.init.shared.b64 [empty], 32; @%p0 mbarrier.init.shared.b64 [empty+8], 32;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.b32 n, 0; mov.b32 v, 0; setp.lt.u32 %p1, %i, 32; @!%p1 bra CONSUME;
    elect.sync _|%p2, -1; @!%p2 bra END;
    PRODUCE:
      and.b32 k, n, 1; shr.u32 parity, n, 1; and.b32 parity, parity, 1; xor.b32 parity, parity, 1;
      mad.lo.u32 place, k, 8, empty; {wait("place", "parity", "W0")}
      mad.lo.u32 place, k, 8, full; mbarrier.arrive.expect_tx.shared.b64 _, [place], 128;
      mad.wide.u32 from, n, 128, %a; mad.lo.u32 %r1, k, 512, ring;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [from], 128, [place];
      add.u32 n, n, 1; setp.lt.u32 %p3, n, 7; @%p3 bra PRODUCE; bra END;
    CONSUME:
      and.b32 k, n, 1; shr.u32 parity, n, 1; and.b32 parity, parity, 1;
      mad.lo.u32 place, k, 8, full; {wait("place", "parity", "W1")}
      mad.lo.u32 %r1, k, 512, ring; mad.lo.u32 %r1, %lane, 4, %r1; ld.shared.b32 %r2, [%r1];
      mad.lo.u32 v, v, 3, %r2; mad.lo.u32 place, k, 8, empty;
      mbarrier.arrive.shared.b64 _, [place];
      add.u32 n, n, 1; setp.lt.u32 %p3, n, 7; @%p3 bra CONSUME;
    END: st.global.b32 [%out_i], v;
"""


def test_a_ring_of_bulk_copies(execute):
    a, out = rows(7, 32), np.zeros(64, np.uint32)
    execute(RING, {"a": a, "out": out}, Shape(block=64, smem=2048))
    want = np.zeros(32, np.uint32)
    for row in a:
        want = want * np.uint32(3) + row
    assert (out[32:] == want).all()
    each_order(RING, {"a": rows(7, 32), "out": out}, Shape(block=64, smem=2048))


def test_bytes_may_come_before_they_are_announced(execute):
    """The transaction count is negative for a while; the phase still waits for the arrival."""
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = f"""{init(2)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 {copy("data", "%a", 256)} @%p0 mbarrier.arrive.shared.b64 _, [bar];
    bar.sync 0; @%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 256;
    @%p0 mbarrier.arrive.shared.b64 _, [bar]; {wait("bar", 0, "W0")}
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024))
    assert (out == a[0]).all()
    each_order(body, {"a": rows(1, 64), "out": out}, Shape(block=64, smem=1024))


def test_two_copies_may_share_a_phase(execute):
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = f"""{init(1)}
    .reg .b32 data, high; add.u32 data, bar, 128; add.u32 high, bar, 256;
    .reg .b64 second; add.u64 second, %a, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p0 {copy("data", "%a", 128)} @%p0 {copy("high", "second", 128)} {wait("bar", 0, "W0")}
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024))
    assert (out == a[0]).all()


def test_a_phase_without_bytes_of_its_own_completes_by_complete_tx(execute):
    out = np.zeros(2, np.uint32)
    test = "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; selp.b32 %r0, 1, 0, %p1;"
    body = f"""{init(1)} mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;
    {test} st.global.b32 [%out], %r0;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 64;
    {test} st.global.b32 [%out+4], %r0;
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out.tolist() == [0, 1]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (init(1).replace("[bar], 1;", "[bar], 0;"), r"mbarrier.init with count 0; it takes 1\.\."),
        (init(1) + "mbarrier.arrive.shared.b64 _, [bar], 2;",
         r"lane 0 arrives 2 times on mbarrier 0x400 .*, which expects only 1 more of 1 in phase 0"),
        (init(3) + "mbarrier.arrive.shared.b64 _, [bar]; mbarrier.init.shared.b64 [bar], 3;",
         "initialises mbarrier 0x400 .* again while it is in use"),
        ("mov.u32 %r0, smem; mbarrier.arrive.shared.b64 _, [%r0+8];",
         r"no mbarrier was initialised at shared 0x408 of CTA \(0,0,0\)"),
        (init(1) + "mbarrier.inval.shared.b64 [bar]; mbarrier.arrive.shared.b64 _, [bar];",
         "no mbarrier was initialised at shared 0x400"),
        (init(1) + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048575;"
         "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1;", r"leaves its range of \+-10"),
        (init(1) + "mbarrier.arrive.shared.b64 _, [bar], %i;", "arrives 0 times on mbarrier 0x400"),
        (init(2) + "mbarrier.arrive.noComplete.shared.b64 %d0, [bar], 2;",
         r"arrives \.noComplete on mbarrier 0x400 .* and is the last of its phase 0"),
        (init(1) + "mbarrier.arrive.shared.b64 %d0, [bar];" * 2 + "sub.u64 %d0, %d0, 1;"
         "mbarrier.test_wait.shared.b64 %p1, [bar], %d0;",
         "waits by a state of phase 0 of mbarrier 0x400 .*, which is in its phase 2"),
    ],
)  # fmt: skip
def test_misused_mbarriers(body, sentence):
    with pytest.raises(BarrierMisuse, match=sentence):
        simulate_ptx(body, {}, Shape(block=1, smem=64))


def test_an_mbarrier_may_be_made_anew_where_another_is_done(execute):
    out = np.zeros(1, np.uint32)
    body = f"""{init(1)} mbarrier.arrive.shared.b64 _, [bar]; mbarrier.inval.shared.b64 [bar];
    mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 _, [bar];
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; selp.b32 %r0, 1, 2, %p1;
    st.global.b32 [%out], %r0;
    """
    execute(body, {"out": out}, Shape(block=1, smem=64))
    assert out[0] == 2


def test_a_spin_on_test_wait_lets_the_copy_complete(execute):
    a, out = rows(1, 64), np.zeros(64, np.uint32)
    body = f"""{init(1)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256; @%p0 {copy("data", "%a", 256)}
    {START} SPIN: mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0; {again("SPIN", "!%p1")}
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;
    """
    execute(body, {"a": a, "out": out}, Shape(block=64, smem=1024))
    assert (out == a[0]).all()


def test_a_parity_is_0_or_1_by_the_letter():
    body = f"{init(1)} @%p0 mbarrier.arrive.shared.b64 _, [bar]; mov.u32 %r5, PARITY;"
    body += wait("bar", "%r5", "W")
    assert not simulate_ptx(body.replace("PARITY", "0"), {}, Shape(smem=64)).advisories
    (told,) = simulate_ptx(body.replace("PARITY", "2"), {}, Shape(smem=64)).advisories
    assert "warp 0 waits for parity 2: by the letter it is 0 or 1" in str(told)


# -- a wait whose result nobody looks at -----------------------------------------------------------

LOADED = f"""{init(1)} .reg .b32 data; add.u32 data, bar, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256; @%p0 {copy("data", "%a", 256)} WAITS
    mad.lo.u32 data, %i, 4, data; ld.shared.b32 %r0, [data]; st.global.b32 [%out_i], %r0;"""
TRY = "mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0;"
IGNORED = {
    "once": TRY,
    "twice": TRY * 2,
    "in a loop of three": f"""mov.u32 %r9, 3; W: {TRY} sub.u32 %r9, %r9, 1;
        setp.ne.u32 %p2, %r9, 0; @%p2 bra W;""",
    "a loop that goes on where it should come back": f"W: {TRY} @%p1 bra W;",
}


@pytest.mark.parametrize("waits", IGNORED.values(), ids=IGNORED)
def test_a_try_wait_that_has_timed_out_is_no_wait(waits):
    """PTX ISA 9.7.13.15.16: it returns false after a time limit, so it is done again until true."""
    arrays = {"a": rows(1, 64), "out": np.zeros(64, np.uint32)}
    with pytest.raises(Hazards, match=r"the mbarrier.try_wait of this warp at .* returned false"):
        simulate_ptx(LOADED.replace("WAITS", waits), arrays, Shape(block=64, smem=1024))


def test_a_try_wait_before_a_wait_is_looked_at():
    """As where a pipeline asks early for the slot that it needs next."""
    arrays = {"a": rows(1, 64), "out": np.zeros(64, np.uint32)}
    early = f"{TRY} @%p1 bra ON; {wait('bar', 0, 'W')} ON:"
    simulate_ptx(LOADED.replace("WAITS", early), arrays, Shape(block=64, smem=1024))
    assert (arrays["out"] == arrays["a"][0]).all()


def test_a_state_of_another_mbarrier_is_refused():
    """Both are in the same phase, so a phase alone would do."""
    body = f"""{INIT.replace("COUNT", "32")} @%p0 mbarrier.init.shared.b64 [bar+8], 32; bar.sync 0;
        mbarrier.arrive.shared.b64 %d5, [bar]; mbarrier.arrive.shared.b64 %d6, [bar+8];
        W: mbarrier.try_wait.shared.b64 %p3, [bar+AT], %d5; @!%p3 bra W;"""
    simulate_ptx(body.replace("AT", "0"), {"out": np.zeros(1, np.uint32)}, Shape(smem=64))
    with pytest.raises(BarrierMisuse, match="by a state that no arrival at it has returned"):
        simulate_ptx(body.replace("AT", "8"), {"out": np.zeros(1, np.uint32)}, Shape(smem=64))

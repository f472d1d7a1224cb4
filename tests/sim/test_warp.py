"""Exchange between the lanes of a warp, against a definition lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim import BadOperand

LANES = np.arange(32)
FULL = 0xFFFFFFFF


def values(dtype=np.uint32, seed: int = 0) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, 64, dtype)


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The ISA's own definition: (lane that is read, predicate)."""
    segment, clamp = c >> 8 & 31, c & 31
    top, low = (lane & segment) | (clamp & ~segment), lane & segment
    j = {
        "up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment),
    }[mode]  # fmt: skip
    inside = j >= top if mode == "up" else j <= top
    return (j, True) if inside else (lane, False)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("width", [32, 16, 8, 4, 2])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(execute, mode, width):
    a, moves = values(), (0, 1, 2, 3, width // 2, width - 1, 31)
    segment = (32 - width) << 8
    c = segment | (0 if mode == "up" else 31)
    for b in moves:
        out = np.zeros((64, 2), np.uint32)
        body = f"""
        ld.global.b32 %r0, [%a_i];
        shfl.sync.{mode}.b32 %r1|%p0, %r0, {b}, {c}, -1;
        selp.b32 %r2, 1, 0, %p0; st.global.v2.b32 [%out_i], {{%r1, %r2}};
        """
        execute(body, {"a": a, "out": out}, Shape(block=64))
        for t in range(64):
            lane, inside = source_lane(mode, t % 32, b, c)
            assert out[t].tolist() == [a[t // 32 * 32 + lane], inside], (t, b)


def test_shfl_with_a_lane_number_of_each_lane(execute):
    a, out = values()[:32], np.zeros(32, np.uint32)
    body = """
    ld.global.b32 %r0, [%a_i]; mad.lo.u32 %r1, %lane, 7, 3;
    shfl.sync.idx.b32 %r2, %r0, %r1, 31, -1; st.global.b32 [%out_i], %r2;
    """
    execute(body, {"a": a, "out": out})
    assert (out == a[(LANES * 7 + 3) % 32]).all()


def test_shfl_among_some_lanes(execute):
    a, out = values()[:32], np.zeros(32, np.uint32)
    body = """
    ld.global.b32 %r0, [%a_i]; mov.b32 %r1, 5; setp.lt.u32 %p0, %lane, 16;
    @%p0 shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0x0000FFFF; st.global.b32 [%out_i], %r1;
    """
    execute(body, {"a": a, "out": out})
    assert (out == np.where(LANES < 16, a[LANES ^ 1], 5)).all()


MASKS = [FULL, 0x0000FFFF, 0xF0F0F0F0, 0x80000001, 1]


@pytest.mark.parametrize("mask", MASKS)
def test_vote(execute, mask):
    for pattern in (0, FULL, mask, 0x0F0F00FF, 0x80000000):
        out = np.zeros((32, 4), np.uint32)
        body = f"""
        .reg .b32 m, bit; mov.b32 m, {mask}; shr.b32 bit, m, %lane; and.b32 bit, bit, 1;
        setp.ne.u32 %p0, bit, 0; @!%p0 bra OUT;
        mov.b32 bit, {pattern}; shr.b32 bit, bit, %lane; and.b32 bit, bit, 1;
        setp.ne.u32 %p1, bit, 0;
        vote.sync.ballot.b32 %r0, %p1, m; vote.sync.all.pred %p2, %p1, m;
        vote.sync.any.pred %p3, %p1, m; vote.sync.uni.pred %p4, !%p1, m;
        selp.b32 %r1, 1, 0, %p2; selp.b32 %r2, 1, 0, %p3; selp.b32 %r3, 1, 0, %p4;
        st.global.v4.b32 [%out_i], {{%r0, %r1, %r2, %r3}};
        OUT:
        """
        execute(body, {"out": out})
        votes = pattern & mask
        want = [votes, votes == mask, votes != 0, votes in (0, mask)]
        for lane in range(32):
            assert out[lane].tolist() == (want if mask >> lane & 1 else [0] * 4)


@pytest.mark.parametrize("bits", [32, 64])
def test_match(execute, bits):
    dtype, r = (np.uint32, "%r") if bits == 32 else (np.uint64, "%d")
    for few in (1, 3, 40):
        a = np.random.default_rng(few).integers(0, few, 32).astype(dtype) << dtype(bits - 8)
        out = np.zeros((32, 3), np.uint32)
        body = f"""
        ld.global.b{bits} {r}0, [%a_i];
        match.any.sync.b{bits} %r1, {r}0, -1; match.all.sync.b{bits} %r2|%p0, {r}0, -1;
        selp.b32 %r3, 1, 0, %p0; st.global.b32 [%out_i], %r1; st.global.b32 [%out_i+4], %r2;
        st.global.b32 [%out_i+8], %r3;
        """
        execute(body, {"a": a, "out": out})
        same = [sum(1 << j for j in range(32) if a[j] == v) for v in a]
        every = FULL if len(set(a.tolist())) == 1 else 0
        assert out.tolist() == [[s, every, every != 0] for s in same]


REDUCE = {
    "add": lambda x: int(x.astype(object).sum()), "min": lambda x: int(x.min()),
    "max": lambda x: int(x.max()), "and": lambda x: int(np.bitwise_and.reduce(x)),
    "or": lambda x: int(np.bitwise_or.reduce(x)), "xor": lambda x: int(np.bitwise_xor.reduce(x)),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mask", [FULL, 0x00FF00F0])
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in ("add", "min", "max") for k in ("u32", "s32")]
    + [(n, "b32") for n in ("and", "or", "xor")],
)  # fmt: skip
def test_redux(execute, name, kind, mask):
    dtype = np.int32 if kind == "s32" else np.uint32
    a, out = values(dtype, 5)[:32], np.zeros(32, dtype)
    body = f"""
    .reg .b32 bit; mov.b32 bit, {mask}; shr.b32 bit, bit, %lane; and.b32 bit, bit, 1;
    setp.ne.u32 %p0, bit, 0; @!%p0 bra OUT;
    ld.global.b32 %r0, [%a_i]; redux.sync.{name}.{kind} %r1, %r0, {mask};
    st.global.b32 [%out_i], %r1; OUT:
    """
    execute(body, {"a": a, "out": out})
    taking = (mask >> LANES & 1).astype(bool)
    want = np.array([REDUCE[name](a[taking]) & FULL], np.uint32).view(dtype)[0]
    assert (out == np.where(taking, want, 0)).all()


@pytest.mark.parametrize("name", ["min", "max"])
def test_redux_of_floats_on_sm_100(name):
    a = np.array([*np.random.default_rng(1).normal(0, 9, 31), np.nan], np.float32)
    for flags in ("", ".abs", ".NaN", ".abs.NaN"):
        out = np.zeros(32, np.float32)
        body = f"""
        ld.global.b32 %r0, [%a_i]; redux.sync.{name}{flags}.f32 %r1, %r0, -1;
        st.global.b32 [%out_i], %r1;
        """
        simulate_ptx(body, {"a": a, "out": out}, arch="sm_100a")
        x = np.abs(a) if "abs" in flags else a
        want = np.nan if "NaN" in flags else (np.nanmin if name == "min" else np.nanmax)(x)
        assert np.array_equal(out, np.full(32, want, np.float32), equal_nan=True)


def test_activemask(execute):
    out = np.zeros(32, np.uint32)
    body = """
    setp.lt.u32 %p0, %lane, 9; @%p0 bra LOW; activemask.b32 %r0; bra STORE;
    LOW: activemask.b32 %r0; STORE: st.global.b32 [%out_i], %r0;
    """
    execute(body, {"out": out})
    assert (out == np.where(LANES < 9, 0x1FF, FULL ^ 0x1FF)).all()


@pytest.mark.parametrize("mask", [FULL, 0xFFFF0000, 0x00000010])
def test_elect_picks_one_lane_of_the_mask(execute, mask):
    out = np.full((32, 2), 99, np.uint32)
    body = f"""
    .reg .b32 bit; mov.b32 bit, {mask}; shr.b32 bit, bit, %lane; and.b32 bit, bit, 1;
    setp.ne.u32 %p0, bit, 0; @!%p0 bra OUT;
    elect.sync %r0|%p1, {mask}; selp.b32 %r1, 1, 0, %p1;
    st.global.v2.b32 [%out_i], {{%r0, %r1}}; OUT:
    """
    execute(body, {"out": out})
    taking = (mask >> LANES & 1).astype(bool)
    leaders = out[taking][:, 0]
    assert len(set(leaders.tolist())) == 1 and taking[leaders[0]]
    assert (out[taking][:, 1] == (LANES[taking] == leaders[0])).all()


def test_every_lane_may_be_elected_but_always_the_same():
    seen = set()
    for seed in range(31):
        out = np.zeros((32, 2), np.uint32)
        body = """
        elect.sync %r0|%p0, -1; elect.sync %r1|%p1, -1; st.global.v2.b32 [%out_i], {%r0, %r1};
        """
        simulate_ptx(body, {"out": out}, order="elected", seed=seed)
        assert (out == out[0, 0]).all()
        seen.add(int(out[0, 0]))
    assert seen == set(range(1, 32))  # lane 0 in all other orders


@pytest.mark.parametrize("what", ["shfl.sync.idx.b32 %r0, %r1, 0, 31, -1;",
                                  "vote.sync.ballot.b32 %r0, %p0, -1;",
                                  "redux.sync.add.u32 %r0, %r1, -1;"])  # fmt: skip
def test_a_mask_that_names_absent_lanes_is_found(what):
    body = f"mov.b32 %r1, 0; setp.lt.u32 %p0, %lane, 4; @%p0 {what}"
    sentence = r"names lane 4 of CTA \(0,0,0\) warp 0, which is not here \(only lanes 0,1,2,3 are"
    with pytest.raises(BadOperand, match=sentence):
        simulate_ptx(body, {})


def test_a_lane_that_is_not_in_its_own_mask_is_found():
    with pytest.raises(BadOperand, match="does not name lane 3"):
        simulate_ptx("mov.b32 %r1, 0; redux.sync.add.u32 %r0, %r1, 0xFFFFFFF7;", {})

"""Faults of rings, named barriers, bounds and unwritten memory, each beside a twin that is right:
the first is found, in two orders, the second clean.
"""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, copy, init, rows, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned
from test_fresh_faults import CLUSTER, FENCE, OUT, PAIR, SIGNALS, START, STORE

from cutex.sim import SimError

BLOCK = Shape(block=64, smem=8192)
ORDERS = ({}, {"order": "random", "seed": 1})
SYNC, COMMIT = "bar.sync 0;", "cp.async.commit_group;"


# -- rings of cp.async, which 64 threads fill a word each, and read the other warp's ---------------


def ring(first: str, round_: str, stages: int = 3, count: int = 4, tail: bool = True) -> str:
    """Copies of rows by ``first``, then for each row ``round_``, in which `ROW` reads a row, `NEXT`
    copies the one ``stages - 1`` further, `COMMIT` commits, unless there is none and not ``tail``.
    """

    def copied(row: int) -> str:
        return f"cp.async.ca.shared.global [mine+{row % stages * 256}], [%x_i+{row * 256}], 4;"

    text = [START, "xor.b32 %r3, mine, 128; mov.u32 %r1, 0;"]
    text += [copied(int(part)) if part.isdigit() else COMMIT for part in first.split()]
    for row in range(count):
        more = row + stages - 1 < count
        read = f"ld.shared.u32 %r2, [%r3+{row % stages * 256}]; add.u32 %r1, %r1, %r2;"
        one = round_.replace("ROW", read)
        one = one.replace("NEXT", copied(row + stages - 1) if more else "")
        text.append(one.replace("COMMIT", COMMIT if more or tail else ""))
    return "\n".join([*text, OUT])


ROUND = f"cp.async.wait_group 1; {SYNC} NEXT COMMIT ROW"
RIGHT = ring("0 C 1 C", ROUND)
TWO = f"NEXT COMMIT cp.async.wait_group 1; {SYNC} ROW"
UNKNOWN, OVERWRITES = "which a cp.async of CTA (0,0,0) warp", "the cp.async of CTA (0,0,0) warp"
RINGS = {
    "a wait for a group too few": (
        ring("0 C 1 C", ROUND.replace("group 1", "group 2")), RIGHT, UNKNOWN),
    "two copies in the first group": (ring("0 1 C", ROUND), RIGHT, UNKNOWN),
    "no empty groups at the end": (ring("0 C 1 C", ROUND, tail=False), RIGHT, UNKNOWN),
    "no group at all": (ring("0 1", ROUND.replace("COMMIT", "")), RIGHT, UNKNOWN),
    "the barrier before the wait": (
        ring("0 C 1 C", f"{SYNC} cp.async.wait_group 1; NEXT COMMIT ROW"), RIGHT, UNKNOWN),
    "a copy before the barrier": (
        ring("0 C 1 C", f"cp.async.wait_group 1; NEXT COMMIT {SYNC} ROW"), RIGHT, OVERWRITES),
    "two slots and one barrier": (
        ring("0 C", TWO, 2), ring("0 C", TWO + SYNC, 2), "cp.async of CTA (0,0,0) warp"),
    "one warp waits": (
        ring("0 C", f"@%p1 cp.async.wait_group 0; {SYNC} ROW", count=1),
        ring("0 C", f"cp.async.wait_group 0; {SYNC} ROW", count=1), UNKNOWN),
    "half of a warp waits": (
        ring("0 C", "setp.lt.u32 %p3, %lane, 16; @%p3 cp.async.wait_group 0; bar.sync 0; ROW",
             count=1),
        ring("0 C", "setp.lt.u32 %p3, %lane, 16; @%p3 cp.async.wait_group 0;"
             "@!%p3 cp.async.wait_group 0; bar.sync 0; ROW", count=1),
        "advisory, race: lane 16 of CTA (0,0,0) warp 0 arrives, and only other lanes have waited"),
    "a store where a copy is in flight": (
        ring("0 C", f"st.shared.u32 [mine], 7; cp.async.wait_group 0; {SYNC} ROW", count=1),
        ring("0 C", f"cp.async.wait_group 0; st.shared.u32 [mine], 7; {SYNC} ROW", count=1),
        UNKNOWN),
}  # fmt: skip

# -- named barriers --------------------------------------------------------------------------------


def handed(first: int, full: str, empty: str, parts: int = 4) -> str:
    """Warp 1 fills two slots in turn, and arrives at the barriers ``full``; from part ``first`` on
    it waits at ``empty`` before; warp 0 adds.
    """
    fills, adds = [], []
    for part in range(parts):
        to, at, slot = full[part % 2], empty[part % 2], part % 2 * 256
        fills += [f"bar.sync {at}, 64;"] if part >= first else []
        fills += [
            f"add.u32 %r5, %i, {part}; st.shared.u32 [mine+{slot}], %r5; bar.arrive {to}, 64;"
        ]
        adds += [f"bar.sync {to}, 64; ld.shared.u32 %r2, [mine+{slot + 128}];"
                 "add.u32 %r1, %r1, %r2;"]  # fmt: skip
        adds += [f"bar.arrive {at}, 64;"] if part + 2 < parts else []
    text = [START, "mov.u32 %r1, 0; @%p1 bra C;", *fills, "bra E; C:", *adds, f"E: {OUT}"]
    return "\n".join(text)


def pair(fills: str, adds: str) -> str:
    return f"""{START} mov.u32 %r1, 0; @%p1 bra C; {fills} bra E;
    C: {adds} ld.shared.u32 %r1, [mine+128]; E: {OUT}"""


STORES = "st.shared.u32 [mine], %i;"
ONE = pair(f"{STORES} bar.arrive 1, 64;", "bar.sync 1, 64;")
LOOP = f"""{START} mov.u32 %r5, 0; mov.u32 %r6, HERE; L: bar.sync 1, 64; add.u32 %r5, %r5, 1;
    setp.lt.u32 %p6, %r5, %r6; @%p6 bra L; mov.u32 %r1, %r5; {OUT}"""
CROSS = f"""{START} @%p1 bra A; bar.sync 1, 64; bar.sync 2, 64; bra E;
    A: bar.sync HERE, 64; bar.sync 1, 64; E: mov.u32 %r1, 1; {OUT}"""
BARRIERS = {
    "both slots are full at one barrier": (
        handed(2, "11", "34"), handed(2, "12", "34"), "named barrier 1"),
    "both slots are empty at one barrier": (
        handed(2, "12", "33"), handed(2, "12", "34"), "arrives at named barrier 3 again"),
    "full and empty at one barrier": (
        handed(2, "12", "12"), handed(2, "12", "34"), "arrives at named barrier"),
    "a slot is awaited a round late": (
        handed(3, "12", "34"), handed(2, "12", "34"), "named barrier"),
    "no arrival": (pair(STORES, "bar.sync 1, 64;"), ONE, "deadlock"),
    "an arrival at another barrier": (
        pair(f"{STORES} bar.arrive 2, 64;", "bar.sync 1, 64;"), ONE, "deadlock"),
    "an arrival before the store": (
        pair(f"bar.arrive 1, 64; {STORES}", "bar.sync 1, 64;"), ONE, "no barrier orders the two"),
    "two counts": (pair(f"{STORES} bar.arrive 1, 64;", "bar.sync 1, 96;"), ONE, "barrier misuse"),
    "a count of one and a half warps": (
        pair(f"{STORES} bar.arrive 1, 48;", "bar.sync 1, 48;"), ONE, "no multiple of the warp"),
    "a round more in one warp": (
        LOOP.replace("HERE;", "4; @%p1 mov.u32 %r6, 3;"), LOOP.replace("HERE", "4"), "deadlock"),
    "two barriers crosswise": (
        CROSS.replace("HERE, 64;", "2, 64;"),
        CROSS.replace("HERE, 64; bar.sync 1", "1, 64; bar.sync 2"), "deadlock"),
}  # fmt: skip

# -- bounds: HERE is the first value in the fault, the second in its twin --------------------------

QUADS = "mad.lo.u32 %r3, thread, 16, at; mad.wide.u32 %d3, thread, 16, %x;"
LOADED = f"""{init(1)} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p0 {copy("bar+TO", "%x+FROM", 256)} {wait("bar", 0, "W")}"""
PLACES = {
    "a global word before the tensor": (f"ld.global.u32 %r1, [%x_i+HERE]; {OUT}", "-4", "4"),
    "a shared word before the array": (
        f"{STORES} bar.sync 0; mad.lo.s32 %r3, HERE, 4, mine; ld.shared.u32 %r1, [%r3]; {OUT}",
        "-1", "0"),
    "a row too many": ("st.global.u32 [%out_i+HERE], 1;", "1024", "768"),
    "an index of more than 31 bits": (
        f"mov.u32 %r3, HERE; mul.wide.s32 %d3, %r3, 4; add.s64 %d3, %d3, %x;"
        f"ld.global.u32 %r1, [%d3]; {OUT}", "0x80000004", "4"),
    "a vector over the end of shared memory": (
        f"{QUADS} st.shared.v4.u32 [%r3+HERE], {{1, 2, 3, 4}};", "7184", "7168"),
    "the source of a cp.async": (
        f"{QUADS} cp.async.cg.shared.global [%r3], [%d3+HERE], 16; cp.async.wait_all;",
        "15376", "15360"),
    "the source of a cp.async of which nothing is taken": (
        f"{QUADS} cp.async.cg.shared.global [%r3], [%d3+15616], 16, HERE; cp.async.wait_all;",
        "16", "0"),
    "the target of a cp.async": (
        "cp.async.ca.shared.global [mine+HERE], [%x_i], 4; cp.async.wait_all;", "8192", "7936"),
    "rows of ldmatrix": (
        f"{QUADS} st.shared.v4.u32 [%r3+7168], {{1, 2, 3, 4}}; bar.warp.sync -1;"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r4, %r5}, [%r3+HERE];",
        "7184", "7168"),
    "an atomic": ("red.global.add.u32 [%out_i+HERE], 1;", "1024", "0"),
    "a local array": (
        ".local .align 16 .b8 loc[64]; st.local.v4.u32 [loc], {1, 2, 3, 4};"
        f"ld.local.u32 %r1, [loc+HERE]; {OUT}", "64", "12"),
    "the peer's shared memory": (
        f"{PAIR} st.shared::cluster.u32 [far+HERE], 1; {CLUSTER_SYNC}", "1024", "0"),
}  # fmt: skip
BULK = {
    "the source of a bulk load": (LOADED.replace("TO", "128"), "FROM", "16144", "16128"),
    "the target of a bulk load": (LOADED.replace("FROM", "0"), "TO", "7952", "7936"),
}

# -- values that nothing has written, in twins that write them -------------------------------------

FLOATS = ".reg .f32 %f<9>; mov.f32 %f1, 0f3f800000;"
LACKS, HAS = "setp.ne.u32 %p5, thread, 40; @%p5 " + STORES, STORES
TREE = "".join(f"shfl.sync.bfly.b32 %r2, %r1, {1 << n}, 31, -1; add.u32 %r1, %r1, %r2;"
               for n in range(5))  # fmt: skip
READ = "ld.shared.u32 %r1, [mine];"
VALUES = {
    "a maximum": (f"{FLOATS} {LACKS} ld.shared.f32 %f2, [mine]; max.f32 %f3, %f2, %f1;"
                  "st.global.f32 [%out_i], %f3;", "comes from shared memory 0x4a0"),
    "bits by a mask in a register": (
        f"{LACKS} mov.u32 %r5, 0xff; {READ} and.b32 %r1, %r1, %r5; {OUT}", "shared memory 0x4a0"),
    "bytes by prmt": (f"{LACKS} {READ} prmt.b32 %r1, %r1, 0, 0x0123; {OUT}", "memory 0x4a0"),
    "redux": (f"{LACKS} {READ} redux.sync.add.u32 %r1, %r1, -1; {OUT}", "warp 1 lane 0 stores"),
    "sums of warps, and of these": (
        f"{LACKS} {READ} {TREE} shr.u32 %r3, thread, 5; mad.lo.u32 %r3, %r3, 4, at;"
        "setp.eq.u32 %p6, %lane, 0; @%p6 st.shared.u32 [%r3+1024], %r1; bar.sync 0;"
        f"ld.shared.v2.u32 {{%r4, %r5}}, [at+1024]; add.u32 %r1, %r4, %r5; {OUT}",
        "warp 0 lane 0 stores into global memory a value that comes from shared memory 0x4a0"),
    "a word of a bulk store": (
        f"{LACKS} {FENCE} bar.sync 0; {STORE} @%p0 cp.async.bulk.wait_group 0;",
        "advisory, uninitialised: CTA (0,0,0) warp 0 stores in bulk shared memory 0x4a0, which"),
    "what a bulk store takes comes from": (
        f"{LACKS} {READ} add.u32 %r1, %r1, 1; st.shared.u32 [mine+512], %r1; {FENCE} bar.sync 0;"
        f"{STORE.replace('[at]', '[at+512]')} @%p0 cp.async.bulk.wait_group 0;",
        "stores in bulk shared memory 0x6a0, a value that comes from shared memory 0x4a0"),
    "a counter in local memory": (
        f".local .align 16 .b8 loc[64]; {LACKS} {READ} st.local.v2.u32 [loc+8], {{%r1, 5}};"
        "ld.local.u32 %r2, [loc+8]; add.u32 %r2, %r2, 1; st.local.u32 [loc+16], %r2;"
        f"ld.local.u32 %r1, [loc+16]; {OUT}", "comes from shared memory 0x4a0"),
    "a bulk load that is short": (
        f"{init(1)} mad.lo.u32 %r3, %i, 4, bar; "
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], BYTES;"
        f"@%p0 {copy('bar+128', '%x', 'BYTES')} {wait('bar', 0, 'W')}"
        f"ld.shared.u32 %r1, [%r3+128]; {OUT}", "warp 1 lane 0 stores"),
    "a peer's word": (
        f"{PAIR} {LACKS.replace('40', '9')} {CLUSTER_SYNC} ld.shared::cluster.u32 %r1, [far];"
        f"{OUT} {CLUSTER_SYNC}", "lane 9 stores into global memory a value"),
    "a peer's copy": (
        f"{SIGNALS.replace('COUNT', '1')} {LACKS.replace('40', '9')} {FENCE} bar.sync 0;"
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; .reg .b32 fat;"
        "mapa.shared::cluster.u32 fat, at, peer; @%p0 cp.async.bulk.shared::cluster.shared::cta"
        f".mbarrier::complete_tx::bytes [fat+256], [at], 128, [fbar]; {wait('bar', 0, 'W')}"
        f"ld.shared.u32 %r1, [mine+256]; add.u32 %r1, %r1, 1; {OUT} {CLUSTER_SYNC}",
        "lane 9 stores into global memory a value that comes from shared memory 0x524"),
}  # fmt: skip
CLEAN = {  # what does not depend on them, or is written over
    "a maximum with infinity": f"{FLOATS} {LACKS} mov.f32 %f1, 0f7f800000;"
    "ld.shared.f32 %f2, [mine]; max.f32 %f3, %f2, %f1; st.global.f32 [%out_i], %f3;",
    "masked bits": f"{LACKS} selp.u32 %r5, -1, 0, %p5; {READ} and.b32 %r1, %r1, %r5; {OUT}",
    "a new value": f"{LACKS} {READ} add.u32 %r1, %r1, 1; st.shared.u32 [mine+512], %r1;"
    f"st.shared.u32 [mine+512], 5; ld.shared.u32 %r1, [mine+512]; {OUT}",
    "the word beside a NaN": f"st.shared.u32 [mine], 0x7fffffff; {READ} add.u32 %r1, %r1, 1; {OUT}",
}


def told(text: str, shape: Shape, how: dict) -> str:
    """The first two lines of what is told, advisories included."""
    arrays = {"x": rows(1, 4096).reshape(-1), "out": aligned(np.zeros(256, np.uint32))}
    try:
        report = simulate_ptx(text, arrays, shape, **how)
    except SimError as error:
        return " ".join(str(error).split("\n")[:2])
    return " ".join(str(a) for a in report.advisories)


def hold(fault: str, right: str, says: str, shape: Shape = BLOCK) -> None:
    for how in ORDERS:
        assert says in (found := told(fault, shape, how)), found
        assert not told(right, shape, how)


def sampled(cases: dict) -> list:
    """The names, of which two in three are behind the slow marker."""
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=slow if n % 3 else []) for n, name in enumerate(cases)]


@pytest.mark.parametrize("name", [*sampled(RINGS), *sampled(BARRIERS)])
def test_a_fault_of_a_ring_or_a_barrier_is_found(name):
    hold(*{**RINGS, **BARRIERS}[name])


@pytest.mark.parametrize("name", [*sampled(PLACES), *sampled(BULK)])
def test_an_access_out_of_bounds_is_found(name):
    if name in BULK:
        text, where, fault, right = BULK[name]
        says = "past the end of x" if where == "FROM" else "bad address"
    else:
        text, fault, right = PLACES[name]
        text, where, says = START + text, "HERE", "bad address"
    shape = CLUSTER if PAIR in text else BLOCK
    hold(text.replace(where, fault), text.replace(where, right), says, shape)


@pytest.mark.parametrize("name", [*VALUES])
def test_a_value_that_nothing_has_written_is_followed(name):
    text, says = VALUES[name]
    shape = CLUSTER if CLUSTER_SYNC in text else BLOCK
    text = text if "BYTES" in text else START + text
    right = text.replace(LACKS, HAS).replace(LACKS.replace("40", "9"), HAS)
    hold(text.replace("BYTES", "128"), right.replace("BYTES", "256"), says, shape)


@pytest.mark.parametrize("name", CLEAN)
def test_what_no_longer_depends_on_it_is_clean(name):
    assert not told(START + CLEAN[name], BLOCK, {})

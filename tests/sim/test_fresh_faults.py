"""Faults of every kind, each beside a twin that is right: the first is found, the second clean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, copy, init, rows, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim import SimError

FENCE = "fence.proxy.async.shared::cta;"
START = """.reg .b32 at, mine, thread; mov.u32 thread, %tid.x; mov.u32 at, smem;
    mad.lo.u32 mine, thread, 4, at; setp.eq.u32 %p0, thread, 0; setp.lt.u32 %p1, thread, 32;
    setp.eq.u32 %p2, %cta, 0; mad.wide.u32 %d1, thread, 4, %out;"""
OUT = "st.global.u32 [%out_i], %r1;"
STORE = """@%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [at], 256;
    @%p0 cp.async.bulk.commit_group;"""
LOAD = f"""@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p0 {copy("bar+128", "%x", 256)} {wait("bar", 0, "W")}"""
ADD = "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [at], 128;"
LOCK = """setp.ne.u32 %p3, thread, 0; @%p3 bra OUT;
    L: atom.SEM.gpu.global.cas.b32 %r1, [%out], 0, 1; setp.ne.u32 %p2, %r1, 0; @%p2 bra L;
    ld.global.u32 %r2, [%x]; add.u32 %r2, %r2, 1; st.global.u32 [%x], %r2; FREE OUT: bar.sync 0;"""
PAIR = f"""{CLUSTER_SYNC} .reg .b32 peer, far; mov.u32 peer, %cluster_ctarank;
    xor.b32 peer, peer, 1; mapa.shared::cluster.u32 far, mine, peer;"""
SIGNALS = f"""{PAIR} .reg .b32 bar, fbar; add.u32 bar, at, 512;
    mapa.shared::cluster.u32 fbar, bar, peer; @%p0 mbarrier.init.shared.b64 [bar], COUNT;
    @%p0 fence.mbarrier_init.release.cluster; {CLUSTER_SYNC}"""
TO_PEER = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [fbar];"
FROM_PEER = wait("bar", 0, "W", "acquire.cluster.shared::cta")
COPY = "cp.async.ca.shared.global [mine], [%d2], 4;"
BULK = f"""{init(1)} mad.lo.u32 %r3, %i, 4, bar;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%p0 {copy("bar+128", "%x", 256)}"""
SIDES = """.reg .b32 at; and.b32 %r2, %lane, 1; setp.eq.u32 %p3, %r2, 0; @!%p3 bra O;
    mov.u32 %r5, 0x55555555; bra P; O: mov.u32 %r5, HERE; P:"""
TURNS = f"{START} add.u32 %r9, %i, 5; st.shared.u32 [mine], %r9; {FENCE} bar.sync 0;"
SET = "@%p0 st.release.gpu.global.u32 [%x+2048], 99;"
POLL = """P: ld.acquire.gpu.global.u32 %r1, [%x+2048]; setp.ne.u32 %p3, %r1, 99; @%p3 bra P;"""
ROW = "mad.lo.u32 %r3, %lane, 16, at;"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r4, %r5}, [%r3];"
HANDS = f"{START} setp.eq.u32 %p3, thread, 1; @!%p2 bra R;"
FLAG = "st.relaxed.gpu.global.u32 [%x], 99; bra E;"
TAKES = """R: @!%p0 bra E; P: ld.acquire.gpu.global.u32 %r1, [%x]; setp.ne.u32 %p4, %r1, 99;
    @%p4 bra P; ld.global.u32 %r2, [%out+512]; st.global.u32 [%out+256], %r2; E:"""
CTAS = Shape(grid=2, block=32, smem=1024)
CLUSTER = Shape(grid=2, block=32, cluster=2, smem=1024)
GROUP = Shape(block=128, smem=64)


class Pair(NamedTuple):
    """A kernel in which ``HERE`` is replaced by ``fault`` or by ``right``; ``says``: a part of the
    first report of the former.
    """

    text: str
    fault: str
    right: str
    says: str
    shape: Shape = Shape(block=64, smem=4096)
    advisory: bool = False


PAIRS = {
    # -- values that nothing has written
    "smem to global": Pair(
        f"{START} HERE ld.shared.u32 %r1, [mine]; add.u32 %r1, %r1, 1; {OUT}",
        "", "st.shared.u32 [mine], 1;", "stores into global memory a value that comes from shared"),
    "smem as an address": Pair(
        f"{START} HERE ld.shared.u32 %r1, [mine]; and.b32 %r1, %r1, 60;"
        "mad.wide.u32 %d2, %r1, 4, %out; st.global.u32 [%d2], 1;",
        "", "mov.u32 %r2, 4; st.shared.u32 [mine], %r2;", "at an address that comes from shared"),
    "smem that decides": Pair(
        f"{START} HERE ld.shared.u32 %r1, [mine]; setp.eq.u32 %p3, %r1, 5; @%p3 bra END;"
        "st.global.u32 [%out_i], 1; END:",
        "", "st.shared.u32 [mine], 1;", "takes or leaves a branch by shared", advisory=True),
    "a register": Pair(
        f"{START} HERE add.u32 %r1, %r77, 1; {OUT}", "", "mov.u32 %r77, 1;", "register %r77"),
    "a predicate that chooses": Pair(
        f"{START} HERE selp.u32 %r1, 1, 2, %p9; {OUT}", "", "setp.eq.u32 %p9, thread, 3;",
        "stores into global memory a value that comes from register %p9"),
    "a predicate of a store": Pair(
        f"{START} @%p1 setp.eq.u32 %p9, thread, 3; HERE and.pred %p8, %p9, %p9;"
        "@%p8 st.global.u32 [%out_i], 1;", "", "@!%p1 setp.eq.u32 %p9, thread, 40;",
        "warp 1 lane 0 writes memory or leaves it by register %p9", advisory=True),
    "the lane of a shfl": Pair(
        f"{START} HERE shfl.sync.idx.b32 %r1, thread, %r55, 31, -1; {OUT}", "",
        "mov.u32 %r55, 3;", "register %r55"),
    "the lanes that nothing has filled": Pair(
        f"{START} @%p1 st.shared.u32 [mine], 1; ld.shared.u32 %r1, [mine]; HERE"
        f"{OUT}", "", "selp.b32 %r1, %r1, 0, %p1;", "CTA (0,0,0) warp 1 lane 0 stores into"),
    # -- warps
    "shfl of an absent lane": Pair(
        f"{START} mov.u32 %r1, %lane; setp.lt.u32 %p3, %r1, 16; @!%p3 bra OVER;"
        f"shfl.sync.idx.b32 %r1, %r1, HERE, 31, 0xffff; OVER: {OUT}",
        "20", "5", "reads the register of lane 20, which does not", advisory=True),
    "bar.warp.sync without a lane that is there": Pair(
        f"bar.warp.sync HERE; mov.u32 %r1, 1; {OUT}",
        "0xffff", "0xffffffff", "membermask of bar.warp.sync does not name lane 16"),
    "rows of stmatrix": Pair(
        f"{START} and.b32 %r2, %lane, HERE; mad.lo.u32 %r3, %r2, 16, at; mov.u32 %r4, %lane;"
        "@%p1 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r4};",
        "3", "31", "store different values to shared memory"),
    # -- atomics and locks
    "one CTA clears what all add to": Pair(
        f"{START} HERE bar.sync 0; red.global.add.u32 [%d1], 1;",
        "@%p2 st.global.u32 [%d1], 3;", "", "wrote another value there by an ordinary store", CTAS),
    "one CTA clears what all add to in bulk": Pair(
        f"{START} st.shared.u32 [mine], 1; {FENCE} HERE bar.sync 0; {ADD}"
        "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;",
        "@%p2 st.global.u32 [%d1], 3; fence.proxy.async.global;", "",
        "wrote another value there by an ordinary store", CTAS),
    "a relaxed lock": Pair(
        f"{START} {LOCK.replace('FREE', 'st.release.gpu.global.u32 [%out], 0;')}".replace(
            "SEM", "HERE"), "relaxed", "acquire", "reads x[0]", Shape(grid=4, block=32, smem=64)),
    "a lock that an ordinary store frees": Pair(
        f"{START} {LOCK.replace('FREE', 'HERE [%out], 0;').replace('SEM', 'acquire')}",
        "st.global.u32", "st.release.gpu.global.u32", "writes out[0]",
        Shape(grid=4, block=32, smem=64)),
    "one thread polls": Pair(
        f"""{START} @!%p2 bra R; st.global.u32 [%d1+512], 5; bar.sync 0; @%p0 fence.acq_rel.gpu;
        @%p0 st.relaxed.gpu.global.u32 [%out], 1; bra END; R: @!%p0 bra GO;
        P: ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra P;
        GO: HERE ld.global.u32 %r2, [%d1+512]; END: bar.sync 1;""",
        "", "bar.sync 0;", "reads out[160]", Shape(grid=2, block=64, smem=64)),
    "another lane has the fence of a flag": Pair(
        f"{HANDS} @%p0 st.global.u32 [%out+512], 7; @%p0 fence.acq_rel.gpu; HERE {FLAG} {TAKES}",
        "bar.warp.sync -1; @%p3", "@%p0", "has no fence of its own", CTAS, True),
    "another lane has the fence of a poll": Pair(
        f"""{HANDS} @%p0 st.global.u32 [%out+512], 7; @%p0 st.release.gpu.global.u32 [%x], 99;
        bra E; R: @!%p0 bra G; P: ld.relaxed.gpu.global.u32 %r1, [%x]; setp.ne.u32 %p4, %r1, 99;
        @%p4 bra P; G: bar.warp.sync -1; HERE fence.acq_rel.gpu; bar.warp.sync -1;
        @%p0 ld.global.u32 %r2, [%out+512]; @%p0 st.global.u32 [%out+256], %r2; E:""",
        "@%p3", "@%p0", "has no fence of its own", CTAS, True),
    "one lane fences what all have stored": Pair(
        f"{HANDS} st.global.u32 [%d1+512], 7; HERE @%p0 fence.acq_rel.gpu; @%p0 {FLAG} {TAKES}",
        "", "bar.warp.sync -1;", "lane 0 of CTA (0,0,0) warp 0 releases, and its lane 1", CTAS,
        True),
    "one lane polls and fences": Pair(
        f"""{HANDS} st.global.u32 [%d1+512], 7; bar.warp.sync -1;
        @%p0 fence.acq_rel.gpu; @%p0 {FLAG}
        R: @!%p0 bra G; P: ld.relaxed.gpu.global.u32 %r1, [%x]; setp.ne.u32 %p4, %r1, 99;
        @%p4 bra P; fence.acq_rel.gpu; G: HERE ld.global.u32 %r2, [%d1+512];
        st.global.u32 [%d1+256], %r2; E:""",
        "", "bar.warp.sync -1;", "of which only lane 0 knows by its acquire", CTAS, True),
    # -- proxies
    "a fence of shared memory for global": Pair(
        f"{init(1)} st.global.u32 [%x_i], %i; HERE bar.sync 0; {LOAD}",
        FENCE, "fence.proxy.async.global;", "proxy: a copy that CTA (0,0,0) warp 0 issues reads x"),
    "a fence of the thread that copies": Pair(
        f"{START} st.shared.u32 [mine], %i; HERE {STORE} @%p0 cp.async.bulk.wait_group 0;",
        f"@%p0 {FENCE} bar.sync 0;", f"bar.sync 0; @%p0 {FENCE}", "proxy: the bulk store of"),
    "ld.global.nc of what a bulk store wrote": Pair(
        f"{START} st.shared.u32 [mine], %i; {FENCE} bar.sync 0; {STORE}"
        f"@%p0 cp.async.bulk.wait_group 0; bar.sync 0; HERE.u32 %r1, [%out_i];"
        "st.global.u32 [%x_i], %r1;", "ld.global.nc", "ld.global", "by ld.global.nc"),
    # -- groups and barriers
    "another thread waits for the bulk store": Pair(
        f"""{START} st.shared.u32 [mine], %i; {FENCE} bar.sync 0; setp.eq.u32 %p3, thread, 32;
        {STORE} HERE cp.async.bulk.wait_group.read 0; bar.sync 0; st.shared.u32 [mine], 7;
        @%p0 cp.async.bulk.wait_group 0;""",
        "@%p3", "@%p0", "while it is still being read by the bulk store"),
    "the warp that only arrived reads": Pair(
        f"{START} st.shared.u32 [mine], %i; @%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;"
        f"xor.b32 %r2, mine, 128; HERE ld.shared.u32 %r1, [%r2]; {OUT}",
        "", "mov.u32 %r1, 0; @!%p1", "no barrier orders the two"),
    # -- clusters
    "a remote store to a CTA that may have returned": Pair(
        f"{START} {PAIR} @%p2 st.shared::cluster.u32 [far], 1; HERE",
        "", CLUSTER_SYNC, "returns without having waited for a store of", CLUSTER),
    "a barrier of the CTA for a store of its peer": Pair(
        f"{START} {PAIR} st.shared::cluster.u32 [far], %i; HERE ld.shared.u32 %r1, [mine]; {OUT}"
        f"{CLUSTER_SYNC}", "bar.sync 0;", CLUSTER_SYNC, "no barrier orders the two", CLUSTER),
    "ld.shared of a peer's address": Pair(
        f"{START} {PAIR} st.shared.u32 [mine], %i; {CLUSTER_SYNC} HERE.u32 %r1, [far]; {OUT}"
        f"{CLUSTER_SYNC}", "ld.shared", "ld.shared::cluster", "names shared memory of", CLUSTER),
    "an arrival by .shared at a peer's mbarrier": Pair(
        f"{START} {SIGNALS.replace('COUNT', '32')} HERE {FROM_PEER} {CLUSTER_SYNC}",
        "mbarrier.arrive.shared.b64 _, [fbar];", TO_PEER, "names shared memory of", CLUSTER),
    "a wait at a peer's mbarrier": Pair(
        f"{START} {SIGNALS.replace('COUNT', '32')} {TO_PEER} HERE {CLUSTER_SYNC}",
        FROM_PEER.replace("[bar]", "[fbar]"), FROM_PEER, "names shared memory of", CLUSTER),
    "an atomic of a CTA's scope beside the peer's": Pair(
        f"{START} {PAIR} @%p0 st.shared.u32 [at], 0; {CLUSTER_SYNC} mapa.shared::cluster.u32 far,"
        f"at, 0; red.relaxed.HERE.shared::cluster.add.u32 [far], 1; {CLUSTER_SYNC}",
        "cta", "cluster", "so they are not atomic to each other", CLUSTER),
    "red.async to what nothing has set": Pair(
        f"""{START} {SIGNALS.replace("COUNT", "1")} HERE
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [far], %i,
        [fbar]; {wait("bar", 0, "W")} ld.shared.u32 %r1, [mine]; {OUT} {CLUSTER_SYNC}""",
        "", f"st.shared.u32 [mine], 0; {CLUSTER_SYNC}", "the red.async changes shared", CLUSTER),
    "what st.async brought is stored in bulk": Pair(
        f"""{START} {SIGNALS.replace("COUNT", "1")} mov.u32 %r3, %cta; mad.wide.u32 %d2, %r3, 128,
        %out; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [far], %i, [fbar];
        {wait("bar", 0, "W")} HERE
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d2], [at], 128;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; {CLUSTER_SYNC}""",
        "", FENCE, "which the st.async wrote at PTX line", CLUSTER, True),
    # -- copies, and who has waited
    "the source of a cp.async": Pair(
        f"{START} xor.b32 %r3, thread, 32; mad.wide.u32 %d2, %r3, 4, %x; {COPY}"
        "cp.async.commit_group; HERE st.global.u32 [%x_i], 5; cp.async.wait_all;",
        "bar.sync 0;", "cp.async.wait_all; bar.sync 0;", "which the cp.async of CTA (0,0,0) warp"),
    "the source of a bulk load": Pair(
        f"{BULK} HERE st.global.u32 [%x_i], 5; {wait('bar', 0, 'V')}",
        "bar.sync 0;", f"{wait('bar', 0, 'W')} bar.sync 0;", "which the bulk copy of CTA (0,0,0)"),
    "a bulk store to the source of a bulk load": Pair(
        f"""{init(1)} mad.lo.u32 %r3, %i, 4, bar; st.shared.u32 [%r3+512], %i; {FENCE} bar.sync 0;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
        @%p0 {copy("bar+128", "%out", 256)} HERE
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [bar+512], 256;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; {wait("bar", 0, "V")}""",
        "", wait("bar", 0, "W"), "issues a bulk store to out[0]"),
    "only some lanes commit their cp.async": Pair(
        f"{START} mad.wide.u32 %d2, thread, 4, %x; {COPY} setp.lt.u32 %p3, %lane, 16;"
        "HERE cp.async.commit_group; cp.async.wait_group 0; cp.async.wait_all;",
        "@%p3", "", "waits for its cp.async groups, and its copy"),
    "one lane waits for the copy, its warp reads": Pair(
        f"{BULK} @!%p0 bra R; {wait('bar', 0, 'W')} R: HERE ld.shared.u32 %r1, [%r3+128]; {OUT}",
        "", "bar.warp.sync 0xffffffff;", "only lane 0 has waited", Shape(block=32, smem=4096)),
    "a TMA load of what another CTA's stores wrote": Pair(
        f"""{init(1)} setp.eq.u32 %p2, %cta, 0; setp.eq.u32 %p0, %lane, 0; @!%p2 bra R;
        @%p0 st.global.u32 [%x], 5; @%p0 st.release.gpu.global.u32 [%out], 1; bra E;
        R: @!%p0 bra E; mbarrier.init.shared.b64 [bar], 1;
        P: ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra P; HERE
        mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64; {copy("bar+128", "%x", 64)}
        {wait("bar", 0, "W")} E:""",
        "", "fence.proxy.async;", "proxy: a copy that CTA (1,0,0)", Shape(2, 32, smem=1024)),
    "a release for the store of another lane": Pair(
        f"""{START} setp.eq.u32 %p3, thread, 1; @%p3 st.global.u32 [%x], 5; HERE
        @%p0 red.release.gpu.global.add.u32 [%out], 1;""",
        "", "bar.warp.sync 0xffffffff;", "and its lane 1 has stored to global", CTAS, True),
    "local memory": Pair(
        f"{START} .local .align 4 .b8 loc[64]; HERE ld.local.u32 %r1, [loc+4]; {OUT}",
        "", "st.local.u32 [loc+4], 3;", "a value that comes from local memory at 4"),
    "lanes that name different barriers": Pair(
        "and.b32 %r1, %lane, HERE; bar.sync %r1, 32;", "1", "0", "name different barriers", CTAS),
    # -- masks of several groups, and what the values of others' lanes are made of
    "masks of bar.warp.sync that differ": Pair(
        f"{SIDES} bar.warp.sync %r5; mov.u32 %r1, 1; {OUT}", "0xffffffff", "0xaaaaaaaa",
        "with membermask 0xffffffff, which names lane 0; that one has 0x55555555"),
    "masks of redux that differ": Pair(
        f"{SIDES} redux.sync.add.u32 %r1, %lane, %r5; {OUT}", "0xbfffffff", "0xaaaaaaaa",
        "with membermask 0xbfffffff, which names lane 0"),
    "shfl of a lane outside of its mask": Pair(
        f"{SIDES.replace('HERE', '0xaaaaaaaa')} xor.b32 %r6, %lane, HERE;"
        f"shfl.sync.idx.b32 %r1, %lane, %r6, 31, %r5; {OUT}",
        "1", "2", "reads the register of lane 1, which does not", advisory=True),
    "a register that one branch writes": Pair(
        f"{START} @%p1 mov.u32 %r77, 3; HERE add.u32 %r1, %r77, 1; {OUT}",
        "", "@!%p1 mov.u32 %r77, 4;", "CTA (0,0,0) warp 1 lane 0 stores into global memory a"),
    "half of a loaded pair": Pair(
        f"{START} mad.lo.u32 mine, thread, 8, at; HERE ld.shared.v2.u32 {{%r1, %r2}}, [mine];"
        f"add.u32 %r1, %r1, %r2; {OUT}",
        "st.shared.u32 [mine], 1;", "st.shared.v2.u32 [mine], {1, 2};", "that comes from shared"),
    "smem to another lane": Pair(
        f"{START} HERE ld.shared.u32 %r1, [mine]; shfl.sync.down.b32 %r1, %r1, 3, 31, -1; {OUT}",
        "setp.ne.u32 %p3, %lane, 9; @%p3 st.shared.u32 [mine], %i;", "st.shared.u32 [mine], %i;",
        "warp 0 lane 6 stores into global memory a value that comes from shared"),
    "smem to a product": Pair(
        f"""{START} .reg .f32 %f<9>; mov.f32 %f1, 0f00000000; HERE bar.sync 0;
        mad.lo.u32 %r3, %lane, 16, at; mov.u32 %r9, 0;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f2, %f3, %f4, %f5}},
        {{%r10, %r11, %r12, %r13}}, {{%r9, %r9}}, {{%f1, %f1, %f1, %f1}};
        @%p1 st.global.f32 [%out_i], %f4;""",
        "sub.u32 %r8, %lane, 9; setp.lt.u32 %p3, %r8, 7; mad.lo.u32 %r8, %lane, 16, at;"
        "@!%p3 st.shared.v4.u32 [%r8], {0, 0, 0, 0};",
        "mad.lo.u32 %r8, %lane, 16, at; st.shared.v4.u32 [%r8], {0, 0, 0, 0};",
        "warp 0 lane 4 stores into global memory a value that comes from shared"),
    "smem as a barrier's number": Pair(
        f"{START} HERE ld.shared.u32 %r1, [mine]; and.b32 %r1, %r1, 3; bar.sync %r1, 64;",
        "", "st.shared.u32 [mine], 1;", "names a barrier by shared memory"),
    "discarded memory": Pair(
        f"{START} ld.global.u32 %r1, [%x_i]; bar.sync 0; HERE ld.global.u32 %r1, [%x_i]; {OUT}",
        "@%p0 discard.global.L2 [%x], 128;", "", "reads x["),
    # -- waits of the wrong kind
    "a bulk store's group is committed behind the wait": Pair(
        f"{START} st.shared.u32 [mine], %i; {FENCE} bar.sync 0; {STORE[:STORE.rindex('@')]} HERE"
        "@%p0 cp.async.bulk.wait_group.read 0; bar.sync 0; st.shared.u32 [mine], 7;"
        "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;",
        "", "@%p0 cp.async.bulk.commit_group;", "while it is still being read by the bulk store"),
    "an elected lane stores in bulk, lane 0 waits": Pair(
        f"""{START} st.shared.u32 [mine], %i; {FENCE} bar.sync 0; elect.sync %r9|%p3, -1;
        and.pred %p4, %p3, %p1;
        @%p4 cp.async.bulk.global.shared::cta.bulk_group [%out], [at], 256;
        @%p4 cp.async.bulk.commit_group; HERE cp.async.bulk.wait_group.read 0; bar.sync 0;
        st.shared.u32 [mine], 7; @%p4 cp.async.bulk.wait_group 0;""",
        "@%p0", "@%p4", "with lane 0, by its number, and PTX line", advisory=True),
    "cp.async's wait for a bulk store": Pair(
        f"{START} st.shared.u32 [mine], %i; {FENCE} bar.sync 0; {STORE} HERE bar.sync 0;"
        "st.shared.u32 [mine], 7; @%p0 cp.async.bulk.wait_group 0;",
        "cp.async.wait_all;", "@%p0 cp.async.bulk.wait_group.read 0;",
        "being read by the bulk store"),
    "a bulk store's wait for cp.async": Pair(
        f"{START} mad.wide.u32 %d2, thread, 4, %x; {COPY} cp.async.commit_group; HERE"
        f"ld.shared.u32 %r1, [mine]; {OUT} cp.async.wait_all;",
        "cp.async.bulk.wait_group 0;", "cp.async.wait_group 0;", "a cp.async of"),
    "a state of the phase before": Pair(
        f"""{init(64)} .reg .b64 s0, s1; mad.lo.u32 %r3, %i, 4, bar;
        mbarrier.arrive.shared.b64 s0, [bar];
        A: mbarrier.try_wait.shared.b64 %p5, [bar], s0; @!%p5 bra A;
        st.shared.u32 [%r3+128], %i; mbarrier.arrive.shared.b64 s1, [bar];
        B: mbarrier.try_wait.shared.b64 %p5, [bar], HERE; @!%p5 bra B; xor.b32 %r4, %r3, 128;
        ld.shared.u32 %r1, [%r4+128]; {OUT}""",
        "s0", "s1", "waits by a state of phase 0", Shape(block=64, smem=8192)),
    # -- clusters
    "a store between arrive and wait": Pair(
        f"""{START} {PAIR} HERE barrier.cluster.wait.aligned; ld.shared::cluster.u32 %r1, [far];
        {OUT} {CLUSTER_SYNC}""",
        "barrier.cluster.arrive.aligned; st.shared.u32 [mine], %i;",
        "st.shared.u32 [mine], %i; barrier.cluster.arrive.aligned;", "no barrier orders", CLUSTER),
    "st.async to a CTA, its bytes to another's mbarrier": Pair(
        f"""{START} {SIGNALS.replace("COUNT", "1")}
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [far], %i, [HERE];
        {wait("bar", 0, "W")} ld.shared.u32 %r1, [mine]; {OUT} {CLUSTER_SYNC}""",
        "bar", "fbar", "mbarrier", CLUSTER),
    # -- one lane knows, its warp goes on
    "one lane polls a flag, its warp reads": Pair(
        f"""{START} @!%p2 bra R; st.global.u32 [%d1+512], 5; bar.warp.sync -1;
        @%p0 st.release.gpu.global.u32 [%out], 1; bra E; R: @!%p0 bra GO;
        P: ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra P;
        GO: HERE ld.global.u32 %r2, [%d1+512]; E:""",
        "", "bar.warp.sync -1;", "lane 1 of CTA (1,0,0) warp 0 reads out[129]", CTAS, True),
    "one lane takes a lock, its warp works": Pair(
        f"""{START} @!%p0 bra GO; L: atom.acquire.gpu.global.cas.b32 %r1, [%out], 0, 1;
        setp.ne.u32 %p2, %r1, 0; @%p2 bra L; GO: HERE
        ld.global.u32 %r2, [%d1+512]; add.u32 %r2, %r2, 1; st.global.u32 [%d1+512], %r2;
        bar.warp.sync -1; @%p0 st.release.gpu.global.u32 [%out], 0;""",
        "", "bar.warp.sync -1;", "lane 1 of CTA (1,0,0) warp 0 reads out[129]", CTAS, True),
    "one lane waits for its bulk store, its warp overwrites": Pair(
        f"""{START} st.shared.u32 [mine], %i; {FENCE} bar.warp.sync -1;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [at], 128;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group.read 0; HERE
        st.shared.u32 [mine], 7; @%p0 cp.async.bulk.wait_group 0;""",
        "", "bar.warp.sync -1;", "of the bulk store from there only lane 0 has waited",
        Shape(block=32, smem=4096), True),
    "one lane arrives for the loads of its warp": Pair(
        f"""{init(1)} .reg .b32 mb; add.u32 mb, bar, 16; @%p0 mbarrier.init.shared.b64 [mb], 1;
        bar.sync 0; mad.lo.u32 %r3, %i, 4, bar; setp.eq.u32 %p2, %lane, 0;
        setp.lt.u32 %p1, %i, 32; @!%p1 st.shared.u32 [%r3], %i; bar.sync 0; @%p1 bra C;
        {wait("mb", 0, "M")} st.shared.u32 [%r3], 5; bra E; C: ld.shared.u32 %r1, [%r3+128];
        HERE @%p2 mbarrier.arrive.shared.b64 _, [mb]; {OUT} E:""",
        "", "bar.warp.sync -1;", "one lane's arrival does not tell of the others' loads",
        Shape(block=64, smem=8192), True),
    "one lane copies over the loads of its warp": Pair(
        f"""{init(1)} mad.lo.u32 %r3, %lane, 4, bar; st.shared.u32 [%r3+128], %i;
        bar.warp.sync -1; ld.shared.u32 %r1, [%r3+128]; fence.proxy.async.shared::cta; HERE
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; @%p0 {copy("bar+128", "%x", 128)}
        {wait("bar", 0, "W")} {OUT}""",
        "", "bar.warp.sync -1;", "is missing between the loads of all lanes and the copy of one",
        Shape(block=32, smem=4096), True),
    # -- what bulk stores and reductions change
    "zeros by ordinary stores beneath a bulk reduction": Pair(
        f"{START} st.shared.u32 [mine], %i; {FENCE} st.global.u32 [%out_i], 0; HERE bar.sync 0;"
        f"{ADD} @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;",
        "", "fence.proxy.async.global;", "proxy: a bulk reduction that CTA (0,0,0) warp 0 issues"),
    "an ordinary store beneath a bulk store": Pair(
        f"{START} st.shared.u32 [mine], %i; {FENCE} st.global.u32 [%out_i], 3; HERE bar.sync 0;"
        f"{STORE} @%p0 cp.async.bulk.wait_group 0;",
        "", "fence.proxy.async.global;", "proxy: a bulk store that CTA (0,0,0) warp 0 issues",
        advisory=True),
    "a bulk load to the peer that completes on an own mbarrier": Pair(
        f"""{START} {SIGNALS.replace("COUNT", "1")}
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [far], [%x], 128,
        [HERE]; {wait("bar", 0, "W")} {CLUSTER_SYNC}""",
        "bar", "fbar", "they must lie in the same CTA", CLUSTER),
    "a bulk load of what another CTA's bulk reduction may still change": Pair(
        f"""{TURNS} .reg .b32 bar; add.u32 bar, at, 512; @%p0 mbarrier.init.shared.b64 [bar], 1;
        bar.sync 0; @!%p2 bra R; {ADD} @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_groupHERE 0; {SET} bra E; R: {POLL} fence.proxy.async;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; @%p0 {copy("bar+128", "%out", 128)}
        {wait("bar", 0, "W")} E:""",
        ".read", "", "reads out[0] (256 uint32), and CTA (0,0,0) wrote it", CTAS),
    "an atomic beside a bulk reduction": Pair(
        f"""{TURNS} @!%p2 bra R; {ADD} @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_group 0; bra E; R: red.relaxed.gpu.global.add.u32 [%d1+HERE], 1;
        E:""", "0", "512", "one of the two is a bulk reduction", CTAS, True),
    "an atomic, and a bulk reduction with no proxy fence": Pair(
        f"{TURNS} red.global.add.u32 [%d1], 1; HERE bar.sync 0; {ADD}"
        "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;",
        "", "fence.proxy.async.global;", "which atomics of CTA (0,0,0) warp 0 wrote",
        Shape(block=32, smem=1024), True),
    "bulk reductions in turn, told of before they end": Pair(
        f"""{TURNS} @!%p2 bra R; {ADD} @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_groupHERE 0; {SET} bra E; R: {POLL} fence.proxy.async; {ADD}
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; E:""",
        ".read", "", "their order may differ each time", CTAS, True),
    "bulk reductions in turn, with no proxy fence behind the flag": Pair(
        f"""{TURNS} @!%p2 bra R; {ADD} @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_group 0; {SET} bra E; R: {POLL} HERE {ADD}
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0; E:""",
        "", "fence.proxy.async.global;", "a flag orders the two, but by the letter", CTAS, True),
    "a bulk load of what another CTA's bulk store wrote": Pair(
        f"""{TURNS} .reg .b32 bar; add.u32 bar, at, 512; @%p0 mbarrier.init.shared.b64 [bar], 1;
        bar.sync 0; @!%p2 bra R; {STORE.replace("256", "128")}
        @%p0 cp.async.bulk.wait_group 0; {SET} bra E; R: {POLL} HERE
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; @%p0 {copy("bar+128", "%out", 128)}
        {wait("bar", 0, "W")} E:""",
        "", "fence.proxy.async;", "which a bulk store of CTA (0,0,0) warp 0 wrote", CTAS, True),
    "a counter that is no atomic, beside flags": Pair(
        f"{START} @%p0 st.release.gpu.global.u32 [%d1+512], 1; HERE",
        "@%p0 ld.global.u32 %r1, [%out]; @%p0 add.u32 %r1, %r1, 1; @%p0 st.global.u32 [%out], %r1;",
        "@%p0 atom.global.add.u32 %r1, [%out], 1;", "writes out[0] (256 uint32), which CTA (3,0,0)",
        Shape(grid=4, block=32, smem=64)),
    # -- copies of several lanes
    "one lane arrives for the copies of its warp": Pair(
        f"""{START} .reg .b32 bar; add.u32 bar, at, 512; @%p0 mbarrier.init.shared.b64 [bar], 1;
        bar.sync 0; @!%p1 bra R; mad.wide.u32 %d2, thread, 4, %x; {COPY} cp.async.wait_all; HERE
        @%p0 mbarrier.arrive.shared.b64 _, [bar]; bra E; R: {wait("bar", 0, "W")}
        ld.shared.u32 %r1, [mine+-128]; {OUT} E:""",
        "", "bar.warp.sync -1;", "one lane's arrival does not tell of the others' copies",
        advisory=True),
    "one lane stores the copies of its warp in bulk": Pair(
        f"""{START} mad.wide.u32 %d2, thread, 4, %x; {COPY} cp.async.wait_all; {FENCE} HERE
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%out], [at], 128;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;""",
        "", "bar.warp.sync -1;", "a bar.warp.sync is missing between the copies of all lanes",
        Shape(block=32, smem=4096), True),
    "ldmatrix of what each lane has copied": Pair(
        f"""{START} {ROW} mad.wide.u32 %d2, thread, 16, %x;
        cp.async.cg.shared.global [%r3], [%d2], 16; cp.async.wait_all; HERE {LDMATRIX} {OUT}""",
        "", "bar.warp.sync -1;", "warp 0 reads shared memory 0x400, which the cp.async of its lane",
        Shape(block=32, smem=4096), True),
    "ldmatrix of what each lane has stored": Pair(
        f"{START} {ROW} st.shared.v4.u32 [%r3], {{%i, %i, %i, %i}}; HERE {LDMATRIX} {OUT}",
        "", "bar.warp.sync -1;", "a bar.warp.sync is missing between these lanes",
        Shape(block=32, smem=4096), True),
    # -- registers
    "setmaxnreg.inc to less than at the start": Pair(
        "setmaxnreg.HERE.sync.aligned.u32 104;", "inc", "dec",
        "as CTAs of 384 threads start with", Shape(block=384, smem=64)),
    "setmaxnreg.dec to more": Pair(
        "setmaxnreg.dec.sync.aligned.u32 24; bar.sync 0; setmaxnreg.HERE.sync.aligned.u32 40;",
        "dec", "inc", ".dec takes no more than it has", GROUP),
}  # fmt: skip


def run(text: str, shape: Shape, head: str = "") -> list[str]:
    """The first lines of what is told, advisories included."""
    arrays = {"x": rows(1, 1024).reshape(-1), "out": aligned(np.zeros(256, np.uint32))}
    try:
        told = simulate_ptx(text, arrays, shape, head=head).advisories
    except SimError as error:
        return str(error).split("\n")[:2]
    return [str(advisory) for advisory in told]


SAMPLE = [pytest.param(name, marks=[] if n % 3 == 1 else [pytest.mark.slow])
          for n, name in enumerate(PAIRS)]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_the_fault_is_found_and_its_twin_is_clean(name: str) -> None:
    pair = PAIRS[name]
    told = " ".join(run(pair.text.replace("HERE", pair.fault), pair.shape))
    assert pair.says in told and ("advisory" in told) == pair.advisory, told
    assert not run(pair.text.replace("HERE", pair.right), pair.shape)


@pytest.mark.parametrize("use", [
    "@%p1 st.global.u32 [%out_i], %r1;",
    "selp.b32 %r2, %r1, 7, %p1; st.global.u32 [%out_i], %r2;",
    "mov.b64 %d3, {%r1, %i}; mov.b64 {%r2, %r3}, %d3; st.global.u32 [%out_i], %r3;",
    "and.b32 %r2, %r1, 0; st.global.u32 [%out_i], %r2;",
    "max.u32 %r2, %r1, 0xffffffff; st.global.u32 [%out_i], %r2;",
    "shl.b32 %r2, %r1, 3; st.shared.u32 [mine], %r2;",
    "setp.lt.and.u32 %p3, %r1, 4, %p1; @%p3 st.global.u32 [%out_i], 1;",
    "mov.u32 %r1, 5; add.u32 %r1, %r1, 1; st.global.u32 [%out_i], %r1;",
], ids=["left out", "other", "beside", "masked", "no matter", "kept", "and", "new"])  # fmt: skip
def test_a_value_that_nothing_depends_on_is_clean(use: str) -> None:
    """Of 64 threads the first warp's values are there."""
    text = f"{START} @%p1 st.shared.u32 [mine], 1; ld.shared.u32 %r1, [mine]; {use}"
    assert not run(text, Shape(block=64, smem=4096))

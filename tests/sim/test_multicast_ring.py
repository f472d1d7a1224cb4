"""A ring whose tiles come by multicast: each of two CTAs loads a half of every tile into both."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import CLUSTER_SYNC, rows, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim import SimError

COPY = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [a], [src], 128, [b], mask;"
)
TO = """mapa.shared::cluster.u32 fe, b, RANK;
    @%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [fe];"""
BOTH = TO.replace("RANK", "0") + TO.replace("RANK", "1")
# two slots of 256 bytes, six tiles; warp 0 loads, warp 1 stores what it reads
RING = f"""
    .reg .b32 at, full, empty, thread, rank, n, slot, par, a, b, fe, half, k; .reg .b16 mask;
    .reg .b64 src; mov.u32 at, smem; add.u32 full, at, 2048; add.u32 empty, at, 2112;
    mov.u32 thread, %tid.x; mov.u32 rank, %cluster_ctarank; setp.eq.u32 %p0, thread, 0;
    setp.lt.u32 %p1, thread, 32; setp.eq.u32 %p2, thread, 32;
    @%p0 mbarrier.init.shared.b64 [full], 1; @%p0 mbarrier.init.shared.b64 [full+8], 1;
    @%p0 mbarrier.init.shared.b64 [empty], COUNT; @%p0 mbarrier.init.shared.b64 [empty+8], COUNT;
    fence.mbarrier_init.release.cluster; {CLUSTER_SYNC}
    mov.u32 n, 0; shl.b32 half, rank, 7; @!%p1 bra TAKE; @!%p0 bra DONE;
    LOAD: and.b32 slot, n, 1; shr.u32 par, n, 1; and.b32 par, par, 1; xor.b32 par, par, 1;
    mad.lo.u32 b, slot, 8, empty; {wait("b", "par", "E", "acquire.cluster.shared::cta")}
    mad.lo.u32 b, slot, 8, full; mbarrier.arrive.expect_tx.shared.b64 _, [b], BYTES;
    mad.lo.u32 a, slot, 256, at; add.u32 a, a, half; mad.lo.u32 k, n, 256, half;
    mad.wide.u32 src, k, 1, %x; mov.u16 mask, MASK; {COPY} add.u32 n, n, 1;
    setp.lt.u32 %p3, n, 6; @%p3 bra LOAD; bra DONE;
    TAKE: and.b32 slot, n, 1; shr.u32 par, n, 1; and.b32 par, par, 1;
    mad.lo.u32 b, slot, 8, full; {wait("b", "PARITY", "F")}
    sub.u32 k, thread, 32; mad.lo.u32 a, slot, 256, at; mad.lo.u32 a, k, 4, a; EARLY
    ld.shared.u32 %r1, [a]; ld.shared.u32 %r2, [a+128]; mad.lo.u32 a, rank, 384, k;
    mad.lo.u32 a, n, 64, a; mad.wide.u32 %d1, a, 4, %out; st.global.u32 [%d1], %r1;
    st.global.u32 [%d1+128], %r2; MEET mad.lo.u32 b, slot, 8, empty; FREE add.u32 n, n, 1;
    setp.lt.u32 %p3, n, 6; @%p3 bra TAKE;
    DONE: END
"""
RIGHT = {
    "COUNT": "2", "BYTES": "256", "MASK": "3", "PARITY": "par", "EARLY": "", "FREE": BOTH,
    "MEET": "fence.proxy.async; bar.warp.sync -1;", "END": CLUSTER_SYNC,
}  # fmt: skip
SHAPE = Shape(grid=2, block=64, cluster=2, smem=4096)


def run(order: str = "fifo", **changed: str) -> None:
    body = RING
    for name, text in (RIGHT | changed).items():
        body = body.replace(name, text)
    x, out = rows(1, 1024).reshape(-1), aligned(np.zeros(768, np.uint32))
    report = simulate_ptx(body, {"x": x, "out": out}, SHAPE, order=order)
    assert not [a for a in report.advisories if "proxy" not in str(a)], report.advisories
    assert (out.reshape(2, -1) == x[:384]).all()


@pytest.mark.parametrize("order", ["fifo", "eager", "peer-late", "random"])
def test_the_ring_is_right(order: str) -> None:
    run(order)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"MASK": "1"}, "deadlock: .* never completes"),
        ({"MASK": "2"}, "deadlock: .* never completes"),
        ({"MASK": "0"}, "deadlock: .* never completes"),
        ({"MASK": "1; shl.b16 mask, mask, rank"}, "deadlock: .* never completes"),
        ({"BYTES": "128"}, "bytes announced: phase 0"),
        ({"COUNT": "1", "FREE": "@%p2 mbarrier.arrive.shared.b64 _, [b];"}, "bytes announced"),
        ({"COUNT": "1"}, "arrives 1 time"),
        ({"FREE": 2 * TO.replace("RANK", "0")}, "bytes announced"),
        ({"PARITY": "1"}, "arrives 1 time"),
        ({"EARLY": "mad.lo.u32 b, slot, 8, empty;" + BOTH, "FREE": ""}, "no barrier orders the"),
        ({"END": ""}, "returns without having waited"),
    ],
    ids=["first alone", "second alone", "none", "own alone", "own half announced", "own released",
         "one arrival", "first released", "other parity", "released early", "leaves early"],
)  # fmt: skip
def test_a_fault_is_found(changed: dict[str, str], says: str) -> None:
    with pytest.raises(SimError, match=r"(?s)" + says):
        run(**changed)

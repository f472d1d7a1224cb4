"""Atomics and other strong accesses of shared memory, of several sizes and of parts of words."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards

# two warps; %p0: thread 0, %p1: thread 32
START = """mov.u32 %r9, smem; setp.eq.u32 %p0, %i, 0; setp.eq.u32 %p1, %i, 32;
    mov.b16 %h0, 1; mov.b32 %r1, 1; mov.b64 %d6, 1; mov.b16 %h1, %h0;
    @%p0 st.shared.v4.u32 [%r9], {0, 0, 0, 0}; bar.sync 0;"""
FLAG = "st.release.cta.shared.u64 [%r9], 1;"

OVERLAP = {
    "64 bits, 32 in it": ("atom.shared.add.u64 %d7, [%r9], 1;", "red.shared.add.u32 [%r9+4], 1;"),
    "by generic addresses": (
        "cvta.shared.u64 %d1, smem; atom.add.u64 %d7, [%d1], 1;", "red.shared.add.u32 [%r9], 1;"),
    "a flag": (FLAG, "ld.acquire.cta.shared.u32 %r2, [%r9];"),
    "asked for before it is set": ("ld.volatile.shared.u32 %r2, [%r9+4];", FLAG),
    "16 bits, 32 around": (
        "atom.shared.cas.b16 %h2, [%r9+2], %h0, %h1;", "atom.shared.or.b32 %r2, [%r9], 1;"),
    "a byte, a pair": ("st.volatile.shared.u8 [%r9+1], 1;", "st.volatile.shared.u16 [%r9], 1;"),
}  # fmt: skip
APART = {
    "side by side": ("atom.shared.add.u64 %d7, [%r9], 1;", "red.shared.add.u32 [%r9+8], 1;"),
    "bytes of one word": ("st.volatile.shared.u8 [%r9], 1;", "st.volatile.shared.u16 [%r9+2], 1;"),
    "a vector of words": (
        "ld.volatile.shared.v2.u32 {%r2, %r3}, [%r9]; st.volatile.shared.u64 [%r9+8], 1;",
        "red.shared.add.u32 [%r9+4], 1;"),
    "loads of two sizes": (
        "ld.volatile.shared.u64 %d7, [%r9];", "ld.volatile.shared.u32 %r2, [%r9]; "
        "st.volatile.shared.u64 [%r9+8], %d6;"),
}  # fmt: skip


def run(first: str, second: str, between: str = "") -> list[str]:
    texts = enumerate((first, second))
    guarded = (f"@%p{k} bra T{k}; bra E{k}; T{k}: {text} E{k}:" for k, text in texts)
    body = f"{START} {between.join(guarded)} bar.sync 0;"
    return [str(a) for a in simulate_ptx(body, {}, Shape(block=64, smem=64)).advisories]


@pytest.mark.parametrize("pair", OVERLAP.values(), ids=OVERLAP)
def test_strong_accesses_that_overlap_in_part_are_told(pair):
    for first, second in (pair, pair[::-1]):
        (only,) = run(first, second)
        assert "overlap in part" in only and "shared memory 0x40" in only
        assert only.count(" bits") == 1 and "PTX line" in only
        assert run(first, second, "bar.sync 0;") == []


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_those_that_do_not_are_clean(pair):
    for first, second in (pair, pair[::-1]):
        assert run(first, second) == []


@pytest.mark.parametrize("store", ["st.volatile.shared.u8 [%r9+1], 1;",
    "atom.shared.cas.b16 %h2, [%r9], %h0, %h1;"])  # fmt: skip
def test_a_part_of_a_word_beside_an_ordinary_load(store):
    """Held against later ordinary accesses of the same bytes, and of no others."""
    with pytest.raises(Hazards, match=r"race: .* reads shared memory 0x400, which .* at PTX line"):
        run(store, "ld.shared.u16 %h3, [%r9];")
    assert run(store, "ld.shared.u16 %h3, [%r9+2];") == []
    assert run(store, "ld.shared.u16 %h3, [%r9];", "bar.sync 0;") == []


def test_scopes_of_the_warp_that_changed_a_word_first():
    """An atomic of the scope of its CTA is found beside one of another CTA, whatever a third warp
    with the wider scope has changed since."""
    body = f"""{START} mapa.shared::cluster.u32 %r8, %r9, 0; barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned; mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p2, %r2, 0;
        mov.u32 %r4, %tid.x; setp.eq.and.u32 %p3, %r4, 0, %p2; setp.eq.and.u32 %p4, %r4, 32, %p2;
        setp.eq.u32 %p5, %i, 64;
        @%p3 red.relaxed.SCOPE.shared::cta.add.u32 [%r9], 1;
        @%p4 red.relaxed.cluster.shared::cta.add.u32 [%r9], 1;
        @%p5 red.relaxed.cluster.shared::cluster.add.u32 [%r8], 1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    shape = Shape(grid=2, block=64, cluster=2, smem=64)
    simulate_ptx(body.replace("SCOPE", "cluster"), {}, shape)
    with pytest.raises(Hazards, match="one of the two has the scope of its CTA only"):
        simulate_ptx(body.replace("SCOPE", "cta"), {}, shape)


def test_a_reduction_of_words_beside_its_vector_is_of_one_size():
    body = f"{START} @%p1 red.shared.add.u32 [%r9], 1; bar.sync 0; ld.shared.u32 %r5, [%r9];"
    out = np.zeros(64, np.uint32)
    simulate_ptx(f"{body} st.global.u32 [%out_i], %r5;", {"out": out}, Shape(block=64, smem=64))
    assert (out == 1).all()

"""tcgen05.cp, copies from shared to tensor memory, against their definition."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from barriers import wait
from multiplications import B_AT, SMEM, Mma, operand
from ptx_kernel import Shape, simulate_ptx

from cutex.sim.errors import Hazards, UnknownInstruction

COPIES = {  # rows, columns of 32 bits, and the lanes of each row
    "128x256b": (128, 8, lambda r: [r]),
    "128x128b": (128, 4, lambda r: [r]),
    "64x128b.warpx2::02_13": (64, 4, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 4, lambda r: [r, r + 32] if r < 32 else [r + 32, r + 64]),
    "32x128b.warpx4": (32, 4, lambda r: [r, r + 32, r + 64, r + 96]),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("swizzle", [0, 32, 128])
@pytest.mark.parametrize("group", [1, 2])
def test_cp_moves_rows_of_core_matrices_to_lanes(form, swizzle, group):
    rows, words, lanes = COPIES[form]
    source = operand("u8", swizzle)
    case = Mma(source, operand("u8", start=B_AT), 128 * group, 32, group, "s32")
    values = np.random.default_rng(1).integers(0, 256, (group, rows, 4 * words))
    images = np.zeros((group, SMEM), np.uint8)
    for image, mine in zip(images, values, strict=True):
        source.put(image, mine)
    case.shared = lambda: images  # type: ignore[method-assign]
    before, copy = case.tensor_memory(), f"tcgen05.cp.cta_group::{group}.{form} [%r20], %d2;"
    text = case.text()
    mma = text[text.index("@%p3 tcgen05.mma") : text.index("%p4;") + 4]
    case.text = lambda: text.replace(mma, "@%p3 " + copy)  # type: ignore[method-assign]
    got = case.run(before)
    for cta in range(group):
        raw = values[cta].astype(np.uint8).view(np.uint32)
        for r in range(rows):
            for lane in lanes(r):
                before[cta, lane, case.column : case.column + words] = raw[r]
    np.testing.assert_array_equal(got, before)


def test_an_mma_reads_what_a_copy_before_it_put_into_tensor_memory():
    """In order, with no wait in between: A goes to tensor memory and is multiplied from there."""
    case = Mma("f16", operand("f16", start=B_AT), 128, 64, column=32, a_column=8)
    source, (a, _, _) = operand("f16"), case.values()
    images = case.shared()
    source.put(images[0], a)
    before, text = case.tensor_memory(), case.text()
    want = case.run(before)
    before[:, :, 8:16] = 0
    copy = Mma(source, case.b, 128, 64).text()
    setup = copy[copy.index("add.u32 %r21, %r0, 0;") : copy.index("mov.u32 %r23")]
    setup += "@%p3 tcgen05.cp.cta_group::1.128x256b [%r22], %d2;"
    at = text.index("@%p3 tcgen05.mma")
    case.text = lambda: text[:at] + setup + text[at:]  # type: ignore[method-assign]
    case.shared = lambda: images  # type: ignore[method-assign]
    np.testing.assert_array_equal(case.run(before), want)


def test_the_4_lane_copy_is_named():
    case = Mma(operand("u8"), operand("u8", start=B_AT), 128, 32, d="s32")
    text = case.text() + "@%p3 tcgen05.cp.cta_group::1.4x256b [%r20], %d2;"
    case.text = lambda: text  # type: ignore[method-assign]
    with pytest.raises(UnknownInstruction, match="4x256b"):
        case.run()


# -- when its source and its target may be used ----------------------------------------------------

ALONE = """.reg .b32 bar, tm, here; mov.u32 %r0, smem; add.u32 bar, %r0, 4096; shl.b32 here, %i, 2;
    add.u32 here, here, %r0; setp.eq.u32 %p0, %i, 0; setp.lt.u32 %p1, %i, 32; mov.u32 %r9, 7;
    @%p0 mbarrier.init.shared.b64 [bar], 1; @!%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+4112], 64;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; ALLOCATED:
    st.shared.b32 [here], %i; FILLED shr.u32 %r2, %r0, 4; cvt.u64.u32 %d0, %r2;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    ld.shared.b32 tm, [%r0+4112]; or.b64 %d0, %d0, 0x400800010000;
    BODY
    tcgen05.fence::after_thread_sync; and.b32 %r3, %i, 96; shl.b32 %r3, %r3, 16;
    add.u32 %r3, %r3, tm; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3];
    tcgen05.wait::ld.sync.aligned; st.global.b32 [%x_i], %r4;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @!%p1 bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 tm, 64; FREED:"""
COPY = "@%p0 tcgen05.cp.cta_group::1.32x128b.warpx4 [tm], %d0;"
COMMIT = "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];"
OVER, LANDED = "st.shared.b32 [here], %r9;", wait("bar", 0, "W")
PROXY = "fence.proxy.async;"


@pytest.mark.parametrize(
    ("body", "filled", "says"),
    [
        (COPY + COMMIT + LANDED, PROXY, ""),
        (COPY + COMMIT + LANDED + OVER, PROXY, ""),
        (COPY + COPY + COMMIT + LANDED, PROXY, ""),  # in order
        (COPY + COMMIT + LANDED, "", "proxy: the tcgen05.cp .* with no fence.proxy.async"),
        (COPY + COMMIT + OVER + LANDED, PROXY, "still being read by the tcgen05.cp"),
        (COPY + COMMIT + "bar.sync 0;" + OVER + LANDED, PROXY, "still being read by the tcgen05"),
        (COPY + "bar.sync 0;", PROXY, "still being written by the tcgen05.cp"),
        (COPY + COMMIT, PROXY, "still being written by the tcgen05.cp"),
        (COMMIT + COPY + LANDED, PROXY, "still being written by the tcgen05.cp"),
        (COPY + COMMIT + LANDED + OVER + "bar.sync 0;" + COPY, PROXY, "no fence.proxy.async"),
    ],
)
def test_a_copy_is_ordered_by_a_commit_and_a_wait_alone(body, filled, says):
    text, out = ALONE.replace("BODY", body).replace("FILLED", filled), np.zeros(128, np.uint32)
    run = partial(simulate_ptx, text, {"x": out}, Shape(block=128, smem=8192), arch="sm_100a")
    if says:
        with pytest.raises(Hazards, match=says):
            run()
        return
    assert not run().advisories
    assert out.tolist() == [4 * (i % 32) for i in range(128)]

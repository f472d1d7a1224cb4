"""Tensor maps that the kernel changes: every field, the copy to global memory, and the fence."""

from __future__ import annotations

import numpy as np
import pytest
from barriers import init, wait
from copies import WAIT, Copy, Tensor, load_text, run
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned, encode

from cutex.sim import BadOperand, Hazards

BEFORE = {
    "address": 0x7F0000001000, "kind": "f16", "dims": [640, 320, 7], "strides": [1280, 409600],
    "box": [64, 32, 1], "steps": [1, 2, 1], "swizzle": 128, "flags": 1 << 18,
}  # fmt: skip
CHANGES = [  # the instruction's field, type and operands; the resulting map
    ("global_address", "b64", "0x123456789ab0", {"address": 0x123456789AB0}),
    ("rank", "b32", "3", {"dims": [640, 320, 7, 1], "strides": [1280, 409600, 0]}),
    ("box_dim", "b32", "0, 48", {"box": [48, 32, 1]}),
    ("box_dim", "b32", "1, 256", {"box": [64, 256, 1]}),
    ("box_dim", "b32", "2, 5", {"box": [64, 32, 5]}),
    ("global_dim", "b32", "0, 641", {"dims": [641, 320, 7]}),
    ("global_dim", "b32", "2, 100000", {"dims": [640, 320, 100000]}),
    ("global_stride", "b64", "0, 0xfedcba9870", {"strides": [0xFEDCBA9870, 409600]}),
    ("global_stride", "b64", "1, 0xfedcba9870", {"strides": [1280, 0xFEDCBA9870]}),
    ("element_stride", "b32", "0, 3", {"steps": [3, 2, 1]}),
    ("element_stride", "b32", "2, 8", {"steps": [1, 2, 8]}),
    ("elemtype", "b32", "10", {"kind": "bf16"}),
    ("elemtype", "b32", "8", {"kind": "f32.ftz"}),
    ("elemtype", "b32", "11", {"kind": "f32", "tf32": True}),
    ("elemtype", "b32", "12", {"kind": "f32.ftz", "tf32": True}),
    ("interleave_layout", "b32", "2", {"interleave": 2}),
    ("swizzle_mode", "b32", "0", {"swizzle": 0}),
    ("swizzle_mode", "b32", "2", {"swizzle": 64}),
    ("fill_mode", "b32", "1", {"nan": True}),
]


def bytes_of(raw: bytes) -> np.ndarray:
    return aligned(np.frombuffer(raw, np.uint8))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("field", "kind", "operands", "change"), CHANGES)
def test_a_field_of_a_map_in_global_memory(execute, field, kind, operands, change):
    rest = bytes(range(64))
    given = bytes_of(encode(**BEFORE, rest=rest))
    values = operands.rpartition(", ")
    constant = field in ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
    register = "%d0" if kind == "b64" else "%r0"
    value = values[2] if constant else register
    body = f"""mov.{kind} {register}, {values[2]}; setp.eq.u32 %p0, %i, 5;
    @%p0 tensormap.replace.tile.{field}.global.b1024.{kind} [%map], {values[0]}{values[1]}{value};
    """
    execute(body, {"map": given}, Shape())
    assert given.tobytes() == encode(**{**BEFORE, **change}, rest=rest)


def test_a_map_that_ordinary_stores_wrote_takes_an_acquire():
    copy = Copy(Tensor("f32", (64, 32)), (32, 16), (0, 0))
    acquire = "@%p0 fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"

    def without(body: str, *arrays, **how) -> None:
        assert acquire in body
        simulate_ptx(body.replace(acquire, ""), *arrays, **how)

    run(simulate_ptx, copy, load_text(copy) + WAIT)
    with pytest.raises(
        Hazards, match=r"which PTX line .* wrote by an ordinary store, with no fence"
    ):
        run(without, copy, load_text(copy) + WAIT)


WARPS = """setp.eq.u32 %p0, %lane, 0; mov.u64 %d0, 4096; shr.u32 %r0, %i, 5; cvt.u64.u32 %d1, %r0;
    DIFFERENT @%p0 tensormap.replace.tile.global_address.global.b1024.b64 [%map], %d0;"""


def test_warps_that_give_a_map_the_same_field_write_the_same_bytes():
    simulate_ptx(
        WARPS.replace("DIFFERENT", ""), {"map": bytes_of(encode(**BEFORE))}, Shape(block=96)
    )
    other = WARPS.replace("DIFFERENT", "mad.lo.u64 %d0, %d1, 4096, %d0;")
    with pytest.raises(Hazards, match="race: "):
        simulate_ptx(other, {"map": bytes_of(encode(**BEFORE))}, Shape(block=96))


@pytest.mark.parametrize("atomicity", [0, 1, 2, 3])
def test_the_atoms_of_a_swizzle(atomicity):
    """Three bits at once: the hint of Blackwell's driver beside them, bit 21, is cleared too."""
    given = bytes_of(encode(**{**BEFORE, "flags": 1 << 21}))
    body = f"""setp.eq.u32 %p0, %i, 0;
    @%p0 tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [%map], {atomicity};"""
    simulate_ptx(body, {"map": given}, arch="sm_100a")
    assert given.tobytes() == encode(**{**BEFORE, "flags": 0}, atomicity=atomicity)


@pytest.mark.parametrize("kind", [13, 14, 15])
def test_types_of_less_than_a_byte(kind):
    given = bytes_of(encode(**BEFORE))
    body = f"""setp.eq.u32 %p0, %i, 0;
    @%p0 tensormap.replace.tile.elemtype.global.b1024.b32 [%map], {kind};"""
    simulate_ptx(body, {"map": given}, arch="sm_100a")
    assert given.tobytes() == encode(**{**BEFORE, "kind": kind - 2})


@pytest.mark.parametrize("field", ["box_dim", "global_dim", "element_stride", "global_stride"])
def test_there_are_five_dimensions(field):
    kind, value = ("b64", "%d0") if field == "global_stride" else ("b32", "%r0")
    body = f"tensormap.replace.tile.{field}.global.b1024.{kind} [%map], 5, {value};"
    with pytest.raises(BadOperand, match=rf"{field}.*: ordinal 5, it takes 0..[34]"):
        simulate_ptx(body, {"map": bytes_of(encode(**BEFORE))}, assembles=False)


# -- used by TMA -----------------------------------------------------------------------------------

ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"
FENCE = "fence.proxy.tensormap::generic.release.gpu;"
LOAD = f"""{init(1)}
    .reg .b32 here; mov.u32 %r20, smem; add.u32 %r20, %r20, 128; shl.b32 here, %i, 2;
    add.u32 here, here, %r20; setp.eq.u32 %p0, %i, 0; @!%p0 bra CHANGED;
    CHANGE
    CHANGED: bar.sync 0; PUBLISH
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    @%p0 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
         [%r20], [%map, {{0}}], [bar];
    {wait("bar", 0, "W0")} ld.shared.b32 %r0, [here]; st.global.b32 [%out_i], %r0;
"""
IN_GLOBAL = "tensormap.replace.tile.global_address.global.b1024.b64 [%map], %b;"
IN_SHARED = """mov.u32 %r30, smem; mov.b32 %r31, 0; COPY: add.u32 %r32, %r30, %r31;
    cvt.u64.u32 %d2, %r31; add.u64 %d2, %map, %d2; ld.global.b32 %r33, [%d2];
    st.shared.b32 [%r32+512], %r33; add.u32 %r31, %r31, 4; setp.lt.u32 %p3, %r31, 128;
    @%p3 bra COPY;
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r30+512], %b;"""
RELEASE = """mov.u32 %r30, smem; add.u32 %r30, %r30, 512;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%map], [%r30], 128;"""


def load(change: str, publish: str, run=simulate_ptx, **how) -> list[int]:
    """32 words by a map of ``a``, which the kernel sets to ``b``."""
    a, b = (aligned(np.arange(32, dtype=np.uint32) + at) for at in (0, 1000))
    out = np.zeros(32, np.uint32)
    text = LOAD.replace("CHANGE\n", f"{change}\n").replace("PUBLISH", publish)
    given = bytes_of(encode(a.ctypes.data, "u32", [32], [], [32]))
    run(text, {"map": given, "a": a, "b": b, "out": out}, Shape(smem=1024), **how)
    return out.tolist()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ["fifo", "eager", "starved"])
@pytest.mark.parametrize("change", ["in global", "in shared"])
def test_tma_takes_the_changed_map(change, order):
    change, publish = {
        "in global": (IN_GLOBAL + FENCE, ACQUIRE), "in shared": (IN_SHARED, RELEASE + ACQUIRE),
    }[change]  # fmt: skip
    assert load(change, publish, order=order) == list(range(1000, 1032))


@pytest.mark.parametrize(("change", "publish"), [(IN_GLOBAL, ""), (IN_SHARED, RELEASE)])
def test_without_the_fence_tma_may_take_the_old_one(change, publish):
    with pytest.raises(Hazards, match=r"proxy: .* takes the tensor map at .* changed \(tensormap"):
        load(change, publish)


@pytest.mark.parametrize(("change", "publish", "told"), [
    (IN_GLOBAL, ACQUIRE, 1), (FENCE + IN_GLOBAL, ACQUIRE, 1), (IN_GLOBAL + FENCE, ACQUIRE, 0),
    (IN_SHARED, RELEASE + ACQUIRE, 0),
])  # fmt: skip
def test_a_change_that_is_not_released_is_an_advisory(change, publish, told):
    reports = []
    run = lambda *arrays, **how: reports.append(simulate_ptx(*arrays, **how))
    load(change, publish, run)
    assert len(reports[0].advisories) == told
    assert not told or "generic.release of the thread that did" in str(reports[0].advisories[0])


def test_a_fence_before_the_change_is_none():
    with pytest.raises(Hazards, match=r"no fence\.proxy\.tensormap::generic\.acquire"):
        load(ACQUIRE + IN_GLOBAL, "")


def test_a_map_that_does_not_change_needs_no_fence():
    assert load("", "") == list(range(32))

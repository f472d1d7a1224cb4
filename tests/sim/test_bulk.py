"""Bulk copies of plain bytes, waits for their groups, and stores that complete on mbarriers.

Snippets run in the simulator, and on a Hopper GPU where there is one.
"""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from copies import BYTES, CLUSTER, DONE, DUMP, FILL, WAIT, Copy, Tensor, run
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim.errors import BadOperand, Hazards
from cutex.sim.machine.bulk_groups import BulkGroups
from cutex.sim.machine.events import Events
from cutex.sim.machine.flight import Flight
from cutex.sim.machine.operation import Engine
from cutex.sim.scheduler import Scheduler
from cutex.sim.timing.events import Arrive, Send
from cutex.sim.timing.record import Recorder

# -- plain bulk copies -----------------------------------------------------------------------------

ANY = Copy(Tensor("u8", (4096,)), (16,), (0,))  # where the map does not matter
PLAIN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("size", [16, 48, 4096])
def test_bulk_loads_move_bytes(execute, size):
    body = f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {size};
        @%p0 {PLAIN} [%r0+64], [%x+{4096 - size}], {size}, [%r1];
        {WAIT} {DUMP}
    """
    got = run(execute, ANY, body)[0]
    want = np.full(BYTES, FILL, np.uint8)
    want[64 : 64 + size] = ANY.tensor.data[4096 - size :]
    np.testing.assert_array_equal(got, want)


def test_bulk_loads_multicast(execute):
    body = f"""
        mov.u32 %r10, %cluster_ctarank;
        setp.eq.and.u32 %p3, %r10, 1, %p0;
        mov.u16 %h0, 3;
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
        {CLUSTER}
        @%p3 {PLAIN}.multicast::cluster [%r0], [%x], 256, [%r1], %h0;
        {WAIT} {CLUSTER} {DUMP}
    """
    got = run(execute, ANY, body, ctas=2)
    for rank in range(2):
        np.testing.assert_array_equal(got[rank, :256], ANY.tensor.data[:256])
        assert (got[rank, 256:] == FILL).all()


def test_a_mask_names_ctas_of_the_cluster():
    load = f"mov.u16 %h0, 5; @%p0 {PLAIN}.multicast::cluster [%r0], [%x], 256, [%r1], %h0;"
    with pytest.raises(BadOperand, match="the CTA mask 0x5 names rank 2, in a cluster of 2 CTAs"):
        run(simulate_ptx, ANY, f"{CLUSTER} {load} {CLUSTER}", ctas=2)


# A kernel that fills nothing; a store of 64 words of which the first are written.
WRITES = """mov.u32 %r0, smem; mad.lo.u32 %r1, %i, 4, %r0; setp.lt.u32 %p1, %i, COUNT;
    @%p1 st.shared.u32 [%r1], %i; fence.proxy.async.shared::cta; bar.sync 0;
    setp.eq.u32 %p0, %i, 0; @%p0 """
OUT_OF = {
    "a store": "cp.async.bulk.global.shared::cta.bulk_group [%out], [%r0], 256;",
    "a sum": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%r0], 256;",
}


@pytest.mark.parametrize("copy", OUT_OF.values(), ids=OUT_OF)
@pytest.mark.parametrize("count", [0, 32, 64])
def test_what_nothing_has_written_is_not_stored(copy, count):
    out = aligned(np.zeros(64, np.uint32))
    text = WRITES.replace("COUNT", str(count)) + copy + DONE
    if count == 64:
        simulate_ptx(text, {"out": out}, Shape(block=64, smem=256))
        assert out.tolist() == list(range(64))
        return
    said = rf"uninitialised: the bulk store reads shared memory .*: {256 - 4 * count} of 256 bytes"
    with pytest.raises(Hazards, match=said):
        simulate_ptx(text, {"out": out}, Shape(block=64, smem=256))


def test_a_sum_that_every_lane_asks_for_is_told():
    text = WRITES.replace("COUNT", "64").replace("@%p0 ", "") + OUT_OF["a sum"]
    text += DONE.replace("@%p0 ", "")
    report = simulate_ptx(
        text, {"out": aligned(np.zeros(64, np.uint32))}, Shape(smem=256, block=64)
    )
    assert "32 lanes of CTA (0,0,0) warp 0 issue this cp.reduce" in report.advisories[0].message


def test_bulk_stores_move_bytes(execute):
    copy = Copy(Tensor("u8", (4096,)), (16,), (0,))
    smem = np.random.default_rng(1).integers(0, 256, (1, BYTES), np.uint8)
    want = copy.tensor.data.copy()
    want[1024:1328] = smem[0, 512:816]
    body = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%x+1024], [%r0+512], 304;" + DONE
    run(execute, copy, body, smem)
    np.testing.assert_array_equal(copy.tensor.data, want)


@pytest.mark.parametrize("policy", ["", ", %d9"])
def test_bulk_stores_leave_out_the_bytes_that_a_mask_does_not_name(policy):
    copy = Copy(Tensor("u8", (4096,)), (16,), (0,))
    hint = ".L2::cache_hint" if policy else ""
    store = f"@%p0 cp.async.bulk.global.shared::cta.bulk_group{hint}.cp_mask [%x+1024], [%r0], 304"
    body = f"createpolicy.fractional.L2::evict_first.b64 %d9, 0.5; {store}{policy}, 0x80F1;" + DONE
    want = copy.tensor.data.copy()
    where = 1024 + np.flatnonzero([0x80F1 >> i % 16 & 1 for i in range(304)])
    want[where] = FILL
    run(simulate_ptx, copy, body)
    np.testing.assert_array_equal(copy.tensor.data, want)


PLAIN_REDUCTIONS = [
    ("add.f32", np.float32, np.add), ("add.noftz.f16", np.float16, np.add),
    ("add.noftz.bf16", ml_dtypes.bfloat16, np.add), ("add.f64", np.float64, np.add),
    ("min.f16", np.float16, np.minimum), ("max.bf16", ml_dtypes.bfloat16, np.maximum),
    ("add.s32", np.int32, np.add), ("min.s32", np.int32, np.minimum),
    ("max.u32", np.uint32, np.maximum), ("add.u64", np.uint64, np.add),
    ("and.b32", np.uint32, np.bitwise_and), ("xor.b64", np.uint64, np.bitwise_xor),
    ("inc.u32", np.uint32, lambda a, b: np.where(a >= b, 0, a + np.uint32(1))),
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("op", "dtype", "function"), PLAIN_REDUCTIONS)
def test_bulk_reductions_combine_with_what_is_there(execute, op, dtype, function):
    draw, count = np.random.default_rng(2), 256 // np.dtype(dtype).itemsize
    floats = op.split(".")[-1] in ("f16", "bf16", "f32", "f64")
    values = draw.normal if floats else lambda size: draw.integers(0, 1000, size)
    old, new = (values(size=count).astype(dtype) for _ in range(2))
    copy = Copy(Tensor("u8", (4096,)), (16,), (0,))
    copy.tensor.data[512:768] = old.view(np.uint8)
    smem = np.full((1, BYTES), FILL, np.uint8)
    smem[0, 64:320] = new.view(np.uint8)
    text = f"@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%x+512], [%r0+64], 256;"
    run(execute, copy, text + DONE, smem)
    want = np.asarray(function(old, new)).astype(dtype)
    np.testing.assert_array_equal(copy.tensor.data[512:768].view(dtype), want)


@pytest.mark.parametrize("reduction", ["", "add"])
def test_bulk_copies_to_another_cta(execute, reduction):
    """Rank 1 sends 256 bytes of its shared memory to rank 0, which waits for them."""
    op = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    op = f"cp.reduce.async.bulk.{op}.add.u32" if reduction else f"cp.async.bulk.{op}"
    body = f"""
        mov.u32 %r10, %cluster_ctarank;
        setp.eq.u32 %p2, %r10, 1;
        setp.eq.and.u32 %p3, %r10, 0, %p0;
        and.pred %p4, %p2, %p0;
        mapa.shared::cluster.u32 %r12, %r0, 0;
        mapa.shared::cluster.u32 %r13, %r1, 0;
        @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
        {CLUSTER}
        @%p4 {op} [%r12+1024], [%r0+64], 256, [%r13];
        @%p2 bra LATER;
        {WAIT}
        LATER: {CLUSTER}
        {DUMP}
    """
    smem = np.random.default_rng(4).integers(0, 256, (2, BYTES), np.uint8)
    got = run(execute, ANY, body, smem, ctas=2)
    want = smem.copy()
    words = want[0, 1024:1280].view(np.uint32)
    sent = smem[1, 64:320].view(np.uint32)
    words[:] = words + sent if reduction else sent
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("size", "at"), [(24, 0), (8, 0), (32, 8)])
def test_bulk_copies_of_other_than_16_bytes_are_refused(size, at):
    refused = pytest.raises(BadOperand, match="size and address must be multiples of 16")
    with refused:
        run(simulate_ptx, ANY, f"mov.u32 %r20, {size}; @%p0 {PLAIN} [%r0], [%x+{at}], %r20, [%r1];")
    store = "cp.async.bulk.global.shared::cta.bulk_group"
    with pytest.raises(BadOperand, match="size and address must be multiples of 16"):
        run(simulate_ptx, ANY, f"mov.u32 %r20, {size}; @%p0 {store} [%x+{at}], [%r0], %r20;")


# -- bulk groups -----------------------------------------------------------------------------------


def test_a_group_is_overdue_while_an_older_one_than_allowed_is_in_flight():
    machine = SimpleNamespace(wake=lambda *_: None, events=Events())
    groups, thread = BulkGroups(machine, SimpleNamespace(issued=0)), (0, 0)
    made = []
    for _ in range(3):
        made.append(groups.joined(thread))
        groups.commit(thread)
    groups.commit(thread)  # an empty one
    assert groups.overdue(0, [5, 0], 3, True) == 0 and groups.overdue(0, [0], 0, True) == 0
    assert groups.overdue(0, [5], 0, True) is None  # a lane that has stored nothing
    made[2].finished()
    made[1].finished()
    assert groups.overdue(0, [0], 3, True) == 0  # the oldest of four is not done
    assert groups.overdue(0, [0], 4, True) is None
    made[0].finished()
    assert groups.overdue(0, [0], 0, True) is None


def three_stores(wait: str, overwrite: int) -> str:
    rows = [f"@%p0 cp.async.bulk.global.shared::cta.bulk_group [%x+{i * 1024}], [%r0+{i * 1024}], "
            "1024; @%p0 cp.async.bulk.commit_group;" for i in range(3)]  # fmt: skip
    more = f"@%p0 st.shared.u32 [%r0+{overwrite * 1024}], 0; @%p0 cp.async.bulk.wait_group 0;"
    return "".join(rows) + f"@%p0 cp.async.bulk.{wait};" + more


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_wait_group_n_frees_all_but_the_last_n(left, order):
    for seed in range(4 if order == "random" else 1):
        copy = Copy(Tensor("u8", (4096,)), (16,), (0,))
        smem = np.random.default_rng(1).integers(0, 256, (1, BYTES), np.uint8)
        want = smem[0, :3072].copy()
        body = three_stores(f"wait_group.read {left}", 2 - left)
        run(simulate_ptx, copy, body, smem, order=order, seed=seed)
        np.testing.assert_array_equal(copy.tensor.data[:3072], want)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_what_wait_group_n_leaves_may_not_be_overwritten(left):
    text = three_stores(f"wait_group.read {left}", 3 - left)
    with pytest.raises(Hazards, match=r"a store .* overwrites .* being read by the bulk store"):
        run(simulate_ptx, ANY, text)


# -- stores that complete on an mbarrier -----------------------------------------------------------

ASYNC = "async{}.shared::cluster.mbarrier::complete_tx::bytes"


def remote(text: str, size: int, offset: int = 0) -> str:
    """Run the text in rank 1 of two CTAs for rank 0, on all lanes: %r12 its shared memory, %r13 its
    mbarrier; rank 0 waits for ``size`` bytes.
    """
    return f"""
        mov.u32 %r10, %cluster_ctarank;
        setp.eq.u32 %p2, %r10, 1;
        setp.eq.and.u32 %p3, %r10, 0, %p0;
        mapa.shared::cluster.u32 %r12, %r0, 0;
        mapa.shared::cluster.u32 %r13, %r1, 0;
        shl.b32 %r14, %lane, 4;
        add.u32 %r12, %r12, %r14;
        mad.lo.u32 %r20, %lane, 100, 7;
        add.u32 %r21, %r20, 1;
        cvt.u64.u32 %d4, %r20;
        @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {size};
        {CLUSTER}
        {text}
        @%p2 bra LATER;
        {WAIT}
        LATER: {CLUSTER}
        {DUMP}
    """


def lanes_words(smem: np.ndarray) -> np.ndarray:
    """Words (32 lanes, 4), 16 bytes per lane."""
    return smem[:512].view(np.uint32).reshape(32, 4)


STORES = [
    ("b32", "%r20", 1),
    ("v2.u32", "{%r20, %r21}", 2),
    ("v4.b32", "{%r20, %r21, %r20, %r21}", 4),
    ("b64", "%d4", 2),
    ("v2.b64", "{%d4, %d4}", 4),
]


@pytest.mark.parametrize(("kind", "value", "words"), STORES)
def test_st_async_writes_and_counts_in_the_other_cta(execute, kind, value, words):
    op = "st." + ASYNC.format(".weak")
    got = run(
        execute, ANY, remote(f"@%p2 {op}.{kind} [%r12], {value}, [%r13];", 128 * words), ctas=2
    )
    low = 7 + 100 * np.arange(32)
    want = {"b32": [low], "v2.u32": [low, low + 1], "v4.b32": [low, low + 1] * 2,
            "b64": [low, 0 * low], "v2.b64": [low, 0 * low] * 2}[kind]  # fmt: skip
    np.testing.assert_array_equal(lanes_words(got[0])[:, :words], np.stack(want, 1))
    assert (lanes_words(got[0])[:, words:] == 0xEEEEEEEE).all()
    assert (got[1] == FILL).all() and (got[0, 512:] == FILL).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("kind", "name", "function"),
    [("u32", "add", np.add), ("s32", "min", np.minimum), ("u32", "max", np.maximum),
     ("b32", "and", np.bitwise_and), ("b32", "xor", np.bitwise_xor), ("u64", "add", np.add)],
)  # fmt: skip
def test_red_async_combines_in_the_other_cta(execute, kind, name, function):
    value = "%d4" if kind == "u64" else "%r20"
    size = int(kind[1:]) // 8
    op = "red." + ASYNC.format(".relaxed.cluster") + f".{name}.{kind}"
    twice = f"@%p2 {op} [%r12], {value}, [%r13];" * 2
    got = run(execute, ANY, remote(twice, 64 * size), ctas=2)
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{size}")
    x = (7 + 100 * np.arange(32)).astype(dtype)
    old = np.full(size, FILL, np.uint8).view(dtype)
    want = function(function(old, x), x)
    np.testing.assert_array_equal(
        got[0, :512].reshape(32, 16)[:, :size].copy().view(dtype)[:, 0], want
    )


@pytest.mark.parametrize(("step", "operations"), [(4, 1), (8, 32)])
def test_adjacent_lanes_of_st_async_are_one_operation(step, operations, monkeypatch):
    """What a warp writes side by side arrives as a whole."""
    issued, issue = [], Flight.issue
    monkeypatch.setattr(Flight, "issue", lambda self, op: (issued.append(op), issue(self, op))[1])
    text = f"mapa.shared::cluster.u32 %r18, %r0, 0; mad.lo.u32 %r18, %lane, {step}, %r18; "
    text += f"@%p2 st.{ASYNC.format('.weak')}.b32 [%r18], %r20, [%r13];"
    got = run(simulate_ptx, ANY, remote(text, 128), ctas=2)
    assert len([op for op in issued if op.engine is Engine.DSMEM]) == operations
    words, lanes = got[0].view(np.int32), np.arange(32)
    np.testing.assert_array_equal(words[: 8 * step : step // 4], 7 + 100 * lanes)


@pytest.mark.parametrize("text", [
    f"@%p2 st.{ASYNC.format('.weak')}.b32 [%r12], %r20, [%r13];",
    f"@%p2 red.{ASYNC.format('.relaxed.cluster')}.add.u32 [%r12], %r20, [%r13];",
    """mapa.shared::cluster.u32 %r12, %r0, 0; setp.eq.and.u32 %p4, %r10, 1, %p0;
    @%p4 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r12], [%r0],
    128, [%r13];""",
], ids=["st.async", "red.async", "bulk copy"])  # fmt: skip
def test_the_clock_has_each_byte_sent_to_another_cta_once(text, monkeypatch):
    """As many as the barrier there expects, or the clock would wait for ever or not at all."""
    start, recorders = Scheduler.run, []

    def recorded(self: Scheduler) -> None:
        recorders.append(Recorder(self.m, {}))
        self.m.observe(recorders[-1])
        start(self)

    monkeypatch.setattr(Scheduler, "run", recorded)
    run(simulate_ptx, ANY, remote(text, 128), ctas=2)
    (recorder,) = recorders
    events = [e for program in recorder.programs.values() for e in program]
    (expected,) = (e for e in events if isinstance(e, Arrive) and e.expect)
    sent = [e for e in events if isinstance(e, Send)]
    assert {e.signal for e in sent} == {expected.barrier}
    assert sum(e.size for e in sent) == expected.expect == 128


def test_st_async_and_its_mbarrier_lie_in_one_cta():
    text = f"@%p2 st.{ASYNC.format('.weak')}.b32 [%r12], %r20, [%r1];"
    with pytest.raises(BadOperand, match="they must lie in the same CTA"):
        run(simulate_ptx, ANY, remote(text, 128), ctas=2)


def test_reading_what_st_async_still_writes_is_a_race():
    text = f"@%p2 st.{ASYNC.format('.weak')}.b32 [%r12], %r20, [%r13]; {CLUSTER} "
    text += "ld.shared.u32 %r9, [%r0];"
    with pytest.raises(Hazards, match=r"a load .* still being written by the st\.async"):
        run(simulate_ptx, ANY, remote(text, 128), ctas=2)

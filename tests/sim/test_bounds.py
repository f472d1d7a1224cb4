"""Accesses outside of every tensor, buffer or stack: the report names warp, lane, address and
neighbour.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from barriers import copy, init, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned

from cutex.sim import BadAddress

WHO = r"CTA \(0,0,0\) warp 0 lane "


def load(offset: str, bits: str = "b32") -> str:
    return f"ld.global.{bits} %r0, [%a_i{offset}];"


@pytest.mark.parametrize(
    ("offset", "lane", "where"),
    [
        ("+4", 31, "0 bytes past the end of a (32 int32)"),
        ("+400", 0, "272 bytes past the end of a (32 int32)"),
        ("+-4", 0, "4 bytes before a (32 int32)"),
        ("+2", 31, "and its last 2 bytes lie past the end of a (32 int32)"),
    ],
)
def test_an_access_past_either_end_names_the_nearest_tensor(offset, lane, where):
    a = np.arange(32, dtype=np.int32)
    with pytest.raises(BadAddress, match=rf"{WHO}{lane} loads 0x[0-9a-f]+, {re.escape(where)}"):
        simulate_ptx(load(offset), {"a": a})
    with pytest.raises(BadAddress, match=rf"{WHO}{lane} stores"):
        simulate_ptx(f"st.global.b32 [%a_i{offset}], 0;", {"a": a})
    assert (a == np.arange(32)).all()


def test_the_last_bytes_of_a_tensor_may_be_read():
    simulate_ptx("ld.global.u8 %h0, [%a_i+3];", {"a": np.arange(32, dtype=np.int32)})


def test_the_report_names_the_ptx_line():
    with pytest.raises(BadAddress, match=r"\n    at PTX line \d+: ld.global.b32 %r0, \[%a_i\+4\]"):
        simulate_ptx(load("+4"), {"a": np.arange(32, dtype=np.int32)})


def test_misaligned_accesses():
    a = np.zeros(128, np.int32)
    with pytest.raises(BadAddress, match=rf"{WHO}0 loads 0x[0-9a-f]+, not aligned to 4 bytes"):
        simulate_ptx(load("+2"), {"a": a})
    with pytest.raises(BadAddress, match=r"not aligned to 16 bytes"):
        simulate_ptx("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%a_i];", {"a": a})


def test_the_first_lane_at_fault_is_named():
    body = "setp.ge.u32 %p0, %lane, 13; @%p0 add.u64 %a_i, %a_i, 4096; ld.global.b32 %r0, [%a_i];"
    with pytest.raises(BadAddress, match=rf"{WHO}13 loads"):
        simulate_ptx(body, {"a": np.zeros(32, np.int32)})
    with pytest.raises(BadAddress, match=r"CTA \(1,0,0\) warp 1 lane 31"):
        simulate_ptx(load("+4"), {"a": np.zeros(128, np.int32)}, Shape(grid=2, block=64))


# -- views -----------------------------------------------------------------------------------------


def address_of(row: str, column: str, row_bytes: int) -> str:
    return (
        f".reg .b64 at; mad.wide.u32 at, {row}, {row_bytes}, %a; mad.wide.u32 at, {column}, 4, at;"
    )


def strided(rows: int, columns: int, row_length: int, offset: int = 0) -> np.ndarray:
    whole = np.arange(offset + rows * row_length, dtype=np.int32)
    return whole[offset:].reshape(rows, row_length)[:, :columns]


def test_the_padding_of_a_strided_view_is_out_of_bounds():
    a = strided(32, 5, 8)
    simulate_ptx(
        f"mov.b32 %r1, 4; {address_of('%lane', '%r1', 32)} ld.global.b32 %r0, [at];", {"a": a}
    )
    with pytest.raises(BadAddress, match=rf"{WHO}0 loads 0x[0-9a-f]+, in the padding of a "
                       r"\(32x5 int32\), 20 bytes from its start"):  # fmt: skip
        body = f"mov.b32 %r1, 5; {address_of('%lane', '%r1', 32)} ld.global.b32 %r0, [at];"
        simulate_ptx(body, {"a": a})


def test_a_vector_that_covers_padding_is_out_of_bounds():
    whole = np.zeros(33 * 8, np.int32)
    start = (-whole.ctypes.data % 32) // 4
    a = whole[start : start + 32 * 8].reshape(32, 8)[:, :5]
    with pytest.raises(BadAddress, match="in the padding of a"):
        simulate_ptx("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%a_i+16];", {"a": a})
    columns = whole[start : start + 32 * 8].reshape(32, 8)[:, ::3]  # elements 0, 3 and 6 of a row
    with pytest.raises(BadAddress, match="in the padding of a"):
        simulate_ptx("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%a_i];", {"a": columns})


BULK = {
    "load": f"""{init(1)} @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], SIZE;
        @%p0 {copy("bar+128", "%a", "SIZE")} {wait("bar", 0, "W")}""",
    "store": """@%p1 cp.async.bulk.global.shared::cta.bulk_group [%a], [bar], SIZE;
        @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;""",
}
BULK["sum"] = BULK["store"].replace("cp.async.bulk.global", "cp.reduce.async.bulk.global").replace(
    "group [", "group.add.u32 [")  # fmt: skip
FILL = """.reg .b32 bar; mov.u32 bar, smem; mad.lo.u32 %r1, %i, 4, bar; st.shared.b32 [%r1], %i;
    fence.proxy.async.shared::cta; bar.warp.sync -1; setp.eq.u32 %p1, %i, 0;"""


@pytest.mark.parametrize("how", BULK)
def test_a_bulk_copy_that_covers_padding_is_out_of_bounds(how):
    body = ("" if how == "load" else FILL) + BULK[how]
    whole = aligned(np.zeros((32, 32), np.int32))
    simulate_ptx(body.replace("SIZE", "64"), {"a": whole[:, :16]}, Shape(smem=512))
    with pytest.raises(BadAddress, match=r"\+128, in the padding of a \(32x16 int32\), 64 bytes"):
        simulate_ptx(body.replace("SIZE", "128"), {"a": whole[:, :16]}, Shape(smem=512))


@pytest.mark.parametrize("how", ["store", "sum", "plain", "atomic"])
def test_a_read_only_array_is_not_written(how):
    plain = {"plain": "st.global.b32 [%a_i], 1;", "atomic": "red.global.add.u32 [%a_i], 1;"}
    body = plain.get(how) or FILL + BULK[how].replace("SIZE", "128")
    a = aligned(np.zeros(32, np.int32))
    a.flags.writeable = False
    simulate_ptx(load(""), {"a": a})
    with pytest.raises(BadAddress, match=r"in a\[0\] \(32 int32\), a read-only array"):
        simulate_ptx(body, {"a": a}, Shape(smem=512))
    assert not a.any()


def test_the_rest_of_the_storage_behind_an_offset_view_is_out_of_bounds():
    a = np.arange(64, dtype=np.int32)[16:48]
    out = np.zeros(32, np.int32)
    simulate_ptx("ld.global.b32 %r0, [%a_i]; st.global.b32 [%out_i], %r0;", {"a": a, "out": out})
    assert (out == a).all()
    with pytest.raises(BadAddress, match=rf"{WHO}0 loads 0x[0-9a-f]+, 4 bytes before a"):
        simulate_ptx(load("+-4"), {"a": a})
    with pytest.raises(BadAddress, match=rf"{WHO}31 loads 0x[0-9a-f]+, 0 bytes past the end of a"):
        simulate_ptx(load("+4"), {"a": a})


def test_a_broadcast_view_has_one_row():
    a = np.broadcast_to(np.arange(4, dtype=np.int32), (8, 4))
    simulate_ptx("ld.global.b32 %r0, [%a+12];", {"a": a})
    with pytest.raises(BadAddress, match="0 bytes past the end of a"):
        simulate_ptx("ld.global.b32 %r0, [%a+16];", {"a": a})


def test_a_reversed_view_extends_downwards():
    a = np.arange(32, dtype=np.int32)[::-1]
    out = np.zeros(32, np.int32)
    body = """
    neg.s32 %r1, %lane; mad.wide.s32 %d0, %r1, 4, %a; ld.global.b32 %r0, [%d0];
    st.global.b32 [%out_i], %r0;
    """
    simulate_ptx(body, {"a": a, "out": out})
    assert (out == a).all()


def test_two_tensors_of_one_storage_are_one_region():
    whole = np.arange(48, dtype=np.int32)
    a, b = whole[:32], whole[16:]
    body = "ld.global.b32 %r0, [%a_i]; st.global.b32 [%b_i], %r0;"
    simulate_ptx(body, {"a": a, "b": b})
    assert (whole[16:] == np.arange(32)).all()
    with pytest.raises(BadAddress, match=r"past the end of a \(32 int32\) and b \(32 int32\)"):
        simulate_ptx("ld.global.b32 %r0, [%b_i+4];", {"a": a, "b": b})


def test_an_access_may_not_run_from_one_tensor_into_its_neighbour():
    raw = np.zeros(128, np.uint8)
    start = -raw.ctypes.data % 16
    a, b = raw[start : start + 20], raw[start + 20 : start + 64]
    with pytest.raises(BadAddress, match="and its last 4 bytes lie past the end of a"):
        simulate_ptx("ld.global.b64 %d0, [%a+16];", {"a": a, "b": b}, Shape(block=1))


def test_a_tensor_without_elements_has_no_bytes():
    empty, out = np.zeros((0, 4), np.float32), np.zeros(32, np.int32)
    simulate_ptx("st.global.b32 [%out_i], 1;", {"empty": empty, "out": out})
    assert out.all()
    with pytest.raises(BadAddress, match="0x"):
        simulate_ptx("ld.global.b32 %r0, [%empty];", {"empty": empty, "out": out})
    with pytest.raises(BadAddress, match="the launch has no tensors"):
        simulate_ptx("ld.global.b32 %r0, [%empty];", {"empty": empty})


def test_a_pointer_that_was_never_written_says_so():
    with pytest.raises(BadAddress, match="which comes from a register that nothing has written"):
        simulate_ptx("ld.global.b32 %r0, [%d7+8];", {"a": np.zeros(4, np.int32)})
    with pytest.raises(BadAddress, match="which comes from a register that nothing has written"):
        simulate_ptx("ld.b32 %r0, [%d7];", {"a": np.zeros(4, np.int32)})


def test_a_null_pointer():
    with pytest.raises(BadAddress, match=r"stores 0x0, \d+ bytes before a"):
        simulate_ptx("mov.u64 %d0, 0; st.b32 [%d0], 1;", {"a": np.zeros(4, np.int32)})


# -- other spaces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("smem", "offset", "bits"),
    [(256, 256, 8), (256, 253, 16), (100, 100, 8), (100, 96, 64), (0, 0, 32)],
)
def test_shared_memory_ends_where_the_launch_says(smem, offset, bits):
    head = ".extern .shared .align 16 .b8 smem[];" if not smem else ""
    register = {8: "%h0", 16: "%h0", 32: "%r0", 64: "%d0"}[bits]
    limit = re.escape(f"(0x400..0x{1024 + smem:x})")
    what = rf"accesses {bits // 8} bytes at shared 0x{1024 + offset:x}, (not aligned|outside)"
    body = f"ld.shared.b{bits} {register}, [smem+{offset}];"
    with pytest.raises(BadAddress, match=rf"{WHO}0 {what}.*{limit}"):
        simulate_ptx(body, {}, Shape(smem=smem), head=head)


def test_shared_memory_begins_after_the_part_that_the_system_keeps():
    with pytest.raises(BadAddress, match="at shared 0x3fc, outside the CTA's shared memory"):
        simulate_ptx("st.shared.b32 [smem+-4], 0;", {}, Shape(smem=256))
    with pytest.raises(BadAddress, match="at shared 0x0, outside"):
        simulate_ptx("mov.b32 %r0, 0; st.shared.b32 [%r0], 0;", {}, Shape(smem=256))


def test_the_last_bytes_of_shared_memory_may_be_used():
    simulate_ptx("st.shared.b32 [smem+96], %i;", {}, Shape(block=1, smem=100))


def test_shared_memory_of_a_cta_that_the_cluster_lacks():
    with pytest.raises(BadAddress, match="at shared 0x2000400, in no CTA of its cluster"):
        simulate_ptx(
            "mov.u32 %r0, smem; mapa.shared::cluster.u32 %r0, %r0, 2;"
            "st.shared::cluster.b32 [%r0], 1;", {}, Shape(grid=2, cluster=2, smem=64)
        )  # fmt: skip


def test_local_memory_ends_with_the_stack():
    head = ".local .align 4 .b8 mine[32];"
    with pytest.raises(BadAddress, match=rf"{WHO}0 accesses 4 bytes of local memory at 32, "
                       "past the end of its 32 bytes"):  # fmt: skip
        simulate_ptx(f"{head} st.local.b32 [mine+32], 1;", {})
    with pytest.raises(BadAddress, match="local memory at 2, not aligned to 4 bytes"):
        simulate_ptx(f"{head} st.local.b32 [mine+2], 1;", {})


def test_a_module_variable_ends_where_it_was_declared():
    head = ".global .align 4 .b32 first[4]; .global .align 32 .b32 second;"
    with pytest.raises(BadAddress, match="0 bytes past the end of the variable first"):
        simulate_ptx("ld.global.b32 %r0, [first+16];", {}, head=head)


def test_bulk_copies_are_bounded_too():
    body = """
    .reg .b32 bar, to; mov.u32 bar, smem; add.u32 to, bar, 128;
    mbarrier.init.shared.b64 [bar], 1;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [%a+64], 128, [bar];
    """
    with pytest.raises(BadAddress, match="its last 64 bytes lie past the end of a"):
        simulate_ptx(body, {"a": _aligned_bytes(128)}, Shape(block=1, smem=512))


def _aligned_bytes(count: int) -> np.ndarray:
    raw = np.zeros(count + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + count]

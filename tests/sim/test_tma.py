"""Tensor copies against their definition, element by element.

Snippets run in the simulator, and on a Hopper GPU where there is one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from copies import (
    BYTES,
    CLUSTER,
    DONE,
    DUMP,
    FILL,
    LOAD,
    SETUP,
    WAIT,
    Copy,
    Tensor,
    check_load,
    check_store,
    load_text,
    run,
    store_text,
)  # fmt: skip
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import ATOMS_OF_32, aligned, size_of

from cutex.sim.errors import BadAddress, BadOperand, Hazards, SimError, UnknownInstruction

REFUSED = (BadOperand, Hazards)


# -- boxes -----------------------------------------------------------------------------------------

BOXES = {  # rank: dims, box, and coordinates inside, over each end, and outside
    1: ((40,), (16,), [(8,), (-8,), (32,), (40,), (-16,)]),
    2: ((40, 9), (16, 4), [(8, 3), (-8, 3), (32, 7), (8, -2), (40, 0), (0, 9), (-8, -3)]),
    3: ((24, 5, 4), (8, 3, 2), [(8, 1, 1), (-8, 4, 3), (16, -1, -1), (16, 3, 5)]),
    4: ((24, 3, 4, 3), (8, 2, 2, 2), [(8, 1, 1, 1), (-8, -1, 3, 2), (16, 2, -1, -1)]),
    5: ((16, 3, 2, 3, 4), (8, 2, 2, 2, 3), [(8, 1, 0, 1, 1), (-8, -1, 1, 2, 3), (8, 2, 0, -1, -2)]),
}  # fmt: skip
CASES = [(dims, box, at) for dims, box, places in BOXES.values() for at in places]
STORED = [case for case in CASES if min(case[2]) >= 0]  # an H200 traps on the others


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("dims", "box", "at"), CASES)
def test_loads_of_one_to_five_dimensions_over_every_side(execute, dims, box, at):
    check_load(execute, Copy(Tensor("f16", dims, pad=16), box, at))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("dims", "box", "at"), STORED)
def test_stores_of_one_to_five_dimensions_write_only_inside(execute, dims, box, at):
    check_store(execute, Copy(Tensor("bf16", dims, pad=16), box, at))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("dims", "box", "at"), [case for case in CASES if case not in STORED])
def test_stores_at_negative_coordinates_are_refused(dims, box, at):
    with pytest.raises(BadOperand, match="the hardware traps on negative ones"):
        check_store(simulate_ptx, Copy(Tensor("f16", dims, pad=16), box, at))


def test_a_store_over_a_row_that_ends_inside_16_bytes_is_found():
    copy = Copy(Tensor("f16", (20, 9)), (16, 4), (8, 3))
    with pytest.raises(Hazards, match="overwrites the 8 bytes behind the end of each row"):
        check_store(simulate_ptx, copy)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("offset", [0, 128, 640])
@pytest.mark.parametrize(
    ("swizzle", "kind"), [(32, "u8"), (64, "f16"), (128, "f32"), (ATOMS_OF_32, "f32"), (0, "u64")]
)
def test_swizzles_are_of_the_absolute_address(execute, swizzle, kind, offset):
    inner = (abs(swizzle) or 64) // size_of(kind)
    tensor = Tensor(kind, (3 * inner, 40))
    copy = Copy(tensor, (inner, 24), (inner, 20), swizzle=swizzle, offset=offset)
    check_load(execute, copy)
    check_store(execute, copy)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_elements_outside_are_nan_where_the_map_says_so(execute, kind):
    copy = Copy(Tensor(kind, (16, 6)), (16, 4), (-8, 4), nan=True)
    check_load(execute, copy)
    assert (copy.loaded()[:32].view(np.uint16) == 0x7FF7).any()


def test_loads_through_a_tf32_map_round_to_the_nearest(execute):
    check_load(execute, Copy(Tensor("f32", (16, 6)), (8, 4), (4, 1), tf32=True))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("steps", [(1, 2, 1), (1, 3, 2), (2, 1, 1), (1, 8, 3)])
@pytest.mark.parametrize("at", [(0, 0, 0), (8, 1, 2), (0, -3, 1), (0, 5, -4)])
def test_element_strides_skip_rows_but_not_elements_of_a_row(execute, steps, at):
    copy = Copy(Tensor("f16", (16, 11, 6)), (8, 5, 4), at, steps)
    check_load(execute, copy)
    if min(at) >= 0:
        check_store(execute, copy)


def test_a_box_of_256_rows(execute):
    check_load(execute, Copy(Tensor("u8", (64, 300)), (64, 256), (0, 60), swizzle=64))


@pytest.mark.parametrize("delta", [-16, 16])
def test_a_load_counts_every_byte_of_its_box(delta):
    copy = Copy(Tensor("f16", (40, 9)), (16, 4), (-8, 7))  # most of it outside
    text = load_text(copy).replace(f"[%r1], {copy.bytes};", f"[%r1], {copy.bytes + delta};")
    with pytest.raises(SimError, match=f"tx-count {delta}"):
        run(simulate_ptx, copy, text + WAIT)


# -- reductions ------------------------------------------------------------------------------------

FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
DTYPES = {**FLOATS, "s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}
REDUCTIONS = {
    "add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("kind", "name"),
    [*product(("f32", "f16", "bf16", "s32"), ("add",)),
     *product(("f16", "bf16", "s32", "u32", "s64", "u64"), ("min", "max")),
     *product(("u32", "s32", "u64"), ("and", "or", "xor"))],
)  # fmt: skip
def test_reductions_combine_with_what_is_there(execute, kind, name):
    tensor, rng = Tensor(kind, (16, 6)), np.random.default_rng(3)
    copy = Copy(tensor, (8, 4), (8, 3), offset=256)
    smem = rng.integers(0, 256, (1, BYTES), np.uint8)
    dtype = DTYPES[kind]
    if kind in FLOATS:
        for array in (tensor.data, smem.reshape(-1)):
            values = rng.normal(size=array.nbytes // np.dtype(dtype).itemsize)
            array[:] = values.astype(dtype).view(np.uint8)
    combine = lambda a, b: np.asarray(REDUCTIONS[name](a.view(dtype), b.view(dtype))).view(np.uint8)
    want = copy.stored(smem[0], combine)
    text = store_text(copy).replace("cp.async", "cp.reduce.async")
    text = text.replace("shared::cta.tile", f"shared::cta.{name}.tile")
    run(execute, copy, text + DONE, smem)
    np.testing.assert_array_equal(tensor.data, want)


# -- clusters --------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", ["fifo", "eager", "peer-late", "random"])
@pytest.mark.parametrize("mask", [0b1111, 0b1010, 0b0001])
def test_multicast_writes_and_signals_each_cta_of_the_mask(mask, order):
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 4), swizzle=128, offset=1024)
    multicast = load_text(copy, f", {mask}").splitlines()
    issue = "\n".join(multicast[2:]).replace(LOAD, LOAD + ".multicast::cluster")
    body = f"""
        mov.u32 %r10, %cluster_ctarank;
        mov.u32 %r11, {mask};
        shr.u32 %r11, %r11, %r10;
        and.b32 %r11, %r11, 1;
        setp.eq.u32 %p2, %r11, 1;                  // this CTA is in the mask
        setp.eq.and.u32 %p3, %r10, 1, %p0;         // rank 1 issues, for others too
        and.pred %p4, %p0, %p2;
        @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {copy.bytes};
        {CLUSTER}
        {issue.replace("@%p0", "@%p3")}
        @!%p2 bra LATER;
        {WAIT}
        LATER: {CLUSTER}
        {DUMP}
    """
    got = run(simulate_ptx, copy, body, ctas=4, order=order, seed=2)
    for rank in range(4):
        want = copy.loaded() if mask >> rank & 1 else np.full(BYTES, FILL)
        np.testing.assert_array_equal(got[rank], want, err_msg=f"rank {rank}")


def test_multicast_on_hardware_too(execute):
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 4), swizzle=128)
    issue = load_text(copy, ", 3").replace(LOAD, LOAD + ".multicast::cluster").splitlines()
    body = f"""
        mov.u32 %r10, %cluster_ctarank;
        setp.eq.and.u32 %p3, %r10, 0, %p0;
        {issue[1]}
        {CLUSTER}
        {" ".join(issue[2:]).replace("@%p0", "@%p3")}
        {WAIT} {CLUSTER} {DUMP}
    """
    got = run(execute, copy, body, ctas=2)
    for rank in range(2):
        np.testing.assert_array_equal(got[rank], copy.loaded())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("order", ["fifo", "peer-late", "random"])
def test_with_cta_group_2_both_ctas_of_a_pair_complete_on_one_barrier(leader, order):
    """Each CTA loads its half into its own memory and signals the leader's barrier."""
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 4), swizzle=128)
    issue = "\n".join(load_text(copy).splitlines()[2:]).replace("[%r1]", "[%r12]")
    body = f"""
        mov.u32 %r10, %cluster_ctarank;
        setp.eq.u32 %p2, %r10, {leader};
        and.pred %p3, %p2, %p0;
        mapa.shared::cluster.u32 %r12, %r1, {leader};
        @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {2 * copy.bytes};
        {CLUSTER}
        {issue.replace(LOAD, LOAD + ".cta_group::2")}
        @!%p2 bra LATER;
        {WAIT}
        LATER: {CLUSTER}
        {DUMP}
    """
    got = run(simulate_ptx, copy, body, ctas=2, arch="sm_100a", order=order, seed=1)
    for rank in range(2):
        np.testing.assert_array_equal(got[rank], copy.loaded())


@pytest.mark.parametrize("parity", [0, 1])
def test_multicast_with_cta_group_2_signals_the_cta_of_that_parity_in_each_pair(parity):
    """Rank 1 of four multicasts to all; two boxes arrive on one barrier of each pair."""
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 4), swizzle=128)
    issue = "\n".join(load_text(copy, ", 15").splitlines()[2:]).replace("[%r1]", "[%r12]")
    body = f"""
        mov.u32 %r10, %cluster_ctarank;
        and.b32 %r11, %r10, 1;
        setp.eq.u32 %p2, %r11, {parity};
        setp.eq.and.u32 %p3, %r10, 1, %p0;
        and.pred %p4, %p2, %p0;
        mapa.shared::cluster.u32 %r12, %r1, {parity};
        @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {2 * copy.bytes};
        {CLUSTER}
        {issue.replace(LOAD, LOAD + ".multicast::cluster.cta_group::2").replace("@%p0", "@%p3")}
        @!%p2 bra LATER;
        {WAIT}
        LATER: {CLUSTER}
        {DUMP}
    """
    got = run(simulate_ptx, copy, body, ctas=4, arch="sm_100a")
    for rank in range(4):
        np.testing.assert_array_equal(got[rank], copy.loaded())


# -- races -----------------------------------------------------------------------------------------


def test_a_load_into_a_buffer_that_a_store_still_reads_is_a_race():
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0))
    unfinished = store_text(copy) + load_text(copy) + WAIT
    with pytest.raises(Hazards, match=r"TMA load .* overwrites .* being read by the TMA store"):
        run(simulate_ptx, copy, unfinished + DONE)
    run(simulate_ptx, copy, store_text(copy) + DONE + load_text(copy) + WAIT)


def test_reading_what_a_load_still_writes_is_a_race():
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0))
    with pytest.raises(Hazards, match=r"a load .* reads .* still being written by the TMA load"):
        run(simulate_ptx, copy, load_text(copy) + "ld.shared.u32 %r9, [%r0];" + WAIT)


# -- refused by hardware ---------------------------------------------------------------------------


def refused(copy: Copy, text: str, sentence: str) -> None:
    with pytest.raises(REFUSED, match=sentence):
        run(simulate_ptx, copy, text)


@pytest.mark.parametrize(("kind", "x"), [("f16", 3), ("f16", -5), ("u8", 8), ("f32", 2)])
def test_an_inner_coordinate_off_16_bytes_is_refused(kind, x):
    copy = Copy(Tensor(kind, (64, 16)), (16, 8), (x, 0))
    sentence = rf"inner coordinate {x} .* is not a multiple of 16 bytes: the hardware traps"
    refused(copy, load_text(copy), sentence)
    refused(copy, store_text(copy), sentence)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("offset", [8, 16, 32, 48, 64, 80])
def test_a_box_in_shared_memory_off_128_bytes_is_refused(offset, swizzle):
    """An H100 ends with CUDA_ERROR_MISALIGNED_ADDRESS at each of these, without a swizzle too."""
    inner = (swizzle or 128) // 2
    copy = Copy(Tensor("f16", (64, 16)), (inner, 8), (0, 0), swizzle=swizzle, offset=offset)
    refused(copy, load_text(copy), "which is not 128-byte aligned")
    refused(copy, store_text(copy), "which is not 128-byte aligned")


def test_a_misaligned_map_is_refused():
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0))
    odd = load_text(copy).replace("[%map,", "[%d9,")
    refused(
        copy, "add.u64 %d9, %map, 32;" + odd, "tensor map at 0x[0-9a-f]+ is not 64-byte aligned"
    )


def test_another_number_of_coordinates_than_dimensions_is_refused():
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0))
    text = load_text(copy).replace("2d", "3d").replace("{0, 0}", "{0, 0, 0}")
    refused(copy, text, "3 coordinates for a tensor map of rank 2")


def test_a_box_past_the_end_of_shared_memory_is_refused():
    copy = Copy(Tensor("f16", (64, 256)), (64, 128), (0, 0), offset=1024)
    with pytest.raises(SimError, match="outside the CTA's shared memory"):
        run(simulate_ptx, copy, load_text(copy))


def test_a_map_that_reaches_past_its_tensor_is_found():
    tensor = Tensor("f16", (64, 16))
    copy = Copy(tensor, (64, 8), (0, 16))
    tensor.dims = (64, 32)
    with pytest.raises(SimError, match=r"bytes past the end of x"):
        run(simulate_ptx, copy, load_text(copy) + WAIT)


def test_a_map_that_reaches_into_the_padding_of_a_view_is_found():
    tensor = Tensor("f16", (64, 16), pad=16)
    for width, found in ((64, False), (72, True)):
        tensor.dims = (width, 16)
        copy = Copy(tensor, (72, 8), (0, 4))
        whole = tensor.data
        tensor.data = whole.reshape(16, -1)[:, :128]
        for text in (load_text(copy) + WAIT, store_text(copy) + DONE):
            with pytest.raises(BadAddress, match="in the padding of x") if found else nullcontext():
                run(simulate_ptx, copy, text)
        tensor.data = whole


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"box": (4, 8)}, "box rows of 8 bytes are not a multiple of 16"),
        ({"box": (128, 8), "swizzle": 128}, "box rows of 256 bytes are wider than the 128-byte"),
        ({"box": (64, 8), "swizzle": 32}, "box rows of 128 bytes are wider than the 32-byte"),
        ({"box": (16, 8), "swizzle": 64}, "box rows of 32 bytes are narrower than the 64-byte"),
        ({"tensor": Tensor("u16", (64, 16)), "nan": True}, "NaN fill of a u16 tensor"),
        ({"tensor": Tensor("f64", (64, 16)), "nan": True}, "NaN fill of a f64 tensor"),
        ({"tensor": Tensor("f32.ftz", (64, 16))}, "f32.ftz"),
    ],
)
def test_maps_that_hardware_or_the_simulator_does_not_take_are_refused(change, sentence):
    values = {"tensor": Tensor("f16", (128, 16)), "box": (64, 8), "at": (0, 0)}
    copy = Copy(**{**values, **change})
    refused(copy, load_text(copy) + WAIT, sentence)


def test_a_map_of_a_misaligned_tensor_is_refused():
    copy = Copy(Tensor("f16", (64, 16)), (64, 4), (0, 0))
    moved = "@%p0 add.u64 %d9, %x, 8; @%p0 st.global.u64 [%map], %d9;"
    refused(copy, moved + load_text(copy) + WAIT, "is not 16-byte aligned")


@pytest.mark.parametrize("name", ["inc", "dec"])
def test_reductions_that_the_simulator_does_not_define_are_named(name):
    copy = Copy(Tensor("u32", (16, 6)), (8, 4), (8, 3))
    text = store_text(copy).replace("cp.async", "cp.reduce.async")
    with pytest.raises(UnknownInstruction, match=name):
        run(simulate_ptx, copy, text.replace("shared::cta.tile", f"shared::cta.{name}.tile"))


@pytest.mark.parametrize("order", ["fifo", "eager", "random"])
def test_two_loads_to_one_place_race_unless_they_bring_the_same(order):
    """Equal bytes are an advisory: in others' kernels several warps load the data that all of them
    read.
    """
    copy = Copy(Tensor("f16", (64, 8)), (64, 4), (0, 0))
    reports = []

    def twice(second: Copy) -> None:
        first, again = load_text(copy), load_text(second)
        again = again[again.index("@%p0 cp.async") :]
        body = first.replace(f" {copy.bytes};", f" {2 * copy.bytes};") + again + WAIT + DUMP
        run(lambda *a, **k: reports.append(simulate_ptx(*a, **k)), copy, body, order=order)

    twice(copy)
    assert ["both copy the same bytes" in a.message for a in reports[0].advisories] == [True]
    with pytest.raises(Hazards, match=r"race: the TMA load of .* overwrites shared memory"):
        twice(replace(copy, at=(0, 4)))


# -- what a store takes ----------------------------------------------------------------------------

OTHER_MAP = SETUP.replace("%map", "%other").split("%lane, 0;")[1].split("@%p0 mbarrier")[0]


def test_a_store_with_another_swizzle_than_the_load_is_found():
    """The bytes of each row would be permuted."""
    first = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0), swizzle=128)
    for swizzle in (128, 64, 0):
        other = Copy(first.tensor, (64 if swizzle != 64 else 32, 8), (0, 8), swizzle=swizzle)
        store = store_text(other).replace("%map", "%other")
        text = SETUP + OTHER_MAP + load_text(first) + WAIT + store + DONE
        arrays = {"map": first.map, "other": other.map, "x": first.tensor.data}
        arrays["s"] = aligned(np.zeros(BYTES, np.uint8))
        before = first.tensor.data.copy()
        if swizzle == 128:
            simulate_ptx(text, arrays, Shape(block=32, smem=BYTES + 64))
            np.testing.assert_array_equal(first.tensor.data[1024:], before[:1024])
            continue
        said = r"swizzle: the TMA store of .* takes its box with (no|64-byte) swizzle .*128-byte"
        with pytest.raises(Hazards, match=said):
            simulate_ptx(text, arrays, Shape(block=32, smem=BYTES + 64))


@pytest.mark.parametrize(("at", "right"), [((0, 12), True), ((0, 8), False)])
def test_what_nothing_has_written_is_stored_outside_of_the_tensor_only(at, right):
    """Half of the box is written: the rest may be a part behind the tensor's end."""
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), at)
    fill = "st.shared.v4.u32 [%r9], {%i, %i, %i, %i};"
    bare = SETUP[: SETUP.index("shl.b32")] + "mad.lo.u32 %r9, %lane, 16, %r0;" + fill
    bare += SETUP[SETUP.index("fence.proxy.async") :]
    arrays = {"map": copy.map, "x": copy.tensor.data}
    shape = Shape(block=32, smem=BYTES + 64)
    if right:
        simulate_ptx(bare + store_text(copy) + DONE, arrays, shape)
        return
    with pytest.raises(Hazards, match=r"uninitialised: the TMA store of .* 512 of 1024 bytes"):
        simulate_ptx(bare + store_text(copy) + DONE, arrays, shape)

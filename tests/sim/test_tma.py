"""Bulk and tensor copies against their definition, element by element.

Snippets run in the simulator, and on a Hopper GPU where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned, encode, size_of, swizzled

from cutex.sim.bulk_groups import BulkGroups
from cutex.sim.errors import BadOperand, Hazards, SimError, UnknownInstruction

FILL = 0xEE  # what shared memory holds before a copy
BYTES = 16384  # of shared memory that is filled and looked at
LOAD = "shared::cluster.global.tile.mbarrier::complete_tx::bytes"
REFUSED = (BadOperand, Hazards)


@dataclass
class Tensor:
    """A tensor in global memory; everything innermost first, ``pad`` in bytes per dimension."""

    kind: str
    dims: tuple[int, ...]
    pad: int = 0
    seed: int = 0
    data: np.ndarray = field(init=False)  # bytes
    strides: tuple[int, ...] = field(init=False)  # bytes, of the outer dimensions

    def __post_init__(self) -> None:
        strides, n = [], self.dims[0] * size_of(self.kind)
        for d in self.dims[1:]:
            strides.append(-(-n // 16) * 16 + self.pad)
            n = strides[-1] * d
        self.strides = tuple(strides)
        raw = np.random.default_rng(self.seed).integers(0, 256, -(-n // 16) * 16, np.uint8)
        self.data = aligned(raw)

    def byte_at(self, position: tuple[int, ...]) -> int | None:
        """Of the element at ``position``; None outside."""
        if not all(0 <= x < d for x, d in zip(position, self.dims, strict=True)):
            return None
        strides = (size_of(self.kind), *self.strides)
        return sum(x * s for x, s in zip(position, strides, strict=True))


@dataclass
class Copy:
    """One box of a tensor: its map, its coordinates, and where in shared memory it lies."""

    tensor: Tensor
    box: tuple[int, ...]
    at: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: int = 0
    offset: int = 0
    nan: bool = False
    tf32: bool = False

    @property
    def map(self) -> np.ndarray:
        """Without the address, which the kernel puts in."""
        t = self.tensor
        raw = encode(0, t.kind, t.dims, t.strides, self.box, self.steps or None,
                     swizzle=self.swizzle, nan=self.nan, tf32=self.tf32)  # fmt: skip
        return aligned(np.frombuffer(raw, np.uint8))

    @property
    def coordinates(self) -> str:
        return "{" + ", ".join(map(str, self.at)) + "}"

    def elements(self) -> list[tuple[np.ndarray, int | None]]:
        """For each element of the box: its bytes' places in shared memory, its byte in the tensor
        (None outside).
        """
        size = size_of(self.tensor.kind)
        steps = (1, *self.steps[1:]) if self.steps else (1,) * len(self.box)
        counts = [-(-b // s) for b, s in zip(self.box, steps, strict=True)]
        out = []
        for k, place in enumerate(product(*(range(n) for n in reversed(counts)))):
            position = tuple(a + p * s for a, p, s in
                             zip(self.at, reversed(place), steps, strict=True))  # fmt: skip
            bytes_ = self.offset + k * size + np.arange(size)
            out.append((swizzled(bytes_, self.swizzle), self.tensor.byte_at(position)))
        return out

    @property
    def bytes(self) -> int:
        return len(self.elements()) * size_of(self.tensor.kind)

    def loaded(self) -> np.ndarray:
        """Shared memory after a load."""
        size = size_of(self.tensor.kind)
        smem = np.full(BYTES, FILL, np.uint8)
        outside = {2: b"\xf7\x7f", 4: b"\xf7\x7f\xf7\x7f"}[size] if self.nan else bytes(size)
        for where, byte in self.elements():
            value = np.frombuffer(outside, np.uint8)
            if byte is not None:
                value = self.tensor.data[byte : byte + size]
            if self.tf32:
                value = (value.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.uint8)
            smem[where] = value
        return smem

    def stored(self, smem: np.ndarray, combine=None) -> np.ndarray:
        """The tensor after a store of shared memory."""
        size = size_of(self.tensor.kind)
        data = self.tensor.data.copy()
        for where, byte in self.elements():
            if byte is not None:
                new = smem[where]
                if combine:
                    new = combine(data[byte : byte + size].copy(), new)
                data[byte : byte + size] = new
        return data


SETUP = f"""
mov.u32 %r0, smem;
add.u32 %r1, %r0, {BYTES};                      // an mbarrier, and another
setp.eq.u32 %p0, %lane, 0;
@%p0 st.global.u64 [%map], %x;
@%p0 fence.proxy.tensormap::generic.release.gpu;
@%p0 fence.proxy.tensormap::generic.acquire.gpu [%map], 128;
@%p0 mbarrier.init.shared::cta.b64 [%r1], 1;
@%p0 mbarrier.init.shared::cta.b64 [%r1+8], 1;
@%p0 fence.mbarrier_init.release.cluster;
shl.b32 %r2, %lane, 4;                          // shared memory, 512 bytes at a time, from s
mad.wide.u32 %d1, %cta, {BYTES}, %s;
FILLED:
add.u32 %r3, %r0, %r2;
cvt.u64.u32 %d0, %r2;
add.u64 %d0, %d0, %d1;
ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d0];
st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 512;
setp.lt.u32 %p1, %r2, {BYTES};
@%p1 bra FILLED;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
WAIT = """
WAITS:
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
@!%p1 bra WAITS;
"""
DUMP = f"""
shl.b32 %r2, %lane, 4;                          // shared memory back to s
DUMPED:
add.u32 %r3, %r0, %r2;
cvt.u64.u32 %d0, %r2;
add.u64 %d0, %d0, %d1;
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3];
st.global.v4.u32 [%d0], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 512;
setp.lt.u32 %p1, %r2, {BYTES};
@%p1 bra DUMPED;
"""
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
DONE = "@%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"


def run(execute, copy: Copy, body: str, smem: np.ndarray | None = None, ctas: int = 1, **how):
    """The body after SETUP, by one warp per CTA of a cluster; returns what `s` holds at the end,
    (ctas, BYTES).
    """
    s = aligned(np.full((ctas, BYTES), FILL, np.uint8) if smem is None else smem)
    arrays = {"map": copy.map, "x": copy.tensor.data, "s": s}
    shape = Shape(grid=ctas, block=32, cluster=ctas, smem=BYTES + 64)
    execute(SETUP + body, arrays, shape, **how)
    return s.reshape(ctas, BYTES)


def load_text(copy: Copy, more: str = "") -> str:
    return f"""
        @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {copy.bytes};
        @%p0 cp.async.bulk.tensor.{len(copy.at)}d.{LOAD}
            [%r0+{copy.offset}], [%map, {copy.coordinates}], [%r1]{more};
    """


def store_text(copy: Copy) -> str:
    return (
        f"@%p0 cp.async.bulk.tensor.{len(copy.at)}d.global.shared::cta.tile.bulk_group "
        f"[%map, {copy.coordinates}], [%r0+{copy.offset}];"
    )


def check_load(execute, copy: Copy) -> None:
    got = run(execute, copy, load_text(copy) + WAIT + DUMP)[0]
    np.testing.assert_array_equal(got, copy.loaded())


def check_store(execute, copy: Copy) -> None:
    smem = np.random.default_rng(5).integers(0, 256, (1, BYTES), np.uint8)
    want = copy.stored(smem[0])
    run(execute, copy, store_text(copy) + DONE, smem)
    np.testing.assert_array_equal(copy.tensor.data, want)


# -- boxes -----------------------------------------------------------------------------------------

BOXES = {  # rank: dims, box, and coordinates inside, over each end, and outside
    1: ((40,), (16,), [(8,), (-8,), (32,), (40,), (-16,)]),
    2: ((40, 9), (16, 4), [(8, 3), (-8, 3), (32, 7), (8, -2), (40, 0), (0, 9), (-8, -3)]),
    3: ((24, 5, 4), (8, 3, 2), [(8, 1, 1), (-8, 4, 3), (16, -1, -1), (16, 3, 5)]),
    4: ((24, 3, 4, 3), (8, 2, 2, 2), [(8, 1, 1, 1), (-8, -1, 3, 2), (16, 2, -1, -1)]),
    5: ((16, 3, 2, 3, 4), (8, 2, 2, 2, 3), [(8, 1, 0, 1, 1), (-8, -1, 1, 2, 3), (8, 2, 0, -1, -2)]),
}  # fmt: skip
CASES = [(dims, box, at) for dims, box, places in BOXES.values() for at in places]


@pytest.mark.parametrize(("dims", "box", "at"), CASES)
def test_loads_of_one_to_five_dimensions_over_every_side(execute, dims, box, at):
    check_load(execute, Copy(Tensor("f16", dims, pad=16), box, at))


@pytest.mark.parametrize(("dims", "box", "at"), CASES)
def test_stores_of_one_to_five_dimensions_write_only_inside(execute, dims, box, at):
    check_store(execute, Copy(Tensor("bf16", dims, pad=16), box, at))


@pytest.mark.parametrize("offset", [0, 128, 640])
@pytest.mark.parametrize(("swizzle", "kind"), [(32, "u8"), (64, "f16"), (128, "f32"), (0, "u64")])
def test_swizzles_are_of_the_absolute_address(execute, swizzle, kind, offset):
    inner = (swizzle or 64) // size_of(kind)
    tensor = Tensor(kind, (3 * inner, 40))
    copy = Copy(tensor, (inner, 24), (inner, 20), swizzle=swizzle, offset=offset)
    check_load(execute, copy)
    check_store(execute, copy)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_elements_outside_are_nan_where_the_map_says_so(execute, kind):
    copy = Copy(Tensor(kind, (16, 6)), (16, 4), (-8, 4), nan=True)
    check_load(execute, copy)
    assert (copy.loaded()[:32].view(np.uint16) == 0x7FF7).any()


def test_loads_through_a_tf32_map_clear_the_low_bits(execute):
    check_load(execute, Copy(Tensor("f32", (16, 6)), (8, 4), (4, 1), tf32=True))


@pytest.mark.parametrize("steps", [(1, 2, 1), (1, 3, 2), (2, 1, 1), (1, 8, 3)])
@pytest.mark.parametrize("at", [(0, 0, 0), (8, 1, 2), (0, -3, 1), (0, 5, -4)])
def test_element_strides_skip_rows_but_not_elements_of_a_row(execute, steps, at):
    copy = Copy(Tensor("f16", (16, 11, 6)), (8, 5, 4), at, steps)
    check_load(execute, copy)
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


def test_bulk_stores_move_bytes(execute):
    copy = Copy(Tensor("u8", (4096,)), (16,), (0,))
    smem = np.random.default_rng(1).integers(0, 256, (1, BYTES), np.uint8)
    want = copy.tensor.data.copy()
    want[1024:1328] = smem[0, 512:816]
    body = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%x+1024], [%r0+512], 304;" + DONE
    run(execute, copy, body, smem)
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
    class Woken:
        def wake(self, key) -> None:
            pass

    groups, thread = BulkGroups(Woken()), (0, 0)
    made = []
    for _ in range(3):
        made.append(groups.joined(thread))
        groups.commit(thread)
    groups.commit(thread)  # an empty one
    assert groups.overdue(thread, 3) and groups.overdue(thread, 0)
    made[2].finished()
    made[1].finished()
    assert groups.overdue(thread, 3)  # the oldest of four is not done
    assert not groups.overdue(thread, 4)
    made[0].finished()
    assert not groups.overdue(thread, 0)


def three_stores(wait: str, overwrite: int) -> str:
    rows = [f"@%p0 cp.async.bulk.global.shared::cta.bulk_group [%x+{i * 1024}], [%r0+{i * 1024}], "
            "1024; @%p0 cp.async.bulk.commit_group;" for i in range(3)]  # fmt: skip
    more = f"@%p0 st.shared.u32 [%r0+{overwrite * 1024}], 0; @%p0 cp.async.bulk.wait_group 0;"
    return "".join(rows) + f"@%p0 cp.async.bulk.{wait};" + more


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


# -- stores that complete on an mbarrier -----------------------------------------------------------

ASYNC = "async{}.shared::cluster.mbarrier::complete_tx::bytes"


def remote(text: str, size: int, offset: int = 0) -> str:
    """Rank 1 of two CTAs runs the text for rank 0, all lanes: %r12 its shared memory, %r13 its
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
    """(32 lanes, 4 words), 16 bytes per lane."""
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


def test_st_async_and_its_mbarrier_lie_in_one_cta():
    text = f"@%p2 st.{ASYNC.format('.weak')}.b32 [%r12], %r20, [%r1];"
    with pytest.raises(BadOperand, match="they must lie in the same CTA"):
        run(simulate_ptx, ANY, remote(text, 128), ctas=2)


def test_reading_what_st_async_still_writes_is_a_race():
    text = f"@%p2 st.{ASYNC.format('.weak')}.b32 [%r12], %r20, [%r13]; {CLUSTER} "
    text += "ld.shared.u32 %r9, [%r0];"
    with pytest.raises(Hazards, match=r"a load .* still being written by the st\.async"):
        run(simulate_ptx, ANY, remote(text, 128), ctas=2)


# -- what hardware refuses -------------------------------------------------------------------------


def refused(copy: Copy, text: str, sentence: str) -> None:
    with pytest.raises(REFUSED, match=sentence):
        run(simulate_ptx, copy, text)


@pytest.mark.parametrize(("kind", "x"), [("f16", 3), ("f16", -5), ("u8", 8), ("f32", 2)])
def test_an_inner_coordinate_off_16_bytes_is_refused(kind, x):
    copy = Copy(Tensor(kind, (64, 16)), (16, 8), (x, 0))
    sentence = rf"inner coordinate {x} .* is not a multiple of 16 bytes: the hardware traps"
    refused(copy, load_text(copy), sentence)
    refused(copy, store_text(copy), sentence)


def test_misaligned_shared_memory_and_maps_are_refused():
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0), offset=8)
    refused(copy, load_text(copy), "which is not 16-byte aligned")
    refused(copy, store_text(copy), "which is not 16-byte aligned")
    copy.offset = 0
    odd = load_text(copy).replace("[%map,", "[%d9,")
    refused(
        copy, "add.u64 %d9, %map, 32;" + odd, "tensor map at 0x[0-9a-f]+ is not 64-byte aligned"
    )


def test_a_swizzled_box_off_128_bytes_is_refused():
    copy = Copy(Tensor("f16", (64, 16)), (64, 8), (0, 0), swizzle=128, offset=64)
    refused(copy, load_text(copy) + WAIT, "a swizzled box starts at shared 0x\\w+, which is not")


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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"box": (4, 8)}, "box rows of 8 bytes are not a multiple of 16"),
        ({"box": (128, 8), "swizzle": 128}, "box rows of 256 bytes are wider than the 128-byte"),
        ({"box": (64, 8), "swizzle": 32}, "box rows of 128 bytes are wider than the 32-byte"),
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

"""The stand-in for the driver's encoder of tensor maps, and kernels whose host code calls it."""

from __future__ import annotations

import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_maps import encode

from cutex.sim import simulate
from cutex.sim.host.encode_map import TiledMap
from cutex.sim.isa.tensormap import decode_map

# CUtensorMapDataType (cuda.h) and the type of the map; bits
TYPES = {
    0: ("u8", 8), 1: ("u16", 16), 2: ("u32", 32), 3: ("s32", 32), 4: ("u64", 64), 5: ("s64", 64),
    6: ("f16", 16), 7: ("f32", 32), 8: ("f64", 64), 9: ("bf16", 16), 10: ("f32.ftz", 32),
    11: ("f32", 32), 12: ("f32.ftz", 32),
}  # fmt: skip
SWIZZLES = {0: (0, 0), 1: (32, 0), 2: (64, 0), 3: (128, 0), 4: (128, 1), 5: (128, 2), 6: (128, 3)}


@st.composite
def maps(draw) -> TiledMap:
    rank = draw(st.integers(1, 5))
    many = lambda low, high, n=rank: [draw(st.integers(low, high)) for _ in range(n)]
    kind, swizzle = draw(st.sampled_from(sorted(TYPES))), draw(st.sampled_from(sorted(SWIZZLES)))
    bits = TYPES[kind][1]
    widest = min(256 * bits, (SWIZZLES[swizzle][0] or 2048) * 8) // 128
    box = [draw(st.integers(1, widest)) * 128 // bits, *many(1, 256, rank - 1)]
    strides = [16 * s for s in many(0, (1 << 36) - 1, rank - 1)]
    return TiledMap(
        kind, 16 * draw(st.integers(0, 1 << 42)), many(1, 1 << 32), strides, box, many(1, 8),
        swizzle=swizzle, l2_promotion=draw(st.integers(0, 3)), nan_fill=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(maps())
def test_a_map_is_that_of_the_table_of_its_bits(m):
    swizzle, atomicity = SWIZZLES[m.swizzle]
    assert m.encode() == encode(
        m.address, TYPES[m.kind][0], m.dims, m.strides, m.box, m.steps, swizzle=swizzle,
        atomicity=atomicity, nan=m.nan_fill, tf32=m.kind in (11, 12), flags=m.l2_promotion << 17,
    )  # fmt: skip


def test_packed_4_bit_elements_decode_as_bytes():
    tmap = decode_map(TiledMap(13, 0, [64, 8], [32], [64, 8], [1, 1]).encode())
    assert (tmap.dims, tmap.strides, tmap.box) == ((32, 8), (1, 32), (32, 8))


PLAIN = {"kind": 6, "address": 0, "dims": [64, 64], "strides": [128], "box": [64, 8]}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": 16}, "type 16"),
        ({"swizzle": 7}, "swizzle 7"),
        ({"address": 8}, "address 0x8, no multiple of 16"),
        ({"dims": [64, 0]}, "dimension 0: takes 1 to 4294967296"),
        ({"dims": [(1 << 32) + 1, 1]}, "dimension 4294967297"),
        ({"strides": [136]}, "a stride of 136 bytes"),
        ({"strides": [1 << 40]}, "a stride of 1099511627776 bytes"),
        ({"box": [64, 257]}, "box dimension 257"),
        ({"box": [4, 8]}, "box rows of 8 bytes, no multiple of 16"),
        ({"box": [128, 8], "swizzle": 3}, "box rows of 256 bytes with a 128-byte swizzle"),
        ({"steps": [1, 9]}, "element stride 9"),
        ({"interleave": 1}, "rank 2"),
        ({"dims": [8] * 6, "strides": [16] * 5, "box": [8] * 6, "steps": [1] * 6}, "rank 6"),
        ({"kind": 13, "dims": [63, 64]}, "innermost dimension 63, no multiple of 2"),
        ({"kind": 14, "dims": [128, 64]}, "a box of 64 padded elements, not 128"),
        ({"kind": 14, "strides": [144]}, "a stride of 144 bytes: a multiple of 32"),
    ],
)
def test_what_the_driver_refuses(change, sentence):
    with pytest.raises(ValueError, match=f"cuTensorMapEncodeTiled refuses .*{sentence}"):
        TiledMap(**{"steps": [1, 1], **PLAIN, **change}).encode()


# -- kernels of cutlass.experimental ---------------------------------------------------------------

ROWS, COLUMNS = 32, 64


@cute.kernel
def copy_kernel(desc: cutlass.GridConstant[cuda.TensorMap], out: cute.Tensor):
    """Load one box by TMA into smem, and copy it unchanged to `out`."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.Array(cutlass.Float16, (ROWS, COLUMNS), space=cutlass.AddressSpace.smem)
    full = cutlass.Array(cutlass.Int64, 1, space=cutlass.AddressSpace.smem)
    if thread == 0:
        prims.mbarrier_init(full, 1)
    prims.fence_mbarrier_init()
    prims.barrier_cta_sync(0)
    if thread == 0:
        prims.mbarrier_arrive_expect_tx(full, desc.global_tx_bytes())
        prims.cp_async_bulk_tensor_shared_cta_global(smem, desc.get_ptr(), (64, 40), full)
    while not prims.mbarrier_try_wait_parity(full, 0):
        pass
    for column in cutlass.range(COLUMNS, unroll_full=True):
        out[thread, column] = smem[thread, column]


@cute.jit
def copy_by_tma(x: cute.Tensor, out: cute.Tensor, stride_in_16_bytes: cutlass.Int64):
    desc = cuda.create_tensor_map_tiled(
        global_address=x.iterator.toint(),
        dtype=cutlass.Float16,
        global_dims=[x.shape[1], x.shape[0]],
        global_strides=[stride_in_16_bytes],
        box_dims=[COLUMNS, ROWS],
        swizzle=cuda.TensorMapSwizzle.s128b,
    )
    copy_kernel(desc, out).launch(grid=[1, 1, 1], block=[ROWS, 1, 1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_host_code_may_have_the_driver_encode(arch):
    x = torch.randn(60, 120).half()
    out = torch.full((ROWS, COLUMNS), float("nan")).half()
    simulate(copy_by_tma, x, out, 120 * 2 // 16, arch=arch)
    want = torch.zeros(ROWS, COLUMNS).half()
    want[:20, :56] = x[40:, 64:]  # zeros where the box leaves the tensor
    chunks = torch.arange(8) ^ torch.arange(ROWS)[:, None] % 8  # where the swizzle puts 16 bytes
    where = (chunks[:, :, None] * 8 + torch.arange(8)).reshape(ROWS, COLUMNS)
    assert torch.equal(out.gather(1, where), want)


def test_what_it_refuses_is_said_before_anything_runs():
    x, out = torch.zeros(60, 120).half(), torch.full((ROWS, COLUMNS), 7.0).half()
    with pytest.raises(ValueError, match=r"cuTensorMapEncodeTiled refuses a stride of \d+ bytes"):
        simulate(copy_by_tma, x, out, 1 << 37)
    assert (out == 7).all()

"""Tensor maps whose base or strides were no multiples of 16 bytes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from barriers import init, wait
from ptx_kernel import Shape, simulate_ptx
from tensor_maps import aligned, encode

from cutex.sim.errors import BadAddress, BadOperand, Hazards, SimError

LOAD = f"""{init(1)} mov.u32 %r20, smem; add.u32 %r20, %r20, 128;
    @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [bar], BYTES;
    @%p0 cp.async.bulk.tensor.RANKd.shared::cluster.global.tile.mbarrier::complete_tx::bytes
         [%r20], [%map, {{AT}}], [bar]; {wait("bar", 0, "W0")}
"""
STORE = """mov.u32 %r20, smem; add.u32 %r20, %r20, 128; st.shared.u32 [%r20], 0;
    setp.eq.u32 %p0, %i, 0; @%p0 cp.async.bulk.tensor.RANKd.global.shared::cta.tile.bulk_group
    [%map, {AT}], [%r20]; @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"""


def bytes_of(raw: bytes) -> np.ndarray:
    return aligned(np.frombuffer(raw, np.uint8))


def load(tensor: np.ndarray, given: bytes, size: int, text: str = LOAD, **more) -> None:
    rank = str(tensor.ndim)
    at = ", ".join("0" * tensor.ndim)
    body = text.replace("BYTES", str(size)).replace("RANK", rank).replace("AT}", f"{at}}}")
    simulate_ptx(body, {"map": bytes_of(given), "a": tensor, **more}, Shape(smem=4096))


def floor(n: int) -> int:
    return n // 16 * 16


def rows(kind: type, *shape: int) -> np.ndarray:
    """A dense tensor of rows that begin anywhere."""
    return aligned(np.zeros(shape, kind))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("text", [LOAD, STORE], ids=["load", "store"])
@pytest.mark.parametrize(("kind", "name", "columns"), [
    (np.float32, "f32", 250), (np.float16, "f16", 100), (np.uint8, "u8", 24),
])  # fmt: skip
def test_a_stride_that_lost_its_low_bits_is_found(kind, name, columns, text):
    a = rows(kind, 8, columns)
    box = [16 // a.itemsize, 4]
    given = encode(a.ctypes.data, name, [columns, 8], [floor(a.strides[0])], box)
    with pytest.raises(Hazards) as told:
        load(a, given, 64, text)
    first = str(told.value.findings[0])
    assert first.startswith("tensor map: the tensor map of a (") and "PTX line" in first
    assert f"its stride of {a.strides[0]} bytes, of which {floor(a.strides[0])} are left" in first


def test_the_outer_stride_of_a_batch_is_found():
    a = np.lib.stride_tricks.as_strided(rows(np.float32, 4, 21), (4, 3, 4), (84, 16, 4))
    given = encode(a.ctypes.data, "f32", [4, 3, 4], [16, 80], [4, 2, 2])
    with pytest.raises(SimError, match="its stride of 84 bytes, of which 80 are left"):
        load(a, given, 64)  # NOTE: which reads the padding, so that the run ends


def test_a_stride_below_a_unit_that_became_none_is_found():
    a = np.lib.stride_tricks.as_strided(rows(np.float32, 64), (8, 2), (8, 4))
    with pytest.raises(Hazards, match="its stride of 8 bytes, of which 0 are left"):
        load(a, encode(a.ctypes.data, "f32", [2, 8], [0], [4, 4]), 64)


def test_a_tensor_that_repeats_its_row_is_clean():
    a = np.lib.stride_tricks.as_strided(rows(np.float32, 64), (8, 32), (0, 4))
    load(a, encode(a.ctypes.data, "f32", [32, 8], [0], [4, 4]), 64)


def test_a_base_that_lost_its_low_bits_is_found():
    z = rows(np.float32, 8 * 32 + 3)
    a = z[3:].reshape(8, 32)
    given = encode(floor(a.ctypes.data), "f32", [32, 8], [128], [4, 4])
    with pytest.raises(Hazards, match=r"lost the low bits of its base, 0x"):
        load(a, given, 64, z=z)


def test_a_base_that_lost_its_low_bits_stands_before_the_bad_address_that_it_leads_to():
    a = rows(np.float32, 8 * 32 + 3)[3:].reshape(8, 32)  # no tensor of the launch lies before it
    given = encode(floor(a.ctypes.data), "f32", [32, 8], [128], [4, 4])
    with pytest.raises(BadAddress) as told:
        load(a, given, 64)
    first = str(told.value).partition("\n")[0]
    assert re.search(r"tensor map: .* its base, 0x.*; the run ends by bad address$", first)


@pytest.mark.parametrize("columns", [4, 252, 256])
def test_whole_units_are_clean(columns):
    a = rows(np.float32, 8, columns)
    load(a, encode(a.ctypes.data, "f32", [columns, 8], [a.strides[0]], [4, 4]), 64)


def test_a_part_of_a_tensor_is_clean():
    a = rows(np.float32, 8, 256)
    load(a, encode(a.ctypes.data + 64, "f32", [32, 8], [a.strides[0]], [4, 4]), 64)


def test_rows_that_are_padded_to_whole_units_are_clean():
    a = rows(np.float32, 8, 252)[:, :250]
    load(a, encode(a.ctypes.data, "f32", [250, 8], [a.strides[0]], [4, 4]), 64)


@pytest.mark.parametrize(("field", "value"), [
    ("global_address", 8), ("global_stride", 1000), ("global_stride", 1 << 41),
])  # fmt: skip
def test_replace_drops_low_bits_and_tells(field, value):
    kind = "b64"
    ordinal = ", 0" if field == "global_stride" else ""
    a = rows(np.float32, 8, 32)
    given = encode(a.ctypes.data, "f32", [32, 8], [128], [4, 4])
    add = "add.u64 %d0, %a, 8;" if field == "global_address" else f"mov.u64 %d0, {value};"
    body = f"{add} setp.eq.u32 %p0, %i, 0; @%p0 tensormap.replace.tile.{field}.global.b1024.{kind}"
    with pytest.raises(Hazards, match=rf"tensor map: tensormap.replace.*{field}.* gives a tensor"):
        simulate_ptx(f"{body} [%map]{ordinal}, %d0;", {"map": bytes_of(given), "a": a})


def test_a_map_in_use_whose_base_is_between_units_is_an_error():
    a = rows(np.float32, 8, 36)
    with pytest.raises(BadOperand, match="not 16-byte aligned"):
        load(a, encode(a.ctypes.data + 4, "f32", [32, 8], [144], [4, 4]), 64)

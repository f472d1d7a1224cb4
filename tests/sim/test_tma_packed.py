"""Tensor copies of elements of 4 and 6 bits, packed and padded, against their definition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from copies import (
    BYTES,
    DONE,
    DUMP,
    FILL,
    WAIT,
    Copy,
    Tensor,
    check_load,
    check_store,
    load_text,
    run,
    store_text,
)  # fmt: skip
from ptx_kernel import simulate_ptx
from tensor_maps import aligned, encode, swizzled

from cutex.sim.errors import BadOperand

B4X16 = 11  # packed 4-bit elements: a type that only the map has

# -- packed 4-bit elements -------------------------------------------------------------------------


class Packed(Copy):
    """A copy of bytes whose map and coordinates count two 4-bit elements in each byte."""

    @property
    def map(self) -> np.ndarray:
        t, (box, *rows) = self.tensor, self.box
        raw = encode(0, B4X16, (2 * t.dims[0], *t.dims[1:]), t.strides, (2 * box, *rows),
                     swizzle=self.swizzle)  # fmt: skip
        return aligned(np.frombuffer(raw, np.uint8))

    @property
    def coordinates(self) -> str:
        return "{" + ", ".join(map(str, (2 * self.at[0], *self.at[1:]))) + "}"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("swizzle", "wide"), [(0, 16), (32, 32), (64, 64), (128, 128)])
@pytest.mark.parametrize("at", [(0, 0), (32, 3), (-16, -2), (96, 7)])
def test_packed_4_bit_elements_are_copied_as_bytes(swizzle, wide, at):
    check_load(simulate_ptx, Packed(Tensor("u8", (112, 9)), (wide, 8), at, swizzle=swizzle))
    if min(at) >= 0:
        check_store(simulate_ptx, Packed(Tensor("u8", (112, 9)), (wide, 8), at, swizzle=swizzle))


def test_a_packed_copy_starts_at_a_multiple_of_16_bytes():
    copy = Packed(Tensor("u8", (112, 9)), (32, 8), (8, 0))
    with pytest.raises(BadOperand, match=r"inner coordinate 16 of a b4x16 tensor .* traps"):
        check_load(simulate_ptx, copy)


def test_packed_elements_have_no_sums():
    copy = Packed(Tensor("u8", (112, 9)), (32, 8), (0, 0))
    text = store_text(copy).replace("cp.async.bulk", "cp.reduce.async.bulk")
    text = text.replace(".tile.bulk_group", ".add.tile.bulk_group")
    with pytest.raises(BadOperand, match=r"a reduction into a b4x16 tensor .* is not defined"):
        run(simulate_ptx, copy, text + DONE)


# -- padded 4- and 6-bit elements ------------------------------------------------------------------

PADDED = {"b4x16_p64": (12, 8), "b6x16_p32": (13, 12)}  # the map's type; bytes of 16 elements


class Padded(Copy):
    """A copy of bytes whose map and coordinates count 16 elements in 8 or 12 of them."""

    size = 8
    kind = 12

    @property
    def map(self) -> np.ndarray:
        t = self.tensor
        dims = (t.dims[0] // self.size * 16, *t.dims[1:])
        raw = encode(0, self.kind, dims, t.strides, (128, *self.box[1:]), swizzle=self.swizzle)
        return aligned(np.frombuffer(raw, np.uint8))

    @property
    def bytes(self) -> int:
        """The bytes of the transaction: those in global memory."""
        return 8 * self.size * self.box[1]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("swizzle", [0, 128])
@pytest.mark.parametrize("at", [(0, 0), (128, 3), (128, -2), (256, 5), (-128, 0), (0, 9)])
def test_padded_elements_lie_16_in_16_bytes(name, swizzle, at):
    kind, size = PADDED[name]
    rows, tensor = 8, Tensor("u8", (24 * size, 9), pad=32)  # 384 elements a row
    copy = Padded(tensor, (8 * size, rows), at, swizzle=swizzle, offset=1024)
    copy.kind, copy.size = kind, size
    got = run(simulate_ptx, copy, load_text(copy) + WAIT + DUMP, arch="sm_100a")[0]
    written = np.zeros(BYTES, bool)
    for row, unit in product(range(rows), range(8)):
        where = swizzled(1024 + row * 128 + unit * 16 + np.arange(16), swizzle)
        written[where] = True
        byte = tensor.byte_at((at[0] // 16 * size + unit * size, at[1] + row))
        want = bytes(size) if byte is None else tensor.data[byte : byte + size].tobytes()
        assert got[where[:size]].tobytes() == want
    assert (got[~written] == FILL).all()


@pytest.mark.parametrize("name", PADDED)
def test_a_padded_copy_starts_at_a_multiple_of_128_elements(name):
    copy = Padded(Tensor("u8", (192, 9)), (64, 8), (64, 0))
    copy.kind, copy.size = PADDED[name]
    with pytest.raises(BadOperand, match=r"inner coordinate 64 of .* multiple of 128 elements"):
        run(simulate_ptx, copy, load_text(copy) + WAIT + DUMP, arch="sm_100a")


def test_padded_elements_are_not_stored():
    copy = Padded(Tensor("u8", (192, 9)), (64, 8), (0, 0))
    with pytest.raises(BadOperand, match=r"a store of a b4x16_p64 tensor .* is not defined"):
        run(simulate_ptx, copy, store_text(copy) + DONE, arch="sm_100a")


@pytest.mark.parametrize("swizzle", [32, 64])
def test_padded_elements_take_a_swizzle_of_128_bytes_or_none(swizzle):
    copy = Padded(Tensor("u8", (192, 9)), (64, 8), (0, 0), swizzle=swizzle)
    with pytest.raises(BadOperand, match="a box of 128 padded elements, with swizzle"):
        run(simulate_ptx, copy, load_text(copy) + WAIT + DUMP, arch="sm_100a")

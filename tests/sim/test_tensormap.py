"""Tensor maps decode to the fields that the tests encoded, and boxes to the elements under them.

The bits of a map were found by sweeping the DSL, the driver and ``tensormap.replace`` one field at
a time, and by loads on an H200.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_maps import ATOMS_OF_32, KINDS, SWIZZLES, encode, size_of

from cutex.sim.errors import BadOperand
from cutex.sim.isa.tensormap import decode_map, overlap, swizzle_chunks

HINTS = (1, 17, 18, 21)  # bits of word 2 that hardware ignores: L2 promotion and two more


@st.composite
def fields(draw) -> dict:
    rank = draw(st.integers(1, 5))
    many = lambda low, high, n=rank: tuple(draw(st.integers(low, high)) for _ in range(n))
    return {
        "address": draw(st.integers(0, (1 << 43) - 1)) << 4,
        "kind": draw(st.sampled_from(sorted(KINDS))),
        "dims": tuple(1 << d if big else d + 1 for d, big in
                      zip(many(0, 31), many(0, 1), strict=True)),
        "strides": tuple(s << 4 for s in many(1, (1 << 36) - 1, rank - 1)),
        "box": many(1, 256),
        "steps": many(1, 8),
        "swizzle": draw(st.sampled_from(sorted(SWIZZLES))),
        "nan": draw(st.booleans()),
        "tf32": draw(st.booleans()),
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(fields(), st.sets(st.sampled_from(HINTS)), st.binary(min_size=64, max_size=64))
def test_every_field_comes_back(values, hints, rest):
    got = decode_map(encode(**values, flags=sum(1 << h for h in hints), rest=rest))
    size = size_of(values["kind"])
    assert got.address == values["address"]
    assert got.kind == KINDS[values["kind"]] and got.itemsize == size
    assert got.rank == len(values["dims"]) and got.dims == values["dims"]
    assert got.strides == (size, *values["strides"])
    assert got.box == values["box"] and got.steps == values["steps"]
    atoms = values["swizzle"] == ATOMS_OF_32
    assert got.swizzle == (4 if atoms else SWIZZLES[values["swizzle"]])
    assert (got.nan_fill, got.tf32) == (values["nan"], values["tf32"])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("bit", range(4, 40))
def test_every_bit_of_a_stride_has_its_place(bit):
    strides = [16, 32, 48, 64]
    for i in range(4):
        mine = [*strides[:i], 1 << bit, *strides[i + 1 :]]
        tmap = decode_map(encode(0, "u8", [1] * 5, mine, [16, 1, 1, 1, 1]))
        assert tmap.strides == (1, *mine)


def test_the_largest_dimension_is_2_to_the_32():
    assert decode_map(encode(0, "u8", [1 << 32], [], [16])).dims == (1 << 32,)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"interleave": 1}, "tensor map with interleave"),
        ({"interleave": 2}, "tensor map with interleave"),
        ({"flags": 1 << 22}, "not a tensor map that the simulator knows"),  # 96-byte swizzle
        ({"flags": 7 << 4}, "rank 8"),
        *(({"kind": k}, f"type {k}") for k in (14, 15)),
        ({"kind": 11, "dims": [63, 64]}, "tensor map of 63 b4x16 elements"),
        ({"kind": 13, "dims": [120, 64], "box": [128, 8]}, "tensor map of 120 b6x16_p32 elements"),
        *(({"swizzle": 128, "atomicity": a}, "128-byte swizzle of 64-byte") for a in (2, 3)),
    ],
)
def test_what_the_simulator_does_not_define_is_refused(change, sentence):
    values = {"address": 0, "kind": "f16", "dims": [64, 64], "strides": [128], "box": [64, 8]}
    with pytest.raises(BadOperand, match=sentence):
        decode_map(encode(**{**values, **change}))


@pytest.mark.parametrize("rank", [6, 7, 8])
def test_more_than_five_dimensions_are_refused(rank):
    with pytest.raises(BadOperand, match=f"rank {rank}"):
        decode_map(encode(0, "f16", [8], [], [8], flags=(rank - 1) << 4))


@st.composite
def boxes(draw) -> tuple:
    rank = draw(st.integers(1, 4))
    top = 9 if rank < 4 else 4
    pick = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(rank))
    dims, box, steps = pick(1, top), pick(1, top), pick(1, 4)
    return dims, box, steps, pick(-top - 4, top + 4)


@settings(max_examples=400, deadline=None)
@given(boxes())
def test_overlap_is_the_elements_of_the_box_that_lie_in_the_tensor(values):
    dims, box, steps, at = values
    strides = [16 * 10 ** (i + 1) for i in range(len(dims) - 1)]
    tmap = decode_map(encode(0, "u8", dims, strides, box, steps))
    assert tmap.bytes == _count(box, steps)
    part = overlap(tmap, at)
    inside = {}  # place in the box -> byte of the tensor
    for place in product(*(range(n) for n in _traversed(box, steps))):
        position = [a + p * (s if i else 1) for i, (a, p, s) in
                    enumerate(zip(at, place, steps, strict=True))]  # fmt: skip
        if all(0 <= x < n for x, n in zip(position, dims, strict=True)):
            inside[place] = sum(x * s for x, s in zip(position, (1, *strides), strict=True))
    assert part.empty == (not inside)
    if inside:
        ranges = [range(s.start, s.stop) for s in part.slices]
        assert set(product(*ranges)) == set(inside)
        assert part.offset == inside[min(inside)]


def _traversed(box, steps) -> list[int]:
    """Every step-th element of the box; hardware takes all of the innermost dimension."""
    return [
        len(range(0, b, s if i else 1)) for i, (b, s) in enumerate(zip(box, steps, strict=True))
    ]


def _count(box, steps) -> int:
    n = 1
    for t in _traversed(box, steps):
        n *= t
    return n


@pytest.mark.parametrize(("mode", "name"), [(0, 0), (1, 32), (2, 64), (3, 128)])
def test_swizzle_xors_address_bits(mode, name):
    for address in range(0, 4096, 16):
        rows = address >> 7  # of 128 bytes
        want = {0: address, 32: address ^ (rows & 1) << 4, 64: address ^ (rows & 3) << 4,
                128: address ^ (rows & 7) << 4}[name]  # fmt: skip
        assert int(swizzle_chunks(np.array([address >> 4]), mode)[0]) << 4 == want

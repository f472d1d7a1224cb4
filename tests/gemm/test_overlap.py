"""Elements that share memory, against a list of all addresses; and what is refused for it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from matmul_stand_in import StandIn

import cutex
from cutex.ops.overlap import overlaps_itself, share_memory


def byte_addresses(x):
    """The bytes of every element of x, one list for each."""
    for index in itertools.product(*map(range, x.shape)):
        first = x.storage_offset() + sum(i * s for i, s in zip(index, x.stride(), strict=True))
        yield range(first * x.itemsize, (first + 1) * x.itemsize)


def strided(rng, memory, sizes, strides):
    rank = rng.randint(1, 4)
    dtype = rng.choice([torch.uint8, torch.int16, torch.int32])
    shape = [rng.choice(sizes) for _ in range(rank)]
    steps = [rng.choice(strides) for _ in range(rank)]
    return memory.view(dtype).as_strided(shape, steps, rng.randint(0, 60))


@pytest.mark.parametrize("seed", range(4))
def test_overlaps_itself_is_exact(seed):
    rng, memory, found = random.Random(seed), torch.empty(4000, dtype=torch.uint8), set()
    for _ in range(800):
        x = strided(rng, memory, (1, 2, 3, 4, 5, 7), (0, 1, 2, 3, 4, 5, 6, 8, 12, 15, 20, 35))
        starts = [bytes_[0] for bytes_ in byte_addresses(x)]
        want = len(set(starts)) < len(starts)
        assert overlaps_itself(x) == want, (x.shape, x.stride())
        found.add(want)
    assert found == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_share_memory_is_exact(seed):
    rng, memory, found = random.Random(seed), torch.empty(8000, dtype=torch.uint8), set()
    for _ in range(400):
        x, y = (strided(rng, memory, (1, 2, 3, 5), (0, 1, 2, 4, 8, 12, 16, 40)) for _ in range(2))
        of_x, of_y = ({b for bytes_ in byte_addresses(z) for b in bytes_} for z in (x, y))
        assert share_memory(x, y) == bool(of_x & of_y), (x.shape, x.stride(), y.shape, y.stride())
        found.add(bool(of_x & of_y))
    assert found == {True, False}


def test_sizes_of_real_tensors_take_no_time():
    x = torch.empty(1, dtype=torch.bfloat16)
    huge = torch.empty_strided((64, 4096, 32, 128), (2**24, 4096, 128, 1), device="meta")
    assert not overlaps_itself(huge) and not overlaps_itself(huge.transpose(0, 2))
    odd = torch.empty_strided((4095, 4097, 3), (4097, 1, 2**30 + 7), device="meta")
    assert not overlaps_itself(odd)
    assert overlaps_itself(odd.as_strided((4096, 4098, 3), (4097, 1, 2**30 + 7)))
    assert not overlaps_itself(x.expand(1)) and not share_memory(x[:0], x)


A, B = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (63, 1), (1, 63), (2, 4), (33, 2), (1, 0)])
def test_matmul_does_not_write_where_its_elements_overlap(monkeypatch, strides):
    StandIn(monkeypatch)
    memory = torch.zeros(64 * 64 * 4, dtype=torch.bfloat16)
    out = memory.as_strided((64, 64), strides)
    for given in ({}, {"beta": 0.5}, {"residual": out}):
        with pytest.raises(ValueError, match=rf"out of shape .* has strides \({strides[0]}, "):
            cutex.matmul(A, B, out=out, **given)
    assert not memory.any()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("strides", [(64, 1), (1, 64), (65, 1), (128, 2), (2, 128), (1, 65)])
def test_matmul_writes_where_they_do_not(monkeypatch, strides):
    StandIn(monkeypatch)
    out = torch.zeros(64 * 64 * 4, dtype=torch.bfloat16).as_strided((64, 64), strides)
    for _ in range(2):
        torch.testing.assert_close(cutex.matmul(A, B, out=out), A @ B)


def test_tensors_with_gaps_that_share_memory_are_told_apart_from_those_beside_each_other(
    monkeypatch,
):
    StandIn(monkeypatch)
    memory = torch.randn(200, 80).bfloat16()
    left = memory[:64, :64].clone()
    for _ in range(2):  # the second call finds a plan
        memory[:64, :64] = left
        want = left @ B
        torch.testing.assert_close(cutex.matmul(memory[:64, :64], B, out=memory[64:128, :64]), want)
        for rows in (slice(1, 65), slice(63, 127)):
            with pytest.raises(ValueError, match="out shares memory with a, which is read"):
                cutex.matmul(memory[:64, :64], B, out=memory[rows, 16:])
        amax = torch.zeros(64, 2)
        cutex.matmul(A, B, scale_a=amax[:, :1], amax=amax[3:4, 1:])
        with pytest.raises(ValueError, match="amax shares memory with scale_a"):
            cutex.matmul(A, B, scale_a=amax[:, :1], amax=amax[3:4, :1])

"""Rotary position embedding: right against float64, by both conventions, whatever the strides."""

from __future__ import annotations

import math

import pytest
import torch

import cutex
from cutex.kernels.row import choose_rope
from cutex.kernels.row.rope_by_tickets import RopeByTickets

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}


def drawn(device, shape, dtype, seed=0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(dtype).to(device)


def table(device, rows, turned, dtype):
    angles = 10 * drawn(device, (rows, turned), torch.float64, 9)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def reference(x, cos, sin, interleaved, positions=None):
    """The pairs of x as complex numbers, multiplied by cos + i sin."""
    x, turned = x.double(), cos.shape[1]
    rows = torch.arange(x.shape[-3], device=x.device) if positions is None else positions
    factor = torch.complex(cos.double(), sin.double())[rows.long()][..., None, :]  # (.., T, 1, R)
    turns, stays = x[..., : 2 * turned], x[..., 2 * turned :]
    pairs = turns.unflatten(-1, (-1, 2)) if interleaved else turns.unflatten(-1, (2, -1)).mT
    made = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    made = made.flatten(-2) if interleaved else made.mT.flatten(-2)
    return torch.cat([made, stays], -1)


def near(found, wanted, dtype) -> None:
    error = (found.double() - wanted).abs()
    assert bool((error <= ROUNDING[dtype] * (wanted.abs() + 2)).all()), float(error.max())


CASES = [
    ((2, 5, 3, 64), 32, torch.bfloat16, torch.float32),
    ((2, 5, 3, 64), 32, torch.float32, torch.float32),
    ((1, 7, 2, 80), 16, torch.float16, torch.float16),  # a part of a head
    ((6, 2, 37), 9, torch.bfloat16, torch.bfloat16),  # odd, and no batch
    ((3, 1, 1, 6), 3, torch.float32, torch.bfloat16),
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape, turned, dtype, of_table", CASES)
def test_rope_and_its_gradient(device, shape, turned, dtype, of_table, interleaved):
    x = drawn(device, shape, dtype).requires_grad_()
    cos, sin = table(device, 11, turned, of_table)
    y = cutex.rope(x, cos, sin, interleaved=interleaved)
    near(y.detach(), reference(x.detach(), cos, sin, interleaved), dtype)
    dy = drawn(device, shape, dtype, 1)
    y.backward(dy)
    near(x.grad, reference(dy, cos, -sin, interleaved), dtype)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_in_views_and_what_lies_around_them(device, interleaved):
    whole = torch.full((2, 6, 3, 40), torch.nan, dtype=torch.bfloat16, device=device)
    cos, sin = table(device, 9, 8, torch.float32)
    for start in (0, 1, 3, 8):
        x = whole[:, 1:5, :2, start : start + 20]
        x.copy_(drawn(device, x.shape, x.dtype))
        wanted, version = reference(x, cos, sin, interleaved), x._version
        y = cutex.rope(x, cos, sin, interleaved=interleaved, inplace=True)
        assert y is x and x._version > version
        near(x, wanted, x.dtype)
        x.fill_(torch.nan)
        assert whole.isnan().all()


BY_TICKETS = [
    ((2, 21, 3, 64), 32, torch.bfloat16, torch.bfloat16, False),
    ((3, 7, 2, 32), 8, torch.float16, torch.float32, True),  # a part of a head
    ((1, 40, 1, 80), 40, torch.bfloat16, torch.float32, False),  # five vectors
    ((2, 9, 5, 16), 8, torch.float32, torch.float32, True),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape, turned, dtype, of_table, interleaved", BY_TICKETS)
def test_dense_tokens_come_by_bulk_copies(
    device, shape, turned, dtype, of_table, interleaved, monkeypatch, asked
):
    # chunks of two tokens, of which the last has one, more of them than CTAs have slots
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need a Hopper GPU")
    monkeypatch.setattr(choose_rope, "CHUNK_LEAST", 0)
    monkeypatch.setattr(choose_rope, "CHUNK_SHORT", 0)
    monkeypatch.setattr(choose_rope, "CHUNK_BYTES", 2 * shape[2] * shape[3] * dtype.itemsize)
    whole = torch.full((math.prod(shape) + 64,), torch.nan, dtype=dtype, device=device)
    x = whole[32:-32].view(shape)
    x.copy_(drawn(device, shape, dtype))
    cos, sin = table(device, shape[1] + 3, turned, of_table)
    want = reference(x, cos[2:], sin[2:], interleaved, torch.arange(shape[1], device=device))
    how = {"interleaved": interleaved, "offset": 2}
    in_place = shape[1] % 2 == 0
    y = cutex.rope(x, cos, sin, inplace=in_place, **how)
    assert (y is x) == in_place
    near(y, want, dtype)
    assert whole[:32].isnan().all() and whole[-32:].isnan().all()
    assert {kind for kind, *_ in asked} == {RopeByTickets}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_and_an_offset(device, dtype):
    x = drawn(device, (2, 4, 2, 16), torch.float32)
    cos, sin = table(device, 9, 8, torch.float32)
    for given in ([[0, 8, 3, 3], [7, 1, 2, 0]], [5, 0, 8, 1]):
        positions = torch.tensor(given, dtype=dtype, device=device)
        near(cutex.rope(x, cos, sin, positions=positions),
             reference(x, cos, sin, False, positions), x.dtype)  # fmt: skip
    near(cutex.rope(x, cos, sin, offset=5), reference(x, cos[5:], sin[5:], False), x.dtype)


def test_torch_compile_takes_it_whole(device):
    x = drawn(device, (1, 3, 2, 8), torch.float32)
    cos, sin = table(device, 3, 4, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return cutex.rope(x, cos, sin).square().sum(), cutex.rope(x.clone(), cos, sin, inplace=True)

    total, turned = step(x)
    near(turned, reference(x, cos, sin, False), x.dtype)
    assert float(total) == pytest.approx(float(x.square().sum()), rel=1e-5)  # a turn keeps lengths


def inferred(x):
    with torch.inference_mode():
        return x.clone()


BAD = [
    (
        lambda x, c: cutex.rope(inferred(x), c, c, inplace=True),
        ValueError,
        "x is an inference tensor",
    ),
    (lambda x, c: cutex.rope(x[0, 0], c, c), ValueError, "x must be"),
    (lambda x, c: cutex.rope(x, c[:, :2], c), ValueError, "they must be alike"),
    (lambda x, c: cutex.rope(x, c, c.half()), ValueError, "they must be alike"),
    (lambda x, c: cutex.rope(x, c, c, offset=1), ValueError, "offset=1: cos has 3 rows"),
    (lambda x, c: cutex.rope(x, c, c, offset=0.0), TypeError, "offset must be an int"),
    (lambda x, c: cutex.rope(x, c, c, positions=c), TypeError, "positions must be a tensor of"),
    (lambda x, c: cutex.rope(x, c, c, positions=torch.zeros(2).int()), ValueError, "have shape"),
    (lambda x, c: cutex.rope(x.requires_grad_(), c, c, inplace=True), ValueError, "inplace=True"),
    (lambda x, c: cutex.rope(x[:, :, :1].expand_as(x), c, c, inplace=True), ValueError, "overlap"),
    (
        lambda x, c: cutex.rope(x.as_strided(x.shape, (64, 8, 8, 1)), c, c, inplace=True),
        ValueError,
        "elements overlap",
    ),
    (
        lambda x, c: cutex.rope(x, x[0, :, 0, :4], x[0, :, 1, :4], inplace=True),
        ValueError,
        "x shares memory with cos",
    ),
]


@pytest.mark.parametrize("call, error, said", BAD)
def test_bad_input_is_one_sentence(call, error, said):
    with cutex.ops.simulated("sm_90a"), pytest.raises(error, match=said):
        call(torch.zeros(2, 3, 2, 8), torch.zeros(3, 4))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_it_runs_on_any_arch(arch):
    with cutex.ops.simulated(arch):
        x, (cos, sin) = (
            drawn("cpu", (1, 3, 2, 16), torch.float32),
            table("cpu", 3, 8, torch.float32),
        )
        near(cutex.rope(x, cos, sin), reference(x, cos, sin, False), x.dtype)

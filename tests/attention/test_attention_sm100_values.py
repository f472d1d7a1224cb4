"""Blackwell's attention is right, and as exact, whatever the values are; in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cutlass import Float32, cute
from flash_attn_calls import call

import cutex
from cutex.problem.attention.case import AttentionCase

SLOW = pytest.mark.slow
SCALE = 0.125
CASE = AttentionCase(seqlen_q=130, seqlen_k=400, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64)


def attend(q, k, v, bias=0.0):
    """O (batch, rows, heads, dim) and LSE (batch, heads, rows) in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * SCALE + bias
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


# ---- masks by a big negative number


def masked_by(value: float):
    """A score function that hides every key but each 90th from 200 on by `value`; only the first
    keys, which are taken last, are left to all."""

    @cute.jit
    def score_mod(score, batch, head, q, k):
        return score if (k < 100) | ((k >= 200) & (k % 90 == 0)) else Float32(value)

    return score_mod


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        -1e30,
        *(
            pytest.param(x, marks=SLOW)
            for x in (-1e9, -1e10, torch.finfo(torch.float32).min, -math.inf)
        ),
    ],
)
def test_a_mask_by_any_big_negative_number_leaves_what_is_not_masked(value):
    inputs = CASE.inputs()
    key = torch.arange(CASE.seqlen_k)
    seen = (key < 100) | ((key >= 200) & (key % 90 == 0))
    with cutex.ops.simulated("sm_100a"):
        out, lse = call(CASE, inputs, score_mod=masked_by(value))
    want, want_lse = attend(*inputs[:3], bias=torch.where(seen, 0.0, -math.inf))
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.01)


@SLOW
def test_rows_whose_keys_are_all_hidden_by_a_number_are_the_mean_of_them():
    value = torch.finfo(torch.float32).min
    inputs = CASE.inputs()
    with cutex.ops.simulated("sm_100a"):
        out, lse = call(CASE, inputs, score_mod=lambda score, b, h, q, k: Float32(value))
    assert (lse == value).all()
    mean = inputs.v.double().mean(1, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, rtol=0.01, atol=0.001)


# ---- V


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", ["normal", *(pytest.param(x, marks=SLOW) for x in ("x8", "falling"))]
)
def test_what_is_in_a_column_of_v_does_not_touch_the_others(data):
    case = replace(CASE, init=data)
    q, k, v = case.inputs()[:3]
    columns = {0: 1e30, 5: math.inf, 33: math.nan, 63: -1e30, 40: 1e-30}
    with cutex.ops.simulated("sm_100a"):
        want, want_lse = cutex.flash_attn_func(q, k, v, return_lse=True)
        odd = v.clone()
        for column, value in columns.items():
            odd[:, 7::50, :, column] = value
        out, lse = cutex.flash_attn_func(q, k, odd, return_lse=True)
    others = [c for c in range(64) if c not in columns]
    assert torch.equal(out[..., others], want[..., others]) and torch.equal(lse, want_lse)
    exact, magnitude = attend(q, k, odd)[0], attend(q, k, odd.abs())[0]
    for column in (0, 63, 40):
        error = (out[..., column].double() - exact[..., column]).abs()
        # P and O are rounded to bf16, 2^-9 each; a row's terms may cancel
        assert (error <= 2**-7 * magnitude[..., column]).all(), column
    assert not out[..., 5].isfinite().any() and out[..., 33].isnan().all()


@SLOW
def test_v_may_be_as_large_as_its_type_allows():
    q, k, v = CASE.inputs()[:3]
    v[..., 3] = 3e38 / 512  # times the sum of the exponentials below the largest float
    with cutex.ops.simulated("sm_100a"):
        out = cutex.flash_attn_func(q, k, v)
    torch.testing.assert_close(
        out[..., 3].float(), v[:, :1, :, 3].float().expand(out.shape[:3]), rtol=0.01, atol=0
    )


# ---- scores of any size


def large(size: float, dtype: torch.dtype, head_dim: int):
    """Inputs whose scores are `size`, exactly, and steps of what float32 can tell apart there:
    key j has the size and j % 7 steps, so that the largest are in every block."""
    q, k = torch.zeros(1, 130, 1, head_dim), torch.zeros(1, 400, 1, head_dim)
    power = 2.0 ** round(math.log2(size) / 2)
    step = max(8.0, 2.0 ** (2 * math.log2(power) - 22))
    q[..., 0], k[..., 0] = power, power
    q[..., 1], k[..., 1] = step, torch.arange(400)[None, :, None] % 7
    v = torch.randn(1, 400, 1, head_dim, generator=torch.Generator().manual_seed(0))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e10, *(pytest.param(x, marks=SLOW) for x in (1e5, 1e7, 1e14))])
@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=SLOW)])
@pytest.mark.parametrize("sign", [1, pytest.param(-1, marks=SLOW)])
def test_scores_of_any_size_keep_what_they_have(size, head_dim, sign):
    q, k, v = large(size, torch.bfloat16, head_dim)
    q[..., 0] *= sign
    with cutex.ops.simulated("sm_100a"):
        out, lse = cutex.flash_attn_func(q, k, v, softmax_scale=SCALE, return_lse=True)
    want, want_lse = attend(q, k, v)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2.0**-22, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-7, atol=2.0**-8)


# ---- how exact a peaked row is


def by_references(q, k, v, below: float = 0.0):
    """The relative error of O where every reference is `below` powers of two under the row's
    maximum, and only P and O are rounded."""
    want, _ = attend(q, k, v)
    scores = q.double().transpose(1, 2) @ k.double().transpose(1, 2).mT * SCALE
    p = (scores - scores.amax(-1, keepdim=True) + below * math.log(2)).exp()
    found = p.to(q.dtype).double() @ v.double().transpose(1, 2) / p.sum(-1, keepdim=True)
    return relative(found.transpose(1, 2).to(q.dtype), want)


def relative(out, want) -> float:
    return float((out.double() - want).norm() / want.norm())


@SLOW
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("data", ["x4", "x8", "x16", "hot"])
def test_a_peaked_row_is_as_exact_as_references_allow(data, dtype):
    """A reference that was found before the maximum may be any power of two under it: then the one
    large probability is rounded, too, which is exact where it is 1."""
    case = replace(CASE, init=data, seqlen_k=1300, dtype=dtype)
    q, k, v = case.inputs()[:3]
    with cutex.ops.simulated("sm_100a"):
        out = cutex.flash_attn_func(q, k, v)
    bound = max(by_references(q, k, v, below) for below in (0.0, 0.25, 0.5, 0.75))
    assert relative(out, attend(q, k, v)[0]) <= 1.05 * bound


# ---- where references do not hold


@SLOW
@pytest.mark.parametrize("size", [24.0, 96.0, 250.0, 4096.0])
@pytest.mark.parametrize(("head_dim", "queries"), [(64, 130), (64, 100), (256, 130)], ids=str)
def test_jumps_within_and_beyond_the_range_of_float32_in_every_block(size, head_dim, queries):
    """Of 24 and 96 powers of two, which the threshold and a probability hold, and of more; with
    two Q tiles, with one, and by a pair."""
    case = replace(CASE, head_dim=head_dim, head_dim_v=head_dim, seqlen_q=queries)
    q, k, v = case.inputs()[:3]
    q[..., 0], k[..., 0] = 8.0, 0.0
    at = torch.arange(3, 400, 41)
    k[:, at, :, 0] = (size / 1.44 * torch.arange(len(at), 0, -1))[None, :, None].to(k.dtype)
    with cutex.ops.simulated("sm_100a"):
        out, lse = cutex.flash_attn_func(q, k, v, softmax_scale=SCALE, return_lse=True)
    want, want_lse = attend(q, k, v)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-6, atol=2.0**-6)

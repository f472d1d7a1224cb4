"""Caches whose values are near the end of bfloat16's range: sums of probabilities times values stay
finite where their result is."""

from __future__ import annotations

import pytest
import torch

import cutex

LARGE = 1e37
KEYS = 300  # times LARGE is beyond float32
LENGTHS = torch.tensor([KEYS], dtype=torch.int32)
ARCHS = "sm_90a", "sm_100a"

pytestmark = pytest.mark.slow


def is_close(out: torch.Tensor, value: torch.Tensor) -> bool:
    return bool((out.double() / value.double() - 1).abs().max() < 2**-7)


@pytest.mark.parametrize("heads", [4, 32], ids=["few rows", "many rows"])
@pytest.mark.parametrize("arch", ARCHS)
def test_large_values_leave_attention_finite(arch: str, heads: int) -> None:
    gen = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, n, h, 64, generator=gen).bfloat16() for n, h in ((1, heads), (KEYS, 1)))
    v = torch.full((1, KEYS, 1, 64), LARGE).bfloat16()
    with cutex.ops.simulated(arch):
        out, lse = cutex.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS, return_lse=True)
    assert is_close(out, v[0, 0, 0, 0])
    scores = q[0, 0].double() @ k[0, :, 0].double().T / 8
    assert torch.allclose(lse[0, :, 0].double(), scores.logsumexp(-1), atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_large_latent_values_leave_mla_finite(arch: str) -> None:
    q, cache = torch.zeros(1, 1, 16, 576).bfloat16(), torch.zeros(1, KEYS, 1, 576).bfloat16()
    cache[..., 1] = LARGE
    with cutex.ops.simulated(arch):
        out, lse = cutex.flash_mla_with_kvcache(q, cache, None, LENGTHS)
    assert is_close(out[..., 1], cache[0, 0, 0, 1])
    assert not out[..., 2:].any()
    assert torch.allclose(lse, torch.full_like(lse, KEYS).log(), atol=1e-4)

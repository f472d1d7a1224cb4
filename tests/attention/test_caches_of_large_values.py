"""Caches whose values are near the end of bfloat16's range: sums of probabilities times values stay
finite where their result is. And queries that are beyond it: rows beside them are as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


QUERIES = {  # (arch, rows of the same keys, head dim, keys, caches of e4m3, new keys)
    "few rows": ("sm_90a", (1, 4), 64, 150, False, 0),
    "many rows": ("sm_90a", (3, 16), 64, 150, False, 0),
    "few rows, e4m3": ("sm_90a", (1, 4), 64, 150, True, 0),
    "few rows, e4m3, appended": ("sm_90a", (2, 4), 128, 150, True, 2),
    "two groups of rows, e4m3": ("sm_90a", (4, 8), 64, 2100, True, 0),
    "many rows, e4m3": ("sm_90a", (3, 16), 128, 150, True, 0),
    "many rows, e4m3, appended": ("sm_90a", (5, 8), 64, 150, True, 5),
    "rows of Blackwell": ("sm_100a", (3, 16), 64, 150, False, 0),
    "rows of Blackwell, appended": ("sm_100a", (3, 16), 64, 150, False, 3),
}
SPOILED = [torch.inf, -torch.inf, torch.nan, 3e38, 1e30, 1e-30]


@pytest.mark.parametrize("name", QUERIES)
def test_a_spoiled_query_leaves_other_rows_as_they_are(name: str) -> None:
    """Warps hold several rows, which share what they are scaled by and when sums are rescaled."""
    arch, (tokens, heads), dim, keys, fp8, new = QUERIES[name]
    gen = torch.Generator().manual_seed(7)
    q = torch.randn(1, tokens, heads, dim, generator=gen).bfloat16()
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    k, v = (torch.randn(1, keys, 1, dim, generator=gen).to(kind) for _ in "kv")
    lengths = torch.tensor([keys - new], dtype=torch.int32)
    given = {"cache_seqlens": lengths, "causal": True, "return_lse": True}
    if new:
        given |= {"k": k[:, keys - new :].clone(), "v": v[:, keys - new :].clone()}

    def run(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with cutex.ops.simulated(arch):
            return cutex.flash_attn_with_kvcache(q, k.clone(), v.clone(), **given)

    check_others(q, run, tokens // 2, heads // 2)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_spoiled_query_leaves_other_rows_of_mla_as_they_are(arch: str, heads: int) -> None:
    gen = torch.Generator().manual_seed(7)
    q = torch.randn(1, 2, heads, 576, generator=gen).bfloat16()
    cache = torch.randn(1, KEYS, 1, 576, generator=gen).bfloat16()

    def run(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with cutex.ops.simulated(arch):
            return cutex.flash_mla_with_kvcache(q, cache, None, LENGTHS, causal=True)

    check_others(q, run, 1, heads // 2)


def check_others(q: torch.Tensor, run: Callable[..., Any], token: int, head: int) -> None:
    """Of `q` with one value spoiled, check every row but that of `token` and `head` against `run`
    of q as it is; and that a row without a softmax is NaN."""
    want, want_lse = run(q)
    others = torch.ones(q.shape[1:3], dtype=torch.bool)
    others[token, head] = False
    for value in SPOILED:
        spoiled = q.clone()
        spoiled[0, token, head, 3] = value
        out, lse = run(spoiled)
        error = (out - want)[0][others].double().abs().max()
        assert error <= 2**-8 * want.double().abs().max(), value  # P rounded by other references
        assert torch.allclose(lse[0].T[others], want_lse[0].T[others], atol=1e-5), value
        if not abs(value) < torch.inf:
            assert out[0, token, head].isnan().all(), value
            assert lse[0, head, token].isnan(), value

"""Queries and new keys of caches that are turned by their positions (rotary embedding)."""

from __future__ import annotations

import pytest
import torch
from kvcache_calls import SMALL, arguments, in_fp8

import cutex
from cutex.ops.attention.rotated import rotated
from cutex.problem.attention.case import AttentionCase


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_queries_and_new_keys_are_turned(causal):
    """As by a rotation before the call, in complex numbers."""
    case = AttentionCase(**{**SMALL, "seqlen_q": 2, "used_k": (90, 40, 65), "causal": causal})
    given = arguments(case, case.inputs(), new=2)
    angles = torch.rand(128, 16, generator=torch.Generator().manual_seed(0)) * 6

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x[..., :32].float().unflatten(-1, (-1, 2)))
        turn = torch.polar(torch.ones(()), angles[positions])[:, :, None]
        return torch.cat(
            (torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype), x[..., 32:]), -1
        )

    steps = given["cache_seqlens"][:, None] + torch.arange(2)
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    with cutex.ops.simulated("sm_90a"):
        caches = [given[name].clone() for name in ("k_cache", "v_cache")]
        mine = dict(given, k_cache=caches[0], v_cache=caches[1], **tables)
        out = cutex.flash_attn_with_kvcache(**mine)
        given["k"] = turned(given["k"], steps)
        given["q"] = turned(given["q"], steps if causal else steps[:, :1].expand(3, 2))
        want = cutex.flash_attn_with_kvcache(**given)
    assert (out.float() - want.float()).abs().max() < 2**-6
    assert torch.equal(caches[0].nan_to_num(), given["k_cache"].nan_to_num())


@pytest.mark.slow
@pytest.mark.parametrize("narrow_q", [True, False])
def test_queries_and_new_keys_of_8_bits_are_turned(narrow_q):
    """As by a rotation in float64 and one rounding; what grows beyond e4m3's range saturates."""
    case = AttentionCase(**{**SMALL, "seqlen_q": 2, "used_k": (90, 40, 65), "causal": True})
    inputs, _, scales = in_fp8(case, case.inputs())
    given = {**arguments(case, inputs, new=2), **scales}
    given["k"] = given["k"].clone()
    given["k"][0, 0, 0, :2] = torch.tensor([448.0, 448.0]).to(given["k"].dtype)
    given["q"] = given["q"].to(given["k"].dtype) if narrow_q else given["q"]
    angles = torch.rand(128, 16, generator=torch.Generator().manual_seed(0)) * 6
    angles[88] = torch.pi / 4  # of the row with 448: (0, 633)
    narrow = (x.to(given["k"].dtype) for x in (angles.cos(), angles.sin()))
    tables = dict(zip(("rotary_cos", "rotary_sin"), narrow, strict=True))
    turn = torch.complex(*(x.double() for x in tables.values()))
    steps = given["cache_seqlens"][:, None] + torch.arange(2)

    def turned(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pairs = torch.view_as_complex(x[..., :32].double().unflatten(-1, (-1, 2)))
        rows = torch.view_as_real(pairs * turn[steps][:, :, None]).flatten(-2)
        most = 448.0 if dtype == torch.float8_e4m3fn else 1e30
        return torch.cat((rows, x[..., 32:].double()), -1).clamp(-most, most).float().to(dtype)

    with cutex.ops.simulated("sm_90a"):
        caches = [given[name].clone() for name in ("k_cache", "v_cache")]
        mine = dict(given, k_cache=caches[0], v_cache=caches[1], **tables)
        out = cutex.flash_attn_with_kvcache(**mine)
        given["k"] = turned(given["k"], given["k"].dtype)
        given["q"] = turned(given["q"], torch.bfloat16)
        want = cutex.flash_attn_with_kvcache(**given)
    assert (out.float() - want.float()).abs().max() < 2**-6
    found, expected = (x.float().nan_to_num() for x in (caches[0], given["k_cache"]))
    assert found[0, 88, 0, 1] == 448
    # NOTE: float32 in between may round a tie of e4m3 the other way
    assert ((found - expected).abs() <= expected.abs() / 8).all()
    assert (found != expected).float().mean() < 1e-4


@pytest.mark.parametrize("follow", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_packed_queries_and_new_keys_are_turned_as_those_of_each_sequence(follow):
    lengths = torch.tensor([5, 0, 30], dtype=torch.int32)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 2, 5], [0, 1, 4, 4]))
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, h, 64, generator=g).half() for n, h in ((7, 4), (4, 2)))
    angles = torch.rand(64, 16, generator=g) * 6
    tables = angles.cos(), angles.sin()
    with cutex.ops.simulated("sm_90a"):
        both = rotated(q, k, tables, True, lengths, follow, (ends_q, ends_k))
        for x, found, ends, steps in ((q, both[0], ends_q, follow), (k, both[1], ends_k, True)):
            for b in range(3):
                mine = slice(int(ends[b]), int(ends[b + 1]))
                n = mine.stop - mine.start
                if n:
                    at = (lengths[b] + (torch.arange(n) if steps else torch.zeros(n))).int()
                    want = cutex.rope(x[mine][None], *tables, interleaved=True, positions=at[None])
                    assert torch.equal(found[mine], want[0])


@pytest.mark.parametrize(("tokens", "follow"), [(1, False), (3, True), (3, False)])
def test_heads_of_one_tensor_are_turned_as_those_of_two(tokens, follow):
    """Each by the row of its position, whether q and k are launched together or apart."""
    g = torch.Generator().manual_seed(0)
    lengths, angles = torch.tensor([5, 0], dtype=torch.int32), torch.rand(64, 16, generator=g) * 6
    tables = angles.cos(), angles.sin()
    q, k, _ = torch.randn(2, tokens, 6, 64, generator=g).half().split([3, 2, 1], 2)
    with cutex.ops.simulated("sm_90a"):
        joined = rotated(q, k, tables, True, lengths, follow, (None, None))
        apart = rotated(q.clone(), k.clone(), tables, True, lengths, follow, (None, None))
        for x, one, two, steps in zip((q, k), joined, apart, (follow, True), strict=True):
            at = lengths[:, None] + steps * torch.arange(tokens, dtype=torch.int32)
            want = cutex.rope(x, *tables, interleaved=True, positions=at)
            assert torch.equal(one, want) and torch.equal(two, want)

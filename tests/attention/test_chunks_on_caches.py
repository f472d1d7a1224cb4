"""Chunks of prompts on caches: many queries, which the forward kernel takes."""

from __future__ import annotations

import pytest
import torch
from kvcache_calls import SMALL, outcome

import cutex
from cutex.kernels.attention.forward.sm90 import choose
from cutex.ops.attention import plan, prefill
from cutex.ops.attention.call import AttentionCall
from cutex.ops.attention.kvcache_call import KVCacheCall
from cutex.problem.attention.case import AttentionCase

CHUNKS = {
    "pages": ({"seqlen_q": 130, "seqlen_k": 300, "used_k": (300, 171, 0)}, {"page_size": 16}),
    "packed queries": ({"lengths_q": (140, 0, 33), "seqlen_k": 300, "used_k": (300, 0, 65)},
                       {"page_size": 64}),
    "odd pages, window": ({"seqlen_q": 100, "heads_q": 8, "sink": True, "window": (90, None)},
                          {"page_size": 24}),
    "no pages": ({"seqlen_q": 70, "head_dim": 128, "head_dim_v": 128}, {}),
    "all of a cache": ({"seqlen_q": 70, "used_k": None, "causal": False, "softcap": 5.0}, {}),
    "keys split for many CTAs": ({"seqlen_q": 70, "seqlen_k": 1300, "used_k": (1300, 0, 65)}, {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_of_prompts_are_attended_by_the_forward_kernel(name, monkeypatch):
    monkeypatch.setattr(prefill, "is_of_many_queries", lambda call, arch: True)
    fields, more = CHUNKS[name]
    with cutex.ops.simulated("sm_90a"):
        assert outcome(AttentionCase(**{**SMALL, "causal": True, **fields}), **more) == ""


def test_many_queries_are_told_from_few():
    def call(batch: int, tokens: int, heads: int, page: int, **more) -> KVCacheCall:
        q = torch.empty(batch, tokens, heads, 64).half()
        k = torch.empty(batch * 64, page, 8, 64).half()
        table = torch.empty(batch, 64, dtype=torch.int32)
        lengths = torch.empty(batch, dtype=torch.int32)
        return KVCacheCall(
            q, k, k.clone(), None, lengths, table, *[None] * 8, None, None, True, (-1, -1), 0.0, 0
        )._replace(**more)

    chunk = call(4, 512, 32, 64)
    assert prefill.is_of_many_queries(chunk, "sm_90a")
    assert prefill.config_for(chunk, True, "sm_90a").page_size == 64
    for few in (call(1, 512, 8, 64), call(1, 48, 32, 64), call(1, 300, 32, 64)):  # tiles
        assert prefill.is_of_many_queries(few, "sm_90a")
        config = prefill.config_for(few, True, "sm_90a")
        assert config.split and config.why_not() is None
    for other in (
        call(4, 8, 32, 64), call(1, 64, 8, 64), call(1, 29, 32, 64), call(4, 512, 32, 4),
        chunk._replace(num_splits=1), chunk._replace(k=chunk.q, v=chunk.q),
    ):  # fmt: skip
        assert not prefill.is_of_many_queries(other, "sm_90a")
    assert not prefill.is_of_many_queries(chunk, "sm_100a")


@pytest.mark.parametrize(("head_dim", "is_many"), [(128, True), (64, False)])
def test_tiles_for_seven_sms_of_ten_are_many_at_head_dim_128(head_dim, is_many, monkeypatch):
    monkeypatch.setattr(choose, "split", lambda config, shape, num_sms: config)
    q, k = torch.empty(4, 48, 64, head_dim).half(), torch.empty(64, 64, 8, head_dim).half()
    table, lengths = torch.empty(4, 64, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    call = KVCacheCall(
        q, k, k.clone(), None, lengths, table, *[None] * 8, None, None, True, (-1, -1), 0.0, 0
    )  # 96 tiles for 132 SMs
    assert prefill.is_of_many_queries(call, "sm_90a") == is_many


def test_tiles_of_a_chunk_are_cut_as_those_of_flash_attn_func():
    q = torch.empty(1, 2048, 10, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 4096, 10, 128, dtype=torch.bfloat16, device="meta")
    given = {"q": q, "k_cache": k, "v_cache": k, "causal": False, "window_size": (None, None)}
    nothing = dict.fromkeys(KVCacheCall._fields) | {"softcap": 0.0, "num_splits": 0}
    chunk = KVCacheCall(**{**nothing, **given})
    assert prefill.is_of_many_queries(chunk, "sm_90a")
    config = prefill.config_for(chunk, True, "sm_90a")
    assert config.is_cut and config.workspace(prefill.shape_of(chunk)).sums > 0
    assert config == plan.config_for(AttentionCall(q, k, k), True, (None, None))

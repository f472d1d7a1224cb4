"""Plans of attention to caches: which calls share one, and which kernel a call takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvcache_calls import SMALL

import cutex
from cutex.ops.attention import kvcache
from cutex.ops.attention.kvcache import PLANS, alike_rooms, config_for
from cutex.ops.attention.kvcache_call import KVCacheCall
from cutex.problem.attention.case import AttentionCase


@pytest.mark.slow
def test_a_call_like_one_before_launches_with_its_own_tensors():
    case = AttentionCase(**{**SMALL, "used_k": None, "batch": 1, "heads_q": 2, "heads_kv": 1})
    with cutex.ops.simulated("sm_90a"):
        for seed in range(3):
            alike = replace(case, seed=seed)
            inputs = alike.inputs()
            out = cutex.flash_attn_with_kvcache(*inputs[:3])
            assert bool(PLANS) and alike.check(inputs, out, None, poisoned=False).ok
        shifted = torch.empty(inputs.q.numel() + 1, dtype=inputs.q.dtype)[1:].view(inputs.q.shape)
        assert torch.equal(
            cutex.flash_attn_with_kvcache(shifted.copy_(inputs.q), *inputs[1:3]), out
        )
        with pytest.raises(ValueError, match="k_cache cannot be read in place: it starts at"):
            k = torch.empty(inputs.k.numel() + 1, dtype=inputs.k.dtype)[1:].view(inputs.k.shape)
            cutex.flash_attn_with_kvcache(inputs.q, k, inputs.v)


@pytest.mark.slow
def test_a_cache_that_grows_has_one_plan():
    """As transformers' dynamic cache, (batch, heads, keys, D), which is another for each token."""
    known = []
    with cutex.ops.simulated("sm_90a"):
        for keys in (70, 100, 101, 128, 129, 300):
            case = AttentionCase(**{
                **SMALL, "used_k": None, "batch": 1, "heads_q": 2, "heads_kv": 1,
                "seqlen_k": keys, "seed": keys,
                "views": ("contiguous", "heads first", "heads first"),
            })  # fmt: skip
            inputs = case.inputs()
            out = cutex.flash_attn_with_kvcache(*inputs[:3])
            assert case.check(inputs, out, None, poisoned=False).ok
            known.append(sum(map(len, PLANS.known.values())))
    # the second plan is of 65 to 128 keys; a third and a fourth are of longer ones
    assert known == [1, 2, 2, 2, 3, 4]


def test_rooms_of_one_plan_are_those_of_one_kernel():
    def call(room: int, left: int | None = None) -> KVCacheCall:
        q, k = torch.empty(1, 1, 32, 64).half(), torch.empty(1, room, 8, 64).half()
        return KVCacheCall(q, k, k.clone(), *[None] * 11, None, None, False, (left, None), 0.0, 0)

    for room, left in ((1000, None), (1030, None), (300, 200), (190, 200), (200, 200), (33, 7)):
        rooms = alike_rooms(call(room, left), False)
        configs = {config_for(call(x, left), False) for x in rooms}
        assert room in rooms and len(configs) == 1


def test_with_num_splits_the_kernel_does_not_depend_on_the_batch():
    def call(batch: int, num_splits: int) -> KVCacheCall:
        q, k = torch.empty(batch, 32, 8, 128).half(), torch.empty(batch, 200, 8, 128).half()
        return KVCacheCall(
            q, k, k.clone(), *[None] * 11, None, None, True, (None, None), 0.0, num_splits
        )

    one, many = (config_for(call(batch, 1), False) for batch in (1, 40))
    assert one == many != config_for(call(40, 0), False)


def test_no_more_units_than_sms_are_cut_by_their_room_if_parts_are_not_long():
    def found(
        batch: int, room: int, heads: tuple[int, int], dim: int, tokens: int = 1
    ) -> tuple[int, int, bool]:
        q, k, v = (
            torch.empty(batch, rows, count, dim, dtype=torch.float16)
            for rows, count in ((tokens, heads[0]), (room, heads[1]), (room, heads[1]))
        )
        ends = torch.empty(batch, dtype=torch.int32)
        none = [None] * 9
        call = KVCacheCall(q, k, v, None, ends, *none, None, None, False, (-1, -1), 0.0, 0)
        config = config_for(call, False)
        return kvcache.parts_by_room(call, config, room), config.ctas_per_sm, config.overlaps

    # units that are whole: of so many that two launches fit, of too few to fill the GPU, of many
    assert found(6, 775, (16, 8), 128) == (1, 1, True)
    assert found(10, 600, (16, 8), 128) == (1, 1, False)
    assert found(14, 487, (32, 8), 128) == (1, 1, True)
    # parts: of a CTA of an SM each, of half an SM where one would leave a quarter of them idle
    assert found(4, 4000, (8, 2), 64) == (16, 1, True)
    assert found(6, 8000, (8, 8), 64) == (5, 2, True)
    assert found(28, 1719, (64, 4), 128, 4) == (1, 2, False)  # of many rows
    assert found(33, 244, (32, 8), 256) == found(40, 500, (16, 4), 256, 2) == (1, 2, True)
    assert found(40, 1000, (32, 8), 256) == (0, 2, True)
    assert found(6, 40000, (8, 8), 64)[0] == 0  # too long, should other sequences be short

"""Attention to caches of 8 bits, and the roles and rows that the kernels have for them, simulated,
against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvcache_calls import SMALL, outcome

import cutex
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.ops.attention import kvcache
from cutex.ops.attention.kvcache import PLANS, config_for
from cutex.problem.attention.case import AttentionCase

FP8 = {
    "e4m3": ({}, {}),
    "e4m3 in pages": ({"dtype": "fp16", "causal": True, "seqlen_q": 3}, {"page_size": 16}),
    "e4m3 in single rows": ({"batch": 1, "used_k": (70,)}, {"page_size": 1}),
    "e4m3 appended": (
        {"used_k": (200, 5, 66), "softcap": 4.0}, {"new": 2, "page_size": 64, "num_splits": 2}
    ),
    "e4m3 begun later in pages": (
        {"used_k": (90, 5, 66)}, {"leftpad": (7, 3, 20), "new": 2, "page_size": 64}
    ),
    "e4m3, many rows": ({"seqlen_q": 20, "causal": True, "dtype": "fp16"}, {"page_size": 16}),
    "e4m3, many rows in single rows": (
        {"seqlen_q": 20, "head_dim": 128, "head_dim_v": 128, "batch": 1, "seqlen_k": 330,
         "used_k": (330,)}, {"page_size": 1, "new": 2}),
    "e4m3, many rows of packed queries": (
        {"lengths_q": (1, 0, 40), "seqlen_k": 800, "used_k": (800, 5, 166), "head_dim": 192,
         "head_dim_v": 128}, {"new": (1, 0, 9)}),
    "e4m3, wide": ({"head_dim": 256, "head_dim_v": 192, "batch": 1, "used_k": (150,)}, {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [x if x == "e4m3 in pages" else pytest.param(x, marks=pytest.mark.slow) for x in FP8]
)
def test_caches_of_8_bits_are_attended_to(name):
    case, layout = FP8[name]
    with cutex.ops.simulated("sm_90a"):
        assert outcome(AttentionCase(**{**SMALL, **case}), fp8=True, **layout) == ""


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("used", [(300, *(0,) * 7, 165), (*(0,) * 4, 300, *(0,) * 4)], ids=str)
def test_parts_without_keys_are_told_between_others(used, fp8, monkeypatch):
    """The roles that a warp tells its parts wait for no part that it has not loaded."""

    def of_two_sms(*given: object) -> DecodeConfig:
        return replace(config_for(*given), num_sms=2, by_room=False, whole=False)

    monkeypatch.setattr(kvcache, "config_for", of_two_sms)
    PLANS.forget()
    sizes = {"batch": len(used), "seqlen_k": 300, "used_k": used, "heads_q": 16, "seqlen_q": 3}
    sizes |= {} if fp8 else {"head_dim": 256, "head_dim_v": 256}  # of 16 bits, those that are wide
    with cutex.ops.simulated("sm_90a"):
        assert outcome(AttentionCase(**{**SMALL, **sizes}), fp8=fp8) == ""
    PLANS.forget()


TWO_GROUPS = {  # of 16 rows
    "cut": (
        {"seqlen_q": 3, "causal": True, "used_k": (330, 5, 0), "seqlen_k": 330},
        {"page_size": 16},
    ),
    "appended": (
        {"seqlen_q": 4, "dtype": "fp16", "softcap": 4.0, "sink": True, "used_k": (200, 5, 65)},
        {"new": 2},
    ),
    "of packed queries": ({"lengths_q": (1, 0, 4), "window": (100, 0)}, {"page_size": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("name", TWO_GROUPS)
def test_warps_with_two_groups_of_rows_attend_to_caches(name, fp8, monkeypatch):
    def two(*given: object) -> DecodeConfig:
        tiles = {"tile_n": 32, "num_stages": 4, "num_sms": 2, "row_groups": 2}
        return replace(config_for(*given), few_rows=True, by_room=False, whole=False, **tiles)

    monkeypatch.setattr(kvcache, "config_for", two)
    PLANS.forget()
    case, layout = TWO_GROUPS[name]
    sizes = {"heads_q": 16, "heads_kv": 2}
    with cutex.ops.simulated("sm_90a"):
        assert outcome(AttentionCase(**{**SMALL, **sizes, **case}), fp8=fp8, **layout) == ""
    PLANS.forget()

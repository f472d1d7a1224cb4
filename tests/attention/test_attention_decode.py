"""Attention to caches by the Hopper kernel, simulated, against float64: contiguous and in pages,
with poison behind the lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvcache_calls import SMALL, arguments, outcome

import cutex
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.ops.attention import kvcache
from cutex.ops.attention.kvcache import PLANS, config_for
from cutex.problem.attention.case import AttentionCase

CASES = {
    "one token": ({}, {}),
    "pages of 16": ({"causal": True, "seqlen_q": 2}, {"page_size": 16}),
    "pages of 1": ({"used_k": (70, 0, 3), "batch": 3, "heads_q": 2, "heads_kv": 1},
                   {"page_size": 1}),
    "pages of 12, 96 columns": ({"head_dim": 72, "head_dim_v": 40, "batch": 2, "used_k": (30, 65)},
                                {"page_size": 12}),
    "odd pages, parts": ({"head_dim": 40, "head_dim_v": 64}, {"page_size": 24, "num_splits": 3}),
    "entries of a larger cache": ({"sink": True, "window": (50, None)}, {"shuffled": True}),
    "appended to pages": ({"used_k": (200, 5, 66), "causal": True, "seqlen_q": 3, "dtype": "fp16"},
                          {"page_size": 64, "new": 3}),
    "appended, softcap": ({"used_k": (200, 1, 65), "softcap": 5.0, "heads_q": 6},
                          {"new": 1, "shuffled": True}),
    "packed queries": ({"lengths_q": (1, 0, 4), "heads_q": 2, "causal": True}, {"page_size": 64}),
    "parts that a kernel combines": (
        {"seqlen_q": 4, "causal": True, "heads_q": 16, "heads_kv": 1, "batch": 2, "sink": True,
         "seqlen_k": 400, "used_k": (400, 65)}, {"page_size": 16},
    ),
    "rows of two blocks": ({"seqlen_q": 33, "causal": True, "batch": 1, "used_k": (130,)}, {}),
    "rows of three blocks": ({"seqlen_q": 20, "causal": True, "batch": 2, "heads_q": 16,
                              "window": (60, None), "used_k": (200, 14)}, {"page_size": 16}),
    # a second kernel merges its parts
    "begun later": ({"causal": True, "seqlen_q": 3, "window": (90, None), "heads_q": 8,
                     "heads_kv": 1}, {"leftpad": (7, 0, 90), "shuffled": True}),
    "begun later, appended": ({"used_k": (200, 5, 66)}, {"leftpad": (64, 2, 1), "new": 2}),
    "begun later in pages": ({"causal": True, "seqlen_q": 3, "used_k": (90, 0, 65)},
                             {"leftpad": (7, 40, 90), "page_size": 16, "shuffled": True}),
    "begun later in pages, appended": (
        {"used_k": (70, 3, 66), "window": (40, None), "head_dim": 72, "batch": 3},
        {"leftpad": (64, 5, 1), "new": 2, "page_size": 128, "num_splits": 2}),
    "begun later in pages, packed": (
        {"lengths_q": (1, 0, 4), "used_k": (90, 5, 66), "causal": True},
        {"leftpad": (3, 17, 0), "new": (1, 0, 9), "page_size": 12}),
    "packed queries and new keys": (
        {"lengths_q": (1, 0, 40), "used_k": (180, 5, 66), "causal": True}, {"new": (1, 0, 9)}),
    "packed new keys to pages": (
        {"used_k": (200, 5, 66), "causal": True, "seqlen_q": 2},
        {"new": (30, 5, 0), "page_size": 16, "shuffled": True}),
    "rows of a page table": ({}, {"page_size": 8, "shuffled": True}),
    "all of a cache": ({"used_k": None, "batch": 2}, {"num_splits": 1}),
    "heads first": ({"views": ("interleaved", "heads first", "padded"), "used_k": None,
                     "head_dim_v": 128, "head_dim": 192, "batch": 2}, {}),
    "warps with other keys": ({"head_dim": 128, "head_dim_v": 128, "heads_q": 32, "seqlen_k": 500,
                               "used_k": (500, 31, 340), "window": (300, None), "softcap": 8.0},
                              {"page_size": 16}),
    "wide heads": ({"head_dim": 256, "head_dim_v": 256, "batch": 1, "used_k": (150,),
                    "heads_q": 3, "heads_kv": 1}, {"page_size": 32}),
}  # fmt: skip
QUICK = ("packed queries",)  # whose kernel test_varlen_takes_pages has, too


def named(*names: str) -> list:
    return [x if x in names else pytest.param(x, marks=pytest.mark.slow) for x in CASES]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", named(*QUICK))
def test_caches_are_attended_to(name, arch):
    case, layout = CASES[name]
    with cutex.ops.simulated(arch):
        assert outcome(AttentionCase(**{**SMALL, **case}), **layout) == ""


FEW_ROWS = (
    "one token", "pages of 16", "odd pages, parts", "entries of a larger cache", "all of a cache",
    "appended to pages", "appended, softcap", "packed queries", "begun later, appended",
    "packed new keys to pages", "warps with other keys",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("one token", False),
        *(pytest.param(x, False, marks=pytest.mark.slow) for x in FEW_ROWS[1:]),
        *(pytest.param(x, True, marks=pytest.mark.slow) for x in FEW_ROWS if "parts" not in x),
    ],
)
def test_warps_with_other_keys_each_attend_to_caches(name, whole, monkeypatch):
    """Two CTAs have many parts, or units, each, of which every warp begins with another block; of
    shares the warp that loads tells the others."""
    number = FEW_ROWS.index(name)

    def few(*given: object) -> DecodeConfig:
        tiles = {"tile_n": 32, "num_stages": 4, "num_sms": 2}
        told = not whole and "parts" not in name
        shares = {"in_shares": told, "alone": number % 2 == 0, "few_entries": number % 3 > 0}
        config = config_for(*given)
        parts = {"by_room": whole, "whole": whole, "waves": whole, **shares}
        combined = config.combined and not whole
        return replace(config, few_rows=True, combined=combined, **parts, **tiles)

    monkeypatch.setattr(kvcache, "config_for", few)
    PLANS.forget()
    case, layout = CASES[name]
    with cutex.ops.simulated("sm_90a"):
        assert outcome(AttentionCase(**{**SMALL, **case}), **layout) == ""
    PLANS.forget()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_by_room_are_attended_to(parts, queries, monkeypatch):
    """By two CTAs of an SM, whose roles have registers of their own."""
    tiles = {"tile_n": 32, "num_stages": 4, "ctas_per_sm": 2, "num_sms": 9, "merge": 1}

    def short(config: DecodeConfig, *_: object) -> DecodeConfig:
        return replace(config, few_rows=queries == 1, **tiles)

    monkeypatch.setattr(kvcache, "fitted", short)
    monkeypatch.setattr(kvcache, "parts_by_room", lambda *_: parts)
    PLANS.forget()
    case = {**SMALL, "seqlen_q": queries, "causal": True}
    with cutex.ops.simulated("sm_90a"):
        assert outcome(AttentionCase(**case), page_size=16) == ""
    PLANS.forget()


@pytest.mark.slow
def test_a_warp_combines_several_rows_where_units_fill_the_gpu(monkeypatch):
    """Which is said of 20 SMs here; some of the 64 rows have one part, others none."""
    monkeypatch.setattr(
        kvcache,
        "config_for",
        lambda *given: replace(config_for(*given), num_sms=20, combined=True, merge=0),
    )
    PLANS.forget()
    lengths = tuple(i * 37 % 400 for i in range(18))
    case = AttentionCase(
        **{**SMALL, "batch": 18, "heads_q": 60, "heads_kv": 1, "seqlen_k": 400, "used_k": lengths}
    )
    with cutex.ops.simulated("sm_90a"):
        assert outcome(case) == ""
    PLANS.forget()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "seed"), [("random", 1), ("random", 2), ("starved", 0), ("eager", 0)]
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_parts_are_merged_once_whoever_comes_last(order, seed, arch):
    case = AttentionCase(**{**SMALL, "used_k": (200, 190, 65), "sink": True})
    with cutex.ops.simulated(arch, order=order, seed=seed):
        assert outcome(case) == ""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_sink_has_the_name_s_aux_as_well(arch):
    case = AttentionCase(**{**SMALL, "sink": True})
    inputs = case.inputs()
    given = arguments(case, inputs)
    given["s_aux"] = given.pop("learnable_sink")
    with cutex.ops.simulated(arch):
        out, lse = cutex.flash_attn_with_kvcache(**given, return_lse=True)
    found = case.check(inputs, out, lse, poisoned=False)
    assert found.ok, found.message


def test_varlen_takes_pages():
    case = AttentionCase(**{**SMALL, "lengths_q": (2, 1, 0), "causal": True})
    inputs = case.inputs()
    given = arguments(case, inputs, page_size=64)
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q")
    q, k, v, ends = (given.pop(name) for name in names)
    used = given.pop("cache_seqlens")
    with cutex.ops.simulated("sm_90a"):
        out, lse = cutex.flash_attn_varlen_func(
            q, k, v, ends, seqused_k=used, return_lse=True, **given
        )
    found = case.check(inputs, out, lse, poisoned=False)
    assert found.ok, found.message


@pytest.mark.slow
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch():
    """With num_splits, whose borders do not depend on the other sequences."""
    case = AttentionCase(**{**SMALL, "heads_q": 2, "heads_kv": 1, "used_k": (200, 30, 65)})
    given = arguments(case, case.inputs())
    with cutex.ops.simulated("sm_90a"):
        whole = cutex.flash_attn_with_kvcache(**given, num_splits=3)
        for name in ("q", "k_cache", "v_cache", "cache_seqlens"):
            given[name] = given[name][:1]
        alone = cutex.flash_attn_with_kvcache(**given, num_splits=3)
    assert torch.equal(whole[:1], alone)

"""Arguments of flash_attn_with_kvcache: what does not fit is one sentence; configs that do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import cutex
from cutex.arch import ARCHS
from cutex.kernels.attention.decode.choose import CONFIGS, fitted
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops.attention import kvcache
from cutex.ops.attention.cache_plan import appending
from cutex.ops.plain import guard


def given(**more):
    q, cache = torch.zeros(2, 1, 4, 64).half(), torch.zeros(2, 32, 2, 64).half()
    lengths = torch.tensor([3, 32], dtype=torch.int32)
    return {"q": q, "k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": lengths, **more}


TABLE = torch.zeros(2, 1, dtype=torch.int32)
NEW = torch.zeros(2, 1, 2, 64).half()
TWICE = torch.zeros(2, 32, 2, 64).half()
with torch.inference_mode():
    INFERRED = torch.zeros(2, 32, 2, 64).half()
BAD = {
    "leftpad_k is 1: it is called cache_leftpad": {"leftpad_k": 1},
    "cache_leftpad must be a torch.Tensor, got int": {"cache_leftpad": 1},
    "rotary_cos and rotary_sin must be given together": {"rotary_cos": torch.zeros(4, 32)},
    "rotary_cos and rotary_sin need k and v": {
        "rotary_cos": torch.zeros(64, 32), "rotary_sin": torch.zeros(64, 32)
    },
    "k_descale is given, but k_cache has dtype torch.float16": {"k_descale": torch.ones(2, 2)},
    "q_descale is given, but k_cache is not": {"q_descale": torch.ones(2, 2)},
    "v_cache has dtype torch.float16, but k_cache has torch.float8": {
        "k_cache": torch.zeros(2, 32, 2, 64).to(torch.float8_e4m3fn)
    },
    "k_descale is torch.float32 (2,), it must be": {
        "k_cache": torch.zeros(2, 32, 2, 64).to(torch.float8_e4m3fn),
        "v_cache": torch.zeros(2, 32, 2, 64).to(torch.float8_e4m3fn), "k_descale": torch.ones(2),
    },
    "unexpected keyword argument 'pages'": {"pages": 1},
    "page_table and block_table are the same": {"page_table": TABLE, "block_table": TABLE + 0},
    "cache_seqlens must be from 0 to the 32 keys": {
        "cache_seqlens": torch.tensor([1, 33], dtype=torch.int32)
    },
    "room for with 1 new keys": {"k": NEW, "v": NEW},
    "the 32 keys that there is room for, got 33": {"cache_seqlens": 33},
    "the 32 keys that there is room for with 1 new keys, got 32": {
        "cache_seqlens": 32, "k": NEW, "v": NEW
    },
    "k_cache must be a torch.Tensor, got NoneType": {"k_cache": None, "cache_seqlens": 3},
    "cu_seqlens_q must be a torch.Tensor, got int": {"cu_seqlens_q": 3, "cache_seqlens": 3},
    "q has 0 dimensions, it must have 4": {"q": torch.ones(()).half(), "cache_seqlens": 3},
    "k and v must be given together": {"k": NEW},
    "k has shape (2, 1, 2, 64), it must be": {"k": NEW[:1].expand(2, 1, 2, 64)[:, :, :1], "v": NEW},
    "page_table[1] has page -1, k_cache has pages 0 to 1": {
        "page_table": torch.tensor([[0], [-1]], dtype=torch.int32)
    },
    "cache_batch_idx must be from 0 to 1": {
        "cache_batch_idx": torch.tensor([0, 2], dtype=torch.int32)
    },
    "cache_batch_idx must be from 0 to 1, got [0, 5]": {
        "page_table": TABLE, "cache_batch_idx": torch.tensor([0, 5], dtype=torch.int32)
    },
    "cache_leftpad must be from 0 to the keys that a sequence has, [3, 32]": {
        "cache_leftpad": torch.tensor([4, 0], dtype=torch.int32)
    },
    "k_cache and v_cache share memory: k and v cannot be appended": {
        "k_cache": TWICE, "v_cache": TWICE[:], "k": NEW, "v": NEW
    },
    "k shares memory with a cache": {
        "k_cache": TWICE, "k": TWICE[:, 3:4], "v": NEW,
        "cache_seqlens": torch.tensor([3, 3], dtype=torch.int32),
    },
    "v shares memory with a cache": {
        "k_cache": TWICE, "k": NEW, "v": TWICE[:, 5:6],
        "cache_seqlens": torch.tensor([3, 3], dtype=torch.int32),
    },
    "q shares memory with a cache": {
        "k_cache": TWICE, "k": NEW, "v": NEW, "q": TWICE[:, 3:5].view(2, 1, 4, 64),
        "cache_seqlens": torch.tensor([3, 3], dtype=torch.int32),
    },
    "k_cache is an inference tensor, which is not written to": {
        "k_cache": INFERRED, "k": NEW, "v": NEW,
        "cache_seqlens": torch.tensor([3, 3], dtype=torch.int32),
    },
    "cache_batch_idx has an entry twice, [1, 1]": {
        "cache_batch_idx": torch.tensor([1, 1], dtype=torch.int32), "k": NEW, "v": NEW,
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
    },
    "cu_seqlens_k_new is given, but no k and v": {
        "cu_seqlens_k_new": torch.zeros(3, dtype=torch.int32)
    },
    "cu_seqlens_k_new must rise from 0 to at most the 2 rows": {
        "k": NEW[:, 0], "v": NEW[:, 0],
        "cu_seqlens_k_new": torch.tensor([0, 1, 3], dtype=torch.int32),
    },
    "q has dtype torch.float32: rotary_cos": {
        "q": torch.zeros(2, 1, 4, 64), "k": NEW, "v": NEW,
        "rotary_cos": torch.zeros(64, 32), "rotary_sin": torch.zeros(64, 32),
    },
    "q must be a torch.Tensor, got list": {
        "q": [1], "k": NEW, "v": NEW,
        "rotary_cos": torch.zeros(64, 32), "rotary_sin": torch.zeros(64, 32),
    },
    "rotary_cos: q of shape () must be of as many sequences": {
        "q": torch.zeros(()).half(), "k": NEW, "v": NEW,
        "rotary_cos": torch.zeros(64, 32), "rotary_sin": torch.zeros(64, 32),
    },
    "k is on meta, but q is on cpu": {
        "k": NEW.to("meta"), "v": NEW,
        "rotary_cos": torch.zeros(64, 32), "rotary_sin": torch.zeros(64, 32),
    },
    "cache_seqlens must be given with page_table": {"page_table": TABLE, "cache_seqlens": None},
    "cache_seqlens has dtype torch.int64": {"cache_seqlens": torch.tensor([1, 2])},
    "k_cache has batch size 1, but q has 2": {
        "k_cache": torch.zeros(1, 32, 2, 64).half(), "v_cache": torch.zeros(1, 32, 2, 64).half()
    },
    "k_cache has dtype torch.float32": {"k_cache": torch.zeros(2, 32, 2, 64)},
    "k_cache cannot be read in place: its head dim has stride": {
        "k_cache": torch.zeros(2, 32, 64, 2).half().mT
    },
    "num_splits=-1: must be from 0 to": {"num_splits": -1},
    "causal must be True or False": {"causal": 2},
    "window_size=(None, -1): a band off the diagonal": {"window_size": (None, -1)},
    "window_size=(-5, 3): a band off the diagonal": {"window_size": (-5, 3)},
    "has no gradient": {"q": torch.zeros(2, 1, 4, 64).half().requires_grad_()},
    "no multiple of the 2 of k_cache": {"q": torch.zeros(2, 1, 3, 64).half()},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named_in_one_sentence(message):
    with (
        cutex.ops.simulated("sm_90a"),
        pytest.raises((TypeError, ValueError)) as error,
    ):
        cutex.flash_attn_with_kvcache(**given(**BAD[message]))
    said = str(error.value)
    assert message.replace("k has shape (2, 1, 2, 64)", "k has shape (2, 1, 1, 64)") in said
    assert "\n" not in said


@pytest.mark.parametrize("alike", [False, True])
def test_a_plan_appends_only_where_nothing_is_read_and_counts_its_writes(alike):
    """A later call has other tensors than the one that was checked; `alike`, of the same sizes."""
    ran = []
    q, k, v = torch.zeros(2, 1, 4, 64), torch.zeros(2, 1, 2, 64), torch.zeros(2, 1, 2, 64)
    both = torch.zeros(2, 2, 32, 2, 64)
    like = [q, *torch.zeros_like(both), k, v] if alike else None
    run = appending(lambda *tensors: ran.append(tensors), like)
    run(q, both[0], both[1], k, v)
    assert len(ran) == 1 and both._version == 2
    for tensors in (
        (q, both[0], both[0], k, v),
        (q, both[0], both[0, :], k, v),
        (q, both[0], both[1], both[1, :, 3:4], v),
        (q, both[0], both[1], k, both[0, :, 31:]),
        (both[1, :, 2:4].view(2, 1, 4, 64), both[0], both[1], k, v),
    ):
        with pytest.raises(ValueError, match="shares memory"):
            run(*tensors)
    assert len(ran) == 1 and both._version == 2
    in_turn = torch.zeros(2, 32, 2, 2, 64)  # K and V of a head one after the other
    run(q, in_turn[:, :, :, 0], in_turn[:, :, :, 1], k, v)
    assert len(ran) == 2 and in_turn._version == 2
    saved = both[0].clone().requires_grad_(False)
    product = q.requires_grad_().sum() * saved
    run(q.detach(), saved, both[1], k, v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_plan_writes_to_no_inference_tensor_outside_of_inference_mode():
    q, k, v = torch.zeros(2, 1, 4, 64), torch.zeros(2, 1, 2, 64), torch.zeros(2, 1, 2, 64)
    caches = torch.zeros(2, 2, 32, 2, 64)
    takes = guard([q, caches[0], caches[1], k, v])
    appending(lambda *tensors: None, [q, *caches, k, v])(q, caches[0], caches[1], k, v)
    with torch.inference_mode():
        of_mode = torch.zeros_like(caches)
        # what a plan that asks no more relies on: its guard takes them nowhere
        assert not takes(q, of_mode[0], of_mode[1], k, v)
        run = appending(lambda *tensors: None, [q, *of_mode, k, v])
        run(q, of_mode[0], of_mode[1], k, v)
    assert not takes(q, of_mode[0], of_mode[1], k, v) and takes(q, caches[0], caches[1], k, v)
    run(q, caches[0], caches[1], k, v)
    with pytest.raises(ValueError, match="k_cache is an inference tensor"):
        run(q, of_mode[0], of_mode[1], k, v)


def test_parts_of_more_numbers_than_a_kernel_counts_are_refused():
    # NOTE: on a GPU calls after one that was allocated and refused had the same memory, too large
    q, cache = torch.zeros(2100, 1, 1, 64).half(), torch.zeros(2100, 1, 1, 64).half()
    with cutex.ops.simulated("sm_90a"), pytest.raises(ValueError) as error:
        cutex.flash_attn_with_kvcache(q, cache, cache, num_splits=256)
    assert "num_splits=256: so many parts of 2100 blocks of queries take" in str(error.value)
    latent = torch.zeros(300, 1, 1, 576).half()
    lengths = torch.ones(300, dtype=torch.int32)
    with cutex.ops.simulated("sm_90a"), pytest.raises(ValueError) as error:
        cutex.flash_mla_with_kvcache(latent, latent, None, lengths, num_splits=256)
    assert "num_splits=256: so many parts of 300 blocks of queries take" in str(error.value)


def test_without_a_gpu_it_says_where_it_runs():
    with pytest.raises(ValueError, match="q is on cpu: flash_attn_with_kvcache has kernels for"):
        cutex.flash_attn_with_kvcache(**given())


def test_a_slot_is_one_warps_where_warps_have_other_keys_each():
    """A warp could else take the fill before its own for it: the phase has the same parity."""
    few = {"one_block": True, "few_rows": True, "head_dim": 64, "head_dim_v": 64}
    assert DecodeConfig(**few, num_stages=8).why_not() is None
    assert "num_stages=6: with few_rows a multiple of 4" in str(
        DecodeConfig(**few, num_stages=6).why_not()
    )


@pytest.mark.parametrize(
    "other",
    [
        {"appended": False}, {"varlen_new": True}, {"varlen_q": True}, {"one_block": False},
        {"packed": False}, {"leftpad": True}, {"page_size": 12}, {"window": (True, False)},
    ],
    ids=str,
)  # fmt: skip
def test_a_warp_appends_only_rows_that_no_other_loads(other):
    appending = DecodeConfig(appended=True, appends=True, used_k=True, one_block=True)
    assert appending.why_not() is None
    assert "appends=True: takes" in str(replace(appending, **other).why_not())


def test_roles_have_no_more_registers_than_an_sm():
    """setmaxnreg would wait for ever, on a card."""
    of_8_bits = DecodeConfig(fp8=True, used_k=True, tile_n=64, ctas_per_sm=2, head_dim=64)
    of_8_bits = replace(of_8_bits, head_dim_v=64)
    assert of_8_bits.widens and of_8_bits.why_not() is None
    assert of_8_bits.registers_of_sm == 65536
    assert "ctas_per_sm=3: roles want" in str(replace(of_8_bits, ctas_per_sm=3).why_not())


def test_every_choice_fits():
    """Whatever is computed, for few and many units, rows and keys, on each arch."""
    asked = product(CONFIGS.items(), HEAD_DIMS, (0, 1, 16), (False, True), (False, True))
    for (arch, kind), dims, page, fp8, leftpad in asked:
        how = {"head_dim": dims[0], "head_dim_v": dims[1], "page_size": page, "fp8": fp8}
        config = kind(**how, leftpad=leftpad, used_k=True, one_block=True)
        if fp8 and kind is not DecodeConfig:
            continue  # caches of e4m3 have a kernel on Hopper only
        if config.single_rows and any(d * config.cache_element % 128 for d in dims):
            continue  # single rows are loaded by a kernel of larger head dims
        for rows, units, room in product((4, 20, 40), (20, 5000), (500, 4000, 100000)):
            found = fitted(config, room, units, rows)
            assert found.why_not(arch=ARCHS[arch]) is None, found


@pytest.mark.parametrize(
    ("rows", "paged", "least"), [(16, 0, 2), (17, 0, 5), (144, 64, 5), (144, 1, 1)]
)
def test_parts_of_many_rows_at_head_dim_256_are_not_short(rows, paged, least):
    """Of single rows nothing was timed."""
    config = DecodeConfig(head_dim=256, head_dim_v=256, page_size=paged)
    assert fitted(config, 5000, 3, rows).least == least


@pytest.mark.parametrize(
    ("config", "rows", "two"),
    [
        (DecodeConfig(), 65, True),
        (DecodeConfig(head_dim=64, head_dim_v=64), 1024, True),
        (DecodeConfig(), 64, False),  # whose keys memory brings too slowly
        (DecodeConfig(fp8=True), 1024, False),
        (DecodeConfig(page_size=1), 1024, True),
        (DecodeConfig(head_dim=192, head_dim_v=128), 1024, False),
    ],
)
def test_two_ctas_of_an_sm_have_many_rows_of_long_caches(config, rows, two):
    found = fitted(config, 20000, 128, rows)
    assert (found.ctas_per_sm == 2 and found.tile_n == 64) == two
    assert found.why_not() is None
    assert fitted(config, 1000, 128, rows).ctas_per_sm == 1  # shorter ones were not timed


def test_many_short_units_of_e4m3_are_whole():
    for dims, room in (((64, 64), 8192), ((128, 128), 4096)):
        how = {"head_dim": dims[0], "head_dim_v": dims[1], "used_k": True, "one_block": True}
        narrow = DecodeConfig(**how, fp8=True)
        many, few = fitted(narrow, room, 133, 16), fitted(narrow, room, 132, 16)
        assert (many.ctas_per_sm, many.overlaps, few.ctas_per_sm) == (2, False, 1)
        assert fitted(narrow, room, 264, 16).overlaps
        long = fitted(narrow, room + 1, 133, 16)
        assert long == replace(few, most_by_room=narrow.most_by_room) != few


def test_two_groups_of_rows_are_of_long_sequences_in_e4m3():
    how = {"head_dim": 64, "head_dim_v": 64, "used_k": True, "one_block": True}
    narrow, wide = (DecodeConfig(**how, fp8=fp8) for fp8 in (True, False))
    for given in ((narrow, 2048, 512, 17), (narrow, 65536, 8, 32)):
        assert fitted(*given).row_groups == 2
    for given in ((narrow, 2047, 512, 32), (narrow, 4096, 8, 33), (narrow, 4096, 8, 16),
                  (wide, 4096, 8, 32)):  # fmt: skip
        assert fitted(*given).row_groups == 1
    groups = replace(fitted(narrow, 4096, 8, 32), row_groups=3)
    assert "row_groups=3: up to 2 with few_rows, else 1" in str(groups.why_not())


def test_many_units_of_few_rows_are_whole():
    """Those that were timed: more than SMs, of no pages, of up to 128 blocks."""
    how = {"head_dim": 128, "head_dim_v": 128, "used_k": True, "one_block": True}
    config, paged = (DecodeConfig(**how, page_size=page) for page in (0, 16))
    assert fitted(config, 4096, 133, 8).most_whole == 128
    others = (config, 4097, 133, 8), (config, 4096, 132, 8), (config, 900, 133, 17)
    for given in (*others, (paged, 4096, 133, 8)):
        assert fitted(*given).most_whole < 128
    for units, overlaps in ((133, False), (263, False), (264, True), (600, True)):
        assert fitted(config, 888, units, 8).overlaps == overlaps
    for room, parts in ((4000, 1), (4100, 0)):
        call = SimpleNamespace(num_splits=0, batch=140, heads=(8, 1), rows=8)
        assert kvcache.parts_by_room(call, fitted(config, room, 140, 8), room) == parts

"""Attention to caches by the Hopper kernel, simulated, against float64: contiguous and in pages,
with poison behind the lengths; the split of keys over CTAs; arguments that do not fit."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from kvcache_calls import arguments, in_fp8, outcome

import cutex
from cutex.arch import ARCHS
from cutex.compile import compile
from cutex.kernels.attention.decode import LADDERS
from cutex.kernels.attention.decode.choose import CONFIGS, fitted
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.shared import Walk
from cutex.kernels.attention.decode.splits import NEVER, EntrySpan, EvenParts, Splits, weight
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops.attention import kvcache, prefill
from cutex.ops.attention.cache_plan import appending
from cutex.ops.attention.kvcache import PLANS, alike_rooms, config_for
from cutex.ops.attention.kvcache_call import KVCacheCall
from cutex.ops.attention.rotated import rotated
from cutex.problem.attention.case import AttentionCase
from cutex.problem.attention.decode import DecodeProblem
from cutex.sim import simulate

SMALL = {"batch": 3, "heads_q": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 64,
         "seqlen_q": 1, "seqlen_k": 200, "used_k": (200, 0, 65)}  # fmt: skip
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
    """Two CTAs have many parts, or units, each, of which every warp begins with another block."""

    def few(*given: object) -> DecodeConfig:
        tiles = {"tile_n": 32, "num_stages": 4, "num_sms": 2}
        return replace(config_for(*given), few_rows=True, by_room=whole, whole=whole, **tiles)

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


@pytest.mark.parametrize(
    ("lengths", "teams", "size"),
    [
        ([21] * 26, 33, NEVER),  # 104 units of 2562 keys, teams of four CTAs
        ([6] * 76, 132, NEVER),
        ([8], 16, 1),  # one block each
        ([69] * 2, 33, 5),
        ([99] * 5, 33, 17),  # six parts each
        ([40, *[4] * 4], 33, 2),  # more parts of the long one, by all lengths
        ([300, *[10] * 16], 33, 0),  # a part would be twice a share
        ([101] * 28, 66, 0),  # whole, few CTAs would read for long; two parts each are longer
        ([2, *[1] * 64], 66, NEVER),
    ],
)
def test_units_are_cut_where_each_part_has_a_team_to_itself(lengths, teams, size):
    walk = Walk(DecodeConfig(), None, None, None)
    total, units = sum(lengths), len(lengths)
    share = Splits.quota_of(total + units, teams, 1)
    assert walk.best_alone(total, max(lengths), units, teams, share) == size


def test_short_units_stay_whole_in_shares():
    walk = Walk(DecodeConfig(), None, SimpleNamespace(num_splits=0), None)
    assert [walk.uncut(5, longest, 1, False) for longest in (3, 4)] == [(5, 1), (5, 0)]


def test_parts_by_room_are_all_blocks_of_each_unit():
    r = random.Random(2)
    for _ in range(200):
        heads, parts, merge = r.randint(1, 9), r.choice((1, 1, 2, 3, 8)), r.choice((0, 2, 12))
        lengths = [r.randint(1, 20) for _ in range(r.randint(1, 9))]
        team = Splits.team_of(heads, r.choice((1, 4, 8)))
        teams, found, slots = r.randint(1, 40), {}, []
        for cta in range(teams * team):
            even = EvenParts(heads, cta, team, teams, parts, merge)
            at = even.begin
            while at < len(lengths) * (heads // team) * parts:
                blocks = lengths[even.entry(at)]
                piece = even.whole(at) if parts == 1 else even.piece(at, blocks)
                if piece.end > piece.first:
                    mine = piece.part, piece.first, min(piece.end, blocks), piece.parts
                    found.setdefault((piece.entry, piece.head), []).append(mine)
                    slots += [piece.slot_of(piece.part)] * (parts > 1)
                at = piece.after
        assert len(set(slots)) == len(slots)
        for key in ((entry, head) for entry in range(len(lengths)) for head in range(heads)):
            of_unit = sorted(found[key])
            assert [x[0] for x in of_unit] == list(range(of_unit[0][3]))
            assert len(of_unit) == 1 or lengths[key[0]] > merge
            ends = [0, *(x[2] for x in of_unit)]
            assert [x[1] for x in of_unit] == ends[:-1] and ends[-1] == lengths[key[0]]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((166, 1, 215, 32, 8, 64), 1),
        ((76, 1, 739, 8, 1, 64), 1),
        ((65, 4, 208, 32, 2, 128), 1),
        ((2, 1, 4379, 32, 8, 64), 8),
        ((1, 1, 1024, 32, 8, 128), 8),
        ((30, 1, 900, 8, 1, 128), 4),
        ((200, 1, 900, 8, 1, 128), 0),  # long, and more units than SMs
        ((1, 1, 65536, 32, 8, 128), 0),
    ],
)
def test_units_of_little_room_are_cut_by_it(sizes, parts):
    batch, tokens, room, heads, heads_kv, d = sizes

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    k = empty(batch, 1, heads_kv, d).expand(-1, room, -1, -1)
    q, lengths = empty(batch, tokens, heads, d), empty(batch, dtype=torch.int32)
    call = KVCacheCall(
        q, k, k, None, lengths, None, *[None] * 8, None, None, tokens > 1, (-1, -1), 0.0, 0
    )
    with cutex.ops.simulated("sm_90a"):
        config = config_for(call, False)
        assert kvcache.parts_by_room(call, config, room) == parts
        assert (config.by_room, config.whole) == (parts > 0, parts == 1)
        assert not config_for(call._replace(num_splits=3), False).by_room


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


CHUNKS = {
    "pages": ({"seqlen_q": 130, "seqlen_k": 300, "used_k": (300, 171, 0)}, {"page_size": 16}),
    "packed queries": ({"lengths_q": (140, 0, 33), "seqlen_k": 300, "used_k": (300, 0, 65)},
                       {"page_size": 64}),
    "odd pages, window": ({"seqlen_q": 100, "heads_q": 8, "sink": True, "window": (90, None)},
                          {"page_size": 24}),
    "no pages": ({"seqlen_q": 70, "head_dim": 128, "head_dim_v": 128}, {}),
    "all of a cache": ({"seqlen_q": 70, "used_k": None, "causal": False, "softcap": 5.0}, {}),
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
    for other in (
        call(4, 8, 32, 64), call(1, 512, 8, 64), call(4, 512, 32, 4),
        chunk._replace(num_splits=1), chunk._replace(k=chunk.q, v=chunk.q),
    ):  # fmt: skip
        assert not prefill.is_of_many_queries(other, "sm_90a")
    assert not prefill.is_of_many_queries(chunk, "sm_100a")


# ---- the split


def shares(
    lengths: list[int],
    heads: int,
    ctas: int,
    start: int,
    least: int,
    num_splits: int,
    team: int = 1,
    size: int = 0,
):
    """The parts of each unit, by (entry, head): (first, end, part, parts, slot); and the blocks of
    the CTA that has the most. With a `size` of parts a team has one."""
    total = sum(-(-n // size) if size else weight(n, start) for n in lengths) * heads // team
    quota = 1 if size else Splits.quota_of(total, ctas // team, least)
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    most = 0
    for cta in range(ctas // team * team):
        splits = Splits(heads, quota, start, num_splits, cta, team, size)
        at, entry, begin, blocks = splits.begin, 0, 0, 0
        while at < min(splits.end, total):
            while begin + splits.units(lengths[entry]) <= at:
                begin += splits.units(lengths[entry])
                entry += 1
            span = EntrySpan(entry, begin, lengths[entry])
            piece = splits.piece_alone(at, span) if size else splits.piece(at, span)
            assert piece.after > at
            at = piece.after
            if piece.end > piece.first:
                slot = piece.slot_of(piece.part) if piece.parts > 1 else -1
                part = piece.first, piece.end, piece.part, piece.parts, slot
                found.setdefault((piece.entry, piece.head), []).append(part)
                blocks += piece.end - piece.first
        most = max(most, blocks)
    return found, most


def test_every_block_of_keys_is_in_one_part():
    r = random.Random(0)
    for _ in range(400):
        lengths = [r.choice((0, 1, 2, r.randint(0, 50))) for _ in range(r.randint(1, 6))]
        heads, start, least = r.randint(1, 12), r.randint(0, 3), r.randint(1, 4)
        team = Splits.team_of(heads, r.choice((1, 4, 8)))
        ctas = r.randint(team, 40)
        num_splits = r.choice((0, 0, 1, 2, 3, 7))
        size, units, teams = 0, len(lengths) * heads // team, ctas // team
        if num_splits == 0 and units <= teams and r.random() < 0.5:
            lengths = [max(x, 1) for x in lengths]  # as Walk.length has them
            total = sum(lengths) * heads // team
            size = max(Splits.size_alone(total, max(lengths), units, teams), least)
            assert sum(-(-x // size) for x in lengths) * heads // team <= teams
        found, most = shares(lengths, heads, ctas, start, least, num_splits, team, size)
        assert not size or most <= size
        slots = [x[4] for parts in found.values() for x in parts if x[4] >= 0]
        assert len(set(slots)) == len(slots)
        assert max(slots, default=0) < Splits.slots(ctas, len(lengths) * heads, num_splits)
        for entry, length in enumerate(lengths):
            for head in range(heads):
                parts = sorted(found.pop((entry, head), []))
                assert [x[2] for x in parts] == list(range(len(parts)))
                assert {x[3] for x in parts} <= {len(parts)}
                ends = [0, *(x[1] for x in parts)]
                assert [x[0] for x in parts] == ends[:-1] and ends[-1] == length
        assert not found


def test_a_team_reads_neighbouring_heads_at_the_same_time():
    assert [Splits.team_of(n, 8) for n in (1, 2, 5, 8, 12, 13, 40, 64)] == [1, 2, 5, 8, 6, 1, 8, 8]
    splits = [Splits(16, 10, 1, 0, cta, 8) for cta in range(16)]
    pieces = [x.piece(x.begin, EntrySpan(0, 0, 30)) for x in splits]
    assert [x.head for x in pieces] == [*range(8), *range(8)]
    assert [(x.first, x.end) for x in pieces] == [(0, 9)] * 8 + [(9, 19)] * 8


def test_ctas_have_equal_shares_of_ragged_lengths():
    r = random.Random(1)
    lengths = [round(2 ** r.uniform(1, 11)) for _ in range(64)]
    for team in (1, 8):
        _, most = shares(lengths, 8, 264, 1, 1, 0, team)
        assert most <= 1.01 * sum(lengths) * 8 / 264 + 1


# ---- arguments


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
    run = appending(lambda *tensors: ran.append(tensors), 3, like)
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
        for rows, units, room in product((4, 40), (20, 5000), (500, 4000, 100000)):
            found = fitted(config, room, units, rows)
            assert found.why_not(arch=ARCHS[arch]) is None, found


# ---- the ladder

DIMS = {"head_dim": 64, "head_dim_v": 64}


@pytest.mark.slow
@pytest.mark.parametrize("stage", LADDERS.rungs, ids=lambda s: f"{s.arch} {s.number}")
def test_a_stage_takes_ragged_pages(stage):
    sizes = {"batch": 3, "seqlen_q": 2, "seqlen_k": 300, "heads_q": 4, "heads_kv": 2}
    problem = DecodeProblem(**sizes, **DIMS, causal=True, page_size=16, ragged=True)
    assert len({*problem.lengths}) == 3
    inputs, outputs = problem.inputs(), problem.outputs()
    fitted = stage.fitted(problem)
    kernel = fitted.kernel()
    compiled = compile(kernel, problem.dtype, stage.arch)
    names = [a.name for a in kernel.operands(problem.dtype)]
    problem.launcher(partial(simulate, compiled), names)(*inputs, *outputs)
    found = problem.check(*inputs, *outputs)
    assert found.ok, found.message


def test_the_bytes_of_ragged_lengths_are_those_of_their_keys():
    sizes = {"batch": 3, "seqlen_q": 1, "seqlen_k": 640, "heads_q": 4, "heads_kv": 2}
    even, ragged = (DecodeProblem(**sizes, **DIMS, ragged=x) for x in (False, True))
    assert even.bytes - ragged.bytes == 2 * 2 * 128 * (3 * 640 - sum(ragged.lengths))
    assert ragged.flops == 2 * sum(ragged.lengths) * 4 * 128
    assert even.flops == 2 * 3 * 640 * 4 * 128
    config = DecodeConfig(head_dim=64, head_dim_v=64, tile_n=128)
    assert config.flops(even) == 2 * (3 * 5) * 64 * 128 * 128 * 2  # tiles are whole: 64 rows for 2
    assert replace(config, packed=False).flops(even) == 2 * config.flops(even)

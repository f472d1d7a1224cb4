"""How the keys of caches are split over CTAs: every block of keys in one part, equal shares."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cutex
from cutex.kernels.attention.decode.choose import comes_in_waves, fitted
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.shared import Walk
from cutex.kernels.attention.decode.splits import NEVER, EntrySpan, EvenParts, Splits, weight
from cutex.ops.attention import kvcache
from cutex.ops.attention.kvcache import config_for
from cutex.ops.attention.kvcache_call import KVCacheCall


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
        ((200, 1, 900, 8, 1, 128), 1),  # few rows, and more units than SMs
        ((200, 1, 9000, 8, 1, 128), 0),  # longer ones lose by it
        ((2, 1, 65536, 32, 8, 128), 0),
        ((1, 1, 65536, 32, 8, 128), 16),  # which are equal, whatever its length
        ((1, 1, 65536, 24, 24, 128), 0),  # 5 for each of 3 heads' teams, and one team idle of 16
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


@pytest.mark.parametrize(
    ("units", "waves"), [(264, False), (265, True), (384, True), (660, True), (661, False)]
)
def test_whole_units_of_few_waves_have_a_cta_each(units, waves):
    config = fitted(DecodeConfig(head_dim=128, head_dim_v=128, one_block=True), 4096, units, 1)
    assert (config.few_rows, config.ctas) == (True, 264)
    assert comes_in_waves(config, units) == waves


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


def test_shares_are_the_same_where_no_number_of_parts_is_given():
    """A kernel for num_splits=0 computes only whether units are whole, as with num_splits=1, or cut
    where shares end."""
    r = random.Random(4)
    for _ in range(400):
        heads, start = r.randint(1, 6), r.randint(0, 3)
        span = EntrySpan(r.randint(0, 9), r.randint(0, 50), r.randint(1, 30))
        quota, ctas = r.randint(1, 40), r.randint(1, 60)
        for whole in (False, True):
            general = Splits(heads, quota, start, int(whole), r.randrange(ctas))
            special = replace(general, num_splits=0, whole=whole)
            length = weight(span.blocks, start)
            for at in range(max(general.begin, span.begin), span.begin + heads * length):
                found, expected = special.piece(at, span), general.piece(at, span)
                assert (found.end > found.first) == (expected.end > expected.first)
                if found.end > found.first:
                    assert found[:5] == expected[:5] and found.parts == expected.parts
                    assert whole or found == expected


@pytest.mark.parametrize("ulp", [-1, 0, 1])
def test_two_reciprocals_give_the_quotient(ulp):
    """Whatever ulp the hardware's reciprocal is off by: splits.quotient, step by step."""
    r = np.random.default_rng(5)
    b = np.concatenate([np.arange(1, 300), (2 ** r.uniform(0, 31, 60000)).astype(np.int64)])
    drawn = (2 ** r.uniform(0, 31, b.size)).astype(np.int64)
    near = np.minimum(drawn // b * b + r.integers(-1, 2, b.size), 2**31 - 1)
    most = np.full_like(b, 2**31 - 1)
    for a in (drawn, np.maximum(near, 0), np.zeros_like(b), most):
        inverse = (np.float32(1) / b.astype(np.float32)).astype(np.float32)
        inverse = (inverse.view(np.int32) + ulp).view(np.float32)
        found = np.minimum((a.astype(np.float32) * inverse).astype(np.int64), 2**31 - 1)
        found += ((a - found * b).astype(np.float32) * inverse).astype(np.int64)
        left = a - found * b
        found += np.where(left >= b, 1, np.where(left < 0, -1, 0))
        assert np.array_equal(found, a // b)


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


@pytest.mark.parametrize(
    ("head_dim", "room", "units", "whole"),
    [
        (64, 2048, 800, True),  # three waves of 264 CTAs and a bit
        (64, 2048, 300, False),  # the second of two waves would be a few
        (64, 2112, 800, False),
        (128, 2048, 320, True),
        (128, 2048, 144, False),
        (128, 2048, 100, True),
        (128, 2048, 90, False),
    ],
)
def test_units_of_e4m3_are_whole_where_they_fill_the_gpu(head_dim, room, units, whole):
    config = DecodeConfig(head_dim=head_dim, head_dim_v=head_dim, fp8=True, one_block=True)
    found = fitted(config, room, units, 64)
    assert found.most_whole * found.tile_n == (2048 if whole else 0)


@pytest.mark.parametrize(
    ("batch", "fp8", "by_room"), [(1, True, 16), (2, True, 8), (3, True, 0), (1, False, 0)]
)
def test_few_sequences_of_e4m3_are_cut_by_their_room(batch, fp8, by_room):
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q, used = torch.empty(batch, 8, 64, 128).bfloat16(), torch.empty(batch, dtype=torch.int32)
    cache = torch.empty(batch, 65536, 8, 128, dtype=dtype, device="meta")
    scales = [torch.empty(batch, 8)] * 2 if fp8 else [None] * 2
    others = None, None, None, None, None, *scales, None, None, None, None
    call = KVCacheCall(q, cache, cache, None, used, *others, True, (None, None), 0.0, 0)
    config = config_for(call, False)
    assert (config.by_room, kvcache.parts_by_room(call, config, call.room)) == (
        by_room > 0,
        by_room,
    )

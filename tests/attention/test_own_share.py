"""The shares that CTAs have of tiles that are cut along their keys, where the lengths of sequences
are on the card."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from cutlass import Int32, cute

from cutex.device.attention.block_info import ordered
from cutex.device.attention.merged_rows import slots_after
from cutex.device.attention.own_share import OwnShare, Tiles
from cutex.device.attention.split_row import (
    MOST_PARTS,
    SECOND,
    SHORTEST,
    START,
    PartPlace,
    Row,
    TileSpan,
    part_of,
    size_alone,
    turn_of,
)  # fmt: skip
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.signature import KernelArgs, Sizes
from cutex.sim import simulate

CTAS, HEADS, PACK, TILE_M, TILE_N, MOST = 31, 4, 2, 128, 64, 24
CONFIG = Sm90ForwardConfig(
    head_dim=64, head_dim_v=64, tile_m=TILE_M, tile_n=TILE_N, pack=PACK, varlen_q=True, used_k=True,
    num_ctas=CTAS, split=True, dispatch="one",
)  # fmt: skip


@cute.kernel
def find(mFound: cute.Tensor, mEnds: cute.Tensor, mUsed: cute.Tensor):
    args = KernelArgs(cu_seqlens_q=mEnds, seqused_k=mUsed)
    sizes = Sizes(*(Int32(x) for x in (cute.size(mUsed), HEADS, HEADS // PACK, 0, 0, 0)))
    cta, _, _ = cute.arch.block_idx()
    share = OwnShare.find(Tiles(CONFIG, sizes, args, None))
    at, number = Int32(share.begin), Int32(0)
    while at < share.end:
        work, piece, place = share.piece(at)
        at = piece.after
        found = work.m, work.head, work.batch, piece.begin, piece.end, piece.weight, *place
        for i, x in enumerate(found):
            mFound[cta, number, i] = x
        number += 1


@cute.jit
def find_all(mFound: cute.Tensor, mEnds: cute.Tensor, mUsed: cute.Tensor):
    find(mFound, mEnds, mUsed).launch(grid=[CTAS, 1, 1], block=[32, 1, 1])


def lengths(r: random.Random) -> list[tuple[int, int]]:
    """Queries and keys of sequences."""
    left, found = r.choice((3, 7, 15, 40)), []
    for _ in range(r.choice((1, 2, 5, 40))):
        queries = r.choice((0, 1, 64, 65, 100)) if left > 0 else 0
        left -= -(-queries * PACK // TILE_M)
        found.append((queries, r.choice((0, 1, 64, 700, r.randint(1, 20000)))))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_each_tile_is_cut_into_pieces_of_neighbouring_ctas(seed):
    given = lengths(random.Random(seed))
    ends = torch.tensor([0, *(q for q, _ in given)]).cumsum(0).int()
    used, found = torch.tensor([k for _, k in given]).int(), torch.full((CTAS, MOST, 9), -1).int()
    simulate(find_all, found, ends, used, arch="sm_90a")
    blocks = {
        (m, head, b): -(-k // TILE_N)
        for b, (q, k) in enumerate(given)
        for head in range(HEADS // PACK)
        for m in range(-(-q * PACK // TILE_M))
    }
    pieces: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    shares, slots = [0] * CTAS, set()
    for cta in range(CTAS):
        for *tile, begin, end, weight, first, number, parts in found[cta].tolist():
            if parts < 0:
                continue
            known = pieces.setdefault(tuple(tile), [])
            assert (first, number) == (cta - len(known), len(known)) and begin < end <= weight
            part = part_of(ordered(0, blocks[tuple(tile)], 0, 0), begin, end, weight)
            known.append((part.first, part.first + part.count, parts))
            shares[cta] += part.count
            if parts > 1:
                slots.add(PartPlace(first, number, parts).slot + int(max(2 * number - 1, 0)))
    assert pieces.keys() == blocks.keys()
    for tile, of_tile in pieces.items():
        assert of_tile[0][0] == 0 and of_tile[-1][1] == blocks[tile]
        assert all(x[1] == y[0] for x, y in pairwise(of_tile))
        assert all(x[2] == len(of_tile) for x in of_tile)
    assert len(slots) == sum(len(x) for x in pieces.values() if len(x) > 1)
    assert all(0 <= x < 2 * CTAS for x in slots)
    mean = sum(blocks.values()) / CTAS
    most = mean + SECOND + 2 + START * len(blocks) / CTAS
    assert max(shares) <= max(SHORTEST + START, most, max(blocks.values(), default=0) / MOST_PARTS)


def test_rows_of_tiles_are_cut_into_equal_shares():
    r = random.Random(0)
    for _ in range(200):
        spans, length = [], 0
        for _ in range(r.randint(1, 6)):
            spans.append(TileSpan(length, r.randint(0, 5), r.randint(1, 40)))
            length += spans[-1].tiles * spans[-1].weight
        if not length:
            continue
        row, cover = Row.of(length, min(r.choice((1, 3, 7, 31)), length)), set()
        for share in range(row.shares):
            at, end = row.cut(share), row.cut(share + 1)
            assert end - at in (length // row.shares, -(-length // row.shares))
            while at < end:
                assert row.holder(at) == share
                span = next(x for x in spans if x.begin <= at < x.begin + x.tiles * x.weight)
                piece = span.piece(at, end)
                cover |= {(span, piece.tile, i) for i in range(piece.begin, piece.end)}
                at = piece.after
        assert len(cover) == length


def test_equal_parts_suffice_for_all_tiles():
    r = random.Random(1)
    for _ in range(500):
        blocks = [r.randint(0, 300) for _ in range(r.randint(1, 40))]
        ctas = r.choice((7, 31, 132))
        size = size_alone(sum(blocks), max(blocks), len(blocks), ctas)
        if len(blocks) > ctas:
            assert size == 0
        else:
            assert sum(max(-(-x // max(size, 1)), 1) for x in blocks) <= ctas


@pytest.mark.parametrize("ctas", [3, 132])
def test_neighbouring_ctas_have_neighbouring_tiles(ctas):
    for tiles in range(1, 3 * ctas + 2):
        turns = [turn_of(place, tiles, ctas) for place in range(tiles)]
        assert sorted(turns) == list(range(tiles))
        each = max((tiles + ctas // 2) // ctas, 1)
        apart = {b - a for a, b in zip(turns, turns[each:], strict=False)}
        assert apart <= {1}


def test_a_cta_has_two_slots_for_what_it_leaves():
    for parts in (2, 5, 31):
        slots = [PartPlace(4, i, parts).slot + int(slots_after(Int32(i))) for i in range(parts)]
        assert slots == [9, *(2 * (4 + i) for i in range(1, parts))]

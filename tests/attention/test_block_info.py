"""BlockInfo of every block, against a boolean matrix of queries and the keys that they see."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest

from cutex.device.attention.block_info import Band, BlockInfo, Blocks

LENGTHS = range(41)
TILES = ((8, 4), (8, 8), (8, 16), (16, 8), (16, 16), (32, 8))
PACKS = (1, 2, 4, 8)


def bands(tile: int) -> list[Band]:
    """All pairs of a left and a right window around the tile's size, and none; bands that lie off
    the diagonal, on either side."""
    windows = (None, 0, 1, tile - 1, tile, tile + 1, 100)
    off = (-1, -tile, -tile - 3, -100)
    sides = [*itertools.product(windows, windows), *itertools.product(off, (None, tile + 9))]
    sides += [(right, left) for left, right in itertools.product(off, (None, tile + 9))]
    sides = [(a, b) for a, b in sides if a is None or b is None or a + b >= 0]
    return [Band(None if left is None else -left, right) for left, right in sides]


INFOS = [
    BlockInfo(tile_m, tile_n, band, pack)
    for tile_m, tile_n in TILES
    for pack in PACKS
    for band in bands(tile_n)
]


@cache
def visible(seqlen_q: int, seqlen_k: int, band: Band) -> np.ndarray:
    """(seqlen_q, seqlen_k): whether the query sees the key."""
    offset = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = np.ones_like(offset, dtype=bool)
    if band.lo is not None:
        seen &= offset >= band.lo
    if band.hi is not None:
        seen &= offset <= band.hi
    return seen


def tiled(info: BlockInfo, seqlen_q: int, seqlen_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices (m_blocks, n_blocks): the blocks with a visible pair; the blocks without a
    mask."""
    seen = np.repeat(visible(seqlen_q, seqlen_k, info.band), info.pack, axis=0)
    rows, keys = seen.shape
    m_blocks, n_blocks = -(-rows // info.tile_m), -(-keys // info.tile_n)
    touched = np.zeros((m_blocks * info.tile_m, n_blocks * info.tile_n), dtype=bool)
    clean = touched.copy()  # rows past the last query do not count, keys past the last do
    touched[:rows, :keys] = clean[:rows, :keys] = seen
    clean[rows:] = True
    shape = m_blocks, info.tile_m, n_blocks, info.tile_n
    return touched.reshape(shape).any((1, 3)), clean.reshape(shape).all((1, 3))


def expect(blocks: Blocks, touched: np.ndarray, clean: np.ndarray) -> None:
    """Compare `blocks` with one row, or one column, of each matrix."""
    first, end, clean_first, clean_end = blocks
    assert 0 <= first <= clean_first <= clean_end <= end
    assert list(range(first, end)) == list(np.flatnonzero(touched))
    assert list(range(clean_first, clean_end)) == list(np.flatnonzero(clean & touched))


def expect_paths(tile: Blocks, part: Blocks) -> None:
    """Both paths over a tile visit every block once and mask those that are not clean; `part`, of
    one of its warpgroups, lies on it between the blocks that the warpgroup passes over."""
    blocks = list(range(tile.first, tile.end))
    clean = range(tile.clean_first, tile.clean_end)
    for forwards in (None, 0, 1):
        path = tile.path(forwards)
        visited = [path.block(i) for i in range(len(blocks))]
        assert visited == (blocks if forwards else blocks[::-1])
        if not blocks:
            continue
        masked, unmasked, again = tile.runs(forwards)
        assert min(masked, unmasked, again) >= 0 and masked + unmasked + again == len(blocks) - 1
        kinds = [x in clean for x in visited[1:]]
        assert all(kinds[masked : masked + unmasked]) and sum(kinds) == unmasked
        if part.end > part.first:
            before, after = tile.around(part, forwards)
            first = part.path(forwards).start
            assert (
                visited[before] == first and len(blocks) - before - after == part.end - part.first
            )


def expect_turn(tile: Blocks, part: Blocks) -> None:
    """With a turn, block 0 comes right behind the masked blocks and behind the first one, and
    `part` takes the same blocks in the same order."""
    count, turn = tile.end - tile.first, tile.turn()
    path = tile.path(None, turn)
    visited = [path.block(i) for i in range(count)]
    assert sorted(visited) == list(range(tile.end)) and path.first == visited[0]
    assert visited[min(turn, count - 1)] == 0
    assert all(x < tile.clean_end for x in visited[turn:])
    above = tile.around(part, None)[0]
    own = part.path(None, turn - above)
    assert visited[above:] == [own.block(i) for i in range(part.end)]
    assert visited[above + 1 :] == [own.after(1).block(i) for i in range(part.end - 1)]


def hold(info: BlockInfo, seqlen_q: int, seqlen_k: int) -> None:
    """Compare all blocks of both directions with the matrix."""
    touched, clean = tiled(info, seqlen_q, seqlen_k)
    assert (info.num_m_blocks(seqlen_q), info.num_n_blocks(seqlen_k)) == touched.shape
    for m_block in range(touched.shape[0]):
        blocks = info.n_blocks(m_block, seqlen_q, seqlen_k)
        expect(blocks, touched[m_block], clean[m_block])
        if blocks.end > blocks.first:
            seen = tiled(info._replace(tile_n=info.tile_n // 2), seqlen_q, seqlen_k)[0][m_block]
            half = not seen[2 * blocks.end - 1 :].any()  # the matrix may end before that half
            assert info.ends_in_first_half(m_block, seqlen_q, seqlen_k) == half
        half = info._replace(tile_m=info.tile_m // 2)
        for mine in (2 * m_block, 2 * m_block + 1):
            if mine * half.tile_m < seqlen_q * info.pack:
                part = half.n_blocks(mine, seqlen_q, seqlen_k)
                expect_paths(blocks, part)
                if info.band.lo is None and part.end > part.first:
                    expect_turn(blocks, part)
    for n_block in range(touched.shape[1]):
        blocks = info.m_blocks(n_block, seqlen_q, seqlen_k)
        expect(blocks, touched[:, n_block], clean[:, n_block])


@pytest.mark.slow
def test_all_pairs_of_lengths_with_some_of_everything_else():
    """Each pair of lengths occurs with four of the other combinations, each of those with about six
    pairs."""
    r = random.Random(0)
    deck: list[BlockInfo] = []
    for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
        for _ in range(4):
            if not deck:
                deck = r.sample(INFOS, len(INFOS))
            hold(deck.pop(), seqlen_q, seqlen_k)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("pack", PACKS)
def test_all_bands_around_the_edges_of_tiles(pack):
    info = BlockInfo(8, 8, pack=pack)
    for band, seqlen_q, seqlen_k in itertools.product(
        bands(8), (0, 1, 7, 8, 9), (0, 1, 7, 8, 9, 16, 17)
    ):
        hold(info._replace(band=band), seqlen_q, seqlen_k)


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_everything_with_everything(tile, pack):
    for band in bands(tile[1]):
        info = BlockInfo(*tile, band, pack)
        for seqlen_q, seqlen_k in itertools.product(LENGTHS, LENGTHS):
            hold(info, seqlen_q, seqlen_k)


def test_a_band_that_sees_nothing_touches_nothing():
    """The window ends before the first key; an empty range may begin anywhere."""
    info = BlockInfo(8, 8, Band(None, -100))
    for seqlen_q, seqlen_k in itertools.product((1, 8, 20), (1, 8, 20)):
        hold(info, seqlen_q, seqlen_k)


class Number(int):
    """An int that raises where the DSL's Int32 might round otherwise: for a division below 0."""

    def __add__(self, other):
        return Number(int(self) + int(other))

    def __sub__(self, other):
        return Number(int(self) - int(other))

    def __rsub__(self, other):
        return Number(int(other) - int(self))

    def __mul__(self, other):
        return Number(int(self) * int(other))

    def __floordiv__(self, other):
        assert self >= 0, f"{int(self)} // {int(other)}"
        return Number(int(self) // int(other))

    __radd__, __rmul__ = __add__, __mul__


@pytest.mark.sweep(5)
@pytest.mark.parametrize("info", INFOS[:: len(PACKS) + 3])
def test_nothing_negative_is_divided(info):
    band = Band(*(x if x is None else Number(x) for x in info.band))
    info = info._replace(band=band)
    for seqlen_q, seqlen_k in itertools.product((1, 9, 40), (0, 1, 9, 40)):
        for m_block in range(info.num_m_blocks(seqlen_q)):
            info.n_blocks(Number(m_block), Number(seqlen_q), Number(seqlen_k))
        for n_block in range(info.num_n_blocks(seqlen_k)):
            info.m_blocks(Number(n_block), Number(seqlen_q), Number(seqlen_k))

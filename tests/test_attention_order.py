"""TileOrder: every tile once, in every order."""

from __future__ import annotations

import itertools

import pytest

from cutex.kernels.attention.order import TileOrder

SIZES = [*itertools.product((1, 2, 7), (1, 3, 8), (1, 2, 5), (1, 2, 4))]


def places(order: TileOrder) -> list[tuple[int, int, int]]:
    """(m, head, batch) of every tile, in its turn; the other modes of a work tile are 0."""
    tiles = [order.tile(index) for index in range(order.total)]
    assert not any(tile.n or tile.split for tile in tiles)
    return [(tile.m, tile.head, tile.batch) for tile in tiles]


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("l2_rows", [0, 1000, 5000, 1 << 30])
def test_an_order_is_a_bijection(longest_first, l2_rows):
    for num_m_blocks, heads, batch, heads_per_kv in SIZES:
        order = TileOrder(num_m_blocks, heads, batch, longest_first, 1000, heads_per_kv, l2_rows)
        tiles = places(order)
        every = itertools.product(range(num_m_blocks), range(heads), range(batch))
        assert sorted(tiles) == sorted(every)


def test_the_longest_tiles_of_a_group_come_first_and_its_heads_share_l2():
    order = TileOrder(
        num_m_blocks=4, heads=6, batch=2, longest_first=True, rows_k=1000, heads_per_kv=2,
        l2_rows=2500,
    )  # fmt: skip
    tiles = places(order)
    group = 2 * 2  # two heads of K and V fit, two heads of Q read each
    for first in range(0, order.total, 4 * group):
        mine = tiles[first : first + 4 * group]
        assert [m for m, _, _ in mine] == sorted((m for m, _, _ in mine), reverse=True)
        assert len({(h // 2, b) for _, h, b in mine}) == 2


def test_without_a_band_the_tiles_of_a_head_follow_one_another():
    order = TileOrder(3, 2, 2, False, 1000, 1, 1 << 20)
    tiles = places(order)
    assert tiles[:4] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0)]

"""Rows of tiles that end with narrower ones: each column has one tile, each tile one place in the
order, and the CTA that ends last ends when it is said to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from cutex.schedulers.narrow import TIMES, ColumnTiles, EqualShares, NarrowTiles
from cutex.schedulers.ragged import RowGroups, filled
from cutex.schedulers.raster import Raster

ALONE = 1, 1
WIDTH = 192


def spans(tiles: ColumnTiles) -> list[tuple[int, int]]:
    """The first column of each tile, and the column after its last."""
    of = range(tiles.wide + tiles.narrow)
    widths = [tiles.narrow_width if tiles.is_narrow(n) else WIDTH for n in of]
    return [(tiles.first(n), tiles.first(n) + widths[n]) for n in of]


@pytest.mark.parametrize("ctas", [1, 2, 132])
def test_each_column_has_one_tile_and_few_are_empty(ctas: int) -> None:
    drawn = random.Random(ctas)
    for columns in [*range(1, 700, 9), *range(700, 30000, 997)]:
        tiles = ColumnTiles.of(WIDTH, columns, drawn.randint(1, 300), ctas)
        found = spans(tiles)
        assert all(a[1] == b[0] for a, b in pairwise(found))
        assert found[0][0] == 0 and found[-1][0] < columns <= found[-1][1]
        assert columns <= 256 or found[-1][1] - columns < 64


def test_more_narrow_tiles_are_taken_where_the_last_round_is_shorter_by_it() -> None:
    found = [ColumnTiles.of(WIDTH, n, s, 132) for n, s in ((4096, 256), (4096, 16), (1536, 192))]
    assert [(x.wide, x.narrow) for x in found] == [(20, 2), (16, 8), (8, 0)]


def shares(order: Any, ctas: int) -> Iterator[list[tuple[bool, int]]]:
    """The indices that each CTA takes, and whether their tiles are narrow."""
    for cta in range(ctas):
        share, found = EqualShares(order, cta, ctas), []
        wide, narrow = cta, share.first_narrow
        for _ in range(share.end):
            found.append(share.next(wide, narrow))
            wide, narrow = (wide, narrow + ctas) if found[-1][0] else (wide + ctas, narrow)
        yield found


def test_each_tile_is_one_ctas_and_the_last_ends_when_it_is_said_to() -> None:
    drawn = random.Random(1)
    for _ in range(12):
        rows = [drawn.choice([0, drawn.randint(0, 900)]) for _ in range(drawn.randint(1, 9))]
        ends, columns = [sum(rows[: i + 1]) for i in range(len(rows))], drawn.randint(1, 2500)
        raster = Raster(drawn.choice([1, 3, 8]), "m")
        tiles = NarrowTiles(raster, (128, WIDTH), ALONE, RowGroups([], [], [], 32))
        order, ctas = filled(tiles, ends, sum(rows), columns), drawn.choice([1, 3, 30])
        of = ColumnTiles.of(WIDTH, columns, order.strips, ctas)
        order = replace(order, tiles_n=of.wide, narrow=of.narrow)
        found = list(shares(order, ctas))
        told = [(narrow, order.tile(index)) for share in found for narrow, index in share]
        due = {
            (group, m, n)
            for group, count in enumerate(rows)
            for m in range(-(-count // 128))
            for n in range(of.wide + of.narrow)
        }
        assert len(told) == len(due) and {(x.group, x.m, x.n) for _, x in told} == due
        assert all(bool(narrow) == bool(of.is_narrow(x.n)) for narrow, x in told)
        time = max(sum(TIMES[bool(narrow)] for narrow, _ in share) for share in found)
        assert time == (of.ends(order.strips, ctas) if sum(rows) else 0)


def test_narrow_tiles_are_taken_when_wide_ones_come_to_their_rows() -> None:
    raster, groups = Raster(8, "m"), RowGroups([], [], [], 32)
    tiles = NarrowTiles(raster, (128, WIDTH), ALONE, groups)
    order = replace(filled(tiles, [8192], 8192, 4096), tiles_n=20, narrow=2)
    for share in shares(order, 30):
        for i, (narrow, index) in enumerate(share):
            if narrow:  # the row of tiles, by raster order, is that of a wide one beside it
                row = (index - order.strips * 20) // 2
                beside = [share[j][1] // 20 for j in (i - 1, i + 1) if 0 <= j < len(share)]
                assert any(abs(row - x) <= 3 for x in beside)

"""Tiles that are equally wide within a group, on the host: each row of a group in one tile, as few
tiles as may be, little computed in vain.

A mutant is the module with one text changed; the same check must find each.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cutex.kernels.gemm.config import ceil_div
from cutex.schedulers import level, ragged
from cutex.schedulers.raster import Raster

WIDTHS = ((192, 8, 32), (176, 8, 16), (192, 16, 32), (64, 32, 32), (40, 8, 8))
GROUPS = ((0, 500, 1, 0, 193), (1900,), (192, 7, 64))


def check(module: ModuleType, sizes: tuple[int, int, int], rows: tuple[int, ...]) -> None:
    """Raise AssertionError unless the tiles of each group hold its rows once, with a width that
    there is."""
    widths, columns = module.Widths(*sizes), 300
    most, step, coarse = sizes
    groups = ragged.RowGroups([], [], [], 32)
    for cluster in (1, 2):
        tiles = module.LevelTiles(Raster(2), (64, most), (cluster, 1), groups, widths)
        ends = list(itertools.accumulate(rows))
        order: Any = ragged.filled(tiles, ends, ends[-1] + 3, columns)
        seen: Counter[tuple[int, int, int]] = Counter()
        for index in range(order.total):
            tile = order.tile(index)
            for m in range(cluster):
                seen[tile.group, tile.m + m, tile.n] += 1
        assert set(seen.values()) <= {1}
        for group, count in enumerate(rows):
            width, number = int(widths.of(count)), int(widths.tiles(count))
            assert width in widths.all and width <= most and width > 0
            mine = {(m, n) for g, m, n in seen if g == group}
            down = ceil_div(ceil_div(columns, 64), cluster) * cluster
            assert mine == set(itertools.product(range(down), range(number)))
            assert number == ceil_div(count, width) <= ceil_div(count, most)
            # no narrower width would do with as many tiles
            narrower = [w for w in widths.all if w < width]
            assert not count or all(w * number < count for w in narrower)
    assert len(set(widths.all)) == len(widths.all) and widths.all[-1] == most
    assert all(w % (step if w > most // 2 else coarse) == 0 for w in widths.all)


@pytest.mark.parametrize("sizes", WIDTHS, ids=str)
def test_tiles_are_equally_wide_and_hold_each_row_once(sizes: tuple[int, int, int]) -> None:
    for rows in GROUPS:
        check(level, sizes, rows)


def test_little_is_computed_in_vain() -> None:
    widths = level.Widths(192, 8, 32)
    wasted = sum(widths.of(n) * widths.tiles(n) - n for n in range(256, 1024))
    assert wasted < 0.03 * sum(range(256, 1024))


MUTANTS = {
    "a row too few": ("clusters(rows, few), 1)", "rows // few, 1)"),
    "always coarse": ("select(even > self.most // 2, fine, coarse)", "coarse"),
    "always fine": ("select(even > self.most // 2, fine, coarse)", "fine"),
    "a tile too many": ("clusters(rows, self.most), 1)", "clusters(rows, self.most) + 1, 1)"),
    "a tile behind the last": ("return clusters(rows, self.most)", "return rows // self.most + 1"),
    "rows for columns": (
        "TileCounts(self.tiles_n, self.widths.tiles(rows))",
        "TileCounts(self.widths.tiles(rows), self.tiles_n)",
    ),
    "columns by rows": ("clusters(columns, self.tile[0])", "clusters(columns, self.tile[1])"),
    "a width that is not there": ("range(self.step, self.most + 1", "range(self.step, self.most"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_the_widths_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MUTANTS[name]
    source = Path(level.__file__).read_text()
    assert source.count(right) >= 1
    mutant = ModuleType("mutant_level")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(right, wrong), level.__file__, "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, IndexError, ZeroDivisionError)):
        for sizes, rows in itertools.product(WIDTHS[:2], GROUPS):
            check(mutant, sizes, rows)

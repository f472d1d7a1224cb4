"""Groups packed into rounds, on the host: each row of a group in one tile, the widest tiles first,
and the last cluster ends no later than with as few tiles as may be.

A mutant is the module with one text changed; the same check must find each.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from cutex.schedulers import packed
from cutex.schedulers.level import LevelTiles, Widths
from cutex.schedulers.ragged import RowGroups, filled
from cutex.schedulers.raster import Raster, clusters

WIDTHS = Widths(192, 8, 32)
MIXTRAL = 612, 242, 784, 372, 786, 657, 568, 1179  # rows of a router's groups
ROWS = MIXTRAL, (0, 500, 1, 0, 193), (193,), (1900,), (192, 7, 64), (33,) * 20, (0,) * 31 + (70,)


class Held(NamedTuple):
    """The tiles of an order: of each, in turn, its group and its width; and those of each group."""

    turns: list[tuple[int, int]]
    tiles: dict[int, list[tuple[int, int]]]

    @staticmethod
    def of(module: ModuleType, rows: tuple[int, ...], columns: int, count: int) -> Held:
        groups = RowGroups([], [], [], 32)
        tiles = module.PackedTiles(Raster(8), (128, 192), (2, 1), groups, WIDTHS)
        ends, across = list(itertools.accumulate(rows)), clusters(columns, 256)
        order = module.packed(tiles, ends, ends[-1] + 3, columns, count)
        begins = {end - n: g for g, (end, n) in enumerate(zip(ends, rows, strict=True)) if n}
        turns, held = [], {}
        for index in range(order.total):
            tile = order.tile(index)
            group = begins[order.groups.begins[tile.group]]
            assert order.groups.rows(tile.group) == rows[group]
            held.setdefault(group, []).append((tile.m, tile.n))
            number = order.groups.starts[tile.group + 1] - order.groups.starts[tile.group]
            turns.append((group, WIDTHS.shared(rows[group], number // across)))
        return Held(turns, held)

    def time(self, count: int) -> int:
        """When the last of `count` clusters ends, in rows."""
        each = [sum(w + packed.COST for _, w in self.turns[c::count]) for c in range(count)]
        return max(each)


def as_few(rows: tuple[int, ...], columns: int, count: int) -> int:
    """The same of LevelTiles, which take groups as they come, in as few tiles as may be."""
    groups = RowGroups([], [], [], 32)
    tiles = LevelTiles(Raster(8), (128, 192), (2, 1), groups, WIDTHS)
    ends = list(itertools.accumulate(rows))
    order = filled(tiles, ends, ends[-1], columns)
    widths = [WIDTHS.of(rows[order.tile(i).group]) + packed.COST for i in range(order.total)]
    return max(sum(widths[c::count]) for c in range(count))


def check(module: ModuleType, rows: tuple[int, ...], columns: int, count: int) -> None:
    """Raise AssertionError unless the tiles of each group hold its rows once, at each column."""
    held, across = Held.of(module, rows, columns, count), clusters(columns, 256)
    widths = [width for _, width in held.turns]
    rounds = [widths[i : i + count] for i in range(0, len(widths), count)]
    turned = [w for i, one in enumerate(rounds) for w in (one[::-1] if i % 2 else one)]
    assert turned == sorted(widths, reverse=True) and set(widths) <= set(WIDTHS.all)
    of_group = dict(held.turns)
    for group, number in enumerate(rows):
        mine = held.tiles.get(group, [])
        down = len(mine) // across
        assert sorted(mine) == [(2 * m, n) for m in range(across) for n in range(down)]
        assert (down > 0) == (number > 0) and down < clusters(number, 192) + packed.MORE
        assert not number or down * of_group[group] >= number


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_tiles_hold_each_row_once_the_widest_first(rows: tuple[int, ...]) -> None:
    for columns, count in ((300, 5), (2000, 66)):
        check(packed, rows, columns, count)


def check_plan(module: ModuleType) -> None:
    """Raise AssertionError unless a group's tiles are as wide as its rows, to a step."""
    r = random.Random(0)
    for _ in range(300):
        rows, more = r.choice((r.randrange(1, 300), r.randrange(1, 9000))), r.randrange(4)
        group, number = r.randrange(1024), clusters(rows, 192) + more
        plan = module.LevelPlan([0] * 3, WIDTHS)
        plan.order[1] = plan.word(group, rows, number)
        tiles = [(plan.first(1, n), plan.width(1, n)) for n in range(number + 1)]
        assert plan.group(1) == group and plan.group(0) == 0
        assert all(a + w == b for (a, w), (b, _) in itertools.pairwise(tiles))
        ends, widths = tiles[-1][0], {w for _, w in tiles[:-1]}
        assert ends >= rows and widths <= set(WIDTHS.all)
        assert min(widths) <= 96 or ends - rows < 8


def test_a_groups_tiles_are_as_wide_as_its_rows() -> None:
    check_plan(packed)
    plan = packed.LevelPlan([0], WIDTHS)
    plan.order[0] = plan.word(7, 2**31 - 1, number := clusters(2**31 - 1, 192))
    assert plan.order[0] < 2**31 and plan.group(0) == 7
    assert plan.first(0, 5) == 5 * 192 and plan.width(0, number - 1) == 192


def test_the_last_round_is_full() -> None:
    """Of 32 tiles of rows by 16 of columns on 66 clusters; one tile more makes 8 whole rounds."""
    held = Held.of(packed, MIXTRAL, 4096, 66)
    assert len(held.turns) == 528 and as_few(MIXTRAL, 4096, 66) > 1.04 * held.time(66)


def test_a_routers_groups_end_earlier() -> None:
    r, ratios = random.Random(0), []
    for _ in range(3):
        p = [2.7 ** r.gauss(0, 0.5) for _ in range(r.choice((8, 20, 32)))]
        total, columns = 2 ** r.uniform(11, 12.2), 2880
        rows = tuple(int(total * q / sum(p)) for q in p)
        ratios.append(as_few(rows, columns, 66) / Held.of(packed, rows, columns, 66).time(66))
    assert sum(ratios) / len(ratios) > 1.03 and min(ratios) > 0.97


PLANS = {
    "one too few wide": ("tile >= wide", "tile >= wide - 1"),
    "none narrower": ("self.widths.wide(rows, number), 0)", "0, 0)"),
    "first rows of wide tiles": ("narrow * self.widths.step", "0"),
    "a width of another": ("(wide * WIDTHS +", "(wide * 128 +"),
}
MUTANTS = {
    "the narrowest first": ("key=lambda g: (-width(g), g)", "key=lambda g: (width(g), g)"),
    "a tile for the narrowest": ("max(range(most), key", "min(range(most), key"),
    "tiles of other groups": ("across for g in places)", "across for g in range(most))"),
    "many more": ("range(MORE), key", "range(MORE, 2 * MORE), key"),
    "of tiles, not clusters": ("clusters(self.tiles_n, self.cluster_m)", "self.tiles_n"),
    "all rounds alike": ("select(backwards, last - (index - before), index)", "index"),
    "a last round as long as others": ("self.total - before, self.count", "self.count, self.count"),
}


def mutant_of(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    source = Path(packed.__file__).read_text()
    assert source.count(right) == 1
    mutant = ModuleType("mutant_packed")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(right, wrong), packed.__file__, "exec"), mutant.__dict__)
    return mutant


@pytest.mark.parametrize("name", PLANS)
def test_a_fault_of_the_plan_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutant_of(*PLANS[name], monkeypatch)
    with pytest.raises(AssertionError):
        check_plan(mutant)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_the_packing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mutant_of(*MUTANTS[name], monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ZeroDivisionError)):
        for rows in ROWS:
            check(mutant, rows, 4096, 66)
        assert Held.of(mutant, MIXTRAL, 4096, 66).time(66) <= Held.of(
            packed, MIXTRAL, 4096, 66
        ).time(66)

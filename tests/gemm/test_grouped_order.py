"""The scheduler of ragged groups, on the host: each row of a group in one tile, work shared evenly.

A mutant is the module with one text changed; the same check must find each.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cutex.schedulers import ragged
from cutex.schedulers.level import LevelTiles
from cutex.schedulers.narrow import NarrowTiles
from cutex.schedulers.raster import Raster

MOST = 32
TILES = tuple(
    itertools.product(((16, 8), (32, 24)), ((1, 1), (2, 1), (1, 2)), (("m", 2), ("n", 3)))
)


def tiles_of(module: ModuleType, tile: Any, cluster: Any, raster: Any) -> Any:
    groups = module.RowGroups([], [], [], MOST)
    return module.RaggedTiles(Raster(raster[1], raster[0]), tile, cluster, groups)


def groupings() -> Iterator[tuple[int, ...]]:
    """The rows of groups: few of each kind in every combination, then many."""
    for count in (1, 2):
        yield from itertools.product((0, 1, 15, 16, 17, 100), repeat=count)
    yield from itertools.product((0, 1, 17), repeat=3)
    yield from ((0,) * 31 + (33,), (33,) + (0,) * 31, (1,) * 32, (0, 0, 700, 0, 5), (5,) * 7)


def check(module: ModuleType, rows: Sequence[int], tiles: Any, padded: bool) -> None:
    """Raise AssertionError unless tiles of the order hold each row of each group just once, at each
    column, and no row of another; and clusters that take equal steps have equal work."""
    columns, pitch = 50, max(rows) + 3
    ends = list(itertools.accumulate(rows))
    edges = rows if padded else ends
    total = pitch * len(rows) if padded else ends[-1] + 5
    order = module.filled(tiles, edges, total, columns, padded)
    (tile_m, tile_n), (cluster_m, cluster_n) = tiles.tile, tiles.cluster
    seen: Counter[tuple[int, int, int]] = Counter()
    for index in range(order.total):
        first = order.tile(index)
        assert 0 <= first.group < len(rows)
        assert first.m * tile_m < rows[first.group] and first.n * tile_n < columns, first
        for m, n in itertools.product(range(cluster_m), range(cluster_n)):
            seen[first.group, first.m + m, first.n + n] += 1
    for group, count in enumerate(rows):
        begin = group * pitch if padded else ends[group] - count
        assert order.groups.begins[group] == begin
        assert order.groups.ends[group] == begin + count
        down, across = -(-count // tile_m), -(-columns // tile_n)
        for m, n in itertools.product(range(down), range(across)):
            assert seen[group, m, n] == 1
    # what is computed in vain is less than a cluster's tile for each group, along each side
    assert set(seen.values()) <= {1}
    assert all(m < -(-rows[g] // tile_m) + cluster_m - 1 for g, m, _ in seen)
    shares = [len(range(c, order.total, 5)) for c in range(5)]
    assert max(shares) - min(shares) <= 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("padded", [False, True], ids=["ends", "counts"])
def test_every_row_of_a_group_is_in_one_tile(padded: bool) -> None:
    for rows in groupings():
        tiles = tiles_of(ragged, *TILES[sum(rows) % len(TILES)])
        check(ragged, rows, tiles, padded)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shape", TILES, ids=str)
def test_tiles_of_every_shape_cover_the_groups(shape) -> None:
    for rows in ((0, 100, 1, 0, 33), (700,), (5,) * 9):
        check(ragged, rows, tiles_of(ragged, *shape), False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "edges", [[-5, 3, 2, 99], [7, 0, 7, 7], [2**31 - 1] * 4, [-(2**31)] * 4, [4, 4, 10, 8]]
)
@pytest.mark.parametrize("padded", [False, True])
def test_edges_that_no_grouping_has_are_clamped(edges: list[int], padded: bool) -> None:
    rows = 12
    order = ragged.filled(tiles_of(ragged, *TILES[0]), edges, rows, 50, padded)
    for group in range(MOST):
        begin, end = order.groups.begins[group], order.groups.ends[group]
        assert 0 <= begin <= end <= rows
    for index in range(order.total):
        tile = order.tile(index)
        assert tile.m * 16 < order.groups.rows(tile.group)


def test_of_two_kernels_one_has_the_tiles_of_all_groups() -> None:
    """The one for groups that fill their tiles where they waste a row in 24 at most."""
    whole = {(128, 0, 256): True, (1000, 1): False, (5120, 127): True, (3000,): True, (1,): False}
    tiles = tiles_of(ragged, (32, 24), (2, 1), ("m", 2))
    for rows, full in whole.items():
        ends = list(itertools.accumulate(rows))
        given = ends, ends[-1] + 9, 50
        totals = [
            ragged.filled(tiles, *given, only=ragged.Only(128, full=x)).total
            for x in (full, not full)
        ]
        assert totals == [ragged.filled(tiles, *given).total, 0], rows


@pytest.mark.parametrize("kind", [LevelTiles, NarrowTiles, ragged.RaggedTiles])
def test_every_scheduler_is_filled_in_with_the_same_arguments(kind: type) -> None:
    """Those that the kernels' common part passes (kernels/gemm/grouped/sm90/kernel.py)."""
    assert list(inspect.signature(kind.fill).parameters) == [
        "self", "edges", "rows", "columns", "padded", "only"
    ]  # fmt: skip


def test_steps_along_k_cover_a_group_and_an_empty_one_has_one() -> None:
    groups = ragged.RowGroups([0, 5, 5], [5, 5, 133], [], 3)
    assert [groups.steps(g, 64) for g in range(3)] == [1, 1, 2]


MUTANTS = {
    "a tile too few": ("clusters(rows, self.tile_rows)", "(rows // self.tile_rows)"),
    "a tile too many": ("clusters(rows, self.tile_rows)", "(rows // self.tile_rows + 1)"),
    "clusters as if of one tile": (
        "(self.cluster_m, self.cluster_n)\n        ).total",
        "(1, 1)\n        ).total",
    ),
    "tiles as if of clusters of one": (
        "cluster = self.cluster_m, self.cluster_n",
        "cluster = 1, 1",
    ),
    "rows of the group before": (
        "self.ends[group] - self.begins[group]",
        "self.ends[group] - self.begins[max(group - 1, 0)]",
    ),
    "the first group begins late": ("select(last > 0, clamp(before, rows), 0)", "clamp(edge, 1)"),
    "a group begins where it ends": ("edges[cutlass.max(last - 1, 0)]", "edges[last]"),
    "groups behind the last": (
        "return begin, select(group < count, end, begin)",
        "return begin, end",
    ),
    "not clamped": ("return cutlass.min(cutlass.max(x, 0), most)", "return x"),
    "clamped from above alone": (
        "return cutlass.min(cutlass.max(x, 0), most)",
        "return cutlass.min(x, most)",
    ),
    "ends that descend": ("end = cutlass.max(clamp(edge, rows), begin)", "end = clamp(edge, rows)"),
    "padded as if it were not": ("    if padded:", "    if padded and False:"),
    "pitch too long": ("pitch = rows // count", "pitch = rows // count + 1"),
    "the width in rows": (
        "tiles_n = clusters(columns, self.tile[1])",
        "tiles_n = clusters(columns, self.tile[0])",
    ),
    "all but the last group": ("self.groups.starts[self.groups.most]", "self.groups.starts[2]"),
    "another group's tiles": (
        "self.counts(self.groups.rows(group))",
        "self.counts(self.groups.rows(0))",
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_the_scheduler_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MUTANTS[name]
    source = Path(ragged.__file__).read_text()
    assert source.count(right) >= 1
    mutant = ModuleType("mutant_ragged")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(right, wrong), ragged.__file__, "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, IndexError, ZeroDivisionError)):
        for shape in TILES:
            tiles = tiles_of(mutant, *shape)
            for rows in ((0, 100, 1, 0, 33), (40, 16, 0), (5, 17)):
                for padded in (False, True):
                    check(mutant, rows, tiles, padded)
        for edges in ([-5, 3, 2, 99], [4, 4, 10, 8]):
            for padded in (False, True):
                order = mutant.filled(tiles_of(mutant, *TILES[0]), edges, 12, 50, padded)
                for begin, end in zip(order.groups.begins, order.groups.ends, strict=True):
                    assert 0 <= begin <= end <= 12

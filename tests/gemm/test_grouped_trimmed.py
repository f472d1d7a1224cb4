"""Rows of tiles that end with narrower ones, shared by clusters that end together: each tile is one
cluster's, the last ends when it is said to, and the kernel is right. A mutant is the scheduler with
one text changed."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cutex
from cutex.arch import arch as arch_named
from cutex.compile import compile as compile_kernel
from cutex.kernels.gemm.grouped.sm90.trimmed import GroupedTrimmed
from cutex.kernels.gemm.grouped.trimmed_config import TrimmedConfig
from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.schedulers import trimmed
from cutex.schedulers.ragged import WARP, RowGroups, filled
from cutex.schedulers.raster import Raster

WIDTHS = (208, 112), (208, 144), (48, 32)
ORDERS = ("fifo", "eager", "starved", "peer-late", "random")
TILES = Sm90Config(
    tile_m=128, tile_n=48, num_stages=3, warpgroups=2, pingpong=True, cluster_m=2, epi_n=16,
    epi_stages=1, num_ctas=6,
)  # fmt: skip


def config(tiles: Sm90Config = TILES, dtype: str = "bf16", major: str = "column") -> TrimmedConfig:
    row = OperandLayout(dtype)
    product = GeneralConfig(tiles, row, OperandLayout(dtype, major, batched=True), row)
    return TrimmedConfig(product, narrow=32)


def run(number: int, **orders: Any) -> str:
    """Simulate one random problem; return what is wrong."""
    r, g = random.Random(number), torch.Generator().manual_seed(number)
    dtype, name = ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))[number % 2]
    rows = [r.choice((0, 1, 128, 200, 256, 300)) for _ in range(r.randrange(1, 5))]
    n, k = 8 * r.randrange(2, 40), 8 * r.randrange(9, 40)
    x = torch.randn((sum(rows) + 9, k), generator=g).to(dtype)
    w = (torch.randn((len(rows), n, k), generator=g) / k**0.5).to(dtype).mT
    x[sum(rows) :] = math.nan
    out = torch.full((len(x), n), math.nan, dtype=dtype)
    offs = torch.tensor(rows).cumsum(0).int()
    tiles = replace(TILES, cluster_m=r.choice((1, 2)), num_ctas=r.choice((2, 4, 6)))
    compiled = compile_kernel(GroupedTrimmed(config(tiles, name)), name, "sm_90a")
    if found := cutex.simulate(compiled, x, w, out, offs, **orders).findings:
        return str(found)
    unit, begin = torch.finfo(dtype).eps / 2, 0
    for group, count in enumerate(rows):
        mine = slice(begin, begin + count)
        a, b = x[mine].double(), w[group].double()
        slack = unit * (a @ b).abs() + 2.0**-20 * (a.abs() @ b.abs()) + 2.0**-24
        off = (out[mine].double() - a @ b).abs() - slack
        if count and not (off <= 0).all():
            return f"group {group} of {rows}, {n} columns: {off.max().item()} beyond"
        begin += count
    return "" if out[begin:].isnan().all() else "a row of no group was written"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_randomized_problems_are_right(seed: int) -> None:
    assert run(seed, order=ORDERS[seed % len(ORDERS)], seed=seed) == ""


def test_a_config_that_does_not_fit_says_why() -> None:
    hopper = arch_named("sm_90a")
    assert config().why_not(hopper) is None
    assert "in turn" in str(config(replace(TILES, pingpong=False)).why_not(hopper))
    assert "parts of a store" in str(replace(config(), narrow=40).why_not(hopper))
    assert "along K" in str(config(major="row").why_not(hopper))


def best(module: ModuleType, widths: Any, columns: int, strips: int, count: int) -> tuple[Any, int]:
    """The Trim that a warp finds, and when its last cluster ends."""
    choices = [module.Trim.choice(widths, columns, lane) for lane in range(WARP)]
    time, lane = min((x.ends(strips, count), i) for i, x in enumerate(choices))
    return choices[lane], time


def walked(share: Any, module: ModuleType = trimmed) -> Iterator[tuple[Any, Any]]:
    """A cluster's tiles: whether each is narrow, and its number."""
    done = module.Done(0, 0)
    for _ in range(share.tiles):
        narrow, number = share.next(*done)
        yield narrow, number
        done = done.and_one(narrow)


def check(module: ModuleType, drawn: random.Random) -> None:
    """Raise AssertionError unless a product's columns, and tiles, are each computed once, and its
    clusters end when it is said."""
    widths, cluster_m = drawn.choice(WIDTHS), drawn.choice([1, 2])
    rows = [drawn.choice([0, drawn.randint(0, 600)]) for _ in range(drawn.randint(1, 5))]
    ends, columns = [sum(rows[: i + 1]) for i in range(len(rows))], drawn.randint(1, 1200)
    raster = Raster(drawn.choice([1, 3, 8]), "m")
    place = (128, widths[0]), (cluster_m, 1), RowGroups([], [], [], WARP)
    order: Any = filled(module.TrimmedTiles(raster, *place), ends, sum(rows), columns)
    count = drawn.choice([1, 3, 7, 30])
    trim, time = best(module, widths, columns, order.strips, count)
    if drawn.random() < 0.5:  # another that has a wide tile
        choices = [module.Trim.choice(widths, columns, lane) for lane in range(WARP)]
        trim = drawn.choice([x for x in choices if x.wide])
        time = trim.ends(order.strips, count)
    order = replace(order, trim=trim)
    spans = [(trim.first(n), widths[bool(trim.is_narrow(n))]) for n in range(trim.tiles)]
    assert spans[0][0] == 0 and all(a + size == b for (a, size), (b, _) in pairwise(spans))
    assert spans[-1][0] < columns <= sum(spans[-1]) or trim.narrow
    assert columns <= sum(spans[-1])
    told, last = [], 0
    for cluster in range(count):
        found = list(walked(module.Share.of(trim, order.strips, count, cluster), module))
        tiles = [order.tile_of(*x) for x in found]
        assert all(
            bool(x) == bool(trim.is_narrow(y.n)) for (x, _), y in zip(found, tiles, strict=True)
        )
        told += [(x.group, x.m, x.n) for x in tiles]
        last = max(last, sum(widths[bool(x)] + module.COSTS[bool(x)] for x, _ in found))
    due = {
        (group, m * cluster_m, n)
        for group, here in enumerate(rows)
        for m in range(-(-here // (128 * cluster_m)))
        for n in range(trim.tiles)
    }
    assert len(told) == len(due) == order.total and set(told) == due
    assert {(x.group, x.m, x.n) for x in map(order.tile, range(order.total))} == due
    assert last == (time if sum(rows) else 0)


def test_each_tile_is_one_clusters_and_the_last_ends_when_it_is_said_to() -> None:
    for seed in range(12):
        check(trimmed, random.Random(seed))


def check_ends(module: ModuleType) -> None:
    """Raise AssertionError unless the last of 66 clusters ends at most 3 % after the mean."""
    for columns, strips in ((4096, 64), (4096, 128), (7168, 128), (28672, 32)):
        _, time = best(module, (208, 144), columns, strips, 66)
        assert time < 1.03 * strips * columns / 66 * 212 / 208


def test_narrow_tiles_are_taken_where_the_last_cluster_ends_first_with_them() -> None:
    check_ends(trimmed)
    found = [best(trimmed, (208, 144), *x, 66)[0] for x in ((4096, 64), (28672, 32))]
    assert [(x.wide, x.narrow, x.ahead) for x in found] == [(19, 1, 1), (138, 0, 0)]
    assert trimmed.Trim.choice((208, 112), 1 << 30, 0).ends(1 << 20, 66) == trimmed.NEVER


def check_places(module: ModuleType) -> None:
    """Raise AssertionError unless a narrow tile is of the rows of a wide one beside it, or so."""
    trim, count = module.Trim((208, 144), 15, 7, 1), 66
    for cluster in range(count):
        found = list(walked(module.Share.of(trim, 64, count, cluster), module))
        for i, (narrow, number) in enumerate(found):
            if narrow:
                beside = [found[j] for j in (i - 1, i + 1) if 0 <= j < len(found)]
                wide = [x // trim.wide for is_narrow, x in beside if not is_narrow]
                apart = min((abs(number // trim.narrow - x) for x in wide), default=0)
                assert apart <= count // trim.narrow + 1


def test_narrow_tiles_are_taken_when_wide_ones_come_to_their_rows() -> None:
    check_places(trimmed)


MUTANTS = {
    "a tile too few": ("clusters(left, wide), few", "left // wide, few"),
    "a narrow tile's columns forgotten": ("- few * narrow, 0)", ", 0)"),
    "the first narrow tile late": ("(n - self.wide) * narrow", "(n - self.wide + 1) * narrow"),
    "narrow tiles as wide": ("after = self.wide * wide + (n", "after = n * wide + 0 * (n"),
    "a cluster has a wide tile too few": ("+ select(cluster < late, 1, 0)", ""),
    "the places of others": ("others + cluster, cluster - late", "cluster, cluster"),
    "nobody is ahead": ("ahead = select(place < others, ahead, 0)", "ahead = ahead * 0"),
    "all are ahead": ("ahead = select(place < others, ahead, 0)", "ahead = ahead + 0"),
    "what was taken ahead, again": ("few - trim.ahead * others - place", "few - place"),
    "steps of the others for all": ("number * self.count\n", "number * self.others\n"),
    "steps of all for those ahead": ("(number + ahead) * self.others", "number * self.count"),
    "the rest from the start": ("later = ahead * self.others + number", "later = number"),
    "a wide tile twice": ("wides * self.count\n", "(wides + narrows) * self.count\n"),
    "wide tiles of the first": ("wide = self.cluster + wides", "wide = 0 + wides"),
    "narrow tiles before they are due": ("(due | (wides >= self.wides))", "(narrows >= 0)"),
    "more narrow tiles than there are": ("(narrows < self.narrows) & ", "(narrows >= 0) & "),
    "narrow tiles first": ("n + select(narrow, self.trim.wide, 0)", "n"),
    "rows of tiles of one CTA": ("self.tile_rows * self.cluster_m)", "self.tile_rows)"),
    "tiles of one CTA": ("WorkTile(m * self.cluster_m,", "WorkTile(m,"),
    "the groups of wide tiles": ("group(number // across)", "group(number // self.trim.wide)"),
    "the last alone": ("cutlass.max(first, other)", "first"),
    "the first alone": ("cutlass.max(first, other)", "other"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_the_scheduler_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MUTANTS[name]
    source = Path(trimmed.__file__).read_text()
    assert source.count(right) == 1
    mutant = ModuleType("mutant_trimmed")
    monkeypatch.setitem(sys.modules, mutant.__name__, mutant)
    exec(compile(source.replace(right, wrong), trimmed.__file__, "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, IndexError, ZeroDivisionError)):
        check_ends(mutant)
        check_places(mutant)
        for seed in range(30):
            check(mutant, random.Random(seed))

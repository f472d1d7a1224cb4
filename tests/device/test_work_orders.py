"""Every order is a bijection from the indices below its total to work tiles, alone and wrapped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cutlass import Int32, cute

from cutex.compile import Operand, compile
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.order import AttentionOrder, Wave
from cutex.schedulers.order import GroupedOrder, Order, SplitOrder, TileCounts
from cutex.schedulers.raster import ALONG, Raster, RasterOrder
from cutex.sim import simulate

Tiles = set[WorkTile]


def rasters() -> Iterator[tuple[Order, Tiles]]:
    """Raster orders, each with the tiles that it must give once."""
    for m, n, batch in itertools.product((1, 2, 9), (1, 7), (None, 3)):
        for group, along, serpentine in itertools.product((1, 4), ALONG, (False, True)):
            order = RasterOrder.of(Raster(group, along, serpentine), TileCounts(m, n, batch))
            entries = range(batch or 1)
            every = itertools.product(range(m), range(n), entries)
            yield order, {WorkTile(i, j, batch=entry) for i, j, entry in every}


def attention_orders() -> Iterator[tuple[Order, Tiles]]:
    for blocks, heads, batch in itertools.product((1, 5), (1, 6), (1, 3)):
        for longest_first, wave in ((False, None), (True, None), (True, Wave(2, 3))):
            order = AttentionOrder(blocks, heads, batch, longest_first, 1000, 1, 2500, wave)
            every = itertools.product(range(blocks), range(heads), range(batch))
            yield order, {WorkTile(m, head=head, batch=entry) for m, head, entry in every}


def split(orders: Iterator[tuple[Order, Tiles]]) -> Iterator[tuple[Order, Tiles]]:
    for order, tiles in orders:
        for splits in (1, 3):
            each = {t._replace(split=i) for t in tiles for i in range(splits)}
            yield SplitOrder(order, splits), each


def grouped(inner: Callable[[], Iterator[tuple[Order, Tiles]]]) -> Iterator[tuple[Order, Tiles]]:
    """Groups that each have another of the `inner` orders, some of them none."""
    found = list(inner())
    for first in range(0, len(found), 5):
        groups = found[first : first + 5]
        for empty in ((), (0,), (0, 1, 4), (2, 3)):
            here = [(None, set()) if g in empty else x for g, x in enumerate(groups)]
            totals = [0 if order is None else order.total for order, _ in here]
            starts = [0, *itertools.accumulate(totals)]
            order = GroupedOrder(starts, len(groups), lambda g, here=here: here[g][0])
            yield order, {t._replace(group=g) for g, (_, tiles) in enumerate(here) for t in tiles}


ORDERS: dict[str, Callable[[], Iterator[tuple[Order, Tiles]]]] = {
    "raster": rasters,
    "attention": attention_orders,
    "split raster": lambda: split(rasters()),
    "split attention": lambda: split(attention_orders()),
    "grouped raster": lambda: grouped(rasters),
    "grouped, split attention": lambda: grouped(lambda: split(attention_orders())),
    "split, grouped raster": lambda: split(grouped(rasters)),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ORDERS)
def test_every_tile_has_one_index(name: str) -> None:
    seen = 0
    for order, every in ORDERS[name]():
        tiles = [order.tile(index) for index in range(order.total)]
        assert len(tiles) == len(every) and set(tiles) == every
        seen += 1
    assert seen > 10


def test_the_parts_of_a_tile_are_neighbours_and_groups_follow_each_other() -> None:
    raster = RasterOrder.of(Raster(), TileCounts(2, 2))
    tiles = [SplitOrder(raster, 3).tile(i) for i in range(12)]
    assert [t.split for t in tiles] == [0, 1, 2] * 4
    assert len({t._replace(split=0) for t in tiles[:3]}) == 1
    order = GroupedOrder([0, 4, 4, 8], 3, lambda _: raster)
    assert [order.tile(i).group for i in range(8)] == [0] * 4 + [2] * 4


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 100])
def test_a_group_is_found_whatever_the_number_of_groups(groups: int) -> None:
    totals = [(7 * g) % 4 for g in range(groups)]
    totals[-1] += 1
    starts = [0, *itertools.accumulate(totals)]
    order = GroupedOrder(starts, groups, lambda _: RasterOrder.of(Raster(), TileCounts(9, 1)))
    owners = [g for g, total in enumerate(totals) for _ in range(total)]
    assert [order.group(index) for index in range(order.total)] == owners


# ---- traced, with counts that only the kernel knows


@dataclass(frozen=True)
class GroupedConfig:
    groups: int
    splits: int


class GroupedTiles:
    """CTA i writes the tile that a grouped, split raster order has at index i, as in a grouped
    GEMM: mRows (G) rows of each group, in tiles of 16, by two tiles of columns."""

    arch = "sm_90a"
    dtypes = ("int32",)
    name = "sm90_grouped_tiles"

    def __init__(self, config: GroupedConfig) -> None:
        self.config = config

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        plain: dict[str, Any] = {"aligned": False, "whole": False}
        return tuple(
            Operand(name, sizes, "int32", **plain)
            for name, sizes in (("rows", ("g",)), ("starts", ("s",)), ("tiles", ("i", "modes")))
        )

    @cute.jit
    def __call__(
        self, mRows: cute.Tensor, mStarts: cute.Tensor, mTiles: cute.Tensor, stream
    ) -> None:
        grid = (cute.size(mTiles, mode=[0]), 1, 1)
        self.kernel(mRows, mStarts, mTiles).launch(grid=grid, block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mRows: cute.Tensor, mStarts: cute.Tensor, mTiles: cute.Tensor) -> None:
        c = self.config

        def order_of(group: Int32) -> Order:
            counts = TileCounts((mRows[group] + 15) // 16, 2)
            return SplitOrder(RasterOrder.of(Raster(2), counts), c.splits)

        cta, _, _ = cute.arch.block_idx()
        tile = GroupedOrder(mStarts, c.groups, order_of).tile(cta)
        if cute.arch.lane_idx() == 0:
            for i, mode in enumerate((tile.group, tile.m, tile.n, tile.split)):
                mTiles[cta, i] = mode


@pytest.mark.parametrize("rows", [[16], [0, 40, 16, 0, 100], [33] * 7], ids=len)
def test_a_grouped_order_in_a_kernel_is_that_of_the_host(rows: list[int]) -> None:
    config = GroupedConfig(len(rows), splits=3)
    totals = [-(-n // 16) * 2 * config.splits for n in rows]
    starts = [0, *itertools.accumulate(totals)]
    found = torch.full((starts[-1], 4), -1, dtype=torch.int32)
    compiled = compile(GroupedTiles(config), "int32", "sm_90a")
    report = simulate(compiled, torch.tensor(rows, dtype=torch.int32),
                      torch.tensor(starts, dtype=torch.int32), found)  # fmt: skip
    assert not report.findings

    def order_of(group: int) -> Order:
        return SplitOrder(
            RasterOrder.of(Raster(2), TileCounts(-(-rows[group] // 16), 2)), config.splits
        )

    order = GroupedOrder(starts, len(rows), order_of)
    tiles = [order.tile(index) for index in range(order.total)]
    assert found.tolist() == [[t.group, t.m, t.n, t.split] for t in tiles]

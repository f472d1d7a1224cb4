"""Orders: bijections from the indices 0, 1, ... to the work tiles of a problem.

An order knows counts, of tiles, groups or parts, and no tensor. Whatever hands out its indices
(dispatch.py), each index is one tile, and each tile has one index. Orders of one kind of work:

    raster.py                    the tiles of a matrix, in bands, and of a batch of them
    kernels/attention/order.py   blocks of rows of all heads, those with the most keys first

Two wrap any order, each other included: SplitOrder gives every tile to several CTAs, which share
its reduction; GroupedOrder takes groups of work one after the other, each in an order of its own.

Plain operators only: Python ints run it, and the same code traces in the DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import cutlass
from cutlass import Int32, cute

from cutex.device.work_tile import WorkTile

Index = TypeVar("Index", int, Int32)


class Order(Protocol):
    """A bijection from 0 <= index < total to work tiles, in Python ints or the DSL's Int32."""

    @property
    def total(self) -> Any:
        """The number of indices."""

    def tile(self, index: Any) -> WorkTile: ...


class TileCounts(NamedTuple):
    """The numbers of tiles that cover a result (M, N) or, with a batch, (M, N, L)."""

    m: Int32 | int
    n: Int32 | int
    batch: Int32 | int | None = None  # L; None: there is no batch

    @staticmethod
    def of(mOut: cute.Tensor, tile: tuple[int, int]) -> TileCounts:
        """The counts of `tile` (bM, bN) that cover mOut."""
        m, n = cute.ceil_div(mOut.shape[:2], tile)
        return TileCounts(m, n, cute.size(mOut, mode=[2]) if cute.rank(mOut) == 3 else None)

    @property
    def total(self) -> Int32 | int:
        total = self.m * self.n
        return total if self.batch is None else total * self.batch


@dataclass(frozen=True)
class SplitOrder:
    """Each tile of `order` for `splits` indices in a row, one for each part of its reduction."""

    order: Order
    splits: Int32 | int

    @property
    def total(self) -> Any:
        return self.order.total * self.splits

    def tile(self, index: Any) -> WorkTile:
        whole = index // self.splits
        return self.order.tile(whole)._replace(split=index - whole * self.splits)


@dataclass(frozen=True)
class GroupedOrder:
    """The tiles of groups, such as the experts of a mixture, one group after the other.

    starts: the index of each group's first tile, and after them the number of all tiles: a list,
    or a tensor of Int32 (groups + 1). A group may be empty.
    """

    starts: Any
    groups: int
    order_of: Callable[[Any], Order]  # the order of a group's own tiles, given its number

    @property
    def total(self) -> Any:
        return self.starts[self.groups]

    def tile(self, index: Any) -> WorkTile:
        group = self.group(index)
        tile = self.order_of(group).tile(index - self.starts[group])
        return tile._replace(group=group)

    def group(self, index: Index) -> Index:
        """The group that has tile `index`: the last that begins at or before it.

        A binary search whose number of steps depends on `groups` alone, so that threads of a warp
        take the same way.
        """
        found: Any = index * 0
        for bit in reversed(range(max(self.groups - 1, 0).bit_length())):
            later = cutlass.min(found + (1 << bit), self.groups - 1)
            found = select(self.starts[later] <= index, later, found)
        return found


def select(condition: Any, if_so: Any, if_not: Any) -> Any:
    """`if_so` or `if_not`; both are computed."""
    if isinstance(condition, bool):
        return if_so if condition else if_not
    return Int32(cutlass.select_(condition, Int32(if_so), Int32(if_not)))

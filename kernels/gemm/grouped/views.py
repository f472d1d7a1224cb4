"""The rows of one group, as the roles of a kernel see them.

A is loaded through one tensor map over all rows, starting at the group's first row: rows of later
groups in a tile are computed and never stored. Out is stored through one map, too: a view in which
a group's rows end where the map's rows do, so that TMA drops the ones after them, however many they
are (device/row_source.py).

Where the rows are K, A and B are loaded through such views: a group's rows are followed by zeros,
so that nothing after them is added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from cutex.compile import Operand
from cutex.device.epilogue.epilogue_ops import BoundOps, EpilogueOp, op_arguments
from cutex.device.epilogue.scattered_rows import ScatteredRows
from cutex.device.row_source import END, endless_view, row_list
from cutex.schedulers.ragged import RowGroups


def store_operand(mOut: cute.Tensor, slots: cute.ComposedLayout) -> cpasync.TmaInfo:
    """The tensor map that stores slots (bRows, bCols, SLOT) to rows of groups of mOut (M, N)."""
    part = cute.size(slots, mode=[0]), cute.size(slots, mode=[1])
    op = cpasync.CopyBulkTensorTileS2GOp()
    return cpasync.make_tiled_tma_atom(op, endless_view(row_list(mOut)), slots, part)


def stored_rows(out: cpasync.TmaInfo, begin: Int32, end: Int32) -> cpasync.TmaInfo:
    """The rows from `begin` to `end` of a `store_operand`, (rows, N): those after them are out of
    bounds."""
    mX = out.tma_tensor  # (X, N, H, Y, Z)
    mX = cute.domain_offset((Int32(END) - (end - begin), 0, 0, 0, 0), mX)
    return cpasync.TmaInfo(out.atom, mX[None, None, 0, end, END], out.smem_layout)


def column_operand(mOut: cute.Tensor, slots: cute.ComposedLayout) -> cpasync.TmaInfo:
    """The tensor map that stores slots (bCols, bRows, SLOT) of columns of mOut (M, N) to rows of
    groups."""
    view = endless_view(row_list(mOut))  # (X, N, H, Y, Z)
    view = cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0, 2, 3, 4]))
    part = cute.size(slots, mode=[0]), cute.size(slots, mode=[1])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, slots, part)


def stored_columns(out: cpasync.TmaInfo, begin: Int32, end: Int32) -> cpasync.TmaInfo:
    """The rows from `begin` to `end` of a `column_operand`, (N, rows): those after them are out of
    bounds."""
    mX = out.tma_tensor  # (N, X, H, Y, Z)
    mX = cute.domain_offset((0, Int32(END) - (end - begin), 0, 0, 0), mX)
    return cpasync.TmaInfo(out.atom, mX[None, None, 0, end, END], out.smem_layout)


def pairs_apart(mX: cute.Tensor, halves: bool = False) -> cute.Tensor:
    """A view of mX (N, K, E) in which each 16 rows are 8 gates, then the 8 that they gate: the even
    rows of 16 and the odd ones, or of `halves` 8 rows of each."""
    (n, k, groups), (row, *others) = mX.shape, mX.stride
    shape, stride = (8, 2, n // 16), (2 * row, row, 16 * row)
    if halves:
        stride = row, n // 2 * row, 8 * row
    layout = cute.make_layout((shape, k, groups), stride=(stride, *others))
    return cute.make_tensor(mX.iterator, layout)


def scattered_rows(store: Any, group: Int32) -> ScatteredRows:
    """The rows of out of one group, by a store's index."""
    groups, config = store.groups, store.config
    where = groups.begins[group], groups.rows(group)
    return ScatteredRows(store.mOut, store.index, *where, config.add, config.product.out.whole)


def loaded_rows(x: cpasync.TmaInfo, begin: Int32) -> cpasync.TmaInfo:
    """The rows of x (M, K) from `begin` on."""
    mX = cute.domain_offset((begin, 0), x.tma_tensor)
    return cpasync.TmaInfo(x.atom, mX, x.smem_layout)


def summed_operand(mX: cute.Tensor) -> cute.Tensor:
    """A view of mX (M, K), contiguous in M, from which `summed_rows` takes a group's rows along
    K."""
    rows = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 0]))  # (K, M)
    view = endless_view(row_list(rows))  # (X, M, H, Y, Z)
    return cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0, 2, 3, 4]))


def summed_rows(x: cpasync.TmaInfo, begin: Int32, end: Int32) -> cpasync.TmaInfo:
    """The rows from `begin` to `end` along K of a `summed_operand` map, (M, K), followed by
    zeros."""
    mX = x.tma_tensor  # (M, X, H, Y, Z)
    mX = cute.domain_offset((0, Int32(END) - (end - begin), 0, 0, 0), mX)
    return cpasync.TmaInfo(x.atom, mX[None, None, 0, end, END], x.smem_layout)


@dataclass(frozen=True)
class GroupOps:
    """The operations of an epilogue, and their arguments for all groups."""

    ops: tuple[EpilogueOp, ...]
    arguments: tuple[Any, ...]
    columns: Int32 | int  # of the product

    def of(self, groups: RowGroups, group: Int32) -> BoundOps:
        """The operations bound to the product of one group."""
        passed = self.passed(group, groups.begins[group])
        return BoundOps(self.ops, passed, (groups.rows(group), self.columns), transposed=False)

    def of_columns(self, group: Int32, begin: Int32, end: Int32) -> BoundOps:
        """The operations bound to one group's rows from `begin` to `end`, which are the
        accumulator's columns."""
        bounds = end - begin, self.columns
        return BoundOps(self.ops, self.passed(group, begin), bounds, transposed=True)

    def passed(self, group: Int32, begin: Int32) -> tuple[Any, ...]:
        """All arguments, restricted to one group's rows from `begin` on."""
        pairs = zip(op_arguments(self.ops), self.arguments, strict=True)
        return tuple(self.argument(declared, x, group, begin) for declared, x in pairs)

    def argument(self, declared: Any, x: Any, group: Int32, begin: Int32) -> Any:
        """An argument's part for one group: its row of (E, N), or the rows of (M) or (M, N) from
        `begin` on."""
        if not isinstance(declared, Operand):
            return x
        if declared.sizes == ("n",):
            return x[group, None]
        if declared.sizes[0] == "m":
            return cute.domain_offset((begin, *(0 for _ in declared.sizes[1:])), x)
        return x

"""Sources of rows: where in memory the rows are of which a tile of an operand consists.

A tile's rows are loaded in boxes, each of so many rows as are neighbours in memory wherever the box
is. What a source knows is the place of a box:

    DenseRows      all rows are neighbours, as in a matrix or in one of packed sequences
    PagedRows      pages of `page_size` rows, whose numbers are in a page table
    GatheredRows   single rows, whose numbers are in an index

TMA loads each box, and the bytes of a tile are the same for all sources: a ring, its barriers and
the MMA do not know which one fills it. Rows from `length` on are zeros, also within a page, since
what is there in memory may be another sequence's, or was never written.

Where all rows of a tile are neighbours, one TMA copy loads it (attention/rows.py, atoms/tma.py).
The loads here take a copy for each box and swizzled column: whole pages cost little more, single
rows 128 bytes a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

ATOM_ROWS = 8  # of a swizzle
WARP = 32  # lanes
UNROLLED = 8  # boxes whose copies are unrolled
END = 2**30  # rows of mode X of a view whose end moves; no sequence is longer
WRAP = 2**34  # bytes: END times this is 2^64


class Box(NamedTuple):
    """Consecutive rows of a list of rows, some of which may be out of range."""

    offset: Any  # the first row's number
    count: Any  # of the rows that count; the others are zeros


class RowSource(Protocol):
    """The rows 0, 1, ... of one sequence, group or matrix, by their places in a list of rows.

    Plain operators only: Python ints and lists run it, and the same code traces in the DSL.
    """

    def box_rows(self, tile_rows: int) -> int:
        """The rows of a box, of which a tile of `tile_rows` has a whole number."""

    def box(self, row: Any, rows: int) -> Box:
        """The box of `rows` rows that begins at `row`, a multiple of `rows`."""


class DenseRows(NamedTuple):
    """Rows that follow one another from row `offset` on."""

    offset: Int32 | int
    length: Int32 | int

    def box_rows(self, tile_rows: int) -> int:
        return tile_rows

    def box(self, row: Any, rows: int) -> Box:
        return Box(self.offset + row, clamp(self.length - row, rows))


class PagedRows(NamedTuple):
    """Rows in pages of `page_size`: page i of the sequence is page table[i] of memory, whose pages
    begin `pitch` rows apart. With `first`, row 0 is that row of the pages, and boxes are single
    rows, since it may be anywhere in a page.

    NOTE: a box without rows reads the first entry of the table; without any, load nothing.
    """

    table: Any  # (pages) Int32
    length: Int32 | int
    page_size: int
    pitch: Int32 | int
    first: Any = None  # Int32

    def box_rows(self, tile_rows: int) -> int:
        """The most rows that are in one page, if they are whole swizzle atoms; else 1."""
        rows = gcd(self.page_size, tile_rows)
        return rows if rows % ATOM_ROWS == 0 and self.first is None else 1

    def box(self, row: Any, rows: int) -> Box:
        count = clamp(self.length - row, rows)
        row = (row if self.first is None else row + self.first) * clamp(count, 1)
        return Box(self.table[row // self.page_size] * self.pitch + row % self.page_size, count)


def cache_box_rows(page_size: int, tile_rows: int, begins_later: bool = False) -> int:
    """The rows of a box, of which a tile of `tile_rows` has a whole number, in a cache of pages of
    `page_size` rows or, if that is 0, without pages. `begins_later`: the first row may be anywhere
    in a page."""
    first = 0 if begins_later else None
    source = PagedRows(None, 0, page_size, 0, first) if page_size else DenseRows(0, 0)
    return source.box_rows(tile_rows)


class GatheredRows(NamedTuple):
    """Single rows: row i is row index[i] of memory.

    NOTE: a box without rows reads the first entry of the index; without any, load nothing.
    """

    index: Any  # (rows) Int32
    length: Int32 | int

    def box_rows(self, tile_rows: int) -> int:
        return 1

    def box(self, row: Any, rows: int) -> Box:
        count = clamp(self.length - row, rows)
        return Box(self.index[row * clamp(count, 1)], count)


def clamp(x: Any, most: int) -> Any:
    """x, at least 0 and at most `most`."""
    return cutlass.min(cutlass.max(x, 0), most)


# ---- in memory


def why_not_pages(stride: Sequence[int]) -> str | None:
    """The reason why pages (pages, page size, heads, D) of these strides are no list of rows, or
    None. Pages of all heads, of one head after the other, and of K and V in turn are one."""
    if stride[1] < 1 or stride[0] % stride[1]:
        return f"its pages begin {stride[0]} elements apart, no multiple of its rows' {stride[1]}"
    return None


def page_pitch(mX: cute.Tensor) -> Int32:
    """How many rows of mX (pages, page size, heads, D) apart its pages begin, if `why_not_pages` is
    None."""
    return Int32(mX.stride[0] // mX.stride[1])


def row_list(mX: cute.Tensor) -> cute.Tensor:
    """A matrix (rows, D), a list of rows (rows, heads, D), or pages (pages, page size, heads, D),
    as the list (rows, heads, D) in which boxes have their places."""
    shape, stride = mX.shape, mX.stride
    if len(shape) == 2:
        shape, stride = (shape[0], 1, shape[1]), (stride[0], stride[0], stride[1])
    if len(shape) == 4:
        rows = (shape[0] - 1) * page_pitch(mX) + shape[1]
        shape, stride = (rows, *shape[2:]), stride[1:]
    return cute.make_tensor(mX.iterator, cute.make_layout(shape, stride=stride))


def endless_view(mX: cute.Tensor) -> cute.Tensor:
    """A list of rows (rows, heads, D) as (X, D, H, Y, Z), in which a box may end within its rows.

    Row r of a box at `offset` of which `count` rows count has the coordinates

        x = END - count + r,  y = offset + count,  z = END

    so that x is out of bounds, and TMA fills in zeros, just where the rows end. With strides s, s
    and 2^34 - s bytes the address is (offset + r) * s + 2^64, and TMA's addresses wrap.
    """
    (rows, heads, d), (row, head, one) = mX.shape, mX.stride
    wrap = WRAP * 8 // mX.element_type.width - row
    shape, stride = (END, d, heads, rows + 1, END + 1), (row, one, head, row, wrap)
    return cute.make_tensor(mX.iterator, cute.make_layout(shape, stride=stride))


def swizzle_bytes(row_bytes: int) -> int:
    """The widest swizzle that divides a row of a tile evenly."""
    return next(s for s in (128, 64, 32) if row_bytes % s == 0)


def box_operand(
    mX: cute.Tensor,
    tile: tuple[int, int],
    box_rows: int,
    pair: bool = False,
) -> cpasync.TmaInfo:
    """The tensor map that loads boxes of tiles (bRows, bD) of mX, whose slots in smem are K-major
    (slots_layout), as wide as its swizzle; with `pair`, bytes are counted on the barrier of the
    pair's leader."""
    dtype = mX.element_type
    swizzle = swizzle_bytes(tile[1] * dtype.width // 8)
    box = box_rows, swizzle * 8 // dtype.width
    bits = {32: 1, 64: 2, 128: 3}[swizzle]
    layout = cute.make_layout((*box, 1), stride=(box[1], 1, 0))
    layout = cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, layout)
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    op = cpasync.CopyBulkTensorTileG2SOp(group)
    return cpasync.make_tiled_tma_atom(op, endless_view(row_list(mX)), layout, box)


# ---- loads


@dataclass(frozen=True)
class BoxLoads:
    """The loads of tiles of one source's rows, box by box."""

    info: cpasync.TmaInfo  # of box_operand
    source: RowSource
    sX: cute.Tensor  # (bRows, bD, SLOT)
    head: Int32 | int = 0

    @property
    def tile(self) -> tuple[int, int]:
        return cute.size(self.sX, mode=[0]), cute.size(self.sX, mode=[1])

    @property
    def box(self) -> tuple[int, int]:
        """The rows and columns of a box."""
        rows, columns = self.tile
        width = self.sX.element_type.width
        return self.source.box_rows(rows), swizzle_bytes(columns * width // 8) * 8 // width

    @cute.jit
    def load(
        self,
        tile: Int32,
        slot: Int32,
        full: cute.Pointer,
        column: Int32 | int = 0,
        part: Int32 | int = 0,
        parts: cutlass.Constexpr[int] = 1,
        found: tuple[Box, ...] | None = None,
    ) -> None:
        """Start the load of the rows of tile `tile`, from column tile `column`, into `slot`; its
        bytes, those of a whole tile, arrive on `full`. A whole warp calls it; or `parts` warps do,
        each of which loads one part of the rows. `found`: what `find` has found of the tile."""
        rows, box = self.tile[0], self.box
        boxes, columns = rows // box[0] // parts, self.tile[1] // box[1]
        mine = part * boxes
        sX = cute.flat_divide(self.sX, box)  # (boxRows, boxD, BOX, COLUMN, SLOT)
        # NOTE: each lane looks up a box, so that a tile waits for its table or index once for every
        # 32 boxes, not for each
        for first in cutlass.range_constexpr(0, boxes, WARP):
            of_lane = self._of_lane(tile, mine + first) if found is None else found[first // WARP]
            count = min(WARP, boxes - first)
            for i in cutlass.range(count, unroll_full=count <= UNROLLED):
                gX = self.columns_of(Box(*(cute.arch.shuffle_sync(x, i) for x in of_lane)))
                for c in cutlass.range_constexpr(columns):
                    tXsX, tXgX = cpasync.tma_partition(
                        self.info.atom,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(sX[None, None, mine + first + i, c, slot], 0, 2),
                        cute.group_modes(gX[None, None, column * columns + c], 0, 2),
                    )  # (TMA), (TMA)
                    cute.copy(self.info.atom, tXgX, tXsX, tma_bar_ptr=full)

    def find(self, tile: Int32) -> tuple[Box, ...]:
        """Where the boxes of tile `tile` are: of each 32 this lane's. For `load`, once its slot is
        free: the table or the index is read while that is waited for."""
        boxes = self.tile[0] // self.box[0]
        return tuple(self._of_lane(tile, first) for first in range(0, boxes, WARP))

    def _of_lane(self, tile: Int32, first: Int32 | int) -> Box:
        """This lane's box, of those of tile `tile` from `first` on."""
        rows, box_rows = self.tile[0], self.box[0]
        return self.source.box(tile * rows + (first + cute.arch.lane_idx()) * box_rows, box_rows)

    def columns_of(self, box: Box) -> cute.Tensor:
        """A box of all columns, (boxRows, boxD, RestD)."""
        mX = self.info.tma_tensor  # (X, D, H, Y, Z)
        mX = cute.domain_offset((Int32(END) - box.count, 0, 0, 0, 0), mX)
        mX = mX[None, None, self.head, box.offset + box.count, END]  # (X, D)
        return cute.local_tile(mX, self.box, (0, None))

    def of(self, tile: Int32) -> RowTileLoads:
        """The loads of one tile of rows along its columns, as of GEMM's A along K."""
        return RowTileLoads(self, tile)


@dataclass(frozen=True)
class RowTileLoads:
    """The loads of the tiles along D of one tile of rows."""

    loads: BoxLoads
    tile: Int32

    @property
    def num_k_tiles(self) -> Int32:
        d = cute.size(self.loads.info.tma_tensor, mode=[1])
        return cute.ceil_div(d, self.loads.tile[1])

    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the load of tile `k_tile` along D into `slot`. A whole warp calls it."""
        self.loads.load(self.tile, slot, full, k_tile)

"""Running sums along rows, each element read and written once.

A row too long for one CTA is shared by many. Each publishes the value of its part and finds that of
all earlier parts by look-back: value and ready flag share one word, so no fence is needed. Parts
form groups of 32: a warp combines the values of earlier parts of its group, and the prefix of a
group is passed on by the last part of the group before it. A CTA draws its part from a ticket
counter, so the parts it waits for have started.

Source: Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back, 2016. Fixed
groups, instead of whatever has been published first, fix the order of all sums, and so the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.tile import WARP, RowTile
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.fold import Fold
from cutex.kernels.row.kernel import RowKernel, matrix
from cutex.kernels.row.published import leave, taken


@dataclass(frozen=True)
class ScanConfig:
    """What is scanned, in which direction, and the tile: of whole rows, or of a part of one."""

    tile: RowTile
    fold: Fold  # "sum", or "max" of the elements or of their negatives
    out: str  # the dtype of results
    shared: bool = False  # CTAs share a row
    reverse: bool = False  # from the last element to the first
    exclusive: bool = False  # of the elements before each

    def why_not(self) -> str | None:
        if self.tile.threads < WARP or self.tile.ctas > 1:
            return f"threads={self.tile.threads}, ctas={self.tile.ctas}: takes whole warps of a CTA"
        if self.shared and self.tile.rows > 1:
            return f"rows={self.tile.rows}: CTAs that share a row have no other"
        return None


class Scan(RowKernel):
    """y[n] = fold of x[0], ..., x[n] of each row, or without x[n].

    smem            bytes
    totals          4 * warps * vectors of each row
    carry, ticket   4 each
    """

    title = "scan"

    def __init__(self, config: ScanConfig) -> None:
        super().__init__(config)
        if reason := config.why_not():
            raise ValueError(reason)

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        words = Operand("words", ("words",), "int64", aligned=False, whole=False, bounds_by=bounds)
        return (
            matrix("x", dtype, c.tile), matrix("y", c.out, c.tile),
            *((words,) if c.shared else ()), Scalar("parts", "int32"),
        )  # fmt: skip

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, *rest) -> None:
        *words, parts, stream = rest
        tile = self.tile
        blocks = cute.ceil_div(cute.size(mX, mode=[0]), tile.rows) * parts
        self.kernel(mX, mY, tuple(words), parts).launch(
            grid=(blocks, 1, 1),
            block=(tile.num_threads, 1, 1),
            use_pdl=may_overlap(),
            stream=stream,
        )

    # ---- on the device

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, words: tuple, parts: Int32) -> None:
        c, tile = self.config, self.tile
        smem = SmemAllocator()
        shape = tile.warps, tile.vectors, tile.rows
        totals = smem.allocate_tensor(Float32, cute.make_layout(shape), 16)  # (WARP, NumV, ROW)
        carry = smem.allocate_tensor(Float32, cute.make_layout(1), 4)
        ticket = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        thread, unit = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        wait_for_kernel_before()
        if cutlass.const_expr(c.shared):
            if thread == 0:
                taken = cute.arch.atomic_add(
                    words[0].iterator, Int64(1), sem="relaxed", scope="gpu"
                )
                ticket[0] = Int32(taken)
            cute.arch.sync_threads()
            unit = ticket[0]
        part, rows = unit % parts, cute.size(mX, mode=[0])
        row = unit // parts * tile.rows + thread // tile.threads
        here = cutlass.min(row, rows - 1)
        columns = self.columns_of(mX[here, None], part, parts)
        rX = columns.load(mX[here, None], c.fold.fill)  # (V, NumV)
        rS, before = self.within_vectors(rX, totals)  # (V, NumV), (NumV)
        cute.arch.sync_threads()
        total = self.add_totals(before, totals)
        if cutlass.const_expr(c.shared):
            if thread < WARP:
                self.look_back(words[0], carry, total, (here, part, parts))
            cute.arch.sync_threads()
            self.add_carry(before, carry[0])
        if row < rows:
            columns.store(self.result(rS, before, mY), mY[here, None])

    def columns_of(self, gX: cute.Tensor, part: Int32, parts: Int32) -> Columns:
        """This thread's columns of a part of a row gX (N); in reverse the last thread takes the
        first ones."""
        tile = self.tile
        columns = Columns.of(tile, gX)
        if self.config.reverse:
            thread = cute.arch.thread_idx()[0] % tile.threads
            turned = columns.first + (tile.threads - 1 - 2 * thread) * tile.width
            columns = replace(columns, first=turned)
            part = parts - 1 - part
        return columns.moved(part)

    def combine(self, x: Float32, y: Float32) -> Float32:
        return self.config.fold.combine((x,), (y,))[0]

    def start(self) -> Float32:
        return Float32(self.config.fold.start()[0])

    def order(self, count: int) -> list[int]:
        """The indices of this many vectors, or of the elements of one, in scan order."""
        return [*range(count)][:: -1 if self.config.reverse else 1]

    @cute.jit
    def within_vectors(
        self, rX: cute.Tensor, totals: cute.Tensor
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """The scan (V, NumV) inside each of a thread's vectors, and the sum (NumV) of what
        precedes each among its warp's vectors of the same index; the sum of all of these goes to
        `totals`."""
        tile = self.tile
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp, row = thread % tile.threads // WARP, thread // tile.threads
        rS = cute.make_rmem_tensor((tile.width, tile.vectors), Float32)
        before = cute.make_rmem_tensor(tile.vectors, Float32)
        for i in cutlass.range_constexpr(tile.vectors):
            found = self.start()
            for j in self.order(tile.width):
                found = self.combine(found, self.config.fold.of(rX[j, i].to(Float32), Int32(0))[0])
                rS[j, i] = found
            step = 1
            while cutlass.const_expr(step < WARP):
                other = cute.arch.shuffle_sync_up(found, offset=step, mask_and_clamp=0)
                found = cutlass.select_(lane >= step, self.combine(other, found), found)
                step *= 2
            other = cute.arch.shuffle_sync_up(found, offset=1, mask_and_clamp=0)
            before[i] = cutlass.select_(lane == 0, self.start(), other)
            if lane == WARP - 1:
                totals[warp, i, row] = found
        return rS, before

    @cute.jit
    def add_totals(self, before: cute.Tensor, totals: cute.Tensor) -> Float32:
        """Add the sums of earlier warps to `before` (NumV); returns the value of the whole part."""
        tile = self.tile
        thread = cute.arch.thread_idx()[0]
        own, row = thread % tile.threads // WARP, thread // tile.threads
        running = self.start()
        for i in self.order(tile.vectors):
            mine = self.start()
            for warp in cutlass.range_constexpr(tile.warps):
                mine = cutlass.select_(own == warp, running, mine)
                running = self.combine(running, totals[warp, i, row])
            before[i] = self.combine(mine, before[i])
        return running

    def add_carry(self, before: cute.Tensor, carry: Float32) -> None:
        """Add what is before this part to `before` (NumV)."""
        for i in range(self.tile.vectors):
            before[i] = self.combine(carry, before[i])

    @cute.jit
    def look_back(
        self, words: cute.Tensor, carry: cute.Tensor, total: Float32, place: tuple
    ) -> None:
        """Publish this part's value and return that of all parts before it. Called by a whole warp.

        Word 0 is the next ticket. Each row has one word for each part, and one for the prefix of
        each group.
        """
        row, part, parts = place
        lane = cute.arch.lane_idx()
        groups = cute.ceil_div(parts, WARP)
        first = words.iterator + 1 + Int64(row) * (parts + groups)
        group, member = part // WARP, part % WARP
        if lane == 0:
            leave(first + part, total)
        value = self.start()
        if lane < member:
            value = taken(first + group * WARP + lane)
        distance = WARP // 2
        while cutlass.const_expr(distance):
            other = cute.arch.shuffle_sync_bfly(value, offset=distance)
            value = self.combine(value, other)
            distance //= 2
        if lane == 0:
            if group > 0:
                value = self.combine(taken(first + parts + group), value)
            carry[0] = value
            if (member == WARP - 1) & (group + 1 < groups):
                leave(first + parts + group + 1, self.combine(value, total))

    @cute.jit
    def result(self, rS: cute.Tensor, before: cute.Tensor, mY: cute.Tensor) -> cute.Tensor:
        """The scan (V, NumV) of this thread's columns, in y's dtype."""
        c, tile = self.config, self.tile
        rY = cute.make_rmem_tensor((tile.width, tile.vectors), mY.element_type)
        for i in cutlass.range_constexpr(tile.vectors):
            last: Any = None
            for j in self.order(tile.width):
                found = before[i]
                if cutlass.const_expr(not c.exclusive):
                    found = self.combine(before[i], rS[j, i])
                elif cutlass.const_expr(last is not None):
                    found = self.combine(before[i], rS[last, i])
                last = j
                rY[j, i] = (found if c.fold.sign == 1 else -found).to(mY.element_type)
        return rY


def bounds(numbers: Mapping[str, int]) -> tuple[Bound, ...]:
    """The bound of the number of words of a launch."""
    return (Bound("words", words_of(numbers["m"], numbers["parts"])),)


def words_of(rows: int, parts: int) -> int:
    """The words that CTAs publish to each other: a ticket counter, and those of `look_back`."""
    return 1 + rows * (parts + -(-parts // WARP))

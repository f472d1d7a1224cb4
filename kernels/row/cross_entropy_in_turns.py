"""Cross-entropy of long rows by CTAs that stay: the next row is on its way while one ends."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Scalar
from cutex.device.row.columns import Columns
from cutex.device.row.tickets import Tickets
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.by_tickets import DRAWN, FOREVER
from cutex.kernels.row.cross_entropy import (
    RESIDENT,
    SCALARS,
    CrossEntropy,
    CrossEntropyConfig,
    load_now,
    merged_with_sums,
)
from cutex.kernels.row.kernel import parts_of, reductions
from cutex.kernels.row.softmax import combined


class CrossEntropyInTurns(CrossEntropy):
    """The same. A CTA begins with the row of its number, and draws each further one while it walks
    along the one before.

    smem            bytes
    words           8 * warps * values of a row
    drawn           8: the ticket of the next row, by turns
    """

    title = "cross_entropy_in_turns"

    def __init__(self, config: CrossEntropyConfig) -> None:
        super().__init__(config)
        if not config.walks or config.tile.rows * config.tile.ctas > 1:
            raise ValueError("a CTA walks along one row at a time")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        most = super().operands(dtype)[: -len(SCALARS)]
        return (*most, DRAWN, Scalar("groups", "int32"), *SCALARS)

    @cute.jit
    def __call__(self, mX, mTarget, mLse, mLosses, *rest) -> None:
        *totals, mDrawn, groups, s, z, ignored, stream = rest
        threads = self.tile.num_threads
        last, options = self.last_of(totals), (s, z, ignored)
        self.in_turns(mX, mTarget, (mLse, mLosses), last, mDrawn, groups, options).launch(
            grid=(groups, 1, 1),
            block=(threads, 1, 1),
            min_blocks_per_mp=RESIDENT // threads,
            preferred_smem_carveout=10,  # percent; else the DSL asks a GPU
            use_pdl=may_overlap(),
            stream=stream,
        )
        self.add_up(mLosses, mTarget, totals, ignored, stream)

    @cute.kernel
    def in_turns(
        self, mX, mTarget, results: tuple, totals, mDrawn, groups: Int32, options: tuple
    ) -> None:
        c, tile = self.config, self.tile
        (reduction,) = reductions(tile, 2 + c.smoothed)
        drawn = SmemAllocator().allocate_tensor(Int32, cute.make_layout(2), 8)
        rows, row = Int32(cute.size(mX, mode=[0])), Int32(cute.arch.block_idx()[0])
        tickets = Tickets(mDrawn.iterator, row, groups, Int32(0), Int32(1), rows, 1)
        speaks, turn = cute.arch.thread_idx()[0] == 0, Int32(0)
        wait_for_kernel_before()
        target, label = mTarget.element_type(0), cute.make_rmem_tensor(1, mX.element_type)
        label.fill(0)
        if speaks:
            target = load_now(mTarget.iterator + row)
        rX = cute.make_rmem_tensor((tile.width, tile.vectors), mX.element_type)  # (V, NumV)
        self.fetch_first(mX, row, rX)
        while row < rows:
            ticket, ended = tickets.left, target
            if speaks:
                if tickets.left > 0:
                    ticket = tickets.draw()
                drawn[turn % 2] = ticket
            gX = mX[row, None]  # (N)
            columns = Columns.of(tile, gX)
            self.read_label(gX, columns, speaks, target, label)
            found = self.but_last(gX, columns, rX)
            cute.arch.sync_threads()
            ticket = drawn[turn % 2]
            after = tickets.number(ticket)
            rLast = cute.make_rmem_tensor(rX.shape, rX.element_type)
            rLast.store(rX.load())
            if after < rows:
                if speaks:
                    target = load_now(mTarget.iterator + after)
                self.fetch_first(mX, after, rX)
            elif speaks:
                tickets.end(ticket)
            last = columns.moved(parts_of(tile, gX) - 1)
            found = merged_with_sums(found, self.of_part(last, rLast))
            found = combined(reduction, found, turn, FOREVER)
            if speaks:
                self.store_loss(found, columns, ended, label, results, row, options)
            row, turn = after, turn + 1
        if cutlass.const_expr(totals is not None):
            self.add_up_if_last(results[1], mTarget, totals, options[2])

    @cute.jit
    def fetch_first(self, mX: cute.Tensor, row: Int32, rX: cute.Tensor) -> None:
        """Load the first part of a row of mX (M, N) into rX (V, NumV)."""
        gX = mX[row, None]  # (N)
        rX.fill(-Float32.inf)
        Columns.of(self.tile, gX).moved(Int32(0)).fetch(gX, rX)

    @cute.jit
    def but_last(self, gX: cute.Tensor, columns: Columns, rX: cute.Tensor) -> tuple:
        """A thread's partial result for all parts of a row gX (N) but the last one, which rX
        (V, NumV) has then; it has the first one."""
        found = (-Float32.inf, *[Float32(0)] * (1 + self.config.smoothed))
        parts = parts_of(self.tile, gX)
        for part in cutlass.range(parts - 1, unroll=1):
            here, rHere = columns.moved(part), cute.make_rmem_tensor(rX.shape, rX.element_type)
            rHere.store(rX.load())
            rX.fill(-Float32.inf)
            # the next part is on its way while this one is counted; the row may end in its last two
            columns.moved(part + 1).fetch(gX, rX, whole=part + 3 < parts)
            found = merged_with_sums(found, self.of_part(here, rHere))
        return found

    @property
    def kernels(self) -> dict[str, Any]:
        kinds = {name: k for name, k in super().kernels.items() if name != "rows"}
        return {"rows": type(self).in_turns, **kinds}

"""Cross-entropy over rows of logits, each read once, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Bound, Operand, Scalar
from cutex.device.atoms.scalar import fma
from cutex.device.last_arrival import is_last_arrival
from cutex.device.row.columns import Columns
from cutex.device.row.reduction import Values, add
from cutex.device.row.tile import RowTile
from cutex.device.stream_order import may_overlap, wait_for_kernel_before
from cutex.kernels.row.kernel import (
    RowKernel,
    ThisRow,
    elements,
    launch_of,
    matrix,
    meet,
    parts_of,
    reductions,
    row_of,
    row_vector,
)
from cutex.kernels.row.moments import folded, plus
from cutex.kernels.row.softmax import above, combined, exponentials_by_fma, largest, merged

LN_2 = 0.6931471805599453
TOTAL_THREADS = 1024
RESIDENT = 1024  # threads of an SM, of 64 registers each
TOTAL_PARTS = 128  # CTAs that share many losses
WORDS = {16: cutlass.Int16, 32: Int32}  # as which an element is loaded
LAST, ONE, SHARED, CLUSTER = "last", "one", "shared", "cluster"  # who adds up losses


@dataclass(frozen=True)
class CrossEntropyConfig:
    """What a cross-entropy computes, and its tile."""

    tile: RowTile
    smoothed: bool = False  # labels are smoothed: the sum of a row's logits counts, too
    target: str = "int32"  # its dtype
    reduction: str = "none"  # of the losses of rows: "mean" and "sum" leave one number
    walks: bool = False  # the tile holds a part of a row, and goes from part to part
    # who adds up losses: the CTA of rows that ends last; one of a second launch; where they are
    # many, several CTAs share them, and a third launch adds up those sums; of few rows the cluster
    # that has them all
    adds: str = ONE

    @property
    def reduced(self) -> bool:
        return self.reduction != "none"


SCALARS = Scalar("smoothing"), Scalar("z_loss"), Scalar("ignored", "int32")


def one(name: str) -> Operand:
    """An operand that is a single number."""
    return Operand(name, ("one",), "fp32", aligned=False, whole=False)


class CrossEntropy(RowKernel):
    """loss = lse - (1 - s) x[target] - s mean(x) + z lse^2; 0 where the target is ignored.

    Also their sum or mean, added up in a fixed order, and the count of rows in it."""

    title = "cross_entropy"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        totals = [one("loss"), one("count")] if c.reduced else []
        if c.reduced and c.adds == SHARED:
            sizes = "two", "parts"
            bounds = Bound("two", 2, 2), Bound("parts", TOTAL_PARTS, TOTAL_PARTS)
            totals.append(
                Operand("parts", sizes, "fp32", aligned=False, whole=False, bounds=bounds)
            )
        if c.reduced and c.adds == LAST:
            totals.append(Operand("counter", ("words",), "int32", aligned=False, whole=False))
        return (
            matrix("x", dtype, c.tile), row_vector("target", c.target), row_vector("lse"),
            row_vector("losses"), *totals, *SCALARS,
        )  # fmt: skip

    @cute.jit
    def __call__(self, mX, mTarget, mLse, mLosses, *rest) -> None:
        *totals, s, z, ignored, stream = rest
        how = self.how(mX, stream)
        last = self.last_of(totals)
        self.by_rows(mX, mTarget, mLse, mLosses, last, s, z, ignored).launch(**how)
        self.add_up(mLosses, mTarget, totals, ignored, stream)

    def last_of(self, totals: list) -> tuple | None:
        """What the CTA of rows that ends last adds up to, if it does."""
        # NOTE: tracing a kernel puts its own values into a tuple that it is given
        return (*totals,) if self.config.reduced and self.config.adds == LAST else None

    @cute.jit
    def add_up(self, mLosses, mTarget, totals, ignored, stream) -> None:
        """The launches that add up losses, if any."""
        c = self.config
        behind = {"use_pdl": may_overlap(), "stream": stream}
        if cutlass.const_expr(c.reduced and c.adds == SHARED):
            mLoss, mCount, mParts = totals
            self.parts(mLosses, mTarget, mParts, ignored).launch(
                grid=(TOTAL_PARTS, 1, 1), block=(TOTAL_THREADS, 1, 1), **behind
            )
            self.total_of_parts(mParts, mLoss, mCount).launch(
                grid=(1, 1, 1), block=(TOTAL_PARTS, 1, 1), **behind
            )
        elif cutlass.const_expr(c.reduced and c.adds == ONE):
            self.total(mLosses, mTarget, *totals, ignored).launch(
                grid=(1, 1, 1), block=(TOTAL_THREADS, 1, 1), **behind
            )

    def how(self, mX: cute.Tensor, stream: Any) -> dict[str, Any]:
        """The launch arguments of `by_rows`."""
        c = self.config
        how = launch_of(c.tile, mX, stream)
        if c.walks and not c.tile.aligned:
            # NOTE: a few registers less let one CTA more run
            how["min_blocks_per_mp"] = RESIDENT // c.tile.num_threads
            how["preferred_smem_carveout"] = 10  # percent; else the DSL asks a GPU
        return how

    @cute.kernel
    def by_rows(self, mX, mTarget, mLse, mLosses, totals, s, z, ignored) -> None:
        c, tile = self.config, self.config.tile
        (reduction,) = reductions(tile, 2 + c.smoothed, later=True, by_cta=True)
        this = ThisRow.of(tile, mX)
        columns = Columns.of(tile, this(mX))
        wait_for_kernel_before()
        speaks = this.exists & columns.is_first_of_row()
        # two latencies that pass under that of the row
        target, label = mTarget.element_type(0), cute.make_rmem_tensor(1, mX.element_type)
        label.fill(0)
        if speaks:
            target = load_now(mTarget.iterator + this.row)
        rX = row_of(mX, this, columns, -Float32.inf)  # (V, NumV)
        meet(tile)
        if cutlass.const_expr(c.walks):
            found = self.walked(this(mX), columns, rX, speaks, target, label)
        else:
            self.read_label(this(mX), columns, speaks, target, label)
            found = self.of_part(columns, rX)
        found = combined(reduction, found)
        if speaks:
            options = s, z, ignored
            self.store_loss(found, columns, target, label, (mLse, mLosses), this.row, options)
        if cutlass.const_expr(totals is not None):
            self.add_up_if_last(mLosses, mTarget, totals, ignored)

    @cute.jit
    def store_loss(
        self, found: Values, columns: Columns, target: Any, label: cute.Tensor, to: tuple,
        row: Int32, options: tuple,
    ) -> Float32:  # fmt: skip
        """Store a row's lse and loss; returns the loss."""
        mLse, mLosses = to
        s, z, ignored = options
        top, log_total = above(found[0]), cute.math.log2(found[1]) * LN_2
        lse, loss = top + log_total, Float32(0)
        if target != ignored:
            # no class has such a number: nothing is read there
            loss = Float32(float("nan"))
            if columns.holds(target.to(cutlass.Int64)):
                mean = found[2] if self.config.smoothed else None
                loss = apart(top, label[0].to(Float32), mean, s) + log_total + z * lse * lse
        mLse[row] = lse
        mLosses[row] = loss
        return loss

    @cute.jit
    def add_up_if_last(self, mLosses, mTarget, totals, ignored) -> None:
        """Add up the total in whichever CTA finds that all others have finished."""
        mLoss, mCount, mCounter = totals
        threads, thread = self.config.tile.num_threads, cute.arch.thread_idx()[0]
        is_last = SmemAllocator().allocate_tensor(Int32, cute.make_layout(1), 4)
        cute.arch.sync_threads()  # the losses of all rows of this CTA are written
        if thread == 0:
            is_last[0] = Int32(is_last_arrival(mCounter.iterator, cute.arch.grid_dim()[0]))
        cute.arch.sync_threads()
        if is_last[0] != 0:
            total, count = self.added(mLosses, mTarget, ignored, 0, 1, threads)
            if thread == 0:
                self.store_total(total, count, mLoss, mCount)

    @cute.jit
    def read_label(
        self, gX: cute.Tensor, columns: Columns, speaks: Boolean, target: Any, label: cute.Tensor
    ) -> None:
        """Load the target's logit of the row gX (N), in the one thread that holds it."""
        if speaks & columns.holds(target.to(cutlass.Int64)):
            word = cute.recast_tensor(label, WORDS[gX.element_type.width])
            at = gX.iterator + Int32(target)
            word[0] = load_now(cute.recast_ptr(at, dtype=word.element_type))

    @cute.jit
    def of_part(self, columns: Columns, rX: cute.Tensor) -> Values:
        """A thread's partial result for its elements rX (V, NumV): the maximum, the sum of
        exponentials relative to it and, with label smoothing, their contribution to the mean of the
        logits."""
        width, vectors = rX.shape
        x = [rX[j, i].to(Float32) for i in range(vectors) for j in range(width)]
        own = largest(rX)
        e, rest = exponentials_by_fma(x, own)
        sums = [folded(e, plus) * rest]
        if cutlass.const_expr(self.config.smoothed):
            sums.append(part_of_mean(columns, rX.load().to(Float32)))
        return (own, *sums)

    @cute.jit
    def walked(
        self, gX: cute.Tensor, columns: Columns, rX: cute.Tensor, speaks: Boolean, target: Any,
        label: cute.Tensor,
    ) -> Values:  # fmt: skip
        """The same over all parts of a row gX (N); rX has the first."""
        found = (-Float32.inf, *[Float32(0)] * (1 + self.config.smoothed))
        parts = parts_of(self.config.tile, gX)
        for part in cutlass.range(parts, unroll=1):
            here, rHere = columns.moved(part), cute.make_rmem_tensor(rX.shape, rX.element_type)
            rHere.store(rX.load())
            rX.fill(-Float32.inf)
            # the next part is on its way while this one is counted; the row may end in its last two
            columns.moved(part + 1).fetch(gX, rX, whole=part + 3 < parts)
            self.read_label(gX, columns, speaks & (part == 0), target, label)
            found = merged_with_sums(found, self.of_part(here, rHere))
        return found

    @cute.kernel
    def total(self, mLosses, mTarget, mLoss, mCount, ignored) -> None:
        """The sum or mean of mLosses (M), in a fixed order."""
        wait_for_kernel_before()
        total, count = self.added(mLosses, mTarget, ignored, 0, 1)
        if cute.arch.thread_idx()[0] == 0:
            self.store_total(total, count, mLoss, mCount)

    @cute.kernel
    def parts(self, mLosses, mTarget, mParts, ignored) -> None:
        """Write the sum and count of each CTA's share of many losses to mParts (2, P)."""
        wait_for_kernel_before()
        part = cute.arch.block_idx()[0]
        total, count = self.added(mLosses, mTarget, ignored, part, TOTAL_PARTS)
        if cute.arch.thread_idx()[0] == 0:
            mParts[0, part], mParts[1, part] = total, count

    @cute.kernel
    def total_of_parts(self, mParts, mLoss, mCount) -> None:
        """The sum or mean over the shares of all CTAs."""
        (reduction,) = reductions(RowTile(1, TOTAL_PARTS), 2)
        wait_for_kernel_before()
        thread = cute.arch.thread_idx()[0]
        total, count = reduction((mParts[0, thread], mParts[1, thread]), add)
        if thread == 0:
            self.store_total(total, count, mLoss, mCount)

    @cute.jit
    def added(
        self,
        mLosses,
        mTarget,
        ignored,
        part: Int32 | int,
        parts: cutlass.Constexpr[int],
        threads: cutlass.Constexpr[int] = TOTAL_THREADS,
    ) -> Values:
        """The sum of every `parts`-th share of mLosses (M), one share per thread of the CTA's
        `threads`, and how many losses count."""
        (reduction,) = reductions(RowTile(1, threads), 2)
        first = cute.arch.thread_idx()[0] + part * threads
        total, count = Float32(0), Float32(0)
        for row in cutlass.range(first, cute.size(mLosses), parts * threads, unroll=8):
            total += mLosses[row]
            if mTarget[row] != ignored:
                count += 1
        return reduction((total, count), add)

    @cute.jit
    def store_total(self, total: Float32, count: Float32, mLoss, mCount) -> None:
        if cutlass.const_expr(self.config.reduction == "mean"):
            total = total / count
        mLoss[0], mCount[0] = total, count

    @property
    def kernels(self) -> dict[str, Any]:
        kind, c = type(self), self.config
        adds = {
            LAST: {},
            CLUSTER: {},
            ONE: {"total": kind.total},
            SHARED: {"parts": kind.parts, "total": kind.total_of_parts},
        }
        return {"rows": kind.by_rows, **(adds[c.adds] if c.reduced else {})}


class CrossEntropyBackward(RowKernel):
    """dx = dloss * ((1 + 2 z lse) exp(x - lse) - s / N - (1 - s where x is the target)), part by
    part of a row; 0 where the target is ignored. dx may alias x."""

    title = "cross_entropy_backward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        # NOTE: one gradient for all rows has no stride
        dloss = Operand("dloss", ("m",), "fp32", contiguous=None, aligned=False, whole=False)
        return (
            matrix("x", dtype, c.tile), matrix("dx", dtype, c.tile),
            row_vector("target", c.target), row_vector("lse"), dloss,
            *((one("count"),) if c.reduction == "mean" else ()), *SCALARS,
        )  # fmt: skip

    @cute.jit
    def __call__(self, mX, mdX, mTarget, mLse, mdLoss, *rest) -> None:
        *given, stream = rest
        c = self.config
        names = (*(("count",) if c.reduction == "mean" else ()), "s", "z", "ignored")
        tile = self.config.tile
        # NOTE: of a grid, only x may be above 65535
        blocks = parts_of(tile, mX[0, None]) * cute.ceil_div(cute.size(mX, mode=[0]), tile.rows)
        options = dict(zip(names, given, strict=True))
        self.kernel(mX, mdX, mTarget, mLse, mdLoss, options).launch(
            grid=(blocks, 1, 1),
            block=(tile.num_threads, 1, 1),
            use_pdl=may_overlap(),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mdX, mTarget, mLse, mdLoss, options: dict[str, Any]) -> None:
        tile = self.config.tile
        s, z, ignored = options["s"], options["z"], options["ignored"]
        parts, block = parts_of(tile, mX[0, None]), cute.arch.block_idx()[0]
        part, rows = block % parts, cute.size(mX, mode=[0])
        this = block // parts * tile.rows + cute.arch.thread_idx()[0] // tile.threads
        row = cutlass.min(this, rows - 1)
        gX, gdX = mX[row, None], mdX[row, None]  # (N)
        # NOTE: past the last row nothing is read: that row may be overwritten already
        columns = Columns.of(tile, gX).moved(part).where(this < rows)
        wait_for_kernel_before()
        rX = columns.load(gX)  # (V, NumV)
        lse, target, scale = mLse[row], mTarget[row], mdLoss[row]
        if cutlass.const_expr("count" in options):
            scale = scale / options["count"][0]
        if target == ignored:
            scale = Float32(0)
        elif ~columns.holds(target):
            scale = Float32(float("nan"))
        # an exponential and a multiply-add for each element
        e, rest = exponentials_by_fma(elements(rX), lse)
        factor, less = rest * (1 + 2 * z * lse) * scale, s / Float32(columns.n) * scale
        less = cutlass.select_(s == Float32(0), Float32(0), less)  # of an infinite scale, too
        rdX = cute.make_rmem_tensor((tile.width, tile.vectors), Float32)
        for i in cutlass.range_constexpr(tile.vectors * tile.width):
            rdX[i] = fma(e[i], factor, -less)
        subtract_at(columns, rdX, target, (1 - s) * scale)
        if target == ignored:
            rdX.fill(0.0)  # also where a logit is inf or NaN
        if this < rows:
            columns.store(columns.rounded(rdX.load(), mdX), gdX)


@cute.jit
def subtract_at(columns: Columns, rX: cute.Tensor, target: Any, by: Float32) -> None:
    """Subtract `by` from the element of column `target` of rX (V, NumV), where this thread has it:
    a vector is asked first, its elements only where it has the column."""
    width, vectors = rX.shape
    at = Int32(target) - columns.first
    for i in cutlass.range_constexpr(vectors):
        place = at - i * columns.step
        if (place >= 0) & (place < width):
            for j in cutlass.range_constexpr(width):
                if place == j:
                    rX[j, i] -= by


def apart(top: Float32, label: Float32, mean: Float32 | None, s: Float32) -> Float32:
    """top - (1 - s) label - s mean; s is 0 where there is no mean.

    NOTE: logits are subtracted from each other before a logarithm is added, which their sum would
    round off; halves do not overflow where the result does not.
    """
    if mean is None:
        return top - label
    return (2 - 2 * s) * (top * 0.5 - label * 0.5) + 2 * s * (top * 0.5 - mean * 0.5)


def load_now(pointer: cute.Pointer) -> Any:
    """The value at a gmem address, loaded right here.

    NOTE: a plain load sinks to where its value is used, after the row's reduction, and everyone
    then waits for it (docs/facts/rows.md#rows-cross-entropy-label).
    """
    return cute.arch.load(pointer, pointer.dtype, sem="relaxed", scope="gpu")


def part_of_mean(columns: Columns, x: Any) -> Float32:
    """What this thread's elements x (V, NumV) contribute to the row's mean."""
    # NOTE: a sum of logits may overflow where their mean does not, and lse - inf would be NaN
    share = columns.where_held(x) * (Float32(1) / Float32(columns.n))
    return share.reduce(cute.ReductionOp.ADD, Float32(0), 0)


def merged_with_sums(x: Values, y: Values) -> Values:
    return (*merged(x[:2], y[:2]), *(a + b for a, b in zip(x[2:], y[2:], strict=True)))

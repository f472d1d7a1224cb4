"""The gradient of a norm of dense rows that come and go by bulk copies, taken in turn.

A CTA has a row, or a part of one in a cluster, in smem: the threads read it once for the sums over
the row and over its columns, and once again for dx, which takes the place of dy there. So registers
hold the columns' sums alone, and rows may begin anywhere, as in norm_bulk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing
from cutex.device.row.packed import PackedRows
from cutex.device.row.reduction import add
from cutex.device.row.words import Words
from cutex.kernels.row.kernel import launch_of_groups, reductions
from cutex.kernels.row.norm_backward import NormBackward, NormBackwardConfig

LEAST_SLOTS = 2
REGISTERS, SMEM, MEMORY = "registers", "smem", "memory"
AT_ONCE = 4  # words of a thread between two stores to smem, which hold back the next loads
CHAINS = 2  # sums of a thread that are added up beside each other


@dataclass(frozen=True)
class BackwardBulkConfig(NormBackwardConfig):
    """A norm's gradient of dense rows that come by bulk copies.

    The tile's vectors are not used. words: of 32 bits, that a thread has of a row, or of its CTA's
    part of one; slots: for rows of dy, of which x has one less; resident: CTAs of an SM; held:
    where weights are, which for a row are read twice.
    """

    words: int = 1
    slots: int = 3
    resident: int = 1
    held: str = REGISTERS


class NormBackwardBulk(NormBackward):
    """The gradient of dense rows. Thread 0 starts the copies; that of a sum with a residual, which
    is read once, comes to registers."""

    title = "norm_backward_bulk"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    def __init__(self, config: BackwardBulkConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if tile.aligned or tile.rows > 1:
            raise ValueError("rows by bulk copies may begin anywhere, and a CTA has one of them")
        if config.slots < LEAST_SLOTS:
            raise ValueError(f"slots={config.slots} must be at least {LEAST_SLOTS}")

    @cute.jit
    def __call__(self, mX, mdY, mdX, mRstd, *rest) -> None:
        c, (*given, groups, stream) = self.config, rest
        optional = dict(zip(c.optional, given, strict=True))
        how = launch_of_groups(self.tile, c.resident, groups, stream)
        # NOTE: tracing a kernel puts its own values into a dict that it is given
        self.by_rows(mX, mdY, mdX, mRstd, groups, {**optional}).launch(**how)
        self.launch_sums(optional, stream)

    @cute.kernel
    def by_rows(self, mX, mdY, mdX, mRstd, groups: Int32, optional: dict[str, cute.Tensor]) -> None:
        c, tile = self.config, self.tile
        (reduction,) = reductions(tile, 1 + c.centred, repeated=True)
        dense = self.dense
        elements = dense.elements(mX.element_type.width)
        xs = BulkRing.allocate(mX.element_type, elements, c.slots - 1)
        dys = BulkRing.allocate(mX.element_type, elements, c.slots)
        publish_barriers((xs.full, dys.full))
        group = Int32(cute.arch.block_idx()[0]) // tile.ctas
        for ahead in cutlass.range_constexpr(c.slots - 1):
            dense.fetch(mX, group + ahead * groups, xs, ahead)
            dense.fetch(mdY, group + ahead * groups, dys, ahead)
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        words = dense.words(mX, group)
        held = self.weights(words, optional, n)
        sums = {name: zeros(c.words * words.per) for name in c.sums}
        turns = cute.ceil_div(rows - group, groups)
        first = cutlass.min(group, rows - 1)
        rstd, mean = mRstd[first], Float32(0)
        if cutlass.const_expr(c.centred):
            mean = optional["mean"][first]
        for turn in cutlass.range(turns, unroll=1):
            row = group + turn * groups
            # those of the next row are on their way while this one is worked on
            later = cutlass.min(row + groups, rows - 1)
            next_rstd, next_mean = mRstd[later], Float32(0)
            if cutlass.const_expr(c.centred):
                next_mean = optional["mean"][later]
            xs.wait(turn)
            dys.wait(turn)
            sX, sdY = xs[turn], dys[turn]
            begins = dense.run(mX, row).lead, dense.run(mdY, row).lead
            values = self.summed(words, held, (sX, sdY), begins, (mean, rstd), sums)
            means = [total / n for total in reduction(values, add, turn, turns)]
            gMore = dense.run(optional["dsummed"], row).gX if c.summed else None
            self.put(words, held, (sX, sdY), begins, (mean, rstd), means, gMore)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            dense.run(mdX, row).store(sdY)
            # the slot of the turn before, whose dx is on its way out
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            ahead = turn + (c.slots - 1)
            dense.fetch(mX, group + ahead * groups, xs, ahead)
            dense.fetch(mdY, group + ahead * groups, dys, ahead)
            rstd, mean = next_rstd, next_mean
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        for name in c.sums:
            gPart = optional[f"{name}_parts"][group, None]  # (N)
            self.write(words, sums[name], cute.domain_offset((dense.column(n),), gPart))

    # ---- a row in smem

    @cute.jit
    def summed(
        self, words: Words, held: Any, slots: tuple[cute.Tensor, cute.Tensor],
        begins: tuple[Int32, Int32], moments: tuple[Float32, Float32], sums: dict[str, cute.Tensor],
    ) -> tuple[Float32, ...]:  # fmt: skip
        """This thread's part of the sums over the row, of g * xhat and, of a layer norm, g; its
        columns of the row are added to `sums`."""
        mean, rstd = moments
        along, whole = [Float32(0)] * CHAINS, [Float32(0)] * CHAINS
        for word in cutlass.range_constexpr(words.count):
            w = self.of_word(words, held, word)
            for i, (x, dy) in enumerate(self.pairs(words, slots, begins, word)):
                at = word * words.per + i
                xhat = (x - mean if self.config.centred else x) * rstd
                g = dy * w[i] if self.config.weight else dy
                along[at % CHAINS] += g * xhat
                whole[at % CHAINS] += g
                if cutlass.const_expr("dweight" in sums):
                    sums["dweight"][at] += dy * xhat
                if cutlass.const_expr("dbias" in sums):
                    sums["dbias"][at] += dy
        return (sum(along[1:], along[0]), sum(whole[1:], whole[0]))[: 1 + self.config.centred]

    @cute.jit
    def put(
        self, words: Words, held: Any, slots: tuple[cute.Tensor, cute.Tensor],
        begins: tuple[Int32, Int32], moments: tuple[Float32, Float32], means: list[Float32],
        gMore: Any,
    ) -> None:  # fmt: skip
        """dx in the place of dy; gMore, if there is any, is added to it."""
        mean, rstd = moments
        for first in cutlass.range_constexpr(0, words.count, AT_ONCE):
            found = []
            for word in cutlass.range_constexpr(first, min(first + AT_ONCE, words.count)):
                w = self.of_word(words, held, word)
                for i, (x, dy) in enumerate(self.pairs(words, slots, begins, word)):
                    xhat = (x - mean if self.config.centred else x) * rstd
                    g = dy * w[i] if self.config.weight else dy
                    g = g - means[1] if self.config.centred else g
                    found.append((g - xhat * means[0]) * rstd)
            if cutlass.const_expr(gMore is not None):
                more = self.elements(words, gMore, first, len(found) // words.per, True)
                found = [dx + m for dx, m in zip(found, more, strict=True)]
            self.dense.keep(words, found, slots[1], begins[1], first)

    @cute.jit
    def elements(
        self, words: Words, gX: cute.Tensor, first: cutlass.Constexpr[int],
        count: cutlass.Constexpr[int], whole: cutlass.Constexpr[bool] = False,
    ) -> list[Float32]:  # fmt: skip
        """The elements of `count` words of a row gX (N) of memory, in fp32; `whole`: which begins
        as the rows do to a word."""
        rX = cute.make_rmem_tensor((words.per, count), gX.element_type)
        rX.fill(0)
        for i in cutlass.range_constexpr(count):
            column = words.column(first + i)
            if cutlass.const_expr(whole and not words.is_edge(first + i)):
                at = (gX.iterator + column).toint()
                word = cute.make_ptr(gX.element_type, at, cute.AddressSpace.gmem, assumed_align=4)
                cute.autovec_copy(cute.make_tensor(word, words.per), rX[None, i])
            else:
                for j in cutlass.range_constexpr(words.per):
                    if cutlass.const_expr(not words.is_edge(first + i)) or words.holds(
                        first + i, j
                    ):
                        rX[j, i] = gX[column + j]
        return [Float32(rX[j, i]) for i in range(count) for j in range(words.per)]

    def pairs(
        self, words: Words, slots: tuple[cute.Tensor, cute.Tensor], begins: tuple[Int32, Int32],
        word: int,
    ) -> list[tuple[Float32, Float32]]:  # fmt: skip
        """The elements of a word of x and of dy, in fp32."""
        found = [self.dense.pair(words, *at, word) for at in zip(slots, begins, strict=True)]
        return list(zip(*found, strict=True))

    # ---- weights

    @cute.jit
    def weights(self, words: Words, optional: dict[str, cute.Tensor], n: Int32) -> Any:
        """The weights in this thread's columns: in registers, or in smem (V, THREAD, WORD), where
        no other thread reads them, or those of this CTA's part in memory; None if there are
        none."""
        if cutlass.const_expr(not self.config.weight):
            return None
        mW = cute.domain_offset((self.dense.column(n),), optional["weight"])
        if cutlass.const_expr(self.config.held == MEMORY):
            return mW
        rW = words.weights(mW)
        if cutlass.const_expr(self.config.held == REGISTERS):
            return rW
        shape = words.per, self.tile.num_threads, words.count
        sW = SmemAllocator().allocate_tensor(mW.element_type, cute.make_layout(shape), 16)
        for word in cutlass.range_constexpr(words.count):
            own = cute.make_tensor(rW.iterator + word * words.per, cute.make_layout(words.per))
            cute.autovec_copy(own, sW[None, cute.arch.thread_idx()[0], word])
        return sW

    def of_word(self, words: Words, held: Any, word: int) -> list[Float32]:
        """The weights of a word's elements; none if there are none."""
        if not self.config.weight:
            return []
        if self.config.held == REGISTERS:
            return words.pair(held, word)
        if self.config.held == MEMORY:
            return self.elements(words, held, word, 1)
        own = cute.make_rmem_tensor(words.per, held.element_type)
        cute.autovec_copy(held[None, cute.arch.thread_idx()[0], word], own)
        return [Float32(own[i]) for i in range(words.per)]

    @cute.jit
    def write(self, words: Words, rSum: cute.Tensor, gPart: cute.Tensor) -> None:
        """Write the sums of this thread's columns to this CTA's part gPart of a row of sums."""
        for word in cutlass.range_constexpr(words.count):
            for i in cutlass.range_constexpr(words.per):
                if cutlass.const_expr(not words.is_edge(word)) or words.holds(word, i):
                    gPart[words.column(word) + i] = rSum[word * words.per + i]

    @property
    def dense(self) -> PackedRows:
        return PackedRows(self.tile, self.config.words)

    kernels = {"rows": by_rows, "sums": NormBackward.sums}  # noqa: RUF012


def zeros(count: int) -> cute.Tensor:
    found = cute.make_rmem_tensor(count, Float32)
    found.fill(0.0)
    return found

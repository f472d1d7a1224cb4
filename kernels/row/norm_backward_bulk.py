"""The gradient of a norm of dense rows, bulk-copied by persistent CTAs.

A CTA holds a row, or in a cluster a part of one, in smem. Its threads read it once for the sums
over the row and over columns, and again for dx, which overwrites dy there. Registers hold only the
column sums, and rows may start anywhere, as in norm_bulk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument, Operand
from cutex.device.pipeline import publish_barriers
from cutex.device.row.bulk import BulkRing
from cutex.device.row.packed import PackedRows
from cutex.device.row.reduction import add, lanes, pairwise
from cutex.device.row.tile import WARP
from cutex.device.row.vector_words import VectorWords
from cutex.device.row.words import Words
from cutex.device.stream_order import let_next_kernel_start
from cutex.kernels.row.kernel import launch_of_groups, relayed, repeated
from cutex.kernels.row.norm_backward import NormBackward, NormBackwardConfig

LEAST_SLOTS = 2
RELAYS = 1  # the warp that relays
REGISTERS, SMEM, MEMORY = "registers", "smem", "memory"
AT_ONCE = 4  # words of a thread between two stores to smem, which hold back the next loads
CHAINS = 2  # sums of a thread that are added up beside each other


@dataclass(frozen=True)
class BackwardBulkConfig(NormBackwardConfig):
    """A norm's gradient for dense rows that are bulk-copied. The tile's vectors are not used.

    words: the 32-bit words per thread of a row, or of its CTA's part; slots: for rows of dy (x has
    one less); resident: CTAs per SM; held: where the weights are kept, which every row reads twice;
    vector, open: see PackedRows; relays: a cluster's row sums are relayed, and started a turn
    before they are needed.
    """

    words: int = 1
    slots: int = 3
    resident: int = 1
    held: str = REGISTERS
    vector: int = 0
    open: int = 0
    relays: bool = False


class NormBackwardBulk(NormBackward):
    """The gradient of a norm of dense rows. Thread 0 starts the copies; dsummed, which is read
    once, is loaded to registers."""

    title = "norm_backward_bulk"
    archs = ("sm_90a", "sm_100a", "sm_120a")

    def __init__(self, config: BackwardBulkConfig) -> None:
        super().__init__(config)
        tile = config.tile
        if tile.aligned or tile.rows > 1:
            raise ValueError("rows by bulk copies may begin anywhere, and a CTA has one of them")
        least = LEAST_SLOTS + config.relays
        if config.slots < least:
            raise ValueError(f"slots={config.slots} must be at least {least}")
        if config.vector and config.held != REGISTERS:
            raise ValueError(f"held={config.held!r}: vectors of weights are held in registers")

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        made = super().operands(dtype)
        if not self.config.vector:
            return made
        parts = (f"{name}_parts" for name in self.config.sums)
        aligned = {"x", "dy", "dx", "weight", "dsummed", *parts}
        return tuple(
            replace(a, aligned=True) if isinstance(a, Operand) and a.name in aligned else a
            for a in made
        )

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
        made = relayed if c.relays else repeated
        reduction: Any = made(tile, 1 + c.centred)
        dense = self.dense
        elements = dense.elements(mX.element_type.width)
        xs = BulkRing.allocate(mX.element_type, elements, c.slots - 1)
        dys = BulkRing.allocate(mX.element_type, elements, c.slots)
        publish_barriers((xs.full, dys.full))
        let_next_kernel_start()
        group = Int32(cute.arch.block_idx()[0]) // tile.ctas
        for ahead in cutlass.range_constexpr(c.slots - 1):
            dense.fetch(mX, group + ahead * groups, xs, ahead)
            dense.fetch(mdY, group + ahead * groups, dys, ahead)
        rows, n = (Int32(cute.size(mX, mode=[i])) for i in range(2))
        words = dense.words(mX, group)
        held = self.weights(words, optional, n)
        sums = {name: zeros(c.words * words.per) for name in c.sums}
        turns = cute.ceil_div(rows - group, groups)
        given = words, held, (xs, dys), (mX, mdY)
        moments = self.moments(mRstd, optional, group)
        following = self.moments(mRstd, optional, group + groups) if c.relays else moments
        if cutlass.const_expr(c.relays):
            self.begin(given, sums, reduction, moments, (group, Int32(0)), turns)
            cute.arch.sync_threads()
            self.relay(reduction, Int32(0), turns)
        for turn in cutlass.range(turns, unroll=1):
            row = group + turn * groups
            # those of a later row are on their way while this one is worked on
            later = self.moments(mRstd, optional, row + (1 + c.relays) * groups)
            if cutlass.const_expr(c.relays):
                self.begin(given, sums, reduction, following, (row + groups, turn + 1), turns)
                totals = reduction.finish(pairwise(add), turn, turns)
            else:
                xs.wait(turn)
                dys.wait(turn)
                values = self.summed(given, moments, (row, turn), sums)
                totals = reduction(values, add, turn, turns)
            means = [total / n for total in totals]
            gMore = dense.run(optional["dsummed"], row).gX if c.summed else None
            self.put(given, moments, means, (row, turn), gMore)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            # NOTE: other warps would only find where a row lies
            if cute.arch.warp_idx() == 0:
                dense.run(mdX, row, mdY).store(dys[turn])
                # the slot of the turn before, whose dx is on its way out
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                ahead = turn + (c.slots - 1)
                dense.fetch(mX, group + ahead * groups, xs, ahead)
                dense.fetch(mdY, group + ahead * groups, dys, ahead)
            if cutlass.const_expr(c.relays):
                if cute.arch.warp_idx() == RELAYS:
                    reduction.release(turn, turns)
                self.relay(reduction, turn + 1, turns)
                moments, following = following, later
            else:
                moments = later
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        for name in c.sums:
            gPart = optional[f"{name}_parts"][group, None]  # (N)
            self.write(words, sums[name], cute.domain_offset((dense.column(n),), gPart))

    def moments(
        self, mRstd: cute.Tensor, optional: dict[str, cute.Tensor], row: Int32
    ) -> tuple[Float32, Float32]:
        """The mean and rstd of a row; those of the last row if it does not exist."""
        row = cutlass.min(row, Int32(cute.size(mRstd)) - 1)
        mean = optional["mean"][row] if self.config.centred else Float32(0)
        return mean, mRstd[row]

    @cute.jit
    def begin(
        self, given: tuple, sums: dict[str, cute.Tensor], reduction: Any,
        moments: tuple[Float32, Float32], place: tuple[Int32, Int32], turns: Int32,
    ) -> None:  # fmt: skip
        """Start the sums of a row, if it exists, one turn before they are needed."""
        turn = place[1]
        if turn < turns:
            for ring in given[2]:
                ring.wait(turn)
            values = self.summed(given, moments, place, sums)
            reduction.start(lanes(values, add, WARP), turn)

    @cute.jit
    def relay(self, reduction: Any, turn: Int32, turns: Int32) -> None:
        """Send this CTA's sums of a row, if it exists, which all threads have started."""
        if (cute.arch.warp_idx() == RELAYS) & (turn < turns):
            reduction.relay(pairwise(add), turn)

    # ---- a row in smem

    @cute.jit
    def summed(
        self, given: tuple, moments: tuple[Float32, Float32], place: tuple[Int32, Int32],
        sums: dict[str, cute.Tensor],
    ) -> tuple[Float32, ...]:  # fmt: skip
        """This thread's share of the sums over the row: of g * xhat and, for a layer norm, of g.
        Adds its elements to the column `sums`."""
        words, held, *_ = given
        mean, rstd = moments
        along, whole = [Float32(0)] * CHAINS, [Float32(0)] * CHAINS
        step = max(1, self.config.vector)
        for first in cutlass.range_constexpr(0, words.count, step):
            w = self.of_words(words, held, first, step)
            for i, (x, dy) in enumerate(self.pairs(given, place, first, step)):
                at = first * words.per + i
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
        self, given: tuple, moments: tuple[Float32, Float32], means: list[Float32],
        place: tuple[Int32, Int32], gMore: Any,
    ) -> None:  # fmt: skip
        """Write dx over dy, plus gMore if there is one."""
        words, held, (_, dys), (_, mdY) = given
        mean, rstd = moments
        for first in cutlass.range_constexpr(0, words.count, self.config.vector or AT_ONCE):
            count = min(self.config.vector or AT_ONCE, words.count - first)
            w = self.of_words(words, held, first, count)
            found = []
            for i, (x, dy) in enumerate(self.pairs(given, place, first, count)):
                xhat = (x - mean if self.config.centred else x) * rstd
                g = dy * w[i] if self.config.weight else dy
                g = g - means[1] if self.config.centred else g
                found.append((g - xhat * means[0]) * rstd)
            if cutlass.const_expr(gMore is not None):
                more = self.elements(words, gMore, first, count, True)
                found = [dx + m for dx, m in zip(found, more, strict=True)]
            row, turn = place
            self.dense.keep(words, found, dys[turn], self.dense.begin(mdY, row), first)

    @cute.jit
    def elements(
        self, words: Words, gX: cute.Tensor, first: cutlass.Constexpr[int],
        count: cutlass.Constexpr[int], whole: cutlass.Constexpr[bool] = False,
    ) -> list[Float32]:  # fmt: skip
        """The elements of `count` words of a row gX (N) of gmem, in fp32. whole: the row has the
        same offset from a word as the others."""
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
        self, given: tuple, place: tuple[Int32, Int32], first: int, count: int
    ) -> list[tuple[Float32, Float32]]:
        """The elements of x and of dy in `count` words from `first` on, in fp32."""
        words, _, rings, matrices = given
        row, turn = place
        found = [
            self.dense.group(words, ring[turn], self.dense.begin(m, row), first, count)
            for ring, m in zip(rings, matrices, strict=True)
        ]
        return list(zip(*found, strict=True))

    # ---- weights

    @cute.jit
    def weights(self, words: Words, optional: dict[str, cute.Tensor], n: Int32) -> Any:
        """The weights of this thread's columns: in registers, in its own part of smem (V, THREAD,
        WORD), or this CTA's part in gmem; None without weights."""
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

    def of_words(self, words: Words, held: Any, first: int, count: int) -> list[Float32]:
        """The weights of `count` words from `first` on; none without weights."""
        return [w for i in range(count) for w in self.of_word(words, held, first + i)]

    def of_word(self, words: Words, held: Any, word: int) -> list[Float32]:
        """The weights of one word's elements; none without weights."""
        if not self.config.weight:
            return []
        if self.config.held == REGISTERS:
            return words.pair(held, word)
        if self.config.held == MEMORY:
            return self.elements(words, held, word, 1)
        own = cute.make_rmem_tensor(words.per, held.element_type)
        cute.autovec_copy(held[None, cute.arch.thread_idx()[0], word], own)
        return [Float32(own[i]) for i in range(words.per)]

    def write(self, words: Words, rSum: cute.Tensor, gPart: cute.Tensor) -> None:
        """Write this thread's column sums to gPart, this CTA's part of a row of partial sums."""
        if isinstance(words, VectorWords):
            words.keep(rSum, gPart)
        else:
            self.write_words(words, rSum, gPart)

    @cute.jit
    def write_words(self, words: Words, rSum: cute.Tensor, gPart: cute.Tensor) -> None:
        for word in cutlass.range_constexpr(words.count):
            for i in cutlass.range_constexpr(words.per):
                if cutlass.const_expr(not words.is_edge(word)) or words.holds(word, i):
                    gPart[words.column(word) + i] = rSum[word * words.per + i]

    @property
    def dense(self) -> PackedRows:
        c = self.config
        return PackedRows(self.tile, c.words, c.vector, c.open)

    kernels = {"rows": by_rows, "sums": NormBackward.sums}  # noqa: RUF012


def zeros(count: int) -> cute.Tensor:
    found = cute.make_rmem_tensor(count, Float32)
    found.fill(0.0)
    return found

"""The GEMM of few rows with an unaligned first operand: out = ops(A @ B), A (M, K) of any strides
with at most 16 rows, and B (K, N) with N contiguous. It is the weight's gradient of a layer with
few outputs.

A wgmma tile has 64 rows: with 2, it spends its time on reading and multiplying padding. Here a warp
multiplies 16 rows of K by mma.sync, out transposed, and loads them straight into registers: which k
a position of the MMA's operands stands for is free, as long as both operands agree, and so are its
rows and columns. So a lane loads 2 to 8 neighbours of B at a time, from four rows of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu.warp import MmaF16BF16Op
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.guarded_load import load_half, load_words
from cutex.device.epilogue.epilogue_ops import BoundOps, Fragment
from cutex.device.pipeline import Barrier
from cutex.kernels.gemm.config import ELEMENT, ceil_div
from cutex.kernels.gemm.signature import GeneralConfig
from cutex.kernels.gemm.unaligned.few_config import ROWS, STEP_K, SUMS, FewRowsConfig

LOW, HIGH = 0x5410, 0x7632  # selectors of prmt: the low, the high halves of two words
WARP = 32
LANE_K = 4  # neighbours of K that a lane holds, of a step
COLUMNS = 16  # of out, that one mma.sync computes


class FewRows:
    """A cluster computes a tile of out: each warp of its CTAs sums of every so many rows of K.

    barrier     arrives                                        waits
    (CTA)       all threads, their sums being in smem          all, before they add them up
    (cluster)   all threads, the barrier being there           all, before they send sums
    sums        1: thread 0, and 16 bytes of each vector of    all threads, before they add up what
                sums that this CTA stores, of every CTA        the CTAs sent

    smem        bytes
    words       16 * vectors * warps: the sums of each warp
    sent        16 * vectors_of_cta * split_k: of each CTA, what this one stores
    """

    arch = "sm_90a"
    dtypes = ("bf16", "fp16")

    def __init__(self, config: GeneralConfig) -> None:
        assert isinstance(config.tiles, FewRowsConfig)
        self.config, self.tiles = config, config.tiles

    @property
    def name(self) -> str:
        return "sm90_gemm_few_rows"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), the operations' arguments and a stream."""
        *passed, stream = rest
        c = self.tiles
        tiles = cute.ceil_div(cute.size(mB, mode=[1]), c.tile_n)
        self.kernel(mA, mB, mOut, tuple(passed)).launch(
            grid=(tiles * c.split_k, 1, 1),
            block=(c.num_threads, 1, 1),
            cluster=c.cluster,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, passed: tuple[Any, ...]
    ) -> None:
        c, smem = self.tiles, SmemAllocator()
        words = smem.allocate_tensor(
            Float32, cute.make_layout((SUMS, c.vectors, c.warps)), 16
        )  # (V, VECTOR, WARP)
        sent = sums = None
        if cutlass.const_expr(c.split_k > 1):
            shape = SUMS, c.vectors_of_cta, c.split_k
            sent = smem.allocate_tensor(Float32, cute.make_layout(shape), 16)  # (V, VECTOR, CTA)
            sums = Barrier.allocate(smem, "sums", arrivals=1)
            self.announce(sums)
        index, _, _ = cute.arch.block_idx()
        tile, share = index // c.split_k, index % c.split_k
        cute.arch.griddepcontrol_wait()
        rows = RowsOfK.of(c, mA, mB, tile)
        first, end = self.k_range(cute.size(mB, mode=[0]), share)
        acc = self.product(rows, first, end)
        cute.arch.griddepcontrol_launch_dependents()
        self.keep(acc, words)
        cute.arch.sync_threads()
        bound = self.config.bind(self.config.product(mOut), passed)
        if cutlass.const_expr(c.split_k == 1):
            self.store_own(words, bound, mOut, tile)
        else:
            self.exchange(words, sent, sums, share)
            self.store_sent(sent, bound, mOut, tile, share)

    @cute.jit
    def announce(self, sums: Barrier) -> None:
        """Initialise the barrier, and arm it for what all CTAs send to this one. The cluster
        barrier comes just before they send."""
        c = self.tiles
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                sums.init()
                cute.arch.mbarrier_init_fence()
                sums.arrive_expecting(4 * SUMS * c.vectors_of_cta * c.split_k)
        cute.arch.cluster_arrive_relaxed()

    def k_range(self, k: Int32, share: Int32) -> tuple[Int32, Int32]:
        """The rows of K of this CTA, in whole steps except the last."""
        size = cute.ceil_div(k, STEP_K * self.tiles.split_k) * STEP_K
        return share * size, cutlass.min(k, (share + 1) * size)

    @cute.jit
    def product(self, rows: RowsOfK, first: Int32, end: Int32) -> cute.Tensor:
        """This warp's sums (MMA, RestM, RestN) of out transposed, over its steps from `first` to
        `end`."""
        c = self.tiles
        op = MmaF16BF16Op(rows.kind, Float32, (COLUMNS, ROWS, STEP_K))
        mma = cute.make_tiled_mma(op)
        across, down = c.tile_n // COLUMNS, c.tile_m // ROWS
        acc = cute.make_rmem_tensor(cute.make_layout(((2, 2), across, down)), Float32)
        acc.fill(0.0)
        begin = first + cute.arch.warp_idx() * STEP_K
        apart = c.warps * STEP_K  # from step to step of a warp
        for group in cutlass.range(cute.ceil_div(end - begin, apart * c.steps), unroll=1):
            of_a, of_b = rows.load(begin + group * (apart * c.steps), end)
            for step in cutlass.range_constexpr(c.steps):
                left = paired_columns(of_b[None, None, step], rows.kind)
                right = paired_rows(of_a[None, None, step], rows.kind)
                cute.gemm(mma, acc, left, right, acc)
        return acc

    @cute.jit
    def keep(self, acc: cute.Tensor, words: cute.Tensor) -> None:
        """Write this warp's sums to its place in smem, (V, VECTOR, WARP)."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        vectors = cute.group_modes(cute.group_modes(acc, 1, 3), 0, 1)  # (V, VECTOR)
        for i in cutlass.range_constexpr(cute.size(vectors, mode=[1])):
            cute.autovec_copy(cute.coalesce(vectors[None, i]), words[None, i * WARP + lane, warp])

    @cute.jit
    def own_sum(self, words: cute.Tensor, vector: Int32) -> cute.Tensor:
        """The sums of all warps of this CTA."""
        total = cute.make_rmem_tensor(SUMS, Float32)
        total.fill(0.0)
        for warp in cutlass.range_constexpr(self.tiles.warps):
            total.store(total.load() + words[None, vector, warp].load())
        return total

    @cute.jit
    def exchange(self, words: cute.Tensor, sent: cute.Tensor, sums: Barrier, share: Int32) -> None:
        """Send each CTA of the cluster the sums that it stores, and wait for those of all."""
        c = self.tiles
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.cluster_wait()
        for turn in cutlass.range_constexpr(ceil_div(c.vectors, c.num_threads)):
            vector = turn * c.num_threads + thread
            if vector < c.vectors:
                total = cute.recast_tensor(self.own_sum(words, vector), Int32)
                to = sent[None, vector % c.vectors_of_cta, share].iterator
                values = tuple(total[i] for i in range(SUMS))
                cute.arch.store_async_dsmem(to, values, sums[0], vector // c.vectors_of_cta)
        sums.wait(0)

    @cute.jit
    def store_own(
        self, words: cute.Tensor, bound: BoundOps, mOut: cute.Tensor, tile: Int32
    ) -> None:
        """Add up and store all vectors of the tile."""
        c = self.tiles
        thread, _, _ = cute.arch.thread_idx()
        for turn in cutlass.range_constexpr(ceil_div(c.vectors, c.num_threads)):
            vector = turn * c.num_threads + thread
            if vector < c.vectors:  # whole warps
                self.store(self.own_sum(words, vector), bound, mOut, tile, vector, True)

    @cute.jit
    def store_sent(
        self, sent: cute.Tensor, bound: BoundOps, mOut: cute.Tensor, tile: Int32, share: Int32
    ) -> None:
        """Add up what the CTAs sent, in rank order, and store it."""
        c = self.tiles
        thread, _, _ = cute.arch.thread_idx()
        count = c.vectors_of_cta
        for turn in cutlass.range_constexpr(ceil_div(count, c.num_threads)):
            at = turn * c.num_threads + thread
            if at // WARP * WARP < count:  # whole warps, since operations may have them meet
                total = cute.make_rmem_tensor(SUMS, Float32)
                total.fill(0.0)
                for peer in cutlass.range_constexpr(c.split_k):
                    there = sent[None, cutlass.min(at, count - 1), peer]
                    total.store(total.load() + there.load())
                vector = share * count + at
                self.store(total, bound, mOut, tile, vector, at < count)

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        bound: BoundOps,
        mOut: cute.Tensor,
        tile: Int32,
        vector: Int32,
        valid: bool | cutlass.Boolean,
    ) -> None:
        """Run the operations on a vector of sums, and store it to mOut (M, N) if it is `valid`.

        A thread has of an mma.sync's sums two neighbours of a row and two of the row 8 below (PTX
        ISA, "Matrix Fragments for mma.m16n8k16"): two rows of out, and two columns.
        """
        c = self.tiles
        lane, number = vector % WARP, vector // WARP
        across = c.tile_n // COLUMNS
        row = number // across * ROWS + 2 * (lane % 4)
        row = row if valid else bound.bounds[0]
        column = tile * c.tile_n + lane // 4 * (2 * across) + 2 * (number % across)
        values = cute.make_rmem_tensor((2, 2), Float32)  # (R, C)
        for r in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(2):
                values[r, n] = total[r + 2 * n]
        rows, columns = (row, row + 1), (column, column + 1)
        x = bound.apply(Fragment(values, rows, columns, 0, bound.bounds, 2, own=True))
        bound.store_elements(x, mOut)


@dataclass(frozen=True)
class RowsOfK:
    """What this lane loads of rows of K: its elements of A, and its columns of B.

    Addresses are a 64-bit base plus a 32-bit pitch times constants.
    """

    tiles: FewRowsConfig
    kind: type[cutlass.Numeric]
    at_a: list[Int64]  # of each ROWS of A, in the first row of K that this lane has of any
    at_b: Int64
    pitch_a: Int32  # bytes from one row of K to the next
    pitch_b: Int32

    @staticmethod
    def of(c: FewRowsConfig, mA: cute.Tensor, mB: cute.Tensor, tile: Int32) -> RowsOfK:
        lane = cute.arch.lane_idx()
        m, n = cute.size(mA, mode=[0]), cute.size(mB, mode=[1])
        width = 2 * c.tile_n // COLUMNS
        # NOTE: rows of A past the last, and columns of B, are never stored: others will do
        column = cutlass.min(tile * c.tile_n + lane // 4 * width, n - width)
        rows = [cutlass.min(lane // 4 + r * ROWS, m - 1) for r in range(c.tile_m // ROWS)]
        first = LANE_K * (lane % 4)
        at_a = [(mA.iterator + cute.crd2idx((row, first), mA.layout)).toint() for row in rows]
        at_b = (mB.iterator + cute.crd2idx((first, column), mB.layout)).toint()
        pitches = Int32(mA.stride[1]) * ELEMENT, Int32(mB.stride[0]) * ELEMENT
        return RowsOfK(c, mA.element_type, at_a, at_b, *pitches)

    @cute.jit
    def load(self, k: Int32, end: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """The words of this warp's steps from row `k` of K on: single elements of A (LANE_K, RestM,
        STEP), pairs of columns of B (LANE_K, RestN, STEP); 0 past `end`."""
        c = self.tiles
        down, across = c.tile_m // ROWS, c.tile_n // COLUMNS
        of_a = cute.make_rmem_tensor((LANE_K, down, c.steps), Int32)
        of_b = cute.make_rmem_tensor((LANE_K, across, c.steps), Int32)
        if k + ((c.steps - 1) * c.warps + 1) * STEP_K <= end:
            self.load_into(of_a, of_b, k, None)
        else:
            self.load_into(of_a, of_b, k, end)
        return of_a, of_b

    def load_into(self, of_a: cute.Tensor, of_b: cute.Tensor, k: Int32, end: Int32 | None) -> None:
        """Load from row `k` of K on; with `end`, only what is before it."""
        c = self.tiles
        first = k + LANE_K * (cute.arch.lane_idx() % 4)
        at_a = [at + Int64(k) * self.pitch_a for at in self.at_a]
        at_b = self.at_b + Int64(k) * self.pitch_b
        for step in range(c.steps):
            for i in range(LANE_K):
                row = step * c.warps * STEP_K + i
                valid = None if end is None else first + row < end
                words = load_words(at_b + Int64(self.pitch_b) * row, of_b.shape[1], valid)
                for n, word in enumerate(words):
                    of_b[i, n, step] = word
                for r, at in enumerate(at_a):
                    of_a[i, r, step] = load_half(at + Int64(self.pitch_a) * row, valid)


def paired_rows(of_a: cute.Tensor, kind: type[cutlass.Numeric]) -> cute.Tensor:
    """The MMA's operand of rows of A (LANE_K, RestM): pairs of neighbours along K."""
    down = of_a.shape[1]
    shape = (2, 2), down
    found = cute.make_rmem_tensor(cute.make_layout(shape), kind)  # (MMA, RestM)
    to = cute.recast_tensor(found, Int32)
    for row in range(down):
        for half in range(2):
            low, high = of_a[2 * half, row], of_a[2 * half + 1, row]
            to[2 * row + half] = Int32(cute.arch.prmt(low, high, LOW))
    return found


def paired_columns(of_b: cute.Tensor, kind: type[cutlass.Numeric]) -> cute.Tensor:
    """The MMA's operand of columns of B, two in a word of (LANE_K, RestN): pairs of neighbours
    along K, of the first column, of the second, and both of the next two rows."""
    across = of_b.shape[1]
    shape = (2, 2, 2), across
    found = cute.make_rmem_tensor(cute.make_layout(shape), kind)  # (MMA, RestN)
    to = cute.recast_tensor(found, Int32)
    for word in range(across):
        for half in range(2):
            low, high = of_b[2 * half, word], of_b[2 * half + 1, word]
            for column, which in enumerate((LOW, HIGH)):
                to[4 * word + 2 * half + column] = Int32(cute.arch.prmt(low, high, which))
    return found

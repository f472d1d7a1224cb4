"""A product whose K is cut into more shares than a cluster has CTAs, in two kernels.

The CTAs of the first, the general kernel with a share as an entry of a batch, leave the fp32 sums
of a tile in memory (LeaveSums); the second adds them up, in the same order in every run, and stores
them (AddSums). No CTA waits for another of its own kernel, so shares may run in any order.

A thread leaves its accumulators as vectors, beside those of the other threads, so the sums of a
share are one row of memory in which each element of C has its place; a vector is two columns of two
rows, as wgmma gives them to a thread.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.pipeline import Barrier
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.signature import modes, tile_counts, transposed
from cutex.kernels.gemm.sm90.config import Sm90Config
from cutex.kernels.gemm.sm90.general import General
from cutex.kernels.gemm.sm90.load import LoadTiles
from cutex.kernels.gemm.sm90.mma import Cooperative, MmaRole, RoleProduct
from cutex.kernels.gemm.sm90.shared_k import VECTOR, of_thread, thread_vectors, vector_copy
from cutex.schedulers.order import TileCounts

SUMS = OperandLayout("fp32", batched=True, tma=False)  # as the first kernel's out
THREADS = 128  # of a CTA that adds up
AT_ONCE = 16  # loads of a thread that are on their way


def steps_of_share(tiles: Sm90Config, num_k_tiles: Int32) -> Int32:
    """The number of K tiles of a share."""
    return (num_k_tiles + (tiles.k_shares - 1)) // tiles.k_shares


class InShares(General):
    """The general kernel for `k_shares`, and the kernel that adds up what it leaves."""

    @property
    def kernels(self) -> dict[str, Any]:
        """The device functions, by role."""
        return {"": General.kernel, "sums": AddSums.kernel}

    @property
    def load_role(self) -> LoadTiles:
        return LoadShares(self.tiles, self.cluster, self.scheduler)

    def mma_role(
        self,
        sA: cute.Tensor,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
    ) -> MmaRole:
        assert workspace is not None  # as the config has it
        return LeaveSums(self.config, self.tiles, self.scheduler, workspace[0])

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), the workspace (sums, flags), and a stream."""
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        sums, flags, stream = rest
        mShares = self.product_of_shares(sums, mOut)
        self.leaving.launch(mA, mB, mShares, (), stream, (sums, flags))
        mC = transposed(mOut) if self.tiles.swap_ab else mOut
        AddSums(self.tiles).launch(sums, mC, stream)

    @property
    def leaving(self) -> General:
        """This kernel, with each share of K as an entry of a batch that it does not store."""
        general = copy(self)
        general.config = replace(self.config, out=SUMS)
        return general

    def product_of_shares(self, memory: cute.Tensor, mOut: cute.Tensor) -> cute.Tensor:
        """The product of each share of K (M, N, SHARE), of which only the shape is used."""
        m, n = cute.size(mOut, mode=[0]), cute.size(mOut, mode=[1])
        layout = cute.make_layout((m, n, self.tiles.k_shares), stride=(n, 1, 0))
        return cute.make_tensor(memory.iterator, layout)


@dataclass(frozen=True)
class LoadShares(LoadTiles):
    """The load role of a CTA that loads a share of K for each of its tiles."""

    def number(self, tile: WorkTile) -> Int32 | int:
        return tile.batch

    def share(self, split: Int32 | int, num_k_tiles: Int32) -> tuple[Int32 | int, Int32]:
        count = steps_of_share(self.tiles, num_k_tiles)
        return split * count, count


@dataclass(frozen=True)
class LeaveSums(Cooperative):
    """All warpgroups compute a share of a tile, and leave its sums in memory."""

    memory: cute.Tensor  # fp32: a tile for each CTA

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        mma, ab, _, num_k_tiles, mC = product
        counts = tile_counts(self.tiles, mC)
        walk = self.scheduler.walk(counts)
        steps = steps_of_share(self.tiles, num_k_tiles)
        take = ab.consumer()
        for index in cutlass.range(walk.start, walk.end, walk.step, unroll=1):
            take = self.accumulate(mma, ab, take, steps)
            self.leave(mma.acc, walk.tile_at(index), counts)

    @cute.jit
    def leave(self, acc: cute.Tensor, tile: WorkTile, counts: TileCounts) -> None:
        """Leave this thread's accumulators of `tile`, unless it is outside of C."""
        if tile.m < counts.m and tile.n < counts.n:
            number = (tile.batch * counts.m + tile.m) * counts.n + tile.n
            first = self.memory.iterator + number * (self.tiles.tile_m * self.tiles.tile_n)
            vectors = thread_vectors(acc)  # (VECTOR, NumVectors)
            count = cute.size(vectors, mode=[1])
            there = of_thread(first.align(4 * VECTOR), count, self.num_threads)
            cute.copy(vector_copy(), vectors, there)


@dataclass(frozen=True)
class AddSums:
    """The kernel that adds up: a thread takes one vector of each share."""

    tiles: Sm90Config

    @cute.jit
    def launch(self, memory: cute.Tensor, mC: cute.Tensor, stream: Any) -> None:
        """Launch with the memory of LeaveSums and mC (M, N), oriented as the accumulators."""
        counts = tile_counts(self.tiles, mC)
        total = counts.m * counts.n * (self.tiles.tile_m * self.tiles.tile_n // VECTOR)
        self.kernel(memory, mC, counts.n, total).launch(
            grid=(total // THREADS, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, memory: cute.Tensor, mC: cute.Tensor, across: Int32, total: Int32) -> None:
        """Add up vectors of shares that are `total` vectors each, of rows of `across` tiles."""
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        index, shares = block * THREADS + thread, self.tiles.k_shares
        layout = cute.make_layout((VECTOR, shares), stride=(1, total * VECTOR))
        first = memory.iterator + index * VECTOR
        gSums = cute.make_tensor(first.align(4 * VECTOR), layout)  # (VECTOR, SHARE)
        cute.arch.griddepcontrol_wait()
        sums = cute.make_rmem_tensor(VECTOR, Float32)
        sums.fill(0.0)
        held = cute.make_rmem_tensor((VECTOR, min(AT_ONCE, shares)), Float32)
        for begin in cutlass.range_constexpr(0, shares, AT_ONCE):
            count = min(AT_ONCE, shares - begin)
            for i in cutlass.range_constexpr(count):
                cute.autovec_copy(gSums[None, begin + i], held[None, i])
            for i in cutlass.range_constexpr(count):
                sums.store(sums.load() + held[None, i].load())
        self.store(sums, mC, *self.corner(index, across))

    def corner(self, index: Int32, across: Int32) -> tuple[Int32, Int32]:
        """The row and the column of the first element of a share's vector number `index`."""
        c = self.tiles
        size, threads = c.tile_m * c.tile_n // VECTOR, c.mma_warpgroups * WARPGROUP
        tile, vector = index // size, index % size
        eight, thread = vector // threads, vector % threads  # columns, and who has them
        row = tile // across * c.tile_m + thread // 32 * 16 + thread % 32 // 4
        return row, tile % across * c.tile_n + eight * 8 + thread % 4 * 2

    @cute.jit
    def store(self, sums: cute.Tensor, mC: cute.Tensor, row: Int32, column: Int32) -> None:
        """Store the elements of a vector that are within C."""
        m, n = cute.size(mC, mode=[0]), cute.size(mC, mode=[1])
        rounded = cute.make_rmem_tensor(VECTOR, mC.element_type)
        rounded.store(sums.load().to(mC.element_type))
        for half in cutlass.range_constexpr(2):
            at = row + 8 * half
            if at < m and column < n:
                if cutlass.const_expr(self.tiles.swap_ab):
                    mC[at, column] = rounded[2 * half]
                    if column + 1 < n:
                        mC[at, column + 1] = rounded[2 * half + 1]
                else:  # rows begin at 16 bytes, and have whole ones
                    pair = cute.make_tensor(rounded.iterator + 2 * half, cute.make_layout(2))
                    gC = cute.domain_offset((at, column), mC)
                    cute.autovec_copy(pair, cute.make_tensor(gC.iterator.align(4), 2))

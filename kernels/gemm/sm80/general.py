"""The general GEMM by mma.sync: out = ops(A @ B) for any layout, batch and tiles, bf16 and fp16.

- cp.async copies 16 bytes as they are in memory; where K is not contiguous, ldmatrix transposes.
- num_stages slots: while one is multiplied, the others are being filled, a group of copies each.
- The epilogue runs its operations on the sums in registers, and stores them from there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.arch import arch as arch_named
from cutex.compile import Argument
from cutex.kernels.gemm.signature import GeneralConfig, modes, tile_counts
from cutex.kernels.gemm.sm80.config import ARCHS, Sm80Config
from cutex.kernels.gemm.sm80.epilogue import store
from cutex.kernels.gemm.sm80.mma import WarpProduct
from cutex.kernels.gemm.sm80.operand import SmemLayout, SmemOperand, TileCopies
from cutex.schedulers.raster import Raster, RasterOrder


class General:
    """A CTA computes one tile of out; all of its warps copy, multiply and store.

    barrier   arrives        waits
    (CTA)     all threads,   all threads, before they read the slot, and before they have the slot
              their copies   filled that was read last
              being there

    smem      bytes
    sA, sB    tile_m * k_bytes * num_stages, tile_n * k_bytes * num_stages
    """

    archs: tuple[str, ...] = ARCHS
    dtypes = ("bf16", "fp16")
    min_stages = 2  # slots that the ring needs
    swizzled = True  # whether tiles are, in smem

    def __init__(self, config: GeneralConfig) -> None:
        tiles = config.tiles
        if not isinstance(tiles, Sm80Config):
            raise ValueError(f"{type(tiles).__name__} is no config of mma.sync's kernels")
        # of the arch with the most smem: each launch is refused where it has less
        if reason := config.why_not(None, arch_named(ARCHS[0])):
            raise ValueError(reason)
        if tiles.num_stages < self.min_stages:
            raise ValueError(
                f"num_stages={tiles.num_stages}: {self.name} needs at least {self.min_stages}"
            )
        self.config, self.tiles = config, tiles

    @property
    def name(self) -> str:
        return "gemm_mma_general"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.config.arguments()

    @property
    def raster(self) -> Raster:
        return Raster(self.tiles.raster_group, self.tiles.raster_along)

    # ---- on the host

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with a (M, K), b (K, N), out (M, N), each with L first where batched, the
        operations' arguments, and a stream."""
        mA, mB = modes(mA, columns_first=False), modes(mB, columns_first=True)
        *passed, stream = rest
        self.launch(mA, mB, modes(mOut, columns_first=False), tuple(passed), stream)

    @cute.jit
    def launch(
        self, mA: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, passed: tuple[Any, ...], stream
    ) -> None:
        """Launch with mA (M, K), mB (N, K), mOut (M, N), each with L last where batched."""
        total = tile_counts(self.tiles, self.config.product(mOut)).total
        self.kernel(mA, mB, mOut, passed).launch(
            grid=(total, 1, 1), block=(self.tiles.num_threads, 1, 1), min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    # ---- on the GPU

    @cute.kernel
    def kernel(self, mA, mB, mOut, passed: tuple[Any, ...]) -> None:
        c, smem = self.tiles, SmemAllocator()
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        mProduct = self.config.product(mOut)
        tile = RasterOrder.of(self.raster, tile_counts(c, mProduct)).tile(index)
        corner = tile.m * c.tile_m, tile.n * c.tile_n
        mA, mB = entry(mA, tile.batch), entry(mB, tile.batch)
        copies, operands = [], []
        for mX, rows, k_major, row in zip(
            (mA, mB), (c.tile_m, c.tile_n), self.config.k_major, corner, strict=True
        ):
            layout = SmemLayout(rows, c.k_of(16), c.num_stages, k_major, self.swizzled)
            operands.append(SmemOperand.allocate(smem, mX.element_type, layout))
            copies.append(TileCopies.of(operands[-1], mX, row, c.num_threads, thread))
        product = WarpProduct.of(c, operands[0], operands[1], thread)
        self.mainloop(product, copies, cute.ceil_div(cute.size(mA, mode=[1]), c.k_of(16)), thread)
        bound = self.config.bind(mProduct, passed)
        by_pairs = self.config.out.tma and self.config.out.major == "row"
        store(product, entry(mOut, tile.batch), bound, corner, tile.batch, by_pairs)

    @cute.jit
    def mainloop(self, product: WarpProduct, copies, k_tiles: Int32, thread: Int32) -> None:
        slots = self.tiles.num_stages
        for k_tile in cutlass.range_constexpr(slots - 1):
            fill(copies, k_tile, k_tile)
        slot, free = Int32(0), Int32(slots - 1)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            cute.arch.cp_async_wait_group(slots - 2)
            cute.arch.sync_threads()
            # while the first MMAs are under way, the other slots' copies are issued
            next_tile = partial(fill, copies, k_tile + slots - 1, free)
            product.multiply_tile(slot, thread, next_tile)
            free = slot
            slot = slot + 1 if slot < slots - 1 else Int32(0)


def fill(copies: list[TileCopies], k_tile: Int32 | int, slot: Int32 | int) -> None:
    """Have both operands' tiles copied into a slot, as one group of copies."""
    for each in copies:
        each.fill(k_tile, slot)
    cute.arch.cp_async_commit_group()


def entry(mX: cute.Tensor, batch: Int32 | int) -> cute.Tensor:
    """The matrix of `batch`, or the only one, of mX (Rows, Columns) or (Rows, Columns, L)."""
    if cute.rank(mX) == 2:
        return mX
    return mX[None, None, cutlass.min(batch, cute.size(mX, mode=[2]) - 1)]

"""Quantization along columns, or both sides, by persistent CTAs: TMA brings tiles of x ahead.

A CTA with one tile falls short of memory's rate by the time until its loads start, and by waiting
for them, where an element takes many instructions (NVFP4). Here two tiles are always loaded or in
flight, a tensor map bounds x, and the table of factors is written once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tma import load_operand, tile_loads
from cutex.device.pipeline import Barrier, PipelineState, publish_barriers
from cutex.kernels.quantize.config import TILE
from cutex.kernels.quantize.nvfp4 import CODES, OwnScale
from cutex.kernels.quantize.quick import Bounds, QuickTiles
from cutex.kernels.quantize.results import THREADS
from cutex.kernels.quantize.tile import Quantize

SLOTS = 2


class Order(NamedTuple):
    """The order of a CTA's tiles, by row and column of tiles, without a division per tile."""

    across: Int32  # tiles
    rows: Int32  # from one tile to the next
    columns: Int32  # and columns, fewer than across

    def after(self, place: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
        """The tile after the one at `place`."""
        row, column = place[0] + self.rows, place[1] + self.columns
        over = column >= self.across
        return (
            row + cutlass.select_(over, Int32(1), Int32(0)),
            column - cutlass.select_(over, self.across, Int32(0)),
        )


class QuantizeLoop(QuickTiles, Quantize):
    """Quantization of 16-bit x by persistent CTAs.

    barrier         arrives                                    waits
    full[slot]      1: a lane of warp 0, and the tile's bytes  all, before they read the slot
    0 (CTA)         all: factors and columns' results are in   all
                    smem; they are stored

    smem            bytes
    sX              128 * 128 * 2 * SLOTS
    sQ, sMax, sF, inverses as of Quantize
    """

    archs = ("sm_90a",)
    dtypes = ("bf16", "fp16")

    @cute.jit
    def __call__(self, mX: cute.Tensor, *rest) -> None:
        *passed, stream = rest
        c = self.config
        down, across = (cute.ceil_div(cute.size(mX, mode=[i]), TILE) for i in range(2))
        rows = cute.make_layout((TILE, TILE, SLOTS), stride=(TILE, 1, TILE * TILE))
        x = load_operand(mX, cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, rows))
        self.kernel(x, down * across, tuple(passed)).launch(
            grid=(cutlass.min(down * across, c.num_ctas), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            **self.residency,
        )

    @cute.kernel
    def kernel(self, x: cpasync.TmaInfo, num_tiles: Int32, passed: tuple[Any, ...]) -> None:
        c, mX = self.config, x.tma_tensor
        down, across = (cute.ceil_div(cute.size(mX, mode=[i]), TILE) for i in range(2))
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        order = Order(across, step // across, step % across)
        own: Any = None
        rest = passed
        if cutlass.const_expr(c.of.tensor_scale):
            own, rest = passed[0][0], passed[1:]
        smem = SmemAllocator()
        sX = allocate_slots(smem, x.atom.value_type, x.smem_layout)  # (bM, bK, SLOT)
        sMax = self.allocate_magnitudes(smem)
        sQ = self.allocate_turned(smem)
        sF = self.allocate_factors(smem)
        full = Barrier.allocate(smem, "full", arrivals=1, slots=SLOTS)
        publish_barriers((full,))
        place = coming = first // across, first % across
        for slot in cutlass.range_constexpr(SLOTS):
            self.load(x, sX, full, coming, Int32(slot), down)
            coming = order.after(coming)
        if cutlass.const_expr(own is not None):
            inverses = smem.allocate_tensor(Float32, cute.make_layout(CODES), 16)
            own = OwnScale.of(own, inverses)
            own.write_inverses(self.in_pairs)
            cute.arch.sync_threads()
        quick = self.is_quick(sX.element_type)
        bounds = Bounds.of(own) if quick else None
        take = PipelineState(SLOTS, Int32(0), Int32(0))
        for _ in cutlass.range(first, num_tiles, step, unroll=1):
            full.wait(take.phase, take.slot)
            here = sX[None, None, take.slot]
            turned = self.turned(sQ, here)
            again = Boolean(True)
            if cutlass.const_expr(quick):
                quickly = own.scale.tame & self.is_whole(mX, *place)
                if quickly:
                    again = self.quick_tile(here, own, bounds, place, rest, turned, sF)
            if again:
                if cutlass.const_expr(c.rows):
                    self.quantize_rows(here, Int32(0), own, *place, mX, rest[:2], sF)
                smem_tiles = here, sMax, turned, sF
                self.quantize_columns(smem_tiles, Int32(0), own, *place, mX, rest[-2:])
            cute.arch.sync_threads()
            self.load(x, sX, full, coming, take.slot, down)
            self.store_rest(turned, sF, *place, mX, rest)
            cute.arch.sync_threads()
            place, coming = order.after(place), order.after(coming)
            take.advance()

    @cute.jit
    def quick_tile(
        self, sX: cute.Tensor, own: OwnScale, bounds: Bounds, place: tuple[Int32, Int32], rest: Any,
        turned: cute.Tensor, sF: cute.Tensor,
    ) -> Boolean:  # fmt: skip
        """Quantize a whole tile along one side or both; returns whether this thread has a NaN."""
        c, again = self.config, Boolean(False)
        if cutlass.const_expr(c.rows):
            again = self.quick_rows(sX, own, bounds, place, rest[0], sF[None, 0])
        side = sF[None, int(c.rows)]
        return again | self.quick_columns(sX, own, bounds, turned, side)

    @cute.jit
    def load(
        self,
        x: cpasync.TmaInfo,
        sX: cute.Tensor,
        full: cutlass.Constexpr[Barrier],
        place: tuple[Int32, Int32],
        slot: Int32,
        down: Int32,
    ) -> None:
        """Start the load of a tile, if it exists; done by warp 0. Elements outside x arrive as
        zeros."""
        if (cute.arch.warp_idx() == 0) & (place[0] < down):
            with cute.arch.elect_one():
                full.arrive_expecting(TILE * TILE * sX.element_type.width // 8, slot)
            tile_loads(x, sX, place[0]).load(place[1], slot, full[slot])

    def swaps(self, sX: cute.Tensor) -> bool:
        return False  # as TMA writes it

    def row_vector(self, rX: cute.Tensor, i: int) -> cute.Tensor:
        thread, c = cute.arch.thread_idx()[0], self.config
        row = rX[thread // self.lanes + i * self.step, None]
        vector = cute.make_rmem_tensor(c.width, rX.element_type)
        cute.autovec_copy(cute.local_tile(row, (c.width,), (thread % self.lanes,)), vector)
        return vector

"""Probes of TMA: boxes that a CTA loads from L2 or HBM, or stores, with a given number in flight
(any arch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Operand
from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import load_operand, store_operand, tile_loads, tile_stores
from cutex.device.pipeline import Barrier, publish_barriers
from cutex.kernels.probes.sm90 import BOX_K, Probe, row_words, smid
from cutex.kernels.probes.sm100 import clock


class BoxProbe(Probe):
    """The launch of `kernel` with one warp for each row of mOut, and mX (rows, columns) as boxes of
    `n` rows x 128 bytes, for TMA to load or to store."""

    tma_operand: ClassVar[Callable[..., Any]]

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return Operand("mX", ("r", "k"), dtype), Operand("mOut", ("m", "n"), dtype)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream) -> None:
        c = self.config
        layout = slots_layout(mX.element_type, c.n, BOX_K, c.slots, 128)
        self.kernel(self.tma_operand(mX, layout), mOut).launch(
            grid=(cute.size(mOut, mode=[0]), 1, 1), block=(32, 1, 1), stream=stream
        )


class TmaStream(BoxProbe):
    """One warp of each CTA, which loads `count` boxes of `n` rows x 128 bytes, `slots` in flight.
    CTA i starts at box i * `count` of mX and wraps around; the size of mX decides whether L2 holds
    the boxes.

    words: smid, cycles from the first issue to the last arrival
    """

    tma_operand = staticmethod(load_operand)

    @cute.kernel
    def kernel(self, x: cpasync.TmaInfo, mOut: cute.Tensor) -> None:
        c = self.config
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        sX = allocate_slots(smem, mOut.element_type, x.smem_layout)  # (bRows, bK, SLOT)
        full = Barrier.allocate(smem, "loaded", arrivals=1, slots=c.slots)
        publish_barriers((full,))
        out = row_words(mOut, block)
        boxes = cute.size(x.tma_tensor, mode=[0]) // c.n
        box = (block * c.count) % boxes
        slot, phase = Int32(0), Int32(1)
        start = clock()
        for i in cutlass.range(c.count, unroll=1):
            if i >= c.slots:
                full.wait(phase, slot)
            with cute.arch.elect_one():
                full.arrive_expecting(c.n * BOX_K * 2, slot)
            loads = tile_loads(x, sX, box)
            loads.load(Int32(0), slot, full[slot])
            box += 1
            if box == boxes:
                box = Int32(0)
            slot += 1
            if slot == c.slots:
                slot = Int32(0)
                phase ^= 1
        for _ in cutlass.range(c.slots, unroll=1):
            full.wait(phase, slot)
            slot += 1
            if slot == c.slots:
                slot = Int32(0)
                phase ^= 1
        cycles = clock() - start
        if thread == 0:
            out[0] = smid()
            out[1] = cycles


class TmaStores(BoxProbe):
    """One warp of each CTA, which stores `count` boxes of `n` rows x 128 bytes, each a group, with
    at most `slots` of them unread.

    words: cycles until all are read, cycles until all are written
    """

    tma_operand = staticmethod(store_operand)

    @cute.kernel
    def kernel(self, x: cpasync.TmaInfo, mOut: cute.Tensor) -> None:
        c = self.config
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sX = allocate_slots(SmemAllocator(), mOut.element_type, x.smem_layout)  # (bRows, bK, SLOT)
        for i in cutlass.range(thread, cute.size(sX), 32, unroll=1):
            sX[i] = mOut.element_type(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        boxes = cute.size(x.tma_tensor, mode=[0]) // c.n
        box, slot = (block * c.count) % boxes, Int32(0)
        start = clock()
        for _ in cutlass.range(c.count, unroll=1):
            tile_stores(x, sX, box).store(slot, Int32(0))
            cute.arch.cp_async_bulk_wait_group(c.slots - 1, read=True)
            box = (box + 1) % boxes
            slot = (slot + 1) % c.slots
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        read = clock() - start
        cute.arch.cp_async_bulk_wait_group(0)
        written = clock() - start
        if thread == 0:
            out = row_words(mOut, block)
            out[0] = read
            out[1] = written

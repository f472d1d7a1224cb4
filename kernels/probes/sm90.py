"""Probes of sm_90a: cycles of a Hopper SM and of a cluster, measured by a small kernel for each
(those of TMA are in sm90_tma.py). Probes without a wgmma also run on sm_100a.

Each writes 32-bit words into a row of mOut for each CTA, as its docstring says. The figures
measured on an H200 are in results/timing/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import CopyUniversalOp, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from cutex.compile import Operand
from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.scalar import exp2
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.pipeline import Barrier, OrderedBarrier, publish_barriers, sync_cluster
from cutex.kernels.probes.sm100 import clock

WIDTH = 512  # 16-bit elements of a row of mOut
BOX_K = 64  # elements of 16 bits in a row of a TMA box
PEER_WORDS = 4 * WARPGROUP * 8  # of smem that another CTA reads
UNROLL = 8  # independent chains of an arithmetic loop
MULTIPLY = ("wgmma", "registers", "serial")
WHOLE = ("lds", "lds8")  # kinds whose chains are integers


@dataclass(frozen=True)
class ProbeConfig:
    kind: str = ""
    n: int = 0  # columns of a wgmma, rows of a TMA box, KB of smem
    slots: int = 0  # boxes in flight
    count: int = 0  # rounds of the loop


@dsl_user_op
def smid(*, loc=None, ip=None) -> Int32:
    """The number of the calling thread's SM."""
    reading = llvm.inline_asm(
        T.i32(), [], "mov.u32 $0, %smid;", "=r", has_side_effects=True, loc=loc, ip=ip
    )
    return Int32(reading)


@dsl_user_op
def clock64(*, loc=None, ip=None) -> Int64:
    """The 64-bit cycle counter of this SM."""
    reading = llvm.inline_asm(
        T.i64(), [], "mov.u64 $0, %clock64;", "=l,~{memory}", has_side_effects=True, loc=loc, ip=ip
    )
    return Int64(reading)


@dsl_user_op
def packed(x: Float32, y: Float32, *, loc=None, ip=None) -> Float32:
    """The bits of two numbers rounded to bf16, as one float."""
    values = [v.ir_value(loc=loc, ip=ip) for v in (x, y)]
    ptx = "{ .reg .b32 w; cvt.rn.bf16x2.f32 w, $1, $2; mov.b32 $0, w; }"
    return Float32(
        llvm.inline_asm(T.f32(), values, ptx, "=f,f,f", has_side_effects=False, loc=loc, ip=ip)
    )


@cute.jit
def row_words(mOut: cute.Tensor, row: Int32) -> cute.Tensor:
    """A row of mOut as 32-bit words."""
    start = mOut.iterator + Int64(row) * WIDTH
    return cute.make_tensor(
        cute.make_ptr(Int32, start.toint(), cute.AddressSpace.gmem, assumed_align=16),
        cute.make_layout(WIDTH // 2),
    )


class Probe:
    """The launch of `kernel` with one CTA for each row of mOut (rows, WIDTH)."""

    cluster: ClassVar[int] = 1
    num_threads: int = 32
    kernel: Any

    def __init__(self, config: ProbeConfig, arch: str = "sm_90a") -> None:
        self.config, self.arch = config, arch

    @property
    def name(self) -> str:
        return f"{self.arch.rstrip('a').replace('_', '')}_probe_{type(self).__name__.lower()}"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return (Operand("mOut", ("m", "n"), dtype),)

    @cute.jit
    def __call__(self, mOut: cute.Tensor, stream) -> None:
        self.kernel(mOut).launch(
            grid=(cute.size(mOut, mode=[0]), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )


class Clocks(Probe):
    """The SM's number, its cycle counter and the GPU's nanosecond timer: two launches give the mean
    clock between them. Takes `n` KB of smem, so that a CTA has an SM to itself.

    words: smid, cycles (2 words), nanoseconds (2 words)
    """

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        smem = SmemAllocator()
        smem.allocate_array(Int64, self.config.n * 128)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        out = row_words(mOut, block)
        if thread == 0:
            cycles = clock64()
            nanoseconds = Int64(cute.arch.globaltimer())
            out[0] = smid()
            out[1], out[2] = Int32(cycles & 0x7FFFFFFF), Int32(cycles >> 31)
            out[3], out[4] = Int32(nanoseconds & 0x7FFFFFFF), Int32(nanoseconds >> 31)


class Busy(Probe):
    """Two warpgroups side by side. The first runs `count` rounds of four wgmmas of `n` columns; the
    second the same, or as many rounds of 64 instructions of one kind a thread.

    kind: "A+B". A out of "none", "wgmma", "registers" (A of the product comes from there), "serial"
        (waits for each round; the others for the round before). B the same, or "ex2", "fma", "max",
        "cvt" (two floats to one word of bf16), "shfl", "lds", "lds8" (8 lanes at a bank); or 64 of
        each of several, by turns: "ex2&fma"
    words: cycles of the first, cycles of the second
    """

    num_threads = 2 * WARPGROUP

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        c = self.config
        first, second = c.kind.split("+")
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        dtype = mOut.element_type
        smem = SmemAllocator()
        rows = 128 if second in MULTIPLY else 64
        sA = allocate_slots(smem, dtype, slots_layout(dtype, rows, BOX_K, 1, 128))
        sB = allocate_slots(smem, dtype, slots_layout(dtype, c.n, BOX_K, 1, 128))
        sW = cute.make_tensor(smem.allocate_array(Int32, 2048), cute.make_layout(2048))
        for i in cutlass.range(thread, rows * BOX_K, 2 * WARPGROUP):
            sA[i // BOX_K, i % BOX_K, 0] = dtype(0.0)
        for i in cutlass.range(thread, c.n * BOX_K, 2 * WARPGROUP):
            sB[i // BOX_K, i % BOX_K, 0] = dtype(0.0)
        for i in cutlass.range(thread, 2048, 2 * WARPGROUP):
            sW[i] = Int32(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        out = row_words(mOut, block)
        if thread < WARPGROUP:
            if cutlass.const_expr(first != "none"):
                self.multiply(first, sA, sB, out, thread, 0)
        else:
            if cutlass.const_expr(second in MULTIPLY):
                self.multiply(second, sA, sB, out, thread, 1)
            elif cutlass.const_expr(second != "none"):
                self.compute(second, sW, out, thread)

    @cute.jit
    def multiply(
        self,
        how: cutlass.Constexpr[str],
        sA: cute.Tensor,
        sB: cute.Tensor,
        out: cute.Tensor,
        thread: Int32,
        which: cutlass.Constexpr[int],
    ) -> None:
        c = self.config
        dtype = sA.element_type
        groups = cute.size(sA, mode=[0]) // 64
        mma = Wgmma(c.n, dtype, warpgroups=groups)
        if cutlass.const_expr(how == "registers"):
            tCrA = mma.a_registers(BOX_K)
            for i in cutlass.range(cute.size(tCrA), unroll_full=True):
                tCrA[i] = sA[thread % 64, i, 0]
        else:
            tCrA = mma.a_slots(sA)[None, None, None, 0]
        acc = mma.accumulator()
        product = WgmmaProduct(mma, tCrA, mma.b_slots(sB), acc)
        product.issue(0, accumulate=False)
        warpgroup.wait_group(0)
        start = clock()
        for _ in cutlass.range(c.count, unroll=1):
            product.issue(0, accumulate=True)
            warpgroup.wait_group(0 if how == "serial" else 1)
        warpgroup.wait_group(0)
        cycles = clock() - start
        total = Float32(0.0)
        for i in cutlass.range(cute.size(acc), unroll_full=True):
            total += acc[i]
        if thread % WARPGROUP == 0:
            out[which] = cycles
            out[2 + which] = Int32(total)

    @cute.jit
    def compute(
        self, what: cutlass.Constexpr[str], sW: cute.Tensor, out: cute.Tensor, thread: Int32
    ) -> None:
        c = self.config
        parts = what.split("&")
        chains = [
            cute.make_rmem_tensor((UNROLL,), Int32 if part in WHOLE else Float32) for part in parts
        ]
        for x in chains:
            for i in cutlass.range(UNROLL, unroll_full=True):
                x[i] = x.element_type(sW[thread + i])
        start = clock()
        for _ in cutlass.range(c.count, unroll=1):
            for _ in cutlass.range_constexpr(8):
                for i in cutlass.range_constexpr(UNROLL):
                    for part, x in zip(parts, chains, strict=True):
                        self.step(part, x, i, sW, thread)
        cycles = clock() - start
        total = Int32(0)
        for x in chains:
            for i in cutlass.range(UNROLL, unroll_full=True):
                total += Int32(x[i])
        if thread % WARPGROUP == 0:
            out[1] = cycles
            out[3] = total

    @cute.jit
    def step(
        self,
        what: cutlass.Constexpr[str],
        x: cute.Tensor,
        i: cutlass.Constexpr[int],
        sW: cute.Tensor,
        thread: Int32,
    ) -> None:
        """Issue one instruction of chain `i`."""
        factor = x.element_type(0.5)
        if cutlass.const_expr(what == "ex2"):
            x[i] = exp2(x[i])
        elif cutlass.const_expr(what == "fma"):
            x[i] = x[i] * factor + factor
        elif cutlass.const_expr(what == "max"):
            x[i] = cute.arch.fmax(x[i], x[(i + 1) % UNROLL])
        elif cutlass.const_expr(what == "cvt"):
            x[i] = packed(x[i], factor)
        elif cutlass.const_expr(what == "shfl"):
            x[i] = cute.arch.shuffle_sync_bfly(x[i], offset=1)
        elif cutlass.const_expr(what == "lds"):
            x[i] = sW[thread + 32 * i + x[i]]
        else:
            x[i] = sW[8 * (thread % 32) + i + x[i]]


class Signal(Probe):
    """Two warpgroups that take turns `count` times, by named barriers ("named") or by mbarriers
    ("mbarrier").

    words: cycles of all turns; a turn is there and back
    """

    num_threads = 2 * WARPGROUP

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        c = self.config
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        side = cute.arch.make_warp_uniform(thread // WARPGROUP)
        came = Barrier.allocate(SmemAllocator(), "came", arrivals=4, slots=2)
        publish_barriers((came,))
        ordered = OrderedBarrier(1)
        start, phase = clock(), Int32(0)
        for _ in cutlass.range(c.count, unroll=1):
            if cutlass.const_expr(c.kind == "named"):
                if side == 0:
                    ordered.signal(Int32(1))
                    ordered.wait(side)
                else:
                    ordered.wait(side)
                    ordered.signal(Int32(0))
            else:
                if side == 1:
                    came.wait(phase, side)
                with cute.arch.elect_one():
                    came.arrive(1 - side)
                if side == 0:
                    came.wait(phase, side)
                phase ^= 1
        cycles = clock() - start
        if thread == 0:
            row_words(mOut, block)[0] = cycles


class Poll(Probe):
    """A warp that waits `count` times for a phase that is complete.

    words: cycles
    """

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        came = Barrier.allocate(SmemAllocator(), "nobody", arrivals=1)
        publish_barriers((came,))
        start = clock()
        for _ in cutlass.range(self.config.count, unroll=4):
            came.wait(1)
        cycles = clock() - start
        if thread == 0:
            row_words(mOut, block)[0] = cycles


class PeerSignal(Probe):
    """Two CTAs of a cluster that take turns `count` times, by mbarriers in each other's smem.

    words: cycles of all turns; a turn is there and back
    """

    cluster = 2

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        came = Barrier.allocate(SmemAllocator(), "other came", arrivals=1)
        publish_barriers((came,), cluster=True)
        start, phase = clock(), Int32(0)
        for _ in cutlass.range(self.config.count, unroll=1):
            if rank == 1:
                came.wait(phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(came[0], 1 - rank)
            if rank == 0:
                came.wait(phase)
            phase ^= 1
        cycles = clock() - start
        sync_cluster()
        if thread == 0:
            row_words(mOut, block)[0] = cycles


class PeerLoads(Probe):
    """The threads of one CTA read the smem of the other in its cluster: words one after the other,
    each of which holds the address of the next ("chain"), or vectors of 16 bytes, `count` x 8 of
    them ("stream").

    words: cycles
    """

    cluster = 2
    num_threads = WARPGROUP

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        c = self.config
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sW = SmemAllocator().allocate_tensor(Int32, cute.make_layout(PEER_WORDS), 16)
        for i in cutlass.range(thread, PEER_WORDS, WARPGROUP):
            sW[i] = Int32(0)
        sync_cluster()
        theirs = cute.arch.map_dsmem_ptr(sW.iterator, 1 - cute.arch.block_idx_in_cluster())
        total = Int32(0)
        wide = c.kind == "stream"
        copy = cute.make_copy_atom(CopyUniversalOp(), Int32, num_bits_per_copy=128 if wide else 32)
        shape = (4, WARPGROUP, UNROLL) if wide else (1, PEER_WORDS, 1)
        sP = cute.make_tensor(theirs, cute.make_layout(shape))
        values = cute.make_rmem_tensor((shape[0], shape[2]), Int32)
        start = clock()
        for _ in cutlass.range(c.count, unroll=1):
            cute.copy(copy, sP[None, thread + total, None], values)
            for i in cutlass.range_constexpr(shape[2]):
                total += values[0, i]
        cycles = clock() - start
        sync_cluster()
        if thread == 0:
            out = row_words(mOut, block)
            out[0] = cycles
            out[1] = total


class Empty(Probe):
    """CTAs of 384 threads and `n` KB of smem that do nothing, for the time of a launch and of the
    start of the next CTA on an SM.

    words: smid
    """

    num_threads = 384

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        smem = SmemAllocator()
        smem.allocate_array(Int64, self.config.n * 128)
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            row_words(mOut, block)[0] = smid()

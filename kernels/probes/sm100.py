"""Probes of sm_100a: the cycles of single instructions, measured by a small kernel for each.

Each writes its cycles, REPEATS times, as 32-bit words into mOut, an untyped row; the first time is
a warm-up. The loaded data is written after them, so that no load can be optimised away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Int32, Int128, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from cutex.compile import Operand
from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import load_operand, tile_loads
from cutex.device.atoms.tmem import (
    COLUMNS,
    LANES,
    Tmem,
    fence_after_sync,
    fence_before_sync,
    make_load,
)
from cutex.device.pipeline import Barrier, publish_barriers, sync_cluster

REPEATS = 4
WIDTH = 512  # 16-bit elements of mOut's row
BOX = 128, 64  # of a TMA load: rows, and elements of 16 bits
BOX_BYTES = BOX[0] * BOX[1] * 2


@dataclass(frozen=True)
class ProbeConfig:
    columns: int = 0  # columns of tensor memory that one instruction moves, 32 lanes per warp
    batch: int = 0  # instructions before one wait


class Probe:
    """The launch of `kernel` on mOut (rows, WIDTH), whose first row it writes."""

    arch: ClassVar[str] = "sm_100a"
    title: ClassVar[str]
    cluster: ClassVar[int] = 1
    num_threads: ClassVar[int] = 32
    rows: ClassVar[int] = 1  # of mOut
    kernel: Any

    def __init__(self, config: ProbeConfig | None = None) -> None:
        self.config = config or ProbeConfig()

    @property
    def name(self) -> str:
        c = self.config
        return f"sm100_probe_{type(self).__name__.lower()}_{c.columns}x{c.batch}"

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return (Operand("mOut", ("m", "n"), dtype),)

    @cute.jit
    def __call__(self, mOut: cute.Tensor, stream) -> None:
        self.kernel(mOut).launch(
            grid=(self.cluster, 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )


@dsl_user_op
def clock(*, loc=None, ip=None) -> Int32:
    """The cycle counter of this SM, in cycles.

    NOTE: inline assembly that clobbers memory, because the DSL's own clock may move past the
    instructions that it is to time.
    """
    reading = llvm.inline_asm(
        T.i32(), [], "mov.u32 $0, %clock;", "=r,~{memory}", has_side_effects=True, loc=loc, ip=ip
    )
    return Int32(reading)


@cute.jit
def words(mOut: cute.Tensor) -> cute.Tensor:
    """mOut's row as 32-bit words."""
    return cute.make_tensor(
        cute.recast_ptr(mOut.iterator, dtype=Int32), cute.make_layout(WIDTH // 2)
    )


class TmemAccess(Probe):
    """Four warps that move columns of tensor memory to or from registers, 32 bits per lane and
    column."""

    num_threads = LANES
    loads: ClassVar[bool]

    @property
    def bytes(self) -> int:
        """The bytes moved between two readings of the clock."""
        return LANES * 4 * self.config.columns * self.config.batch

    @property
    def total(self) -> int:
        """The expected sum of a thread's registers: 0, 1, 2, ..., summed after each repeat and at
        the end."""
        count = self.config.columns * self.config.batch
        return (REPEATS + 1) * count * (count - 1) // 2

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        c = self.config
        warp = cute.arch.warp_idx()
        thread, _, _ = cute.arch.thread_idx()
        tmem = Tmem.allocate(SmemAllocator(), COLUMNS)
        if warp == 0:
            tmem.acquire()
        cute.arch.sync_threads()
        base = tmem.pointer()
        out = words(mOut)

        layout = cute.make_layout((LANES, c.columns), stride=(1 << 16, 1))
        tX = [cute.make_tensor(base + i * c.columns, layout) for i in range(c.batch)]
        load, store = (
            tcgen05.make_tmem_copy(
                cute.make_copy_atom(op(tcgen05.Repetition(c.columns)), Float32), tX[0]
            )
            for op in (tcgen05.Ld32x32bOp, tcgen05.St32x32bOp)
        )
        tSrc = [load.get_slice(thread).partition_S(x) for x in tX]  # (T2R, T2R_M, T2R_N)
        tDst = [store.get_slice(thread).partition_D(x) for x in tX]  # (R2T, R2T_M, R2T_N)
        cX = cute.make_identity_tensor((LANES, c.columns))
        shape = load.get_slice(thread).partition_D(cX).shape
        rX = [cute.make_rmem_tensor(shape, Float32) for _ in tX]
        for i in cutlass.range_constexpr(c.batch):
            for j in cutlass.range(c.columns, unroll_full=True):
                rX[i][j] = Float32(i * c.columns + j)
            cute.copy(store, rX[i], tDst[i])
        cute.arch.fence_view_async_tmem_store()
        total = Float32(0.0)
        for repeat in cutlass.range_constexpr(REPEATS):
            cute.arch.sync_threads()
            start = clock()
            for i in cutlass.range_constexpr(c.batch):
                if cutlass.const_expr(self.loads):
                    cute.copy(load, tSrc[i], rX[i])
                else:
                    cute.copy(store, rX[i], tDst[i])
            if cutlass.const_expr(self.loads):
                cute.arch.fence_view_async_tmem_load()
            else:
                cute.arch.fence_view_async_tmem_store()
            cycles = clock() - start
            # NOTE: ptxas drops a load whose registers are not read, so all are summed
            for i in cutlass.range_constexpr(c.batch):
                for j in cutlass.range(c.columns, unroll_full=True):
                    total += rX[i][j]
            if thread == 0:
                out[repeat] = cycles
        for i in cutlass.range_constexpr(c.batch):
            cute.copy(load, tSrc[i], rX[i])
        cute.arch.fence_view_async_tmem_load()
        for i in cutlass.range_constexpr(c.batch):
            for j in cutlass.range(c.columns, unroll_full=True):
                total += rX[i][j]
        if thread == 0:
            out[REPEATS] = Int32(total)
        cute.arch.sync_threads()
        if warp == 0:
            tmem.free(base)


class TmemLoad(TmemAccess):
    title = "tcgen05.ld 32x32b, 4 warps"
    loads = True


class TmemStore(TmemAccess):
    title = "tcgen05.st 32x32b, 4 warps"
    loads = False


class SmemCopy(Probe):
    """Copies from smem to tensor memory, 128 lanes of 8 columns, timed until their commit
    arrives."""

    title = "tcgen05.cp 128x256b"
    num_threads = LANES

    @property
    def bytes(self) -> int:
        return LANES * 4 * self.config.columns * self.config.batch

    @property
    def total(self) -> int:
        """The expected sum of the last lane's columns, which all hold the lane's number, counted
        from 1."""
        return LANES * self.config.columns * self.config.batch

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        c = self.config
        warp = cute.arch.warp_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        layout = slots_layout(Float32, LANES, c.columns, 1, 16)
        sX = allocate_slots(smem, Float32, layout)[None, None, 0]  # (LANES, Columns)
        tmem = Tmem.allocate(smem, COLUMNS)
        barrier = Barrier.allocate(smem, "copied", arrivals=1)
        if warp == 0:
            tmem.acquire()
        for j in cutlass.range(c.columns, unroll_full=True):
            sX[thread, j] = Float32(thread + 1)
        cute.arch.fence_view_async_shared()
        publish_barriers((barrier,))
        base = tmem.pointer()
        out = words(mOut)
        for repeat in cutlass.range_constexpr(REPEATS):
            if warp == 0:
                cycles = self.timed(base, sX, barrier, repeat)
                if thread == 0:
                    out[repeat] = cycles
            cute.arch.sync_threads()
        fence_after_sync()
        count = c.columns * c.batch
        tX = cute.make_tensor(base, cute.make_layout((LANES, count), stride=(1 << 16, 1)))
        load = make_load(tX)
        tSrc = load.get_slice(thread).partition_S(tX)  # (T2R, T2R_M, T2R_N)
        cX = cute.make_identity_tensor((LANES, count))
        rX = cute.make_rmem_tensor(load.get_slice(thread).partition_D(cX).shape, Float32)
        cute.copy(load, tSrc, rX)
        cute.arch.fence_view_async_tmem_load()
        total = Float32(0.0)
        for j in cutlass.range(count, unroll_full=True):
            total += rX[j]
        if thread == LANES - 1:
            out[REPEATS] = Int32(total)
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == 0:
            fence_after_sync()
            tmem.free(base)

    @cute.jit
    def timed(
        self,
        base: cute.Pointer,
        sX: cute.Tensor,
        barrier: cutlass.Constexpr[Barrier],
        repeat: cutlass.Constexpr[int],
    ) -> Int32:
        """The cycles of `batch` copies and their commit, issued by one warp."""
        c = self.config
        op = tcgen05.Cp128x256bOp(tcgen05.CtaGroup.ONE)
        tile = cute.make_layout((LANES, c.columns), stride=(1 << 16, 1))
        tX = [cute.make_tensor(base + c.columns * i, tile) for i in range(c.batch)]
        copy = tcgen05.make_s2t_copy(cute.make_copy_atom(op, Float32), tX[0])
        thr_copy = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, thr_copy.partition_S(sX))
        start = clock()
        for i in cutlass.range_constexpr(c.batch):
            cute.copy(copy, source, thr_copy.partition_D(tX[i]))
        with cute.arch.elect_one():
            tcgen05.commit(barrier[0])
        barrier.wait(repeat & 1)
        return clock() - start


class PeerBarrier(Probe):
    """The round trip of a barrier arrival to the other CTA of a pair: each waits for the other's
    arrival."""

    title = "mbarrier arrive at the peer CTA and back"
    cluster = 2

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        rank = cute.arch.block_idx_in_cluster()
        barrier = Barrier.allocate(SmemAllocator(), "other came", arrivals=1)
        publish_barriers((barrier,), cluster=True)
        out = words(mOut)
        peer = 1 - rank
        for repeat in cutlass.range_constexpr(REPEATS):
            if rank == 0:
                start = clock()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barrier[0], peer)
                barrier.wait(repeat & 1)
                cycles = clock() - start
                thread, _, _ = cute.arch.thread_idx()
                if thread == 0:
                    out[repeat] = cycles
            else:
                barrier.wait(repeat & 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barrier[0], peer)
        sync_cluster()


class TmaLoad(Probe):
    """One TMA load of a box that is in L2, from its issue to the end of the wait."""

    title = "TMA load of 16 KB from L2, one CTA"
    pair = False

    def operands(self, dtype: str) -> tuple[Operand, ...]:
        return Operand("mX", ("r", "k"), dtype), Operand("mOut", ("m", "n"), dtype)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream) -> None:
        layout = slots_layout(mX.element_type, BOX[0], BOX[1], 1, 128)
        self.kernel(load_operand(mX, layout, self.pair), mOut).launch(
            grid=(self.cluster, 1, 1), block=(32, 1, 1), cluster=(self.cluster, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cpasync.TmaInfo, mOut: cute.Tensor) -> None:
        rank = cute.arch.block_idx_in_cluster()
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        sX = allocate_slots(smem, mOut.element_type, x.smem_layout)  # (bRows, bK, SLOT)
        barrier = Barrier.allocate(smem, "loaded", arrivals=1)
        publish_barriers((barrier,), cluster=self.pair, with_data=True)
        out = words(mOut)
        loads = tile_loads(x, sX, rank)
        for repeat in cutlass.range_constexpr(REPEATS):
            if cutlass.const_expr(self.pair):
                sync_cluster()
            start = clock()
            if rank == 0:
                with cute.arch.elect_one():
                    barrier.arrive_expecting(BOX_BYTES * self.cluster)
            loads.load(Int32(0), Int32(0), barrier[0])
            if rank == 0:
                barrier.wait(repeat & 1)
                cycles = clock() - start
                if thread == 0:
                    out[repeat] = cycles
        if cutlass.const_expr(self.pair):
            sync_cluster()


class PairTmaLoad(TmaLoad):
    """One TMA load per CTA of a pair, whose bytes all arrive on the leader's barrier."""

    title = "TMA load of 2 x 16 KB from L2, a pair of CTAs"
    pair = True
    cluster = 2


class ClcReply(Probe):
    """The time from asking for another cluster's work to the arrival of the reply. One CTA for each
    row of mOut; the first asks until nothing is left.

    NOTE: to ask again after a reply that nothing is left is undefined (PTX ISA,
    clusterlaunchcontrol.try_cancel), so many more CTAs than run at once are launched.
    """

    title = "clusterlaunchcontrol.try_cancel to its reply"
    rows = 16384

    @cute.jit
    def __call__(self, mOut: cute.Tensor, stream) -> None:
        grid = (cute.size(mOut, mode=[0]), 1, 1)
        self.kernel(mOut).launch(grid=grid, block=(self.num_threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mOut: cute.Tensor) -> None:
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        barrier = Barrier.allocate(smem, "reply", arrivals=1)
        reply = smem.allocate_array(Int128, 1)
        publish_barriers((barrier,))
        out = words(mOut)
        taken = Int32(1)
        for repeat in cutlass.range_constexpr(REPEATS):
            if block == 0 and taken != 0:
                start = clock()
                with cute.arch.elect_one():
                    barrier.arrive_expecting(16)
                    cute.arch.issue_clc_query(barrier[0], reply, multicast=False)
                barrier.wait(repeat & 1)
                cycles = clock() - start
                _, _, _, taken = cute.arch.clc_response(reply)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if thread == 0:
                    out[repeat] = cycles


def probes() -> list[Probe]:
    """The probes: one instruction for its latency, several in flight for the bandwidth."""
    found: list[Probe] = []
    for kind in (TmemLoad, TmemStore):
        for columns, batch in ((1, 1), (32, 1), (64, 1), (32, 4), (64, 2)):
            found.append(kind(ProbeConfig(columns, batch)))
    found += [SmemCopy(ProbeConfig(8, batch)) for batch in (2, 8)]
    return [*found, TmaLoad(), PairTmaLoad(), PeerBarrier(), ClcReply()]

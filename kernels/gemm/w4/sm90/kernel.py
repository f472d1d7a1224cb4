"""The GEMM with a packed weight of 4 bits on Hopper: out = ops(x @ W^T).

The product is computed transposed: rows of the weight are wgmma's rows, since operand A may come
from registers, where codes are widened; rows of x are its columns, as many as there are. The roles
are the general GEMM's (kernels/gemm/sm90): its load role also loads blocks of weight, its MMA role
widens them; its schedulers, clusters, split K and epilogues are as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import SMEM_ALIGN, allocate_slots
from cutex.device.atoms.multicast import AbOperands, Cluster, SharedRing
from cutex.device.atoms.scalar import hidden_zero
from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.wgmma import ROWS, WARPGROUP, WgmmaProduct
from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import transposed
from cutex.kernels.gemm.sm90.general import Barriers, General
from cutex.kernels.gemm.sm90.load import BYTES_AHEAD, LoadOneTile, LoadSegments, LoadTiles
from cutex.kernels.gemm.sm90.mma import (
    Cooperative,
    EpilogueStore,
    MmaRole,
    RoleProduct,
    Walk,
    register_product,
)
from cutex.kernels.gemm.sm90.shared_k import (
    SUMS_BARRIER,
    VECTOR,
    Exchange,
    SplitK,
    StreamK,
    thread_vectors,
)
from cutex.kernels.gemm.w4.fragments import (
    WORDS,
    FewRows,
    Fragments,
    WeightLoads,
    allocate_weights,
    own_warpgroup,
    words_of,
)
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.problem.w4.layout import HALF_K, HALVES, STRIP
from cutex.schedulers.stream_k import StreamedTiles

# ---- loads


def block_share(tiles: W4Config, split: Int32 | int, blocks: Int32) -> tuple[Int32 | int, Int32]:
    """The first block of share `split` of K, and the number of its blocks.

    NOTE: no block of a share is past the last one: unlike x, weights are not zero there.
    """
    if tiles.split_k == 1:
        return split * 0, blocks
    each = (blocks + (tiles.split_k - 1)) // tiles.split_k
    first = cutlass.min(split * each, blocks)
    return first, cutlass.min(each, blocks - first)


@dataclass(frozen=True)
class W4LoadTiles(LoadTiles):
    """The load role of a CTA that loops over tiles."""

    tiles: W4Config

    def share(self, split: Int32 | int, num_k_tiles: Int32) -> tuple[Int32 | int, Int32]:
        return block_share(self.tiles, split, num_k_tiles)

    @cute.jit
    def run(self, operands: W4Operands, ab: SharedRing, mC: cute.Tensor) -> None:
        if cutlass.const_expr(self.tiles.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
        LoadTiles.run(self, operands, ab, mC)
        if cutlass.const_expr(self.tiles.split_k > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def start(self, operands: W4Operands, mC: cute.Tensor) -> None:
        """Prefetch the first blocks of weight into L2, before the kernel before this one ends.

        NOTE: should that one still write them, it writes to L2, where the loads find them.
        """
        c = self.tiles
        if cutlass.const_expr(operands.b is not None):
            cpasync.prefetch_descriptor(operands.b.atom)
        if cutlass.const_expr(not c.one_tile):
            cute.arch.griddepcontrol_launch_dependents()
        loads, first, count = self.begin(operands, mC)
        ahead = max(1, BYTES_AHEAD // c.weight_bytes)
        for k_tile in cutlass.range(first, first + cutlass.min(count, ahead), unroll=1):
            loads.a.prefetch(k_tile)


@dataclass(frozen=True)
class W4LoadSegments(LoadSegments):
    """The load role of a CTA that loops over segments of tiles."""

    tiles: W4Config

    start = W4LoadTiles.start


@dataclass(frozen=True)
class W4LoadOneTile(LoadOneTile):
    """The load role of a CTA with one tile, at a pace."""

    tiles: W4Config

    share = W4LoadTiles.share
    start = W4LoadTiles.start

    @cute.jit
    def run(self, operands: W4Operands, ab: SharedRing, mC: cute.Tensor) -> None:
        if cutlass.const_expr(self.tiles.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
        LoadOneTile.run(self, operands, ab, mC)
        if cutlass.const_expr(self.tiles.split_k > 1):
            cute.arch.cluster_wait()

    def step_bytes(self, mC: cute.Tensor) -> Int32:
        strips = (cute.size(mC, mode=[0]) + (STRIP - 1)) // STRIP
        return strips * (self.tiles.split_k * self.tiles.format.words * 4)


# ---- operands


@dataclass(frozen=True)
class W4Operands:
    """The weight with its slots, and x as the general kernel's second operand."""

    mW: cute.Tensor  # (STRIP, RestK, WORDS)
    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    x: AbOperands  # of which only b is there

    @property
    def b(self) -> Any:
        return self.x.b

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.mW, mode=[1])

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`: its strips, and its part of x."""
        m, _ = cluster.place()
        x, sharers = self.x, cluster.size_m
        b = x.loads_of(1, x.b, x.sB, tile.n, m, sharers, cluster.column_mask())
        first = tile.m * cute.size(self.sW, mode=[1])
        return AbLoads(WeightLoads(self.mW, self.sW, first), b)


# ---- mainloop
#
# Codes are widened in registers, which are wgmma's operand A. A thread widens half a block of K
# while the wgmmas of the half before run: registers of two halves, and the wait for one group of
# wgmmas comes before its registers are written again.


@cute.jit
def widened(
    mma: WgmmaProduct,
    ab: SharedRing,
    take: PipelineState,
    tiles: cutlass.Constexpr[W4Config],
    weights: cutlass.Constexpr[Fragments],
    count: Int32,
) -> PipelineState:
    """mma.acc = W @ x^T over `count` blocks of K from slot `take` on; return the state after. All
    slots are released.

    The accumulators of a warpgroup are of `waves` times 64 rows, each of which has wgmmas of its
    own.
    """
    total, waves = mma.acc, cute.size(mma.acc, mode=[1])
    total.fill(hidden_zero())
    one = mma.mma.accumulator(ROWS * tiles.row_warpgroups, tiles.tile_n).layout  # (MMA, 1, MMA_N)
    size, turns = cute.size(total) // waves, tiles.turns
    wg = own_warpgroup(tiles)
    halves = [mma.mma.a_registers(HALF_K) for _ in range(HALVES)]
    for block in cutlass.range(count, unroll=1):
        ab.wait_full(take)
        for wave in cutlass.range_constexpr(waves):
            strip = wave * tiles.row_warpgroups + wg
            acc = cute.make_tensor(total.iterator + wave * size, one)
            factors = weights.factors(strip, take.slot)
            codes = [weights.codes(strip, half, take.slot) for half in range(HALVES)]
            for half in cutlass.range_constexpr(HALVES):
                warpgroup.wait_group(1)  # that which read these registers
                if cutlass.const_expr(wave == 0 and half == 1):
                    ab.release_before(take, block > 0, turns)
                weights.widen(codes[half], factors, half, halves[half])
                issue_half(mma, halves[half], half, take.slot, acc)
        take.advance_by(turns)
    warpgroup.wait_group(0)
    ab.release_before(take, count > 0, turns)
    return take


def issue_half(
    mma: WgmmaProduct, tCrA: cute.Tensor, half: int, slot: Int32, acc: cute.Tensor
) -> None:
    """Start acc += A @ B[slot]^T of half a block of K, as one group of wgmmas."""
    warpgroup.fence()
    tiled_mma = mma.mma.tiled(warpgroup.OperandSource.RMEM)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    for k_block in range(WORDS):
        b = mma.b[None, None, half * WORDS + k_block, slot]
        cute.gemm(tiled_mma, acc, tCrA[None, None, k_block], b, acc)
    warpgroup.commit_group()


@cute.jit
def widened_few(
    mma: WgmmaProduct,
    sX: cute.Tensor,
    ab: SharedRing,
    take: PipelineState,
    tiles: cutlass.Constexpr[W4Config],
    weights: cutlass.Constexpr[Fragments],
    count: Int32,
) -> PipelineState:
    """mma.acc = W @ x^T over `count` blocks of K from slot `take` on, x in slots sX (bN, bK, SLOT);
    return the state after. All slots are released.

    A block is a chain of loads, conversions and products, each of which waits for the one before,
    with few warps to fill the time: so two blocks are computed side by side where that is faster.

    mma.sync takes its operands from the registers that wgmma does, half of them where there are 8
    columns, and what it leaves is laid out as a wgmma's accumulators are (PTX ISA, "Matrix
    Fragments for mma.m16n8k16").
    """
    mma.acc.fill(0.0)
    few, side_by_side = FewRows(mma, sX, ab, tiles, weights), tiles.side_by_side
    for _ in cutlass.range(count // side_by_side, unroll=1):
        take = few.add(take, side_by_side)
    if cutlass.const_expr(side_by_side > 1):
        for _ in cutlass.range(count % side_by_side, unroll=1):
            take = few.add(take, 1)
    return take


@dataclass(frozen=True)
class Blocks:
    """The mainloop: widened blocks of a weight, times x."""

    tiles: W4Config
    weights: Fragments
    sX: cute.Tensor  # (bN, bK, SLOT)

    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """mma.acc = W @ x^T over `count` blocks from slot `take` on; return the state after."""
        if self.tiles.in_turn:
            return self.run_in_turn(mma, ab, take, count)
        return self.run_all(mma, ab, take, count)

    def run_all(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """`run` over this warpgroup's blocks."""
        if self.tiles.few:
            take = widened_few(mma, self.sX, ab, take, self.tiles, self.weights, count)
        else:
            take = widened(mma, ab, take, self.tiles, self.weights, count)
        self.weights.unscale(mma.acc)
        return take

    @cute.jit
    def run_in_turn(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """`run` by warpgroups that process blocks in rotation; the first one ends up with the sums
        of all."""
        turns, threads = self.tiles.turns, self.tiles.row_warpgroups * WARPGROUP
        mine = cute.arch.make_warp_uniform(cute.arch.warp_idx() // (threads // 32))
        take.skip(mine)
        take = self.run_all(mma, ab, take, (count + (turns - 1) - mine) // turns)
        sums = thread_vectors(mma.acc)  # (VECTOR, NumVectors)
        # NOTE: where the weight was: where x was other CTAs send their sums
        first = cute.recast_ptr(self.weights.sW.iterator, dtype=Float32).align(16)
        others = others_sums(first, cute.size(sums, mode=[1]), turns - 1, threads)
        # NOTE: then all have read the whole ring
        barrier = {"barrier_id": SUMS_BARRIER, "number_of_threads": turns * threads}
        cute.arch.barrier(**barrier)
        if mine > 0:
            cute.autovec_copy(sums, others[None, None, mine - 1])
        cute.arch.barrier(**barrier)
        if mine == 0:
            for other in cutlass.range_constexpr(turns - 1):
                sums.store(sums.load() + others[None, None, other].load())
        return take


def others_sums(first: cute.Pointer, count: int, others: int, threads: int) -> cute.Tensor:
    """A thread's place (VECTOR, NumVectors, TURN) for the sums of the other turns' `threads`."""
    thread, _, _ = cute.arch.thread_idx()
    shape = VECTOR, count, others, threads
    stride = 1, VECTOR * threads, VECTOR * threads * count, VECTOR
    layout = cute.make_layout(shape, stride=stride)
    return cute.make_tensor(first, layout)[None, None, None, thread % threads]


def of_first_turn(tiles: W4Config) -> Any:
    """Whether this warp is of the warpgroups that take the first block."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) < 4 * tiles.row_warpgroups


@dataclass(frozen=True)
class FirstStores(Cooperative):
    """The MMA role of warpgroups that take blocks in turn, the first of which store the tile."""

    tiles: W4Config

    @cute.jit
    def store(self, mma: WgmmaProduct, epilogue: EpilogueStore, tile: WorkTile) -> None:
        if of_first_turn(self.tiles):
            Cooperative.store(self, mma, epilogue, tile)


@dataclass(frozen=True)
class WidenSplitK(SplitK):
    """A SplitK whose shares are counted in blocks."""

    tiles: W4Config
    num_blocks: Any  # of all of K

    @property
    def num_threads(self) -> int:
        return self.tiles.row_warpgroups * WARPGROUP

    @cute.jit
    def run(self, product: RoleProduct) -> None:
        cute.arch.cluster_arrive_relaxed()
        SplitK.run(self, product)

    @cute.jit
    def exchange(self, mma: WgmmaProduct, epilogue: Any, place: cute.Tensor, walk: Walk) -> None:
        cute.arch.cluster_wait()  # its CTAs have initialised their barriers
        if not self.tiles.in_turn or of_first_turn(self.tiles):  # the others end here
            self.send(epilogue.parts(mma.acc), place, walk.split)
            self.sums.wait(0)
            self.store_parts(mma, epilogue, place, walk)

    def compute(self, mma: WgmmaProduct, ab: SharedRing, walk: Walk, count: Int32) -> None:
        _, mine = block_share(self.tiles, walk.split, self.num_blocks)
        self.accumulate(mma, ab, ab.consumer(), mine)


# ---- kernel


class W4Gemm:
    """A CTA computes tiles of out transposed: a load warp, and warpgroups that widen codes and run
    wgmma.

    Barriers and roles are the general kernel's (sm90/general.py), but for these. Of warpgroups that
    take blocks in turn those of one turn arrive at ab.empty[slot], and all meet twice at named
    barrier 5: when they have read the ring, and when all but the first turn have left their sums
    where the weight was. With split_k the cluster's barrier is arrived at when a CTA's own barriers
    are initialised, and waited for before sums are sent. In place of sA, and behind the barriers:

    smem            bytes
    sW              weight_bytes * num_stages: blocks of the tile's strips
    own             own_sums_bytes: the sums of the CTAs that share K

    registers of an MMA thread beside its accumulators: 32 of operand A, of two halves of a block;
    threads have 112 with four warpgroups.
    """

    arch = "sm_90a"
    dtypes = ("bf16", "fp16")

    def __init__(self, config: W4Signature) -> None:
        assert isinstance(config.tiles, W4Config)
        self.config, self.tiles = config, config.tiles
        self.general = General(config.general)

    @property
    def name(self) -> str:
        return "sm90_gemm_w4"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        if dtype != self.config.dtype:
            raise ValueError(f"x={self.config.dtype}: compiled for {dtype}")
        return self.config.arguments()

    @property
    def load_role(self) -> LoadTiles:
        g, c = self.general, self.tiles
        if c.one_tile:
            return W4LoadOneTile(c, g.cluster, g.scheduler, g.pace)
        if isinstance(g.scheduler, StreamedTiles):
            return W4LoadSegments(c, g.cluster, g.scheduler)
        return W4LoadTiles(c, g.cluster, g.scheduler)

    def own_sums(self, smem: SmemAllocator) -> cute.Tensor | None:
        """Where other CTAs send their sums: not to the ring, so that none waits until the others
        have read theirs."""
        if not (size := self.tiles.own_sums_bytes):
            return None
        return smem.allocate_tensor(Float32, cute.make_layout(size // 4), SMEM_ALIGN)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with x (M, K), the packed weight (STRIP, RestK, WORDS), out (M, N), the
        operations' arguments and a stream."""
        mW = words_of(mW)
        *passed, stream = rest
        c, g = self.tiles, self.general
        workspace = None
        if cutlass.const_expr(c.workspace is not None):
            *passed, total, flags = passed
            workspace = total, flags
        mOut = transposed(mOut)
        x = g.load_operand(mX, c.tile_n, c.cluster_m, True)
        out, rows, given = g.stored(mOut, tuple(passed))
        # NOTE: percent of L1, so that two CTAs find room
        more = {"preferred_smem_carveout": 100} if c.shares_sm else {}
        g.start(self.kernel(mW, x, out, rows, given, workspace), mOut, stream, **more)

    @cute.kernel
    def kernel(
        self,
        mW: cute.Tensor,
        x: cpasync.TmaInfo,
        out: Any,
        rows: cute.Tensor | None,
        passed: tuple[Any, ...],
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
    ) -> None:
        """Run the roles; `out`, `rows`, `passed` and `workspace` are the general kernel's."""
        c, g = self.tiles, self.general
        smem = SmemAllocator()
        sW = allocate_weights(smem, c.format, c.strips, c.num_stages)  # (WORDS, STRIP, SLOT)
        sX = allocate_slots(smem, x.atom.value_type, x.smem_layout)  # (bN, bK, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = g.config.product(mOut)
        barriers = Barriers.allocate(smem, g)
        own = self.own_sums(smem)
        operands = W4Operands(mW, sW, AbOperands(None, x, None, sX))
        prepare = partial(self.prepare, operands, workspace, barriers.sums, own)
        g.run(self.load_role, operands, barriers, prepare, mProduct, (out, sC, rows, passed))

    def prepare(
        self,
        operands: W4Operands,
        workspace: tuple[cute.Tensor, cute.Tensor] | None,
        sums: Barrier | None,
        own: cute.Tensor | None,
    ) -> tuple[MmaRole, WgmmaProduct]:
        """The MMA role, and this warpgroup's part of W @ x^T. The MMA warps call it."""
        g, c, sX = self.general, self.tiles, operands.x.sB
        weights = Fragments(operands.sW, c.format, sX.element_type, c.scales_sums, tiny=True)
        blocks = Blocks(c, weights, sX)
        what = g.config, c, g.scheduler
        mma = register_product(c, sX)
        if sums is not None:
            num_blocks = operands.num_k_tiles
            return WidenSplitK(*what, g.cluster, sums, own, num_blocks, own=blocks), mma
        if isinstance(g.scheduler, StreamedTiles):
            assert workspace is not None  # as the config has it
            exchange = Exchange(c, sX, *workspace)
            return StreamK(g.config, c, g.scheduler, exchange, own=blocks), mma
        role = FirstStores if c.in_turn else Cooperative
        return role(*what, own=blocks), mma

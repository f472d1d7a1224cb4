"""The FlashAttention forward on Blackwell: two Q tiles in tensor memory, a role for each unit.

A CTA takes tiles of 256 rows, two Q tiles of 128, of one head, or of a group of query heads packed
into rows, of one sequence. This file holds the kernel: its memory, and which warps run which role.

    tiles.py     barriers, and the state that the roles share; announces tiles, brings Q, K and V
    mma.py       S = Q K^T from shared memory, O += P V with P from tensor memory
    softmax.py   S to P, of each Q tile by four warps, one row per thread
    epilogue.py  O to memory, under the next tile

A source gives the next tile (schedulers/dispatch.py).

- Only blocks that the band cuts are masked; of the others no column waits for the maximum of its
  row, as long as that does not exceed the row's reference by far.
- No warpgroup is needed that scales O after every block; where a reference moves, which
  its threshold makes rare, the softmax warps scale their rows of O themselves.
- A share of the exponentials is computed on FMA units (row_softmax.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tmem import Tmem, fence_after_sync
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.rows import Rows, tma_operand
from cutex.device.pipeline import Warps, is_leader, publish_barriers, sync_cluster
from cutex.kernels.attention.forward.sm100.config import O_PART, ROWS, Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.epilogue import Epilogue
from cutex.kernels.attention.forward.sm100.mma import Mma, follow
from cutex.kernels.attention.forward.sm100.softmax import RowLoop, SoftmaxRole, TentativeRowLoop
from cutex.kernels.attention.forward.sm100.tiles import Barriers, Load, Shared, TileRing
from cutex.kernels.attention.order import AttentionOrder, grid
from cutex.kernels.attention.signature import KernelArgs, Sizes, arguments
from cutex.schedulers.clc import LaunchControl
from cutex.schedulers.counter import Counter
from cutex.schedulers.dispatch import SelfDispatch, Source
from cutex.schedulers.one_tile import OwnNumber
from cutex.schedulers.persistent import EqualSteps


class Registers(NamedTuple):
    """Registers per thread, by role; all threads of a CTA together have 65536."""

    epilogue: int
    softmax: int
    other: int


@dataclass(frozen=True)
class Roles:
    """The warps of each role. A warp may read only its own quarter of tensor memory, so roles that
    read it have four warps, or a multiple."""

    q_tiles: int

    @property
    def epilogue(self) -> Warps:
        return Warps(0, 4)

    @property
    def softmax(self) -> Warps:
        return Warps(self.epilogue.end, 4 * self.q_tiles)

    @property
    def mma(self) -> Warps:
        return Warps(self.softmax.end, 1)

    @property
    def load(self) -> Warps:
        """The load warp; it, the MMA warp and two idle warps make up a warpgroup."""
        return Warps(self.mma.end, 1)

    @property
    def threads(self) -> int:
        return 32 * (self.mma.first + 4)

    @property
    def registers(self) -> Registers:
        return {1: Registers(152, 232, 112), 2: Registers(80, 184, 56)}[self.q_tiles]


class Forward:
    """The forward kernel: its memory and registers. The map of its barriers is in tiles.py.

    smem of a CTA    bytes                                        hd 128   hd 64    hd 256, pair
    sQ               128 * D * 2 * q_tiles                        65536    32768    65536
    sK, sV           tile_n * (D + DV) * 2 / ctas * num_stages    131072   65536    131072
    sO               128 * O_PART * 2 * o_slots                32768    32768    32768
    factors          128 * 4 * q_tiles * work_slots               2048     2048     1024
    words, barriers  less than 1024

    tmem             columns                                      hd 128   hd 64    hd 256, pair
    S, two buffers   2 * tile_n, of which P takes the first half  0        0        0
    O                q_tiles * DV                                 256      256      256
    end                                                           512      384      512

    registers        threads            of each: two Q tiles, one
    EPILOGUE         128                80                   152
    SOFTMAX          128 * q_tiles      184                  232
    MMA, LOAD        128                56                   112
    """

    arch = "sm_100a"

    def __init__(self, config: Sm100ForwardConfig) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config
        self.roles = Roles(config.q_tiles)

    @property
    def name(self) -> str:
        return "sm100_attention_forward"

    @property
    def rows(self) -> type[RowLoop]:
        """How a softmax thread takes the blocks of its row."""
        return TentativeRowLoop if self.config.is_tentative else RowLoop

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype, counter=self.config.dispatch == "dynamic")

    # ---- on the host

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, *rest
    ) -> None:
        c = self.config
        args, stream = KernelArgs.of(self.operands("bf16"), rest[:-1]), rest[-1]
        sizes = Sizes.of(c, mQ, mK, args)
        q = self.load_operand(mQ, Rows(None, c.pack, c.ragged_q), (ROWS, c.head_dim), c.q_tiles)
        of_k = Rows(None, 1, c.ragged_k)
        k = self.load_operand(mK, of_k, (c.tile_n // c.ctas, c.head_dim), c.num_stages)
        v = self.load_operand(mV, of_k, (c.tile_n, c.head_dim_v // c.ctas), c.num_stages)
        of_o = Rows(None, c.pack, c.ragged_q)
        store = cpasync.CopyBulkTensorTileS2GOp()
        o = tma_operand(store, mO, of_o, (ROWS, O_PART), c.o_slots)
        self.kernel(q, k, v, o, args, sizes).launch(
            grid=(grid(c, AttentionOrder.of(c, sizes).total), 1, 1),
            block=(self.roles.threads, 1, 1),
            cluster=(c.ctas, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def load_operand(
        self, mX: cute.Tensor, rows: Rows, tile: tuple[int, int], num_slots: int
    ) -> cpasync.TmaInfo:
        group = tcgen05.CtaGroup.TWO if self.config.pair else tcgen05.CtaGroup.ONE
        return tma_operand(cpasync.CopyBulkTensorTileG2SOp(group), mX, rows, tile, num_slots)

    # ---- on the device

    def source(self, smem: SmemAllocator, args: KernelArgs) -> Source:
        """The source of LOAD's tiles, the same for both LOADs of a pair."""
        c = self.config
        if c.dispatch == "dynamic":
            return Counter(args.counter)
        if c.dispatch == "clc":
            return LaunchControl.allocate(smem, c.ctas)
        return OwnNumber(c.ctas) if c.dispatch == "one" else EqualSteps(c.ctas)

    @cute.kernel
    def kernel(
        self,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        o: cpasync.TmaInfo,
        args: KernelArgs,
        sizes: Sizes,
    ) -> None:
        c, roles = self.config, self.roles
        dtype = q.atom.value_type
        warp = cute.arch.warp_idx()
        smem = SmemAllocator()
        sQ, sK, sV, sO = (allocate_slots(smem, dtype, x.smem_layout) for x in (q, k, v, o))
        factors = smem.allocate_tensor(
            Float32, cute.make_layout((ROWS, c.q_tiles, c.work_slots)), byte_alignment=16
        )
        work = TileRing.allocate(smem, c.work_slots, 0, roles.mma.end)
        barriers = Barriers.allocate(smem, c)
        source = self.source(smem, args)
        tmem = Tmem.allocate(smem, columns=c.columns, pair=c.pair)
        if warp == roles.mma.first:
            tmem.acquire()
        shared_barriers = (work.q, *barriers.all, *source.barriers)
        publish_barriers(shared_barriers, cluster=c.pair, with_data=True)
        pointer = tmem.pointer()
        info = BlockInfo(c.mma_rows, c.tile_n, args.band(c.causal), c.pack)
        shared = Shared(c, sQ, sK, sV, sO, factors, work, barriers, pointer, info, args, sizes)

        if warp >= roles.mma.first:
            cute.arch.setmaxregister_decrease(roles.registers.other)
            if warp == roles.mma.first:
                self.mma(shared)
            elif warp == roles.load.first:
                order = AttentionOrder.of(c, sizes)
                dispatch = SelfDispatch(order, source)
                Load(c, q, k, v, dispatch, order.heads_per_kv).run(shared)
        elif warp < roles.epilogue.end:
            cute.arch.setmaxregister_decrease(roles.registers.epilogue)
            Epilogue(shared, o).run()
        else:
            cute.arch.setmaxregister_increase(roles.registers.softmax)
            tile = (warp - roles.softmax.first) // 4
            SoftmaxRole(shared, tile, self.rows).run()
        # NOTE: when MMA reads that no tile is left, all roles of this CTA are done with all tiles
        if cutlass.const_expr(c.pair):
            sync_cluster()
        if warp == roles.mma.first:
            fence_after_sync()
            tmem.free(pointer)

    @cute.jit
    def mma(self, shared: Shared) -> None:
        leads = cutlass.Boolean(True)
        if cutlass.const_expr(self.config.pair):
            leads = is_leader()
        if leads:
            Mma.of(shared).run()
        else:
            follow(shared)

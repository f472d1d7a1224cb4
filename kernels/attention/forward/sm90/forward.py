"""The FlashAttention forward on Hopper: persistent CTAs, one load warp, up to three warpgroups.

A CTA takes tiles of 64 rows for each warpgroup, of one head, or of a group of query heads packed
into rows, of one sequence. What makes it fast, each with its figure in docs/facts/attention.md:

- K and V stream through rings; QK of a block runs under the softmax of the one before, and the
  warpgroups alternate (compute.py, device/attention/block_loop.py).
- Of long sequences two CTAs take neighbouring rows, and each loads half of every block of K and V
  for both (load.py): L2 reads half as much, and what power that saves goes into the clock.
- Only blocks that the band cuts are masked, and in those that it does not cut no larger score is
  looked for. What the first blocks' scores are like decides how the others come: peaked ones in a
  loop that keeps the largest exponentials and raises references where they turn out low. A tile
  that overflows all the same is computed again (watched_softmax.py, work_ring.py).
- Tiles go to CTAs as they ask for them, the longest first, of as few heads at a time as fill the
  SMs; long causal ones take their keys so that CTAs read the same at one time (order.py). Q of the
  next tile is loaded before it begins, O of the one before is stored by TMA while it runs
  (OutStore).
- Tiles that see all keys and do not fill the SMs in whole rounds are cut along their keys in the
  last one, so that all CTAs end together (parts.py, device/attention/kept_rows.py); few tiles are
  split into equal shares for all CTAs (device/attention/split_row.py, merged_rows.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.multicast import Cluster, SharedRing
from cutex.device.atoms.wgmma import ROWS
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.own_share import OwnShare, Tiles
from cutex.device.attention.rows import Rows, tma_operand
from cutex.device.pipeline import Barrier, Ring, Warps, publish_barriers
from cutex.device.row_source import box_operand, cache_box_rows, page_pitch, swizzle_bytes
from cutex.kernels.attention.forward.sm90.compute import Compute, OutStore
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.load import Load, Pages, PairExchange, SplitLoad
from cutex.kernels.attention.forward.sm90.parts import PartsOrder
from cutex.kernels.attention.forward.sm90.shared import Shared
from cutex.kernels.attention.forward.sm90.split_out import PartMerge
from cutex.kernels.attention.order import AttentionOrder, grid
from cutex.kernels.attention.signature import KernelArgs, Sizes, arguments
from cutex.kernels.attention.work_ring import WorkRing
from cutex.schedulers.counter import Counter
from cutex.schedulers.dispatch import SelfDispatch, Source
from cutex.schedulers.one_tile import OwnNumber
from cutex.schedulers.persistent import EqualSteps


class Registers(NamedTuple):
    """Registers per thread, by role; all threads of a CTA together have 65536."""

    load: int
    mma: int


class Forward:
    """The forward kernel: its barriers, memory and registers.

    barrier          arrives                                waits
    q.full[slot]     1: LOAD, and the bytes by TMA          MMA, before a tile's first QK
    q.empty[slot]    1 an MMA warp, done with the tile, or  LOAD
                     with its last QK (releases_early)
    q_read           1 an MMA warp, done with the last QK   LOAD, where a tile is announced before
                     of a tile                              Q's only slot is free (q_waits)
    k.full, v.full   1: LOAD, and the bytes by TMA          MMA
    k.empty, v.empty 1 an MMA warp, its product being done;  LOAD
                     of both CTAs that share the loads
    exchanged[slot]  see load.py, PairExchange              LOAD, of CTAs that share
    kept             see KeptSums; of a part of a tile      MMA, completing that tile
    (whole)          the MMA warps, parts being split       the same: whether any has failed
    left             see MergedRows                         MMA, of all parts of a tile
    (turn)           the warpgroup that issued a step       the next, before it issues its own
    (warpgroup)      its threads, O being in smem           the same, before TMA stores it

    smem       bytes                                        hd 128   hd 64    hd 256
    sQ         rows * D * 2 * q_stages                      65536    49152    65536
    sK, sV     tile_n * (D + DV) * 2 * num_stages           131072   131072   131072
    sO         rows * DV * 2 / o_parts, or Q's place        32768    24576    32768
    words      less than 1024

    registers  threads                       of each: two warpgroups, three
    LOAD       128                           24               32
    MMA        128 * warpgroups              240              160
    """

    arch = "sm_90a"

    def __init__(self, config: Sm90ForwardConfig) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    @property
    def name(self) -> str:
        return "sm90_attention_forward"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        c = self.config
        return arguments(c, dtype, counter=c.dispatch == "dynamic" or c.split, parts=c.is_cut)

    @property
    def mma_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.config.warpgroups)

    @property
    def load_warps(self) -> Warps:
        """The load warps: a whole warpgroup, of which only the first warp works."""
        return Warps(first=self.mma_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return self.mma_warps.threads + self.load_warps.threads

    @property
    def registers(self) -> Registers:
        return {1: Registers(56, 256), 2: Registers(24, 240), 3: Registers(32, 160)}[
            self.config.warpgroups
        ]

    def source(self, args: KernelArgs) -> Source:
        """The source of LOAD's tiles."""
        if self.config.dispatch == "dynamic":
            return Counter(args.counter, self.config.ctas)
        ctas = self.config.ctas
        return OwnNumber(ctas) if self.config.dispatch == "one" else EqualSteps(ctas)

    def order(self, sizes: Sizes) -> AttentionOrder | PartsOrder:
        """The order of tiles, or of the parts that those of the last round are cut into."""
        order = AttentionOrder.of(self.config, sizes)
        return PartsOrder.of(order, self.config, sizes.rows_k) if self.config.spread else order

    def ctas(self, sizes: Sizes) -> Int32:
        """The CTAs of the grid."""
        c = self.config
        return Int32(c.num_ctas) if c.split else grid(c, self.order(sizes).total)

    def rows(self, info: Any, side: str) -> Rows:
        """The rows of Q and O (side "q") or of K and V ("k"), as TMA sees them."""
        c = self.config
        return Rows(info, c.pack, c.ragged_q) if side == "q" else Rows(info, 1, c.ragged_k)

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, *rest
    ) -> None:
        c = self.config
        args, stream = KernelArgs.of(self.operands("bf16"), rest[:-1]), rest[-1]
        sizes = Sizes.of(c, mQ, mK, args)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        of_q, of_k = self.rows(None, "q"), self.rows(None, "k")
        o_slots = c.warpgroups * (1 if c.own_o else c.q_stages)
        q = tma_operand(load, mQ, of_q, (ROWS, c.head_dim), c.warpgroups * c.q_stages)
        of_kv = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.share else load
        pitches = None
        if cutlass.const_expr(c.page_size > 0):
            box_rows = cache_box_rows(c.page_size, c.tile_n)
            k = box_operand(mK, (c.tile_n, c.head_dim), box_rows)
            v = box_operand(mV, (c.tile_n, c.head_dim_v), box_rows)
            pitches = page_pitch(mK), page_pitch(mV)
        else:
            k = tma_operand(of_kv, mK, of_k, (c.tile_n, c.head_dim), c.num_stages, c.ctas)
            v = tma_operand(of_kv, mV, of_k, (c.tile_n, c.head_dim_v), c.num_stages, c.ctas)
        o = tma_operand(store, mO, of_q, (ROWS, c.head_dim_v // c.o_parts), o_slots)
        self.kernel(q, k, v, o, mO if c.split else None, args, sizes, pitches).launch(
            grid=(self.ctas(sizes), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(c.ctas, 1, 1) if c.share else None,
            min_blocks_per_mp=1,
            cooperative=c.split,  # its CTAs wait for each other
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cpasync.TmaInfo,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        o: cpasync.TmaInfo,
        mO: cute.Tensor | None,
        args: KernelArgs,
        sizes: Sizes,
        pitches: tuple[Int32, Int32] | None,
    ) -> None:
        c = self.config
        dtype = q.atom.value_type
        smem = SmemAllocator()
        sQ = allocate_slots(smem, dtype, q.smem_layout)
        sK = allocate_slots(smem, dtype, self.slots(k, c.head_dim))
        sV = allocate_slots(smem, dtype, self.slots(v, c.head_dim_v))
        if cutlass.const_expr(c.own_o):
            sO = allocate_slots(smem, dtype, o.smem_layout)
        else:
            sO = cute.make_tensor(sQ.iterator, o.smem_layout.outer)
        consumers = self.mma_warps.count
        work = WorkRing.allocate(smem, c.work_slots, c.q_bytes, consumers, c.split)
        q_read = Barrier.allocate(smem, "q read", consumers) if c.q_waits else None
        k_ring = self.ring(smem, "k", c.k_bytes)
        v_ring = self.ring(smem, "v", c.v_bytes)
        exchange = PairExchange.allocate(smem) if c.share else None
        others: tuple[Barrier, ...] = () if q_read is None else (q_read,)
        others += () if exchange is None else (exchange.exchanged,)
        publish_barriers((work.q, k_ring, v_ring, *others), cluster=c.share)
        info = BlockInfo(c.tile_m, c.tile_n, args.band(c.causal), c.pack)
        of_call = info, args, sizes
        shared = Shared(sQ, sK, sV, sO, work, k_ring, v_ring, *of_call, c.ctas, q_read)

        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            cute.arch.setmaxregister_decrease(self.registers.load)
            if warp == self.load_warps.first:
                operands = self.rows(q, "q"), *self.blocks(k, v, args, pitches)
                order = self.order(sizes)
                dispatch = SelfDispatch(order, self.source(args))
                load = Load(c, *operands, order, dispatch, exchange, shared)
                if cutlass.const_expr(c.split):
                    share = OwnShare.find(Tiles(c, sizes, args, order))
                    SplitLoad(load, share).run()
                else:
                    load.run()
        else:
            cute.arch.setmaxregister_increase(self.registers.mma)
            out = OutStore(c, self.rows(o, "q"), sO, args.lse)
            merge = PartMerge(c, mO, args) if c.split else None
            Compute(c, shared, out, merge).run()

    def blocks(
        self,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        args: KernelArgs,
        pitches: tuple[Int32, Int32] | None,
    ) -> tuple[Rows | Pages, Rows | Pages]:
        """The rows of K and of V, as TMA sees them."""
        if pitches is None:
            return self.rows(k, "k"), self.rows(v, "k")
        table, size = args.page_table, self.config.page_size
        return Pages(k, table, size, pitches[0]), Pages(v, table, size, pitches[1])

    def slots(self, info: cpasync.TmaInfo, columns: int) -> cute.ComposedLayout:
        """The layout of the slots of K or V, (bN, columns, SLOT)."""
        c, dtype = self.config, info.atom.value_type
        if not c.page_size:
            return info.smem_layout
        swizzle = swizzle_bytes(columns * dtype.width // 8)
        return slots_layout(dtype, c.tile_n, columns, c.num_stages, swizzle)

    def ring(self, smem: SmemAllocator, name: str, slot_bytes: int) -> Ring:
        """The ring of K or V."""
        c, consumers = self.config, self.mma_warps.count
        if not c.share:
            return Ring.allocate(smem, name, c.num_stages, slot_bytes, consumers)
        cluster = Cluster(c.ctas, 1)
        return SharedRing.of_cluster(smem, name, c.num_stages, slot_bytes, consumers, cluster)

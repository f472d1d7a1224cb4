"""The FlashAttention backward on Hopper, in three launches: preprocess, main and convert.

Main's three warpgroups wait for each other only through rings, so that the tensor cores have one's
products during the others' exponentials:

- two sum the gradients of keys, scores transposed, P and dS from registers as operands A: of 64
  keys each or, of wide head dims, dK and dV of the same 64 (keys.py);
- the third (queries.py) computes dQ from dS in smem, adds it to fp32 sums in global memory, and
  starts all loads. With `own_dq` it only loads, and those that own keys compute dQ, too; then
  CTAs are persistent, and take tiles of keys from a counter.
  Where adds come in one order, three of its warps wait for turns, and add; else one zeroes sums
  that are added to later. Where tiles take equally long, the last ones are cut (../tail.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import SMEM_ALIGN, allocate_slots, slots_layout
from cutex.device.atoms.scalar import pinned
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.rows import Rows, tma_operand
from cutex.device.handover import Handover
from cutex.device.pipeline import Barrier, Ring, Warps, publish_barriers
from cutex.device.stream_order import await_kernel_before, let_next_kernel_start
from cutex.kernels.attention.backward.config import ELEMENT, TILE, WARPGROUP_ROWS, BackwardConfig
from cutex.kernels.attention.backward.rows import BackwardKernel, by_tiles
from cutex.kernels.attention.backward.signature import KernelArgs, RowTiles, Tensors
from cutex.kernels.attention.backward.sm90.keys import KeyGradients, WideKeys, WideValues
from cutex.kernels.attention.backward.sm90.queries import AllGradients, QueryGradients
from cutex.kernels.attention.backward.sm90.shared import (
    Adds,
    Load,
    Shared,
    SumsQueue,
    Supply,
    Zeros,
)
from cutex.kernels.attention.backward.tiles import (
    HeadParts,
    Sizes,
    Tile,
    Walk,
    most_tiles,
    ranked,
    sizes_of,
    tail_of,
    tile_of,
    tile_order,
)
from cutex.schedulers.counter import CounterDispatch


class Operands(NamedTuple):
    """The TMA operands: those loaded, and dK and dV, which are stored."""

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    do: cpasync.TmaInfo
    dk: cpasync.TmaInfo
    dv: cpasync.TmaInfo
    kp: Any  # half of the columns of K; None: CTAs are no pairs


class Main:
    """The kernel that does the work: its barriers, memory and registers. A CTA owns 128 keys (64
    for wide head dims), whose dK and dV stay in registers. For the widest, CTAs with neighbouring
    keys form pairs.

    barrier          arrives                                   waits
    k, v loaded      1: the load warp, and the bytes by TMA    all warpgroups, before they begin
    q, do full       1: the load warp, and the bytes by TMA    the warpgroups that own keys
    q, do empty      1 a warp of those that read them, its     the load warp
                     products being done
    ds full          1 a warp of those that compute scores,    those that compute dQ; of wide head
                     its dS being written                      dims the one that sums dK, too
    ds empty         1 a warp of these, their products being   those that compute scores
                     done, and of dQ of a pair's other CTA
    ds sent          1: the load warp, and the bytes that the  the warpgroup of dQ of a pair
                     other CTA copies
    k read           1 a warp of dQ, after its last dQ, and    those that store dK in its place;
                     of the one that sums dV alone             the load warp, for the next tile
    v read           1 a warp that computes scores             the load warp, for the next tile
    kept             a flag in global memory: a warp that      the same warp of the CTA that has
                     keeps sums of a part of a tile, or of     the tile's end, or the last of the
                     the heads that share its keys             heads (KeptSums)

    smem       bytes                                 hd 128   hd 64    hd 256
    sK, sV     tile_n * (D + DV) * 2                 65536    32768    65536
    sQ         tile_m * D * 2 * num_stages           32768    32768    65536
    sdO        tile_m * DV * 2 * num_stages          32768    32768    65536
    sdS        tile_m * tile_n * 2 * ds_slots * CTAs 32768    65536    16384
    sKp        tile_n * D, of pairs                  0        0        16384
    sdQ        64 * dq_columns * 4 * dq_slots        65536    65536    0
    stats      tile_m * 8 * num_stages               1024     2048     1024

    registers  threads    each, hd 128   of which accumulators      hd 256
    keys       256        240            192: dK, dV, S^T, dP^T     240 (dV, S^T, dP^T), 168 (dK)
    queries    128        24             0; 96 with dQ              96
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @property
    def key_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.config.warpgroups)

    @property
    def query_warps(self) -> Warps:
        return Warps(first=self.key_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return 32 * self.query_warps.end

    def rows(self, info: Any, side: str) -> Rows:
        """The rows of Q and dO (side "q") or of K and V ("k"), as TMA sees them."""
        c = self.config
        return Rows(info, 1, c.ragged_q if side == "q" else c.ragged_k)

    @cute.jit
    def launch(self, tensors: Tensors, args: KernelArgs, stream) -> None:
        c = self.config
        mQ, mK, mV, mdO = tensors.q, tensors.k, tensors.v, tensors.do
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        of_q, of_k = self.rows(None, "q"), self.rows(None, "k")
        k_tile, v_tile = (WARPGROUP_ROWS, c.head_dim), (WARPGROUP_ROWS, c.head_dim_v)
        operands = Operands(
            tma_operand(load, mQ, of_q, (c.tile_m, c.head_dim), c.num_stages),
            tma_operand(load, mK, of_k, k_tile, c.key_tiles),
            tma_operand(load, mV, of_k, v_tile, c.key_tiles),
            tma_operand(load, mdO, of_q, (c.tile_m, c.head_dim_v), c.num_stages),
            tma_operand(store, tensors.dk, of_k, k_tile, c.key_tiles),
            tma_operand(store, tensors.dv, of_k, v_tile, c.key_tiles),
            tma_operand(load, mK, of_k, (WARPGROUP_ROWS, c.dq_width), c.key_tiles)
            if c.pairs
            else None,
        )
        sizes, tiles = sizes_of(c, tensors, args)
        total = tail_of(c, sizes).total if c.spread else most_tiles(c, args, sizes)
        if cutlass.const_expr(c.own_dq):
            total = cutlass.min(Int32(c.num_ctas), total)
        self.kernel(operands, tensors.stats, tensors.dq_sums, args, sizes, tiles).launch(
            grid=(total * c.key_ctas, 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(c.key_ctas, 1, 1) if c.pairs else None,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        stats: cute.Tensor,
        dq_sums: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        tiles: RowTiles,
    ) -> None:
        if cutlass.const_expr(self.config.own_dq):
            self.several_tiles(operands, stats, dq_sums, args, sizes, tiles)
        else:
            self.one_tile(operands, stats, dq_sums, args, sizes, tiles)

    @cute.jit
    def several_tiles(self, operands, stats, dq_sums, args: KernelArgs, sizes, tiles) -> None:
        """Process one tile of keys after another; the warpgroups that own keys compute dQ, too."""
        c, smem = self.config, SmemAllocator()
        order: Any = tail_of(c, sizes) if c.spread else tile_order(c, sizes)
        readers = self.key_warps.count + c.adding_warps + c.late_zeros
        chosen = ranked(c, args, sizes)
        dispatch = CounterDispatch.allocate(smem, order, args.counter, readers, chosen)
        queue = SumsQueue.allocate(smem, c) if c.adding_warps else None
        more = dispatch.barriers if queue is None else (*dispatch.barriers, queue)
        shared = self.shared(smem, operands, args, sizes, tiles, None, more)
        shared = replace(shared, queue=queue, descending=c.descending, flips=c.flips)
        walk = Walk(c, dispatch, args, sizes)
        self.await_preprocess()
        warp, first = cute.arch.warp_idx(), self.query_warps.first
        if warp >= first:
            cute.arch.setmaxregister_decrease(c.registers[-1])
            if warp == first:
                Supply(c, shared, self.load(operands, stats, shared)).run(walk)
            elif cutlass.const_expr(c.adding_warps > 0):
                if warp <= first + c.adding_warps:
                    Adds(c, shared, dq_sums, warp - first - 1).run(walk)
            elif cutlass.const_expr(c.late_zeros):  # noqa: SIM102 - known when tracing
                if warp == first + 1:
                    Zeros(c, dq_sums, tiles).run(walk)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            queries = QueryGradients(c, shared, None, dq_sums)
            AllGradients.of_all(c, shared, queries).run_all(walk, operands.dk, operands.dv)

    @cute.jit
    def await_preprocess(self) -> None:
        """Wait for what preprocess writes, but in a warp that loads K and V before it does."""
        if cutlass.const_expr(not self.config.keys_first):  # noqa: SIM114 - known when tracing
            await_kernel_before()
        elif cute.arch.warp_idx() != self.query_warps.first:
            await_kernel_before()

    def load(self, operands: Operands, stats: cute.Tensor, shared: Shared) -> Load:
        c = self.config
        sides = zip(operands[:4], ("q", "k", "k", "q"), strict=True)
        q, k, v, do = (self.rows(x, side) for x, side in sides)
        kp = self.rows(operands.kp, "k") if c.pairs else None
        return Load(c, q, k, v, do, kp, stats, shared)

    @cute.jit
    def one_tile(self, operands, stats, dq_sums, args: KernelArgs, sizes, tiles) -> None:
        """Process the tile of keys with this CTA's number."""
        c, given = self.config, (operands, stats, dq_sums, args, sizes, tiles)
        index, _, _ = cute.arch.block_idx()
        chosen: Any = ranked(c, args, sizes)
        if cutlass.const_expr(not c.keys_first):
            await_kernel_before()
        if cutlass.const_expr(chosen is None):
            self.tile(tile_of(c, index, args, sizes), *given)
        else:
            number = index // c.key_ctas
            if number < chosen.total:
                index = chosen.index(number) * c.key_ctas + index % c.key_ctas
                self.tile(tile_of(c, index, args, sizes), *given)

    @cute.jit
    def tile(self, tile: Tile, operands, stats, dq_sums, args: KernelArgs, sizes, tiles) -> None:
        """Process a tile of keys."""
        c = self.config
        if tile.has_keys(c):
            shared = self.shared(SmemAllocator(), operands, args, sizes, tiles, tile)
            self.await_preprocess()
            warp = cute.arch.warp_idx()
            if warp >= self.query_warps.first:
                cute.arch.setmaxregister_decrease(c.registers[-1])
                self.queries(self.of_role(shared, args, sizes), operands, stats, dq_sums).run()
            elif cutlass.const_expr(not c.wide):
                cute.arch.setmaxregister_increase(c.registers[0])
                gradients = KeyGradients.of(c, self.of_role(shared, args, sizes))
                gradients.run()
                let_next_kernel_start()
                gradients.store_or_keep(operands.dk, operands.dv)
            elif warp < self.key_warps.count // 2:
                cute.arch.setmaxregister_increase(c.registers[0])
                values = WideValues.of(c, self.of_role(shared, args, sizes))
                values.run()
                values.store_or_keep(operands.dv)
            else:
                cute.arch.setmaxregister_decrease(c.registers[1])
                of_keys = self.of_role(shared, args, sizes)
                keys = WideKeys.of(c, of_keys, self.load(operands, stats, of_keys))
                keys.run()
                let_next_kernel_start()
                keys.store_or_keep(operands.dk)
        elif cutlass.const_expr(c.keys_first):
            await_kernel_before()

    def queries(self, shared: Shared, operands, stats, dq_sums) -> QueryGradients:
        """The role that loads, and computes dQ."""
        return QueryGradients(self.config, shared, self.load(operands, stats, shared), dq_sums)

    def of_role(self, shared: Shared, args: KernelArgs, sizes: Sizes) -> Shared:
        """What a role uses. Where tiles of the last round are divided, it finds its tile itself:
        what all roles have would be spilled."""
        if not self.config.last_parts:
            return shared
        index, _, _ = cute.arch.block_idx()
        return replace(shared, tile=tile_of(self.config, pinned(index), args, sizes))

    def gradient_slots(
        self, sdQ: cute.Tensor, operands: Operands
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """The slots sdV and sdK from which dV and dK are stored: over each warpgroup's slots of
        dQ."""
        c, found = self.config, []
        size = c.dq_bytes // 4  # of a slot of dQ, in numbers of 32 bits
        apart = c.dq_bytes // (WARPGROUP_ROWS * c.head_dim * ELEMENT)
        for at, of in ((0, operands.dv.smem_layout), (1, operands.dk.smem_layout)):
            wide, first = of.outer.stride[2], at * c.key_tiles
            stride = (*of.outer.stride[:2], cute.transform_leaf(lambda x: x * apart, wide))
            place = cute.recast_ptr(
                sdQ.iterator + first * size, of.inner, operands.q.atom.value_type
            )
            found.append(cute.make_tensor(place, cute.make_layout(of.outer.shape, stride=stride)))
        return found[0], found[1]

    @cute.jit
    def shared(
        self,
        smem: SmemAllocator,
        operands: Operands,
        args: KernelArgs,
        sizes: Sizes,
        tiles: RowTiles,
        tile: Tile | None,
        more: tuple[Any, ...] = (),
    ) -> Shared:
        """Allocate smem, and publish the barriers, and `more`."""
        c = self.config
        dtype = operands.q.atom.value_type
        readers = self.query_warps.count
        k_loaded = Barrier.allocate(smem, "k loaded", arrivals=1)
        v_loaded = Barrier.allocate(smem, "v loaded", arrivals=1)
        q = Ring.allocate(smem, "q", c.num_stages, c.q_bytes + c.stats_bytes, self.key_warps.count)
        key_warps = 4 * c.key_tiles  # those that compute dS
        do = Ring.allocate(smem, "do", c.num_stages, c.do_bytes, key_warps)
        dq_warps = readers * c.dq_warpgroups  # that read dS
        others = self.key_warps.count - key_warps  # that read dS for dK
        handover = Handover.allocate(
            smem, "ds", c.ds_slots, key_warps, dq_warps, c.key_ctas, others
        )
        k_read = Barrier.allocate(smem, "k read", arrivals=dq_warps + others)
        v_read = Barrier.allocate(smem, "v read", arrivals=key_warps)
        barriers = (k_loaded, v_loaded, q, do, handover, k_read, v_read, *more)
        sK = allocate_slots(smem, dtype, operands.k.smem_layout)
        sV = allocate_slots(smem, dtype, operands.v.smem_layout)
        sQ = allocate_slots(smem, dtype, operands.q.smem_layout)
        sdO = allocate_slots(smem, dtype, operands.do.smem_layout)
        ds_slots = c.key_tiles * c.ds_slots * c.key_ctas
        ds = slots_layout(dtype, WARPGROUP_ROWS, c.tile_m, ds_slots, 128)
        sdS = allocate_slots(smem, dtype, ds)
        sKp = ds_sent = None
        if cutlass.const_expr(c.pairs):
            sKp = allocate_slots(smem, dtype, operands.kp.smem_layout)
            ds_sent = Barrier.allocate(smem, "ds sent", arrivals=1, slots=c.ds_slots)
        sdQ: Any = None
        if cutlass.const_expr(c.dq_slots > 0):
            of_dq = cute.make_layout((c.dq_bytes // 4 // readers, readers, c.dq_slots))
            sdQ = smem.allocate_tensor(Float32, of_dq, byte_alignment=SMEM_ALIGN)
        sdK = sdV = None
        if cutlass.const_expr(c.own_dq):
            sdV, sdK = self.gradient_slots(sdQ, operands)
        stats = smem.allocate_tensor(
            Float32, cute.make_layout((2 * c.tile_m, c.num_stages)), byte_alignment=128
        )
        if cutlass.const_expr(c.pairs):
            publish_barriers((*barriers, ds_sent), cluster=True)
        else:
            publish_barriers(barriers)
        info = BlockInfo(c.tile_m, c.tile_n, args.band(c.causal))
        parts = HeadParts.of(c, args, sizes) if c.head_parts else None
        return Shared(
            sK, sV, sQ, sdO, sdS, sKp, sdQ, sdK, sdV, stats, k_loaded, v_loaded, q, do, handover,
            ds_sent, k_read, v_read, info, args, tiles, tile, sizes.heads_per_kv, parts,
        )  # fmt: skip


class Backward(BackwardKernel[BackwardConfig]):
    """The backward on Hopper."""

    arch = "sm_90a"
    name = "sm90_attention_backward"
    main = Main

    def workspace(self, tensors: Tensors) -> Tensors:
        # NOTE: where a caller counts tiles of 64 queries, the two of a block follow each other
        c = self.config
        if c.tile_m == TILE:
            return tensors
        stats, sums = tensors.stats, tensors.dq_sums
        return tensors._replace(
            stats=by_tiles(stats, c.row_stats * c.tile_m),
            dq_sums=by_tiles(sums, c.tile_m * c.head_dim),
        )

"""Attention of few queries and long caches on Blackwell: CTAs share the keys evenly.

A CTA has 128 packed rows, the queries of all heads that read one head of K and V, and an SM to
itself. What bounds it is memory: 29 bytes a cycle and SM of a B200. A block of 128 keys at head dim
128 takes 2240 cycles to come; its products take 1024, under the loads, and its softmax, of which
128 rows or one take the same time, some 1500.

Shares, parts and their merge are those of Hopper's (splits.py, out.py).
"""

from __future__ import annotations

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync
from cutex.device.pipeline import Warps, publish_barriers
from cutex.kernels.attention.decode.launch import DecodeKernel, Load, kv_slots, ring
from cutex.kernels.attention.decode.out import out_of
from cutex.kernels.attention.decode.shared import Shared
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.sm100.config import ROWS, Sm100DecodeConfig
from cutex.kernels.attention.decode.sm100.mma import Mma
from cutex.kernels.attention.decode.sm100.shared import Barriers
from cutex.kernels.attention.decode.sm100.softmax import Softmax


class Decode(DecodeKernel[Sm100DecodeConfig]):
    """The decode kernel: its roles and memory; barriers in shared.py, rings as on Hopper, their
    slots released by the commit of the MMA that reads them.

    smem       bytes                                        hd 128   hd 64    hd 256
    sQ         128 * D * 2                                  32768    16384    65536
    sK, sV     tile_n * (D + DV) * 2 * num_stages           196608   196608   131072
    words      less than 1024

    tmem       columns
    S, P       2 * tile_n                                   256      256      128
    O          DV                                           128      64       256
    """

    arch = "sm_100a"

    name = "sm100_attention_decode"

    @property
    def softmax_warps(self) -> Warps:
        return Warps(first=0, count=4)

    @property
    def mma_warp(self) -> Warps:
        return Warps(first=self.softmax_warps.end, count=1)

    @property
    def load_warps(self) -> Warps:
        return Warps(first=self.mma_warp.end, count=self.config.load_warps)

    @property
    def num_threads(self) -> int:
        return 32 * self.load_warps.end

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        k: cpasync.TmaInfo,
        v: cpasync.TmaInfo,
        mO: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        pitches: tuple[Int32, Int32],
    ) -> None:
        c = self.config
        dtype = mQ.element_type
        smem = SmemAllocator()
        sQ = allocate_slots(smem, dtype, kv_slots(dtype, ROWS, c.head_dim, 1))
        sK = allocate_slots(smem, dtype, kv_slots(dtype, c.tile_n, c.head_dim, c.num_stages))
        sV = allocate_slots(smem, dtype, kv_slots(dtype, c.tile_n, c.head_dim_v, c.num_stages))
        last = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        k_ring = ring(smem, "k", c, c.k_bytes, consumers=1)
        v_ring = ring(smem, "v", c, c.v_bytes, consumers=1)
        barriers = Barriers.allocate(smem, self.softmax_warps.count)
        tmem = Tmem.allocate(smem, columns=c.columns)
        warp = cute.arch.warp_idx()
        if warp == 0:
            tmem.acquire()
        publish_barriers((k_ring, v_ring, *barriers))
        pointer = tmem.pointer()
        cute.arch.griddepcontrol_wait()
        sizes = sizes.known(c)
        info = sizes.block_info(c, args.band(c.causal))
        shared = Shared(c, info, args, sizes, sQ, sK, sV, k_ring, v_ring)
        if warp >= self.load_warps.first:
            Load(k, v, *pitches, warp - self.load_warps.first, shared).run()
        elif warp == self.mma_warp.first:
            Mma(c, shared, barriers, pointer).run()
        else:
            out = out_of(c, mO, args, sizes, last)
            Softmax(c, mQ, out, shared, barriers, pointer).run()
        fence_before_sync()
        cute.arch.sync_threads()
        if warp == 0:
            fence_after_sync()
            tmem.free(pointer)

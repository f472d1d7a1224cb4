"""MLA decode on Blackwell: attention of few queries to long caches of latent keys.

A pair of CTAs has 128 packed rows, 64 each, all of O (64 x 512 in fp32, half of an SM's tensor
memory) and 128 keys at a time. Its MMAs take K as the rows of B, of which each CTA holds half, and
V as its columns, of which each holds half, too: so a CTA loads 64 keys as K and half the columns of
all 128 as V, which L2 has then, in slots of 8 KB that the MMAs free in order.

limits, one B200, 128 rows, 128 keys      cycles
tensor cores: QK 1152, PV 1024            2176
HBM, 147456 bytes a pair                  2950 at 7.4 TB/s and 1.85 GHz, for one pair of 74
L2, 139264 bytes a CTA                    1623
exponentials                              512
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import slots_layout
from cutex.device.atoms.tma import load_operand
from cutex.device.atoms.tmem import Tmem, fence_after_sync, fence_before_sync
from cutex.device.attention.block_info import BlockInfo
from cutex.device.pipeline import Warps, is_leader, publish_barriers, sync_cluster
from cutex.device.row_source import box_operand, cache_box_rows, page_pitch
from cutex.kernels.attention.decode.out import Parts
from cutex.kernels.attention.decode.signature import ALL_ROWS, KernelArgs, Sizes
from cutex.kernels.attention.mla.combine import MlaCombine, MlaKernel, MlaOut
from cutex.kernels.attention.mla.config import CHUNK, CHUNKS
from cutex.kernels.attention.mla.signature import args_of, rows_of_q, sizes_of
from cutex.kernels.attention.mla.sm100.config import BOX, CTA_ROWS, CTAS, DIMS, Sm100MlaConfig
from cutex.kernels.attention.mla.sm100.roles import Load, Mma
from cutex.kernels.attention.mla.sm100.shared import LOAD_WARPS, SWIZZLE, Shared
from cutex.kernels.attention.mla.sm100.softmax import Softmax


class Mla(MlaKernel[Sm100MlaConfig]):
    """The MLA kernel: its roles and memory; barriers in shared.py.

    smem       bytes of a CTA
    sQ         64 * 576 * 2                   73728
    sP         64 * 128 * 2                   16384
    sK, sVt    8192 * 17                      139264
    words      less than 2048

    tmem       columns
    S          2 * 64                         128
    O          512 / 2                        256
    """

    arch = "sm_100a"
    softmax_warps = Warps(first=0, count=4)
    mma_warp = Warps(first=4, count=1)
    load_warps = Warps(first=5, count=LOAD_WARPS)
    num_threads = load_warps.end * 32

    name = "sm100_mla_decode"

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mKV: cute.Tensor, mO: cute.Tensor, *rest) -> None:
        c, stream = self.config, rest[-1]
        args = args_of(c, rest[:-1])
        sizes = sizes_of(c, mQ, mKV, args)
        slots = slots_layout(mQ.element_type, CTA_ROWS, CHUNK, CHUNKS, SWIZZLE)
        q = load_operand(rows_of_q(mQ), slots, pair=True)
        kv = box_operand(mKV, (BOX, c.head_dim), cache_box_rows(c.page_size, BOX), pair=True)
        most = sizes.units * (cute.ceil_div(sizes.rows_k, c.tile_n) + c.start)
        self.kernel(q, kv, mO, args, sizes, page_pitch(mKV)).launch(
            grid=(cutlass.min(most * CTAS, c.ctas), 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )
        MlaCombine(c).launch(mO, args, sizes, stream)

    @cute.kernel
    def kernel(
        self,
        q: cpasync.TmaInfo,
        kv: cpasync.TmaInfo,
        mO: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        pitch: Int32,
    ) -> None:
        c = self.config
        info = BlockInfo(ALL_ROWS, c.tile_n, args.band(c.causal), sizes.pack)
        smem = SmemAllocator()
        walk = info, args, sizes
        shared = Shared.allocate(smem, q.atom.value_type, c, self.softmax_warps.count, walk)
        tmem = Tmem.allocate(smem, columns=c.o_column + DIMS, pair=True)
        warp = cute.arch.warp_idx()
        if warp == self.mma_warp.first:
            tmem.acquire()
        publish_barriers((shared.q, shared.kv, *shared.barriers), cluster=True, with_data=True)
        pointer = tmem.pointer()
        if warp >= self.load_warps.first:
            Load(q, kv, pitch, warp - self.load_warps.first, shared).run()
        elif warp == self.mma_warp.first:
            if is_leader():
                Mma(shared, pointer).run()
        else:
            parts = Parts(args, sizes.units, c.tile_m, c.head_dim_v)
            out = MlaOut(c, mO, parts.partials, args, None)
            Softmax(out, parts, shared, pointer).run()
        fence_before_sync()
        sync_cluster()
        if warp == self.mma_warp.first:
            fence_after_sync()
            tmem.free(pointer)

"""MLA decode on Hopper: attention of few queries to long caches of latent keys.

All heads read one row of 576 numbers a key, of which the first 512 are its value, too; so a block
of keys is loaded once, and read as K and as V. 64 rows of queries times heads have O in half of the
registers of an SM: two warpgroups have 256 columns each.

limits, one H100                16 heads                128 heads
memory, bytes a key             1152: 2.9 TB/s          the same, for two CTAs with 64 heads each
tensor cores, 64 keys, 64 rows  2176 cycles of 5000     2176: QK 1152, PV 1024; exponentials 256

A block of keys stays in smem from its load to its PV, and there is room for two. Each has a
warpgroup of its own for the scores, so that QK of one runs under the exponentials and PV of the
other: one alone would leave the tensor cores idle during its exponentials. Who has the scores of a
slot loads it, too, as soon as PV has freed it: there are no registers for a warp that only loads.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import slots_layout
from cutex.device.atoms.tma import load_operand
from cutex.device.attention.block_info import BlockInfo
from cutex.device.pipeline import Warps, publish_barriers
from cutex.device.row_source import box_operand, cache_box_rows, page_pitch
from cutex.kernels.attention.decode.signature import ALL_ROWS, KernelArgs, Sizes
from cutex.kernels.attention.mla.combine import MlaCombine, MlaKernel, MlaOut
from cutex.kernels.attention.mla.signature import args_of, rows_of_q, sizes_of
from cutex.kernels.attention.mla.sm90.config import ROWS, SLOTS, Sm90MlaConfig
from cutex.kernels.attention.mla.sm90.scores import Scores, Values
from cutex.kernels.attention.mla.sm90.shared import SCORES_WARPS, SWIZZLE, Load, Shared


class Registers(NamedTuple):
    """Registers per thread, by role; all threads of a CTA together have 65536."""

    scores: int
    values: int


class Mla(MlaKernel[Sm90MlaConfig]):
    """The MLA kernel: its barriers, memory and registers.

    barrier    arrives                                    waits
    q.full     1: a SCORES warp, and the bytes by TMA     SCORES
    q.empty    1 a SCORES warp, its last QK done          a SCORES warp, before it loads the next
    kv.full    1 a warp that loads, and the bytes by TMA  SCORES of the slot
    kv.empty   1 a VALUES warp, PV being done             SCORES of the slot, before they load it
    turn       1: a SCORES warp, references written       the other slot's warp of the same rows
    products   1 a SCORES warp of the slot, QK done       the other slot's, before their QK
    p_full     1 a SCORES warp of the slot, P written     VALUES; in the end the other's SCORES
    (scores)   its threads, QK being done                 the same, before P is written

    smem       bytes
    sQ         64 * 576 * 2                               73728
    sKV        64 * 576 * 2 * 2                           147456
    sP         the last chunk of each slot
    words      less than 2048

    registers  threads          of each
    SCORES     256              88
    VALUES     256              168
    """

    arch = "sm_90a"
    registers = Registers(scores=88, values=168)
    scores_warps = Warps(first=0, count=SCORES_WARPS * SLOTS)
    values_warps = Warps(first=scores_warps.end, count=8)
    num_threads = values_warps.end * 32

    name = "sm90_mla_decode"
    shared_type: ClassVar[type[Shared]] = Shared
    load_type: ClassVar[type[Load]] = Load
    scores_type: ClassVar[type[Scores]] = Scores

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mKV: cute.Tensor, mO: cute.Tensor, *rest) -> None:
        c, stream = self.config, rest[-1]
        args = args_of(c, rest[:-1])
        sizes = sizes_of(c, mQ, mKV, args)
        slots = slots_layout(mQ.element_type, ROWS, c.head_dim, 1, SWIZZLE)
        q = load_operand(rows_of_q(mQ), slots)
        most = sizes.units * (cute.ceil_div(sizes.rows_k, c.tile_n) + c.start)
        self.kernel(q, self.keys(mKV), mO, args, sizes, page_pitch(mKV)).launch(
            grid=(cutlass.min(most, c.ctas), 1, 1),
            block=(self.num_threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )
        if cutlass.const_expr(c.combined):
            MlaCombine(c).launch(mO, args, sizes, stream)

    def keys(self, mKV: cute.Tensor) -> Any:
        """What a Load loads keys from."""
        c = self.config
        return box_operand(mKV, (c.tile_n, c.head_dim), cache_box_rows(c.page_size, c.tile_n))

    @cute.kernel
    def kernel(
        self,
        q: cpasync.TmaInfo,
        kv: Any,
        mO: cute.Tensor,
        args: KernelArgs,
        sizes: Sizes,
        pitch: Int32,
    ) -> None:
        c = self.config
        info = BlockInfo(ALL_ROWS, c.tile_n, args.band(c.causal), sizes.pack)
        warps = self.scores_warps.count, self.values_warps.count
        walk = info, args, sizes
        smem = SmemAllocator()
        shared = self.shared_type.allocate(smem, q.atom.value_type, c, warps, walk)
        last = smem.allocate_tensor(Int32, cute.make_layout(1 + c.meets), byte_alignment=16)
        publish_barriers((shared.q, shared.kv, shared.p_full, shared.turn, shared.products))
        out = MlaOut.of(c, mO, args, sizes, last)
        warp = cute.arch.warp_idx()
        if warp < self.scores_warps.end:
            cute.arch.setmaxregister_decrease(self.registers.scores)
            slot = warp // SCORES_WARPS
            load = self.load_type(q, kv, pitch, slot, warp % SCORES_WARPS, shared)
            self.scores_type(shared, load, slot).run()
        else:
            cute.arch.setmaxregister_increase(self.registers.values)
            Values(out, shared, warp // 4 - SLOTS).run()

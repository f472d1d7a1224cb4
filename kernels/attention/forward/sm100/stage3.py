"""Stage 3: two Q tiles, so that the tensor cores compute one's products during the other's
exponentials.

Idea: one Q tile leaves the tensor cores idle during its softmax, and MUFU during its products. With
two, of four softmax warps each, Q K^T and P V of the one run under the softmax of the other, and K
and V are loaded once for 256 rows. S and O of both fill tensor memory: 4 times 128 columns.

Changed since stage 2: `tile_m`, and `mma`, which gives P V of the block before and Q K^T of this
one to each Q tile in turn. It does not wait before Q K^T overwrites P: MMAs of one CTA are executed
in the order in which they were started.

Expect at most twice stage 2: for two Q tiles a block takes 2048 cycles of tensor cores and 2048 of
MUFU, side by side.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cutex.device.atoms.tmem import fence_after_sync
from cutex.device.atoms.umma import commit
from cutex.device.attention.block_info import Blocks
from cutex.kernels.attention.forward.sm100.part import Part
from cutex.kernels.attention.forward.sm100.stage2 import Barriers, Stage2


class Stage3(Stage2):
    """The kernel of stage 3: its barriers and its memory.

    barriers: as in stage 2; those of S, P and O once for each Q tile.

    smem      bytes (head_dim 128)                            tmem   columns
    sQ        tile_m * head_dim * 2                 65536     S, P   2 * tile_n      256
    sK        tile_n * head_dim * 2 * num_stages    65536     O      2 * head_dim    256
    sV        tile_n * head_dim * 2 * num_stages    65536
    barriers  120, and 4 for the address of tmem
    """

    number = 3

    @cute.jit
    def mma(self, parts: list[Part], barriers: Barriers, blocks: Blocks) -> None:
        b, count = barriers, blocks.end - blocks.first
        k, v = b.k.consumer(), b.v.consumer()
        phase = Int32(0)
        b.q_loaded.wait(0)
        for i in cutlass.range(count + 1, unroll=1):
            for t in cutlass.range_constexpr(len(parts)):
                if i > 0:
                    if cutlass.const_expr(t == 0):
                        b.v.wait_full(v)
                    b.p_full.wait(phase, t)
                    fence_after_sync()
                    parts[t].start_outputs(v.slot, i > 1)
                    if i == count:
                        commit(b.o_full[t], pair=False)
                if i < count:
                    if cutlass.const_expr(t == 0):
                        b.k.wait_full(k)
                    parts[t].start_scores(k.slot)
                    commit(b.s_full[t], pair=False)
            if i > 0:
                commit(b.v.empty[v.slot], pair=False)
                v.advance()
                phase ^= 1
            if i < count:
                commit(b.k.empty[k.slot], pair=False)
                k.advance()

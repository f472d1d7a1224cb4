"""Stage 3: warp specialisation. A warp of its own loads, and two warpgroups only compute.

Idea: in stage 2, warp 0 waits until all warps are done with a slot before it goes on with its own
rows, and so ties the warpgroups together twice a block. A load warp waits in its place, and they
drift apart: one's products run under the other's softmax.

Changed since stage 2: `kernel` sends each warp to its role, `load` or `compute`, the two halves of
stage 2's `mainloop`. The load role has a warpgroup, of which one warp works, because registers are
traded by warpgroups (setmaxnreg): three with 168 a thread would do here, but not for stage 4, which
keeps S, P and O of 64 rows at the same time, 160 registers before anything else.

If they drift to opposite ends, a block takes what the busier of tensor cores (2048 cycles) and one
warpgroup in order (2 x 512, and more where both want the tensor cores, and some 800 of softmax)
allows. Nothing makes them stay there.

Measured: 501 TFLOPS with 16384 tokens, 391 causal with 4096: 1.00 and 1.01 times stage 2. At head
dim 64 a loss (0.74), which is not understood.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import Warps, publish_barriers
from cutex.device.work_tile import WorkTile
from cutex.kernels.attention.forward.launch import Loads, Operands, Out
from cutex.kernels.attention.forward.sm90.stage0 import Part
from cutex.kernels.attention.forward.sm90.stage2 import Barriers, Stage2


class Registers(NamedTuple):
    """Registers per thread, by role; all threads of a CTA together have 65536."""

    load: int
    compute: int


class Stage3(Stage2):
    """The kernel of stage 3: its barriers and its memory.

    barrier         arrives                               waits
    q_loaded        1: LOAD, and the bytes by TMA         COMPUTE, before the first product
    k.full[slot]    1: LOAD, and the bytes by TMA         COMPUTE, before Q K^T
    k.empty[slot]   1 a COMPUTE warp, Q K^T being done    LOAD
    v.full[slot]    1: LOAD, and the bytes by TMA         COMPUTE, before P V
    v.empty[slot]   1 a COMPUTE warp, P V being done      LOAD

    smem: as in stage 2.

    registers   threads                of each
    LOAD        128                    24
    COMPUTE     128 * warpgroups (2)   240
    """

    number = 3

    @property
    def compute_warps(self) -> Warps:
        return Warps(first=0, count=4 * self.config.warpgroups)

    @property
    def load_warps(self) -> Warps:
        """The load warps: a whole warpgroup, of which only the first warp works."""
        return Warps(first=self.compute_warps.end, count=4)

    @property
    def num_threads(self) -> int:
        return self.compute_warps.threads + self.load_warps.threads

    @property
    def registers(self) -> Registers:
        return Registers(load=24, compute=240)

    @cute.kernel
    def kernel(self, operands: Operands, out: Out, scale: Float32) -> None:
        smem = SmemAllocator()
        slots = operands.allocate(smem)
        barriers = self.barriers(smem)
        publish_barriers(barriers)

        tile = self.own_tile()
        blocks = self.n_blocks(operands, tile)
        warp = cute.arch.warp_idx()
        if warp >= self.load_warps.first:
            cute.arch.setmaxregister_decrease(self.registers.load)
            if warp == self.load_warps.first:
                self.load(operands.loads(slots, tile), barriers, tile, blocks)
        else:
            cute.arch.setmaxregister_increase(self.registers.compute)
            p = self.probabilities(smem, operands.dtype)
            part = self.part(operands, slots, p, tile, scale)
            self.compute(part, barriers, blocks)
            self.store(part, out, tile)

    @cute.jit
    def load(self, loads: Loads, barriers: Barriers, tile: WorkTile, blocks: Blocks) -> None:
        q_loaded, k, v = barriers.q_loaded, barriers.k, barriers.v
        k_fill, v_fill = k.producer(), v.producer()
        with cute.arch.elect_one():
            q_loaded.arrive_expecting(self.config.q_bytes)
        self.load_q(loads, tile, q_loaded[0])
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            n_block = blocks.end - 1 - i
            k_fill = self.load_block(loads.k, k, k_fill, n_block)
            v_fill = self.load_block(loads.v, v, v_fill, n_block)

    @cute.jit
    def compute(self, part: Part, barriers: Barriers, blocks: Blocks) -> None:
        q_loaded, k, v = barriers.q_loaded, barriers.k, barriers.v
        take = k.consumer()
        q_loaded.wait(0)
        for i in cutlass.range(blocks.end - blocks.first, unroll=1):
            acc_s = part.qk.mma.accumulator()
            k.wait_full(take)
            part.qk.into(acc_s).issue(take.slot, accumulate=False)
            warpgroup.wait_group(0)
            k.release(take)
            part.scale_o(self.exponentiate(part, acc_s, blocks.end - 1 - i, "masked"))
            part.p.write(acc_s)
            v.wait_full(take)
            part.pv.issue(take.slot, accumulate=True)
            warpgroup.wait_group(0)
            v.release(take)
            take.advance()

"""Stage 4: the next Q K^T and the last P V run under the softmax.

Idea: a block's softmax needs its scores, and P V needs the softmax, but the next block's Q K^T
needs neither. So a warpgroup starts Q K^T of block j and P V of block j - 1 together, waits for the
first of the two, and takes the softmax of block j while the second runs.

Changed since stage 3: `compute`. The first Q K^T is before the loop and the last P V after it, and
K and V have states of their own, for the ring of K is a block ahead.

NOTE: a step makes its accumulator anew. One that outlived a step would be kept beside the one being
computed, and accumulators that do not fit into registers make ptxas wait for every wgmma.

A warpgroup's block in order is Q K^T, softmax and P V: 512 + 800 + 512 cycles at least, and twice
the products where both warpgroups are at it. Here the 512 to 1024 of P V fall under the softmax.

Measured: 573 TFLOPS with 16384 tokens, 447 causal with 4096: 1.14 and 1.14 times stage 3.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import PipelineState
from cutex.kernels.attention.forward.sm90.stage0 import Part
from cutex.kernels.attention.forward.sm90.stage2 import Barriers
from cutex.kernels.attention.forward.sm90.stage3 import Stage3


class RingStates(NamedTuple):
    """A warpgroup's states in the rings of K and V."""

    k: PipelineState
    v: PipelineState


class Stage4(Stage3):
    """Barriers, smem and registers: as in stage 3."""

    number = 4

    @cute.jit
    def compute(self, part: Part, barriers: Barriers, blocks: Blocks) -> None:
        barriers.q_loaded.wait(0)
        if blocks.end > blocks.first:
            self.attend(
                part, barriers, RingStates(barriers.k.consumer(), barriers.v.consumer()), blocks
            )

    @cute.jit
    def attend(self, part: Part, barriers: Barriers, at: RingStates, blocks: Blocks) -> RingStates:
        """Compute over all blocks of keys, of which there is at least one; return the states
        after."""
        at = self.first_scores(part, barriers, at, blocks.end - 1)
        at = self.further_blocks(part, barriers, at, blocks)
        return self.last_product(part, barriers, at)

    @cute.jit
    def first_scores(
        self, part: Part, barriers: Barriers, at: RingStates, n_block: Int32
    ) -> RingStates:
        acc_s = part.qk.mma.accumulator()
        barriers.k.wait_full(at.k)
        part.qk.into(acc_s).issue(at.k.slot, accumulate=False)
        warpgroup.wait_group(0)
        barriers.k.release(at.k)
        at.k.advance()
        self.exponentiate(part, acc_s, n_block, "masked")
        part.p.write(acc_s)
        return at

    @cute.jit
    def further_blocks(
        self, part: Part, barriers: Barriers, at: RingStates, blocks: Blocks
    ) -> RingStates:
        count = blocks.end - 1 - blocks.first
        return self.steps(part, barriers, at, blocks.end - 2, count, "masked")

    @cute.jit
    def steps(
        self,
        part: Part,
        barriers: Barriers,
        at: RingStates,
        n_block: Int32,
        count: Int32,
        kind: cutlass.Constexpr[str],
    ) -> RingStates:
        """Run `count` steps, from block `n_block` down."""
        for i in cutlass.range(count, unroll=1):
            at = self.step(part, barriers, at, n_block - i, kind)
        return at

    @cute.jit
    def step(
        self,
        part: Part,
        barriers: Barriers,
        at: RingStates,
        n_block: Int32,
        kind: cutlass.Constexpr[str],
    ) -> RingStates:
        """Compute scores and exponentials of a block, and P V of the one before."""
        acc_s = part.qk.mma.accumulator()
        barriers.k.wait_full(at.k)
        self.issue(part, barriers, at, acc_s)
        warpgroup.wait_group(1)
        barriers.k.release(at.k)
        at.k.advance()
        scale = self.exponentiate(part, acc_s, n_block, kind)
        warpgroup.wait_group(0)
        barriers.v.release(at.v)
        at.v.advance()
        part.scale_o(scale)
        part.p.write(acc_s)
        return at

    @cute.jit
    def issue(self, part: Part, barriers: Barriers, at: RingStates, acc_s: cute.Tensor) -> None:
        """Start Q K^T of this block and P V of the one before, in this order."""
        part.qk.into(acc_s).issue(at.k.slot, accumulate=False)
        barriers.v.wait_full(at.v)
        part.pv.issue(at.v.slot, accumulate=True)

    @cute.jit
    def last_product(self, part: Part, barriers: Barriers, at: RingStates) -> RingStates:
        barriers.v.wait_full(at.v)
        part.pv.issue(at.v.slot, accumulate=True)
        warpgroup.wait_group(0)
        barriers.v.release(at.v)
        at.v.advance()
        return at

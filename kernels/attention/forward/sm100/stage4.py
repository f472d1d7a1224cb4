"""Stage 4: only the blocks at an edge are masked.

Idea: as in Hopper's stage 6, `BlockInfo` says which blocks all rows see whole. Those need no mask,
and unmasked scores need not be written back for the second pass.

Changed since stage 3: `softmax` runs the same step in three loops: with a mask, without, and the
first block, in which the keys may end.

A mask is a select and two tests for each score, and a part of a row to store again: 1.6 of the 7
instructions for each score of a masked step.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from cutex.device.attention.block_info import Blocks
from cutex.kernels.attention.forward.sm100.part import Part
from cutex.kernels.attention.forward.sm100.stage2 import Barriers
from cutex.kernels.attention.forward.sm100.stage3 import Stage3


class Stage4(Stage3):
    """Barriers, smem and tensor memory: as in stage 3."""

    number = 4

    @cute.jit
    def softmax(self, part: Part, barriers: Barriers, blocks: Blocks, t: Int32) -> None:
        if blocks.end > blocks.first:
            n_block = blocks.end - 1
            phase = self.step(part, barriers, t, Int32(0), n_block, Boolean(True), "masked")
            n_block -= 1
            edges = cutlass.max(blocks.end - 1 - cutlass.max(blocks.clean_end, blocks.first), 0)
            for i in cutlass.range(edges, unroll=1):
                phase = self.step(part, barriers, t, phase, n_block - i, Boolean(False), "masked")
            n_block -= edges
            for i in cutlass.range(n_block + 1 - blocks.first, unroll=1):
                phase = self.step(part, barriers, t, phase, n_block - i, Boolean(False), "clean")

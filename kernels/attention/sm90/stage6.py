"""Stage 6: only the blocks at an edge are masked.

Idea: of the keys that a block of queries sees, all blocks but the last one or two are seen by all of
its rows. `BlockInfo` says which these are, so the loop over them has no mask at all.

Changed since stage 5: `further_blocks` is two loops of the same step, with and without a mask; a
causal kernel runs the first once at most for 128 queries and as many keys, a full one never.

The mask of a block is one select for each of the 64 scores of a thread, and what tells which to
keep: some 80 of the 580 instructions of a step.

Measured:
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from cutex.device.attention.block_info import Blocks
from cutex.kernels.attention.sm90.stage0 import Part
from cutex.kernels.attention.sm90.stage2 import Barriers
from cutex.kernels.attention.sm90.stage4 import Places
from cutex.kernels.attention.sm90.stage5 import Stage5


class Stage6(Stage5):
    """Barriers, smem and registers: as in stage 5."""

    number = 6

    @cute.jit
    def further_blocks(self, part: Part, barriers: Barriers, at: Places, blocks: Blocks) -> Places:
        n_block = blocks.end - 2
        if cutlass.const_expr(self.config.causal):
            edges = cutlass.max(blocks.end - 1 - blocks.clean_end, 0)
            at = self.steps(part, barriers, at, n_block, edges, "masked")
            n_block -= edges
        clean = n_block + 1 - blocks.first
        return self.steps(part, barriers, at, n_block, clean, "clean")

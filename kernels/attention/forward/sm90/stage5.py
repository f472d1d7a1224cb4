"""Stage 5: ping-pong. The warpgroups take turns at the tensor cores.

Idea: two warpgroups that start their products at the same time get half of the tensor cores each,
end at the same time, and are in their softmax at the same time. If one may start its two products
only when the other has started its own, they queue up behind each other, and one's softmax falls
under the other's products (FlashAttention-3).

Changed since stage 4: `issue` waits for its turn and passes it on.

Of a block's 2048 cycles of wgmma each warpgroup has 1024. Under the other's 1024 and its own P V,
512, there is time for a softmax of 1500 cycles before the tensor cores run dry.

Measured: 580 TFLOPS with 16384 tokens, 446 causal with 4096: 1.01 and 1.00 times stage 4. At head
dim 64, causal, 1.11 to 1.15 times.
"""

from __future__ import annotations

from cutlass import cute

from cutex.device.attention.block_info import Blocks
from cutex.device.pipeline import OrderedBarrier
from cutex.kernels.attention.forward.sm90.stage0 import Part
from cutex.kernels.attention.forward.sm90.stage2 import Barriers
from cutex.kernels.attention.forward.sm90.stage4 import RingStates, Stage4

TURNS = OrderedBarrier(first_barrier=1)  # one for each warpgroup


class Stage5(Stage4):
    """The kernel of stage 5: its barriers and its memory.

    barrier   arrives                                        waits
    (turn)    the warpgroup that has started its products    the other, before it starts its own
    others as in stage 4

    smem and registers: as in stage 4.
    """

    number = 5

    @cute.jit
    def compute(self, part: Part, barriers: Barriers, blocks: Blocks) -> None:
        self.first_turn()
        Stage4.compute(self, part, barriers, blocks)

    @cute.jit
    def first_turn(self) -> None:
        """Give warpgroup 0 the first turn, as if warpgroup 1 had passed it on."""
        if self.warpgroup() == 1:
            TURNS.signal(0)

    @cute.jit
    def issue(self, part: Part, barriers: Barriers, at: RingStates, acc_s: cute.Tensor) -> None:
        mine = self.warpgroup()
        TURNS.wait(mine)
        Stage4.issue(self, part, barriers, at, acc_s)
        TURNS.signal(1 - mine)

"""Stage 3: a row is read once, and stays in the registers of its CTA.

The second pass needs what the first one had: with up to 1024 threads of up to 16 vectors a CTA
holds 128k elements of 2 bytes. The bytes that move are the least there are, 4 an element. Several
short rows share a CTA. The kernel is that of `cutex.softmax` (kernels/row/softmax.py), its tile
never a cluster.
"""

from __future__ import annotations

from cutex.kernels.row.ladder import WholeConfig
from cutex.kernels.row.softmax import Softmax


class Stage3(Softmax):
    def __init__(self, config: WholeConfig) -> None:
        super().__init__(config.tile)

    @property
    def name(self) -> str:
        return f"softmax_{type(self).__name__.lower()}"

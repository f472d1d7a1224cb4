"""Stage 2: a row is read once, and stays in the registers of its CTA.

The second pass needs what the first one had: with up to 1024 threads of up to 16 vectors a CTA
holds 128k elements of 2 bytes. The bytes that move are the least there are, 4 an element, and the
weights come with the first. Several short rows share a CTA. The kernel is that of `cutex.rms_norm`
(kernels/row/norm.py), its tile never a cluster.
"""

from __future__ import annotations

from cutex.kernels.norm import ARCHS
from cutex.kernels.norm.config import WholeConfig
from cutex.kernels.row.norm import Norm, NormConfig


class Stage2(Norm):
    archs: tuple[str, ...] = ARCHS

    def __init__(self, config: WholeConfig) -> None:
        super().__init__(NormConfig(config.tile, weight=config.weight))

    @property
    def name(self) -> str:
        return f"norm_{type(self).__name__.lower()}"

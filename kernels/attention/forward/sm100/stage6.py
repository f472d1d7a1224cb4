"""Stage 6: persistent CTAs; O is stored under the next tile.

Idea: a CTA for each tile begins with a load that nothing hides and ends with a store that nothing
hides, and tiles of a causal problem differ in length. Here a CTA per SM asks for tiles, the
longest first, while it works; four more warps scale and store O of a tile while the others are at
the next; and each Q tile skips the blocks that only the other one sees.

Changed since stage 5: the roles, which are those of the production kernel from here on: mma.py,
softmax.py, epilogue.py, and tiles.py, which loads the tiles and by which all agree on them. Rows
are taken by RowLoop, as in stage 5.

The first load and the last store of a tile, some 2000 and 1500 cycles, are then under the products
of another: with 1024 tokens a tile has but 2 to 8 blocks of 2048 cycles each.
"""

from __future__ import annotations

from cutex.arch import arch as arch_named
from cutex.kernels.attention.forward.sm100.config import Sm100ForwardConfig
from cutex.kernels.attention.forward.sm100.forward import Forward
from cutex.kernels.attention.forward.sm100.ladder import Sm100LadderConfig
from cutex.kernels.attention.forward.sm100.softmax import RowLoop


class Stage6(Forward):
    """Barriers, smem, tensor memory and registers: as in forward.py."""

    number = 6
    rows = RowLoop

    def __init__(self, config: Sm100LadderConfig) -> None:
        if reason := config.why_not(None, arch_named(self.arch)):
            raise ValueError(reason)
        super().__init__(self.with_numbers(config))

    @property
    def name(self) -> str:
        return f"sm100_attention_stage{self.number}"

    def with_numbers(self, config: Sm100LadderConfig) -> Sm100ForwardConfig:
        """The config of the roles, with the numbers that the stage adds."""
        return config.production

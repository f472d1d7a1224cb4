"""The Hopper tiling of MLA decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from cutex.kernels.attention.decode.splits import are_many
from cutex.kernels.attention.mla.config import ELEMENT, HEAD_DIM, MlaConfig

ATOM_ROWS = 8  # of a swizzle: pages of fewer rows are loaded row by row
ROWS = 64  # of one wgmma
KEYS = 64  # of a block
MANY_PARTS = 32  # of a unit of several
SLOTS = 2  # of keys, as many as there is room for: one for each warpgroup of scores


@dataclass(frozen=True)
class Sm90MlaConfig(MlaConfig):
    """The tiling: a CTA has 64 packed rows, and takes 64 keys at a time."""

    num_sms: int = 132
    pairs: bool = False  # two CTAs have neighbouring blocks of rows, whose number is even
    meets: bool = False  # CTAs that wrote parts of a unit wait for each other, and merge them

    tile_m: ClassVar[int] = ROWS
    tile_n: ClassVar[int] = KEYS
    ctas_of_part: ClassVar[int] = 1
    q_bytes: ClassVar[int] = ROWS * HEAD_DIM * ELEMENT
    kv_bytes: ClassVar[int] = KEYS * HEAD_DIM * ELEMENT  # of a slot
    smem_bytes: ClassVar[int] = q_bytes + kv_bytes * SLOTS

    @property
    def team(self) -> int:
        return 2 if self.pairs else 1

    @property
    def flags_of_unit(self) -> int:
        return 2 if self.meets else 1

    @property
    def load_warps(self) -> int:
        """The warps of a warpgroup that load: all for single rows, whose copies are as many as
        rows."""
        return 4 if self.page_size % ATOM_ROWS else 1

    def fitted(self, rows: int, batch: int = 0, num_splits: int = 0, room: int = 0) -> Self:
        m_blocks = -(-rows // ROWS)
        units = batch * m_blocks
        # NOTE: so many units are in few parts, which are merged in less time than it takes to begin
        # another kernel (docs/facts/decode.md#mla-last)
        many = are_many(units, self.num_sms)
        # so are many parts of few units, by CTAs with a row each (#mla-met), even where lengths
        # differ; but of a number of parts one CTA may have several, and with a causal mask a
        # register is spilled
        parts = min(self.num_sms // max(units, 1), -(-room // KEYS))
        least = min(rows, ROWS) if batch == 1 else max(min(rows, ROWS), MANY_PARTS)
        meets = parts >= least and not (many or num_splits or self.causal)
        return replace(self, pairs=m_blocks % 2 == 0, combined=not (many or meets), meets=meets)

"""TileOrder: which tile of attention comes when.

Units are (head, batch entry) pairs, heads first. Without a band all tiles take as long, and the
order is plain: the blocks of rows of one unit after the other, so that those in work at one time
share K and V. With one, blocks of rows differ: those that see the most keys go first, so that the
short ones fill the gaps at the end; and since a wave of long blocks reaches over many units, units
come in groups whose K and V fit into L2 together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutex.device.attention.block_info import larger, smaller


@dataclass(frozen=True)
class TileOrder:
    """A bijection of 0 <= index < total and tiles (m_block, head, batch); Python's ints or the
    DSL's."""

    num_m_blocks: Any
    heads: Any  # that own tiles: groups of packed heads count once
    batch: Any
    longest_first: bool
    rows_k: Any  # keys of a sequence
    heads_per_kv: Any  # owners of tiles that read one head of K and V
    l2_rows: int  # keys of one head, with their values, that fit into L2

    @property
    def units(self) -> Any:
        return self.heads * self.batch

    @property
    def total(self) -> Any:
        return self.num_m_blocks * self.units

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        if not self.longest_first:
            unit = index // self.num_m_blocks
            return index - unit * self.num_m_blocks, unit % self.heads, unit // self.heads
        group = larger(self.l2_rows // larger(self.rows_k, 1), 1) * self.heads_per_kv
        group = smaller(group, self.units)  # units in a group
        number = index // (group * self.num_m_blocks)
        rest = index - number * (group * self.num_m_blocks)
        here = smaller(group, self.units - number * group)  # the last group may be smaller
        row = rest // here
        unit = number * group + rest - row * here
        return self.num_m_blocks - 1 - row, unit % self.heads, unit // self.heads

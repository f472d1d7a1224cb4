"""The order in which the tiles of attention are computed, one of those of schedulers/order.py.

Units are (head, batch entry) pairs, heads first. Without a band all tiles take equally long, and
the order is plain: the blocks of rows of one unit after the other, so that those in work at one
time share K and V. With a band, blocks of rows differ: those that see the most keys go first, so
that the short ones fill the gaps at the end; and since a wave of long blocks spans many units,
units come in groups whose K and V fit into L2 together, on Hopper in groups with one tile for each
CTA: the fewer heads are in work, the more SMs read the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from cutex.device.attention.block_info import Band, BlockInfo, any_in, larger, smaller
from cutex.device.work_tile import WorkTile

if TYPE_CHECKING:
    from cutex.kernels.attention.signature import Sizes
    from cutex.kernels.attention.tiling import Tiling
    from cutex.problem.attention import AttentionProblem


class Wave(NamedTuple):
    """A group of (head, batch entry) units that together have about one tile per CTA."""

    units: Any  # of a group
    last: Any  # of the last group, at least, so that CTAs end together


@dataclass(frozen=True)
class AttentionOrder:
    """A bijection from 0 <= index < total to work tiles, in Python ints or the DSL's Int32."""

    num_m_blocks: Any
    heads: Any  # heads that own tiles; a group of packed heads counts once
    batch: Any
    longest_first: bool
    rows_k: Any  # keys of a sequence
    heads_per_kv: Any  # owners of tiles that read one head of K and V
    l2_rows: int  # keys of one head, with their values, that fit into L2
    wave: Wave | None = None  # None: groups as L2 allows

    @staticmethod
    def of(config: Tiling, sizes: Sizes) -> AttentionOrder:
        """The order in which a production kernel takes the tiles of a problem."""
        c = config
        rows_q = sizes.rows_q // sizes.batch if c.varlen_q else sizes.rows_q  # the mean
        return AttentionOrder(
            num_m_blocks=cute.ceil_div(sizes.longest_q * c.pack, c.tile_m),
            heads=sizes.heads // c.pack,
            batch=sizes.batch,
            longest_first=c.banded,
            rows_k=sizes.rows_k // sizes.batch if c.varlen_k else sizes.rows_k,  # the mean
            heads_per_kv=sizes.heads_per_kv(c.pack),
            l2_rows=c.l2_bytes // ((c.k_bytes + c.v_bytes) * c.ctas) * c.tile_n,
            wave=wave_of(c, cute.ceil_div(rows_q * c.pack, c.tile_m)),
        )

    @property
    def units(self) -> Any:
        return self.heads * self.batch

    @property
    def total(self) -> Any:
        return self.num_m_blocks * self.units

    def tile(self, index: Any) -> WorkTile:
        if not self.longest_first:
            unit = index // self.num_m_blocks
            m = index - unit * self.num_m_blocks
            return WorkTile(m, head=unit % self.heads, batch=unit // self.heads)
        group, last = self.groups()
        number = smaller(index // (group * self.num_m_blocks), last)
        rest = index - number * (group * self.num_m_blocks)
        here = group + (1 - any_in(number, last)) * (self.units - last * group - group)
        row = rest // here
        unit = number * group + rest - row * here
        m = self.num_m_blocks - 1 - row
        return WorkTile(m, head=unit % self.heads, batch=unit // self.heads)

    def groups(self) -> tuple[Any, Any]:
        """The number of units in a group, and the number of the last group, which may have fewer or
        more."""
        group = larger(self.l2_rows // larger(self.rows_k, 1), 1) * self.heads_per_kv
        group = smaller(group, self.units)
        if self.wave is None:
            return group, (self.units - 1) // group
        group = smaller(group, self.wave.units)
        return group, larger(self.units - self.wave.last, 0) // group

    def in_last_group(self, tile: WorkTile) -> Any:
        """Whether a tile is one of the last group's."""
        group, last = self.groups()
        return tile.batch * self.heads + tile.head >= last * group

    @staticmethod
    def is_forwards(index: Any, ctas: int) -> Any:
        """1 if a causal tile visits its K blocks in ascending order (even waves), 0 if descending:
        concurrent CTAs then read the same K blocks from L2.

        Tiles of the first wave begin together. A CTA whose tile was short gets a long one in the
        second, so these end together. Where L2 serves many SMs one block at one time, it needs less
        power.
        """
        return 1 - index // ctas % 2


def wave_of(config: Tiling, num_m_blocks: Any) -> Wave | None:
    """The wave of units that have `num_m_blocks` tiles each; None if the order of this config has
    none."""
    if not config.in_waves:
        return None
    tiles, ctas = larger(num_m_blocks, 1), config.num_ctas // config.ctas
    most = ctas * 7 // 4  # two waves, if the second need not be whole
    return Wave(larger((ctas + tiles // 2) // tiles, 1), (most + tiles - 1) // tiles)


def grid(config: Tiling, total: Int32) -> Int32:
    """The CTAs along x of a production kernel: those of all tiles or, with "static" and "dynamic"
    dispatch, as many as run at one time."""
    if config.dispatch in ("static", "dynamic"):
        total = cutlass.min(Int32(config.num_ctas // config.ctas), total)
    return total * config.ctas


def key_blocks(problem: AttentionProblem, config: Tiling) -> list[int]:
    """The number of key blocks of each tile, in the order in which CTAs, or pairs of them, take the
    tiles."""
    info, m_blocks = block_info(problem, config), tiles_of(problem, config)
    blocks = [
        info.n_blocks(m, problem.seqlen_q, problem.seqlen_k) for m in range(max(m_blocks) + 1)
    ]
    return [blocks[m].end - blocks[m].first for m in m_blocks]


def block_info(problem: AttentionProblem, config: Tiling) -> BlockInfo:
    left, right = problem.bounds
    band = Band(None if left is None else -left, 0 if problem.causal else right)
    return BlockInfo(config.tile_m, config.tile_n, band, config.pack)


def tiles_of(problem: AttentionProblem, config: Tiling) -> list[int]:
    """The block of rows of each tile, in the order in which CTAs, or pairs of them, take the tiles.

    The sequences of a packed problem have equal lengths, so no lengths are needed.
    """
    pack, tile_n = config.pack, config.tile_n
    info = block_info(problem, config)
    order = AttentionOrder(
        num_m_blocks=info.num_m_blocks(problem.seqlen_q),
        heads=problem.heads_q // pack,
        batch=problem.batch,
        longest_first=info.band.bounded and config.dispatch != "one",
        rows_k=problem.seqlen_k,
        heads_per_kv=problem.heads_q // pack // problem.heads_kv,
        l2_rows=config.l2_bytes // config.ctas // (config.k_bytes + config.v_bytes) * tile_n,
        wave=wave_of(config, info.num_m_blocks(problem.seqlen_q)),
    )
    return [order.tile(index).m for index in range(order.total)]

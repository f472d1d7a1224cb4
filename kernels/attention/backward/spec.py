"""What a backward kernel computes, apart from how: the same on every arch.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutex.kernels.attention.spec import ScoreSpec

# of the shares that the last tiles of keys are cut into: the queries of one, at least, and as many
# as take the time of a share's second piece and of the sums that it adds
LEAST_QUERIES, COST_QUERIES = 512, 1024


@dataclass(frozen=True)
class BackwardSpec(ScoreSpec):
    """The gradients that a kernel is compiled to compute.

    dQ is summed in fp32 in global memory, in tiles of tile_m rows, which a config has.
    """

    dlse: bool = False  # the gradient of LSE is passed, too
    deterministic: bool = False  # CTAs add to a tile of dQ in one order

    kernel_module: ClassVar[str] = "backward"  # of an arch's package, with its class Backward

    @property
    def last_first(self) -> bool:
        """Whether, of key blocks that add to one tile of dQ in turn, the last is the first: where
        the band leaves out early queries, a block is there before those of earlier keys are."""
        return self.deterministic and (self.causal or self.window[1])

    @property
    def interleaved(self) -> bool:
        """Whether key blocks of some heads are taken in turn, rather than head by head: so that
        the ones that see the most queries come first; or, deterministic, so that CTAs that add to
        the same tile of dQ do not begin at one time, each to wait for the one before."""
        return self.deterministic or ((self.causal or self.window[1]) and not self.window[0])

    @property
    def waves(self) -> int:
        """How many times the key blocks that are taken in turn fill the SMs."""
        return 2

    @property
    def longest_last(self) -> bool:
        """Whether the key blocks that see the most queries are taken last, by persistent CTAs."""
        return False

    @property
    def flips(self) -> bool:
        """Whether the last group of heads is taken the other way around: the key blocks that see
        the most queries first, from the last queries on, so that the shortest end last."""
        return False

    @property
    def rotated(self) -> bool:
        """Whether CTAs whose key blocks add to the same tiles of dQ in turn begin at queries of
        their own, spread evenly, and end with those before: so that all may begin at one time."""
        return False

    @property
    def reversed(self) -> bool:
        """Whether key blocks are counted from the last: the order's longest rows are its last, and
        the first keys are to go first."""
        return self.interleaved and not self.last_first and not self.ranked

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        raise NotImplementedError

    @property
    def tile_m(self) -> int:
        """The queries of a block, and the rows of a tile of the sums of dQ."""
        raise NotImplementedError

    @property
    def tile_n(self) -> int:
        """The keys that a CTA owns."""
        raise NotImplementedError

    @property
    def num_ctas(self) -> int:
        """The SMs that the order of tiles is made for."""
        raise NotImplementedError

    @property
    def key_ctas(self) -> int:
        """The CTAs of a cluster, which own neighbouring blocks of keys."""
        return 1

    @property
    def row_stats(self) -> int:
        """The numbers of 32 bits that preprocess keeps of each row: LSE and delta."""
        return 2

    @property
    def ranked(self) -> bool:
        """Whether packed sequences are taken by their length, the longest first, and only their
        own tiles."""
        return False

    @property
    def late_zeros(self) -> bool:
        """Whether main zeroes the sums of dQ."""
        return False

    @property
    def first_stores(self) -> bool:
        """Whether the first one to add to a tile of dQ in turn stores, so that nobody zeroes it."""
        return False

    @property
    def spread(self) -> bool:
        """Whether the last tiles of keys are cut along their queries, for all CTAs."""
        return False

    @property
    def tail_steps(self) -> tuple[int, int]:
        """LEAST_QUERIES and COST_QUERIES in blocks."""
        return LEAST_QUERIES // self.tile_m, COST_QUERIES // self.tile_m

    @property
    def sum_warps(self) -> int:
        """The warps that sum dK and dV of a CTA's keys, 16 each."""
        return self.tile_n // 16

    @property
    def sums_of_keys(self) -> int:
        """The numbers of dK and dV that a thread of these has."""
        return (self.head_dim + self.head_dim_v) // 2

    @property
    def partial_numbers(self) -> int:
        """The fp32 numbers of dK and dV of a CTA's keys."""
        return self.tile_n * (self.head_dim + self.head_dim_v)

    @property
    def counted(self) -> bool:
        """Whether CTAs take tiles from a counter in global memory."""
        return False

    @property
    def turns(self) -> int:
        """The parts of a tile of dQ that are added to in an order of their own."""
        return 4 * self.key_ctas

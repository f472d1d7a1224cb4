"""What a backward kernel computes, independent of how and of the arch.

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
    sink: bool = False  # delta is returned, for the gradient of a sink
    deterministic: bool = False  # CTAs add to a tile of dQ in one order

    kernel_module: ClassVar[str] = "backward"  # of an arch's package, with its class Backward

    @property
    def last_first(self) -> bool:
        """Whether the last key block adds first to a tile of dQ, where adds have a fixed order:
        if the band excludes early queries, later key blocks reach a query block before earlier
        ones."""
        return self.deterministic and (self.causal or self.window[1])

    @property
    def interleaved(self) -> bool:
        """Whether key blocks of several heads are interleaved rather than processed head by head:
        so that those seen by the most queries come first; or, if deterministic, so that CTAs adding
        to the same tile of dQ do not start together and wait for each other. Not where all tiles
        are cut into equal shares."""
        bounded = (self.causal or self.window[1]) and not self.window[0]
        return self.deterministic or (bounded and not self.spread)

    @property
    def waves(self) -> int:
        """How many waves of SMs the interleaved key blocks fill."""
        return 2

    @property
    def longest_last(self) -> bool:
        """Whether persistent CTAs process the key blocks with the most queries last."""
        return False

    @property
    def flips(self) -> bool:
        """Whether the last group of heads is processed in reverse: the key blocks with the most
        queries first, from the last queries on, so that the shortest ones end last."""
        return False

    @property
    def rotated(self) -> bool:
        """Whether CTAs whose key blocks add to the same tiles of dQ in turn begin at queries of
        their own, spread evenly, and end with those before: so that all may begin at one time."""
        return False

    @property
    def reversed(self) -> bool:
        """Whether key blocks are numbered from the last: the order's longest rows are its last
        ones, and the first keys must come first."""
        return self.interleaved and not self.last_first and not self.ranked

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        raise NotImplementedError

    @property
    def tile_m(self) -> int:
        """The queries of a block, and the rows of a tile of dQ's sums."""
        raise NotImplementedError

    @property
    def tile_n(self) -> int:
        """The keys that a CTA owns."""
        raise NotImplementedError

    @property
    def num_ctas(self) -> int:
        """The number of CTAs that the order of tiles is made for."""
        raise NotImplementedError

    @property
    def key_ctas(self) -> int:
        """The CTAs of a cluster, which own neighbouring key blocks."""
        return 1

    @property
    def row_stats(self) -> int:
        """The 32-bit values that preprocess stores for each row: LSE and delta."""
        return 2

    @property
    def ranked(self) -> bool:
        """Whether packed sequences are processed by length, the longest first, and only their own
        tiles."""
        return False

    @property
    def ends_interleaved(self) -> bool:
        """Whether, of packed sequences whose tiles are interleaved, only the last ones are, and the
        heads before follow one another."""
        return self.late_zeros

    @property
    def late_zeros(self) -> bool:
        """Whether main zeroes the sums of dQ."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether convert begins while main ends."""
        return False

    @property
    def first_stores(self) -> bool:
        """Whether the first key block to add to a tile of dQ stores instead, so that nobody zeroes
        the sums."""
        return False

    @property
    def spread(self) -> bool:
        """Whether the last tiles of keys are cut along their queries and shared by all CTAs: with a
        causal mask, where they take fewer and fewer steps, all of them."""
        return False

    @property
    def head_parts(self) -> bool:
        """Whether query heads that share keys are divided among CTAs, of which each sums dK and dV
        of its own."""
        return False

    @property
    def last_parts(self) -> bool:
        """Whether the tiles of keys of the last round are divided along their queries, into parts
        with a CTA each."""
        return False

    @property
    def tail_steps(self) -> tuple[int, int]:
        """LEAST_QUERIES and COST_QUERIES, in blocks."""
        return LEAST_QUERIES // self.tile_m, COST_QUERIES // self.tile_m

    @property
    def sum_warps(self) -> int:
        """The number of warps that sum dK and dV of a CTA's keys."""
        return self.tile_n // 16

    @property
    def sums_of_keys(self) -> int:
        """The number of values of dK and dV per thread of these warps."""
        return (self.head_dim + self.head_dim_v) // 2

    @property
    def partial_numbers(self) -> int:
        """The number of fp32 values of dK and dV of a CTA's keys."""
        return self.sum_warps * 32 * self.sums_of_keys

    @property
    def counted(self) -> bool:
        """Whether CTAs draw tiles from a counter in global memory."""
        return False

    @property
    def turns(self) -> int:
        """The parts of a tile of dQ with an order of adds of their own."""
        return 4 * self.key_ctas

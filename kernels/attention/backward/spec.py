"""What a backward kernel computes, apart from how: the same on every arch.

Imports neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from cutex.problem.attention.backward import BackwardProblem

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


@dataclass(frozen=True)
class BackwardSpec:
    """The gradients that a kernel is compiled to compute.

    dQ is summed in fp32 in global memory, in tiles of tile_m rows, which a config has.
    """

    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = False
    window: tuple[bool, bool] = (False, False)  # whether lo and hi of the band are passed
    varlen_q: bool = False  # cu_seqlens_q is passed
    varlen_k: bool = False
    used_q: bool = False  # seqused_q is passed
    used_k: bool = False
    softcap: bool = False
    dlse: bool = False  # the gradient of LSE is passed, too
    deterministic: bool = False  # CTAs add to a tile of dQ in one order

    def of(self, problem: BackwardProblem) -> Self:
        """This config for another problem."""
        left, right = problem.bounds
        return replace(
            self,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            causal=problem.causal,
            window=(left is not None, right is not None and not problem.causal),
            varlen_q=problem.varlen,
            varlen_k=problem.varlen,
            softcap=problem.softcap != 0,
        )

    @property
    def ragged_q(self) -> bool:
        return self.varlen_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        return self.varlen_k or self.used_k

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
    def reversed(self) -> bool:
        """Whether key blocks are counted from the last: the order's longest rows are its last, and
        the first keys are to go first."""
        return self.interleaved and not self.last_first

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
    def row_stats(self) -> int:
        """The numbers of 32 bits that preprocess keeps of each row: LSE and delta."""
        return 2

    @property
    def turns(self) -> int:
        """The parts of a tile of dQ that are added to in an order of their own."""
        return 4

    def why_not_computed(self, problem: Any = None) -> str | None:
        """The reason why no kernel computes it, as one sentence, or None."""
        if (self.head_dim, self.head_dim_v) not in HEAD_DIMS:
            known = ", ".join(f"{k}" if k == v else f"{k}/{v}" for k, v in HEAD_DIMS)
            return f"head dim {self.head_dim}/{self.head_dim_v}: there are kernels for {known}"
        if self.causal and self.window[1]:
            return "causal=True: it is the right side of the window"
        if problem is not None and (self.head_dim, self.head_dim_v) != (
            problem.head_dim, problem.head_dim_v,
        ):  # fmt: skip
            return f"head_dim={self.head_dim}: the problem has {problem.head_dim}"
        return None

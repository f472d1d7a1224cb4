"""The config of a stage of the attention ladder: the tiling, and the problems that it fits.

The stages take dense Q, K, V and O of one head dim, causal or not; all other variants of attention
are left to the production kernel (kernels/attention/forward/config.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cutex.kernels.attention.forward.config import BARRIERS, ELEMENT
from cutex.kernels.attention.forward.sm90.config import WARPGROUP_ROWS

if TYPE_CHECKING:
    from cutex.arch import Arch
    from cutex.problem.attention import AttentionProblem

HEAD_DIMS = (64, 128, 256)
PLAIN = {"window": "", "softcap": 0.0, "varlen": False}  # the fields of a problem that they take


@dataclass(frozen=True)
class LadderConfig:
    """The tiling of a stage: one CTA computes tile_m rows of O, tile_n keys at a time, from
    num_stages slots of K and as many of V."""

    head_dim: int = 128
    causal: bool = False
    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 1
    q_stages: int = 1
    p_in_smem: bool = False  # P goes from the softmax to the second product through smem
    own_o: bool = False  # O is stored through smem of its own
    dispatch: str = "one"  # how tiles are handed out: "one" (a CTA each) or "dynamic" (a counter)
    num_ctas: int = 0  # CTAs of a persistent grid; 0: as many as the arch has SMs

    pack: ClassVar[int] = 1
    ctas: ClassVar[int] = 1
    in_waves: ClassVar[bool] = False
    l2_bytes: ClassVar[int] = 50 * 2**20  # bytes that heads in work at one time should fit into
    # the stages take no argument but Q, K, V, O, LSE and a scale
    lse: ClassVar[bool] = True
    softcap: ClassVar[bool] = False
    window: ClassVar[tuple[bool, bool]] = (False, False)
    varlen_q: ClassVar[bool] = False
    varlen_k: ClassVar[bool] = False

    def fitted(self, head_dim: int, causal: bool) -> LadderConfig:
        """This config for another problem; with heads of 256, a block has half as many keys."""
        keys = min(self.tile_n, 128 * 128 // head_dim)
        return replace(self, head_dim=head_dim, causal=causal, tile_n=keys)

    @property
    def banded(self) -> bool:
        return self.causal

    @property
    def warpgroups(self) -> int:
        return self.tile_m // WARPGROUP_ROWS

    @property
    def q_bytes(self) -> int:
        """Bytes of the Q rows of one tile; its O has as many."""
        return self.tile_m * self.head_dim * ELEMENT

    @property
    def k_bytes(self) -> int:
        """Bytes of K in one block of keys."""
        return self.tile_n * self.head_dim * ELEMENT

    @property
    def v_bytes(self) -> int:
        return self.k_bytes

    @property
    def smem_bytes(self) -> int:
        rows = self.q_bytes * (self.q_stages + self.own_o)
        p = self.tile_m * self.tile_n * ELEMENT if self.p_in_smem else 0
        return rows + 2 * self.k_bytes * self.num_stages + p

    def key_blocks(self, problem: AttentionProblem) -> list[int]:
        """The number of key blocks of each tile of a problem, in the order in which CTAs take the
        tiles."""
        from cutex.kernels.attention.order import key_blocks

        return key_blocks(problem, self)

    def tile_flops(self, problem: AttentionProblem) -> list[float]:
        """The MMA FLOPs of each tile, in the same order."""
        block = 4.0 * self.tile_m * self.tile_n * self.head_dim
        return [block * n for n in self.key_blocks(problem)]

    def why_not(self, problem: AttentionProblem | None, arch: Arch) -> str | None:
        """The reason why this config cannot run `problem` (or, for None, any problem) on `arch`, or
        None."""
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim={self.head_dim}: the ladder takes {', '.join(map(str, HEAD_DIMS))}"
        if self.tile_m != 2 * WARPGROUP_ROWS:
            return f"tile_m={self.tile_m}: two warpgroups take {WARPGROUP_ROWS} rows each"
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}: a multiple of 64 from 64 to 256"
        if self.num_stages < 1 or self.q_stages < 1:
            return f"num_stages={self.num_stages}, q_stages={self.q_stages}: at least 1 slot"
        if self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"head_dim={self.head_dim}, tile_n={self.tile_n}: {self.smem_bytes} bytes of tiles "
                f"and {BARRIERS} of barriers are more than the {arch.smem_per_cta} that a CTA has "
                f"on {arch.name}"
            )
        return None if problem is None else self._why_not_problem(problem)

    def _why_not_problem(self, problem: AttentionProblem) -> str | None:
        for name, plain in PLAIN.items():
            if getattr(problem, name) != plain:
                return f"{name}={getattr(problem, name)}: only the top of the ladder takes it"
        if problem.head_dim_v != problem.head_dim:
            return f"head_dim_v={problem.head_dim_v}: only the top of the ladder takes another of V"
        if (problem.head_dim, problem.causal) != (self.head_dim, self.causal):
            return (
                f"head_dim={self.head_dim}, causal={self.causal}: the problem has "
                f"{problem.head_dim} and {problem.causal}"
            )
        return None

"""How an attention kernel cuts the problem up, what it computes, and when that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ELEMENT = 2  # bytes of bf16 and fp16
BARRIERS = 1024  # bytes of smem kept for barriers and the like
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


@dataclass(frozen=True)
class ForwardConfig:
    """One CTA computes tile_m rows of O, tile_n keys at a time, from rings of num_stages."""

    # what is computed
    head_dim: int = 128
    head_dim_v: int = 128
    pack: int = 1  # query heads of one head of K and V whose rows share a tile
    causal: bool = False
    window: tuple[bool, bool] = (False, False)  # whether lo and hi of the band are passed
    varlen_q: bool = False  # cu_seqlens_q is passed
    varlen_k: bool = False
    used_q: bool = False  # seqused_q is passed
    used_k: bool = False
    softcap: bool = False
    sink: bool = False
    lse: bool = True
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None

    # how
    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 2  # slots of K, and of V
    q_stages: int = 2
    own_o: bool = True  # O leaves through smem of its own, not through Q's
    q_in_registers: bool = False
    overlap: bool = True  # the next QK runs under the softmax
    pingpong: str = "gemm"  # what the warpgroups take turns at: "", "gemm", "exp"
    slack: float = 8.0  # powers of two before sums and outputs are scaled down
    optimistic: bool = True
    dispatch: str = "dynamic"  # "one", "static", "dynamic"
    num_ctas: int = 132
    l2_bytes: int = 50 * 2**20

    @property
    def warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.head_dim * ELEMENT

    @property
    def k_bytes(self) -> int:
        return self.tile_n * self.head_dim * ELEMENT

    @property
    def v_bytes(self) -> int:
        return self.tile_n * self.head_dim_v * ELEMENT

    @property
    def o_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * ELEMENT

    @property
    def smem_bytes(self) -> int:
        o = self.o_bytes if self.own_o else 0
        return self.q_bytes * self.q_stages + (self.k_bytes + self.v_bytes) * self.num_stages + o

    @property
    def ragged_q(self) -> bool:
        return self.varlen_q or self.used_q

    @property
    def ragged_k(self) -> bool:
        return self.varlen_k or self.used_k

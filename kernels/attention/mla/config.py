"""The configs of MLA decode: what its kernels compute, and the tiling on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

ATOM_ROWS = 8  # of a swizzle: pages of fewer rows are loaded row by row
BARRIERS = 4096  # bytes of smem kept for barriers, factors and the like
ELEMENT = 2  # bytes of bf16 and fp16
HEAD_DIM, HEAD_DIM_V = 576, 512  # a latent key with its rotary part; values are its first columns
CHUNK = 64  # columns of a row of a swizzle
ROWS = 64  # of one wgmma


@dataclass(frozen=True)
class MlaConfig:
    """What MLA decode computes, and its Hopper tiling: CTAs take equal shares of all keys, tile_n
    at a time, for 64 packed rows of queries."""

    causal: bool = False
    page_size: int = 64  # keys of a page; 0: the cache has no pages
    lse: bool = True

    share: bool = False  # two CTAs load keys for each other, with an even number of blocks of rows
    tile_n: int = 64
    num_stages: int = 2  # slots of keys
    num_sms: int = 132
    waves: int = 3  # parts in which a block of keys comes
    start: int = 2  # the time of a unit's begin and end, in blocks of keys
    least: int = 1  # blocks of keys of a CTA, at least
    uneven: int = 5  # percent by which the longest unit may exceed a share and not be cut
    slack: float = 8.0  # powers of two before sums and outputs are scaled down

    head_dim: ClassVar[int] = HEAD_DIM
    head_dim_v: ClassVar[int] = HEAD_DIM_V
    tile_m: ClassVar[int] = ROWS
    # what attention to caches in general may have, and this has not
    packed: ClassVar[bool] = True
    varlen_q: ClassVar[bool] = False
    appended: ClassVar[bool] = False
    sink: ClassVar[bool] = False

    @property
    def team(self) -> int:
        """The CTAs that have neighbouring blocks of rows and the same keys."""
        return 2 if self.share else 1

    @property
    def ctas(self) -> int:
        """The CTAs that run at one time."""
        return self.num_sms // self.team * self.team

    @property
    def load_warps(self) -> int:
        """The warps that load: several for single rows, whose copies are as many as rows."""
        return 4 if self.page_size % ATOM_ROWS else 1

    @property
    def q_bytes(self) -> int:
        return ROWS * HEAD_DIM * ELEMENT

    @property
    def kv_bytes(self) -> int:
        """Bytes of a slot of keys."""
        return self.tile_n * HEAD_DIM * ELEMENT

    @property
    def smem_bytes(self) -> int:
        return self.q_bytes + self.kv_bytes * self.num_stages

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if self.page_size < 0:
            return f"page_size={self.page_size}: at least 1, or 0 for a cache without pages"
        if self.tile_n not in (32, 64, 128):
            return f"tile_n={self.tile_n}: 32, 64 or 128, whole rows of a swizzle of P"
        if self.waves not in (1, 3, 9):
            return f"waves={self.waves}: 1, 3 or 9"
        if self.num_stages < 1 or self.least < 1 or self.start < 0:
            return (
                f"num_stages={self.num_stages}, least={self.least}, start={self.start}: "
                "at least 1, 1 and 0"
            )
        if arch is not None and self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"num_stages={self.num_stages}: {self.smem_bytes + BARRIERS} bytes of smem, a CTA "
                f"has {arch.smem_per_cta}"
            )
        return None

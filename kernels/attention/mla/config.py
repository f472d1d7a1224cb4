"""What MLA decode computes, in the part of its configs that all archs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

BARRIERS = 2048  # bytes of smem kept for barriers, factors and the like
ELEMENT = 2  # bytes of bf16 and fp16
HEAD_DIM, HEAD_DIM_V = 576, 512  # a latent key with its rotary part; values are its first columns
CHUNK = 64  # columns of a row of a swizzle of 128 bytes
CHUNKS = HEAD_DIM // CHUNK  # of Q and of keys


@dataclass(frozen=True)
class MlaConfig:
    """What MLA decode computes; CTAs, or pairs of them, process equal shares of all keys."""

    causal: bool = False
    page_size: int = 64  # keys of a page; 0: the cache has no pages
    lse: bool = True
    num_sms: int = 0
    lengths: bool = True  # sequences have lengths of their own; else that of their cache's room
    combined: bool = True  # parts are merged by a kernel of their own, not by the last CTA

    head_dim: ClassVar[int] = HEAD_DIM
    head_dim_v: ClassVar[int] = HEAD_DIM_V
    start: ClassVar[int] = 2  # the time of a unit's begin and end, in blocks of keys
    least: ClassVar[int] = 1  # blocks of keys of a CTA, at least
    rescale_threshold: ClassVar[float] = 8.0  # powers of two before sums and O are scaled
    # of each arch
    tile_m: ClassVar[int]  # packed rows of a unit
    tile_n: ClassVar[int]  # keys of a block
    ctas_of_part: ClassVar[int]  # that work on a part of a unit
    smem_bytes: ClassVar[int]
    # what attention to caches in general may have, and this has not
    packed: ClassVar[bool] = True
    varlen_q: ClassVar[bool] = False
    appended: ClassVar[bool] = False
    by_room: ClassVar[bool] = False
    one_block: ClassVar[bool] = False
    in_shares: ClassVar[bool] = False
    few_entries: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    parts: ClassVar[str] = "shares"
    sink: ClassVar[bool] = False

    @property
    def flags_of_unit(self) -> int:
        """The words in which CTAs count the parts of a unit."""
        return 1

    @property
    def team(self) -> int:
        """The CTAs with neighbouring blocks of rows and the same keys."""
        return 1

    @property
    def ctas(self) -> int:
        """The CTAs that run at one time."""
        together = self.team * self.ctas_of_part
        return self.num_sms // together * together

    def fitted(self, rows: int, batch: int = 0, num_splits: int = 0, room: int = 0) -> Self:
        """The config for `rows` packed rows of each of `batch` sequences (0: of any number), with
        `room` for so many keys, which are cut into `num_splits` parts if that is not 0."""
        return self

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if self.page_size < 0:
            return f"page_size={self.page_size}: at least 1, or 0 for a cache without pages"
        if self.num_sms < self.team * self.ctas_of_part:
            return f"num_sms={self.num_sms}: at least the {self.team * self.ctas_of_part} of a team"
        if arch is not None and self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return (
                f"{self.smem_bytes + BARRIERS} bytes of smem, a CTA of {arch.name} has "
                f"{arch.smem_per_cta}"
            )
        return None

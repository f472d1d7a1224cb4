"""What orders and grids must know of an attention kernel's tiles."""

from __future__ import annotations

from typing import Protocol


class Tiling(Protocol):
    """The fields of a config that decide which tiles there are, and in which order CTAs take
    them."""

    @property
    def tile_m(self) -> int: ...  # rows of O, of packed heads
    @property
    def tile_n(self) -> int: ...  # keys of a block
    @property
    def pack(self) -> int: ...  # query heads of one head of K and V whose rows share a tile
    @property
    def ctas(self) -> int: ...  # CTAs that work on a tile together
    @property
    def k_bytes(self) -> int: ...  # of a block of K in one CTA
    @property
    def v_bytes(self) -> int: ...
    @property
    def dispatch(self) -> str: ...  # how tiles are handed out: "one", "static", "dynamic", "clc"
    @property
    def num_ctas(self) -> int: ...  # of a persistent grid
    @property
    def l2_bytes(self) -> int: ...  # that the heads in work at one time should fit into
    @property
    def in_waves(self) -> bool: ...  # whether heads come in groups with one tile for each CTA
    @property
    def banded(self) -> bool: ...  # whether blocks of rows differ in the key blocks that they touch
    @property
    def varlen_q(self) -> bool: ...  # whether sequences are packed
    @property
    def varlen_k(self) -> bool: ...

"""The config of the Blackwell forward: the tiling, and when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutex.kernels.attention.forward.config import BARRIERS, ELEMENT, ForwardConfig

ROWS = 128  # rows of a Q tile in one CTA: the lanes of tensor memory
TMEM_COLUMNS = 512
P_PART = 32  # columns of scores that become probabilities together
O_PART = 32  # columns of O that are stored at a time


@dataclass(frozen=True)
class Sm100ForwardConfig(ForwardConfig):
    """The Blackwell tiling: one CTA computes q_tiles times 128 rows of O, tile_n keys at a time; a
    pair of CTAs shares K and V, of which each holds half."""

    tile_n: int = 128
    q_tiles: int = 2  # Q tiles in work at one time; with one, two of its blocks of scores are
    pair: bool = False
    num_stages: int = 2  # slots of K, and of V
    work_slots: int = 2  # tiles that may be announced to a CTA's roles at one time
    o_slots: int = 4  # smem slots through which O is stored
    p_first: int = 96  # columns of P after which the second product starts; tile_n: all
    by_fma: int = 4  # of 16 exponentials, those on FMA units, in blocks without a mask
    rescale_threshold: float = 30.0  # powers of two before sums and O are scaled; fp16: 15
    tentative: bool = True  # exponentials of blocks without a mask do not wait for their maximum
    dispatch: str = "dynamic"  # how tiles are handed out: "one", "static", "dynamic", "clc"
    num_ctas: int = 148  # CTAs of a persistent grid
    l2_bytes: int = 105 * 2**20  # bytes that the heads in work at one time should fit into

    in_waves: ClassVar[bool] = False  # was not timed on a GPU

    @property
    def is_tentative(self) -> bool:
        """Whether blocks without a mask are taken with the reference of those before, until that
        does not hold. Not with a user's functions, which are long enough to be written once."""
        return self.tentative and not self.modified

    @property
    def turns(self) -> bool:
        """Whether block 0 of keys comes right behind those that need a mask: scores seldom exceed
        those of both ends of a row. Not where scores depend on their keys' places."""
        return not self.window[0] and not self.modified

    @property
    def ctas(self) -> int:
        """The number of CTAs that work on a tile together."""
        return 2 if self.pair else 1

    @property
    def mma_rows(self) -> int:
        """The rows of one MMA: those of one Q tile in all CTAs."""
        return ROWS * self.ctas

    @property
    def tile_m(self) -> int:
        return self.mma_rows * self.q_tiles

    @property
    def buffers(self) -> int:
        """The number of blocks of scores of one Q tile that tensor memory holds."""
        return 2 // self.q_tiles

    @property
    def o_column(self) -> int:
        """The first column of tensor memory after S, where O begins."""
        return 2 * self.tile_n

    @property
    def columns(self) -> int:
        """The columns of tensor memory in use: two blocks of S, with P over them, and O of all Q
        tiles."""
        return self.o_column + self.q_tiles * self.head_dim_v

    # ---- bytes of one CTA

    @property
    def q_bytes(self) -> int:
        """Bytes of one Q tile in one CTA."""
        return ROWS * self.head_dim * ELEMENT

    @property
    def k_bytes(self) -> int:
        """Bytes of one slot of K in one CTA: all its keys or, for a pair, half of them."""
        return self.tile_n * self.head_dim * ELEMENT // self.ctas

    @property
    def v_bytes(self) -> int:
        return self.tile_n * self.head_dim_v * ELEMENT // self.ctas

    @property
    def o_bytes(self) -> int:
        return ROWS * O_PART * ELEMENT * self.o_slots

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors that scale rows of O at the end."""
        return 4 * ROWS * self.q_tiles * self.work_slots

    @property
    def smem_bytes(self) -> int:
        rings = (self.k_bytes + self.v_bytes) * self.num_stages
        return self.q_bytes * self.q_tiles + rings + self.o_bytes + self.factor_bytes

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if reason := self.why_not_computed():
            return reason
        if self.tile_n % P_PART or not 64 <= self.tile_n <= 128:
            return f"tile_n={self.tile_n}: a multiple of {P_PART} from 64 to 128"
        if self.q_tiles not in (1, 2):
            return f"q_tiles={self.q_tiles}: 1 or 2"
        if self.columns > TMEM_COLUMNS:
            return (
                f"head_dim_v={self.head_dim_v}, q_tiles={self.q_tiles}: {self.columns} columns of "
                f"tensor memory, there are {TMEM_COLUMNS}"
            )
        if self.pack < 1 or ROWS % self.pack:
            return f"pack={self.pack}: must divide the {ROWS} rows of a Q tile"
        if self.p_first % P_PART or not 0 < self.p_first <= self.tile_n:
            return f"p_first={self.p_first}: a multiple of {P_PART}, up to tile_n={self.tile_n}"
        if not 0 <= self.by_fma <= 16:
            return f"by_fma={self.by_fma}: 0 to 16"
        if min(self.num_stages, self.o_slots, self.work_slots) < 2:
            return (
                f"num_stages={self.num_stages}, o_slots={self.o_slots}, "
                f"work_slots={self.work_slots}: at least 2 each"
            )
        if self.dispatch not in ("one", "static", "dynamic", "clc"):
            return f"dispatch={self.dispatch!r}: one, static, dynamic or clc"
        if self.pair and self.dispatch == "dynamic":
            return "dispatch='dynamic': one CTA asks the counter; a pair takes clc, static or one"
        if arch is not None and self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return f"tile_n={self.tile_n}: {self.smem_bytes} bytes of smem, too many for a CTA"
        return None

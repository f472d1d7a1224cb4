"""The config of the Blackwell backward: the tiling, and when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutex.kernels.attention.backward.config import (
    BARRIERS,
    ELEMENT,
    REGISTERS,
    WARPGROUP_THREADS,
)
from cutex.kernels.attention.backward.spec import BackwardSpec

ROWS = 128  # keys of a CTA: the lanes of tensor memory
TMEM_COLUMNS = 512
BOX = 64  # columns of 16 bits of a TMA box, a swizzle's row
PART = 32  # columns of tensor memory that are moved at a time
FOLDED = 8  # elements of a row that hold its LSE and delta, 16 bytes of K
TERMS = 3  # 16-bit terms of each


@dataclass(frozen=True)
class Sm100BackwardConfig(BackwardSpec):
    """The Blackwell tiling: a CTA owns 128 keys of one head, whose dK and dV it keeps in tensor
    memory, and takes the queries tile_m at a time.

    Where dK and dV are too wide, `splits` CTAs own the same keys, and each has a part of the
    columns of dK, dV and dQ; all of them compute S and dP.
    """

    tile_m: int = 128
    num_stages: int = 2  # slots of Q, with the rows' LSE and delta; by halves, of its own half
    do_stages: int = 1  # slots of dO
    dq_width: int = 128  # columns of dQ that are computed at one time
    # slots of PART columns of dQ, of each warp, that wait to be added; 0: added from registers
    dq_slots: int = 0
    splits: int = 1
    folded: bool = True  # LSE and delta are subtracted by one more step of K of S and dP; bf16
    ahead: bool = True  # S of the next block is started before dK and dQ of this one
    late_dk: bool = False  # dK comes behind dQ, with dS^T from smem; tensor memory has none
    early_s: bool = False  # S is started when the first half of Q's columns is there
    halves: bool = False  # of two splits, Q comes by halves of its columns (mma.py)
    dq_in_turn: bool = True  # parts of dQ take places in turn, its own and over dP
    groups: int = 2  # warpgroups that compute P and dS, each of a share of the queries
    persistent: bool = False  # CTAs take one tile of keys after the other, from launch control
    # a thread of those that add dQ; of those that compute; of the others
    registers: tuple[int, int, int] = (152, 136, 88)
    num_ctas: int = 148  # SMs

    tile_n: ClassVar[int] = ROWS

    @property
    def turns(self) -> int:
        return 4 * self.splits

    # ---- columns of tensor memory: S and P, dP and dS, dV, dK, dQ

    @property
    def dp_column(self) -> int:
        return self.tile_m

    @property
    def dv_column(self) -> int:
        return 2 * self.tile_m

    @property
    def dk_column(self) -> int:
        return self.dv_column + self.dv_width

    @property
    def sums_end(self) -> int:
        return self.dk_column + self.dk_width

    @property
    def dq_over_dp(self) -> bool:
        """Whether dQ overlaps dP and dS, because there are no columns left for it."""
        return self.sums_end + self.dq_width > TMEM_COLUMNS

    @property
    def dq_column(self) -> int:
        return self.dp_column if self.dq_over_dp else self.sums_end

    @property
    def columns(self) -> int:
        return self.sums_end + (0 if self.dq_over_dp else self.dq_width)

    # ---- of one CTA

    @property
    def share(self) -> int:
        """The queries of a block that each warpgroup processes."""
        return self.tile_m // self.groups

    @property
    def threads(self) -> int:
        """The threads of a CTA: four warps that add dQ, those that compute, and four others."""
        return WARPGROUP_THREADS * (self.groups + 2)

    @property
    def dv_width(self) -> int:
        """The columns of dV."""
        return self.head_dim_v // self.splits

    @property
    def dk_width(self) -> int:
        """The columns of dK, and of dQ."""
        return self.head_dim // self.splits

    @property
    def dq_parts(self) -> int:
        return self.dk_width // self.dq_width

    @property
    def dq_columns(self) -> tuple[int, ...]:
        """The first columns of the places that parts of dQ use in turn: its own, and over dP and
        dS, whose readers come earlier."""
        one = self.dq_over_dp or self.dq_parts == 1 or self.dq_width > self.tile_m
        if one or not self.dq_in_turn:
            return (self.dq_column,)
        return self.dq_column, self.dp_column

    def dq_use(self, i: Any, part: int) -> Any:
        """How many parts of dQ were in the place of part `part` of block i before it."""
        places = len(self.dq_columns)
        in_a_block = len(range(part % places, self.dq_parts, places))
        return i * in_a_block + part // places

    @property
    def dq_room(self) -> int:
        """The columns of dQ that a thread has registers for."""
        return max(PART, (self.registers[0] - 24) // PART * PART)

    @property
    def dq_at_once(self) -> int:
        """The columns of a part of dQ that a thread holds in registers at once."""
        return max(x for x in range(PART, self.dq_width + 1, PART)
                   if self.dq_width % x == 0 and x <= self.dq_room)  # fmt: skip

    @property
    def dq_parts_at_once(self) -> int:
        """The parts of dQ that are read, one after another, before the first is added."""
        return max(1, min(len(self.dq_columns), self.dq_room // self.dq_width))

    @property
    def dq_rows(self) -> int:
        """The rows of dQ that a warp adds."""
        return self.tile_m // 4

    @property
    def row_stats(self) -> int:
        return FOLDED // 2 if self.folded else 2

    @property
    def stats_bytes(self) -> int:
        """Bytes of LSE and delta of a block of queries."""
        return 4 * self.row_stats * self.tile_m

    @property
    def step_bytes(self) -> int:
        """Bytes of the additional step of K: zeros after each slot of LSE and delta, and the keys'
        entries for S and for dP."""
        if not self.folded:
            return 0
        return self.num_stages * self.stats_bytes + 2 * ROWS * 2 * FOLDED * ELEMENT

    @property
    def q_width(self) -> int:
        """The columns of a slot of Q."""
        return self.head_dim // (2 if self.halves else 1)

    @property
    def q_slots(self) -> int:
        """The slots of Q; with halves, the last is for the columns that belong to the other CTA."""
        return self.num_stages + self.halves

    @property
    def q_bytes(self) -> int:
        """Bytes of Q of a block."""
        return self.tile_m * self.head_dim * ELEMENT

    @property
    def first_q_bytes(self) -> int:
        """Bytes of Q that are loaded together with LSE and delta."""
        return self.q_bytes // 2 if self.early_s else self.q_bytes

    @property
    def do_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * ELEMENT

    @property
    def ds_bytes(self) -> int:
        return self.tile_m * ROWS * ELEMENT

    @property
    def dq_bytes(self) -> int:
        """Bytes of one slot of dQ, of all four warps."""
        return self.tile_m * PART * 4

    @property
    def staged_in_ds(self) -> int:
        """The sums, dK before dV, that a persistent CTA stores through dS's smem, so that the next
        tile's K or V can be loaded at once; the others go through the smem of K and V."""
        widths = (self.dk_width, self.dk_width + self.dv_width) if self.persistent else ()
        return sum(ROWS * width * ELEMENT <= self.ds_bytes for width in widths)

    @property
    def staged_in_q(self) -> bool:
        """Whether dV, which does not fit into dS's smem, is stored through the slot of Q that the
        next tile's second block is loaded into."""
        slot = self.tile_m * self.q_width * ELEMENT
        fits = ROWS * self.dv_width * ELEMENT <= slot and self.num_stages > 1
        return self.persistent and self.staged_in_ds == 1 and fits

    @property
    def smem_bytes(self) -> int:
        kv = ROWS * (self.head_dim + self.head_dim_v) * ELEMENT
        queries = self.q_slots * self.tile_m * self.q_width * ELEMENT
        queries += self.num_stages * self.stats_bytes
        of_dq = self.ds_bytes + self.dq_slots * self.dq_bytes
        return kv + queries + self.do_stages * self.do_bytes + of_dq + self.step_bytes

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if reason := self.why_not_computed(problem):
            return reason
        if self.folded and self.softcap:
            return "softcap: it comes before LSE is subtracted, so folded=True cannot be"
        if self.tile_m not in (64, 128):
            return f"tile_m={self.tile_m}: 64 or 128 queries"
        if self.splits not in (1, 2) or self.dv_width % PART or self.dk_width % PART:
            return f"splits={self.splits}: 1 or 2, parts of the columns that are multiples of 32"
        if self.groups < 2 or self.share % PART:
            return f"groups={self.groups}: at least 2, which take 32 queries each or a multiple"
        if self.early_s and (self.halves or self.head_dim % (2 * BOX)):
            return f"early_s=True: for halves of Q of whole boxes, head dim {self.head_dim}"
        if self.halves and self.splits != 2:
            return f"halves=True: of the columns of two CTAs, splits={self.splits}"
        if self.persistent and (self.splits > 1 or self.deterministic):
            return (
                "persistent=True: for a CTA of all columns, whose adds wait for no earlier tile's: "
                "the order in which launch control hands out tiles is not documented"
            )
        add, compute, other = self.registers
        taken = WARPGROUP_THREADS * (add + self.groups * compute + other)
        at_launch = REGISTERS // self.threads // 8 * 8 * self.threads
        if taken > at_launch:
            return (
                f"registers={self.registers}: more than the {at_launch} of {self.threads} threads"
            )
        if self.dk_width % self.dq_width or self.dq_width % PART:
            return f"dq_width={self.dq_width}: a multiple of 32 that divides {self.dk_width}"
        if self.dq_over_dp and self.dq_width > self.tile_m:
            return f"dq_width={self.dq_width}: dP, over which it is, has {self.tile_m} columns"
        if self.columns > TMEM_COLUMNS:
            return (
                f"tile_m={self.tile_m}: {self.columns} columns of tensor memory, there are "
                f"{TMEM_COLUMNS}"
            )
        if min(self.num_stages, self.do_stages) < 1:
            return f"num_stages={self.num_stages}, do_stages={self.do_stages}: at least 1 each"
        if self.ahead and self.num_stages < 2:
            return f"num_stages={self.num_stages}: ahead=True holds Q of two blocks"
        if arch is not None and self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return f"tile_m={self.tile_m}: {self.smem_bytes} bytes of smem, too many for a CTA"
        return None

"""The config of the Hopper backward: the tiling, and when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutex.kernels.attention.backward.spec import BackwardSpec
from cutex.problem.attention.backward import TILE

ELEMENT = 2  # bytes of bf16 and fp16
WARPGROUP_ROWS = 64  # of one wgmma
WARPGROUP_THREADS = 128
REGISTERS = 65536  # of an SM
SCALARS = 16  # the least registers of a thread for everything else
# the same where dK has a warpgroup of its own: accumulators begin at register 24, and with fewer
# than 8 behind them ptxas waits for each wgmma
SCALARS_OF_DK = 32
BARRIERS = 1024  # bytes of smem kept for barriers and the like


@dataclass(frozen=True)
class BackwardConfig(BackwardSpec):
    """The Hopper tiling: a CTA owns tile_n keys of one head, keeps their dK and dV in registers,
    and loops over the queries in blocks of tile_m."""

    tile_n: int = 128
    tile_m: int = TILE
    score_m: int = TILE  # queries of a block whose scores a warpgroup has at one time
    num_stages: int = 3  # slots of Q, with the rows' LSE and delta, and of dO
    ds_slots: int = 2  # slots of dS
    dq_columns: int = 32  # columns of dQ that are computed at one time
    dq_slots: int = 0  # slots of such columns that wait to be added; 0: added from registers
    pairs: bool = False  # CTAs of neighbouring keys add half of the columns of dQ of both each
    num_ctas: int = 132  # SMs
    own_dq: bool = False  # the warpgroups that own keys compute dQ, too
    alternate: bool = False  # the warpgroups that own keys start their products in alternation
    dq_last: bool = False  # of own_dq: a turn is dK, dV, dQ, not dV, dQ, dK
    late_zeros: bool = False  # sums of dQ are zeroed by main, shortly before they are added to
    spread: bool = False  # the last tiles of keys are cut along their queries, for all CTAs; causal
    # ones are cut all
    head_parts: bool = False  # query heads that share keys are divided among CTAs
    last_parts: bool = False  # tiles of the last round are divided along their queries
    rotated: bool = False  # tiles of a head that begin together are spread over all queries
    early_stats: bool = False  # LSE and delta are read before S^T and dP^T are waited for
    overlap: bool = True  # dV and dK of a block are computed under the exponentials of the next
    dp_start: int = 2  # dP^T is started behind (0) S^T, (1) dV, (2) dK of the block before
    # a thread of those that own keys (of wide head dims those that sum dV, then dK); of dQ
    registers: tuple[int, ...] = (224, 56)

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def keys_first(self) -> bool:
        """Whether main loads K and V while preprocess, which does not write them, ends: it needs
        neither the ranks nor the flags of zeros that preprocess writes to know its first tile."""
        return not (self.late_zeros or self.ranked)

    @property
    def wide(self) -> bool:
        """Whether dV and dK of the same 64 keys are summed by two warpgroups, because one cannot
        hold both."""
        return self.tile_n == WARPGROUP_ROWS

    @property
    def parts(self) -> int:
        """The number of parts of a block of queries whose scores are computed one after another."""
        return self.tile_m // self.score_m

    @property
    def key_tiles(self) -> int:
        return self.tile_n // WARPGROUP_ROWS

    @property
    def warpgroups(self) -> int:
        """The warpgroups that own keys; one more computes dQ."""
        return 2 if self.wide else self.key_tiles

    @property
    def dk_loads(self) -> bool:
        """Whether the warpgroup that sums dK loads a block of queries when it has read Q of the
        one whose slots it takes: of two slots, the warpgroup of dQ would load it only when dS of
        the block between has come, behind which scores wait for it."""
        return self.wide and self.num_stages == 2

    @property
    def dq_warpgroups(self) -> int:
        """The number of warpgroups that compute dQ."""
        return self.key_tiles if self.own_dq else 1

    @property
    def key_ctas(self) -> int:
        return 1 + self.pairs

    @property
    def counted(self) -> bool:
        return self.own_dq

    @property
    def passes_hidden(self) -> bool:
        """Whether a warpgroup skips a tile's first block where none of its keys are visible: with a
        causal mask, the second warpgroup's keys come after the block's queries."""
        return self.own_dq and self.tile_m == WARPGROUP_ROWS and (self.causal or self.window[1])

    @property
    def ragged(self) -> bool:
        return self.ragged_q or self.ragged_k or any(self.window)

    @property
    def ranked(self) -> bool:
        return self.varlen_q and self.varlen_k

    @property
    def ends_interleaved(self) -> bool:
        return self.late_zeros or not (self.own_dq or self.deterministic)

    @property
    def adding_warps(self) -> int:
        """The number of warps that only add dQ, taking blocks in turn, where adds have a fixed
        order: an add takes longer than two blocks to land."""
        return 3 if self.own_dq and self.deterministic else 0

    @property
    def longest_last(self) -> bool:
        return self.adding_warps > 0 and self.last_first

    @property
    def one_fence(self) -> bool:
        """Whether a block's dS is handed over after dQ of the block before, so that one fence
        serves both. Not with separate adding warps, not after the last product of a turn, and not
        where LSE is read late, since the other warpgroup would then wait for dS."""
        return self.adding_warps > 0 or (self.early_stats and not self.dq_last)

    @property
    def flips(self) -> bool:
        return self.longest_last and not self.window[0] and not self.ranked

    @property
    def waves(self) -> int:
        return 1 if self.longest_last and self.tile_m == TILE else 2

    @property
    def first_stores(self) -> bool:
        return self.adding_warps > 0

    @property
    def descending(self) -> bool:
        """Whether blocks of queries are processed from the last to the first: where adds have a
        fixed order and the mask excludes no early queries."""
        return self.adding_warps > 0 and not self.last_first and not self.rotated

    @property
    def may_rotate(self) -> bool:
        """Whether adds come in one order, and all queries of sequences of one length see all
        keys."""
        return self.adding_warps > 0 and not (self.causal or self.ragged)

    @property
    def may_ramp(self) -> bool:
        """Whether tiles that a causal mask makes shorter and shorter may all be cut (spread)."""
        return self.late_zeros and self.causal and not self.ragged

    @property
    def turns(self) -> int:
        return 1 if self.adding_warps else super().turns

    @property
    def sum_warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def sums_of_keys(self) -> int:
        if self.wide:  # a warp has those of dV or dK
            return max(self.head_dim, self.head_dim_v) // 2
        return super().sums_of_keys

    @property
    def sums_at_once(self) -> int:
        """The vectors of kept sums of dK and dV that a thread loads at one time."""
        return 12 if self.wide else 16

    @property
    def dq_width(self) -> int:
        """The columns of dQ that a CTA computes."""
        return self.head_dim // self.key_ctas

    @property
    def stats_bytes(self) -> int:
        """Bytes of LSE and delta for a block of queries."""
        return 2 * 4 * self.tile_m

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.head_dim * ELEMENT

    @property
    def do_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * ELEMENT

    @property
    def ds_bytes(self) -> int:
        return self.tile_m * self.tile_n * ELEMENT

    @property
    def dq_bytes(self) -> int:
        return TILE * self.dq_columns * 4

    @property
    def smem_bytes(self) -> int:
        kv = self.tile_n * (self.head_dim + self.head_dim_v) * ELEMENT
        block = self.q_bytes + self.stats_bytes + self.do_bytes
        of_dq = self.key_ctas * self.ds_slots * self.ds_bytes + self.dq_slots * self.dq_bytes
        of_dq += self.pairs * self.tile_n * self.dq_width * ELEMENT
        return kv + self.num_stages * block + of_dq

    @property
    def accumulators(self) -> tuple[int, ...]:
        """The registers of a thread for dK, dV, S and dP; for wide head dims, for dV, S, dP and
        dK."""
        d, dv, m = self.head_dim, self.head_dim_v, self.score_m
        if self.wide:
            return (dv + 2 * m) // 2, d // 2
        return ((d + dv + 2 * m) // 2,)

    def why_not_own_dq(self) -> str | None:
        """Why the warpgroups that own keys cannot compute dQ, too; None if they can."""
        if self.wide or self.pairs or self.softcap or self.parts > 1:
            return "for CTAs of 128 keys each, without a soft cap"
        if self.dq_columns * WARPGROUP_ROWS * 2 != self.head_dim * self.tile_m:
            return f"dq_columns={self.dq_columns}: half of a block's dQ for each warpgroup"
        if self.dq_slots != 4:
            return f"dq_slots={self.dq_slots}: those of two blocks, 4"
        if self.late_zeros and (self.deterministic or self.varlen_q != self.varlen_k):
            return "late_zeros=True: for adds in any order; queries are packed as keys are"
        if self.head_dim != self.head_dim_v:
            return f"head_dim_v={self.head_dim_v}: dK and dV are stored through the slots of dQ"
        return None

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if reason := self.why_not_computed(problem):
            return reason
        if self.tile_n not in (64, 128):
            return f"tile_n={self.tile_n}: two warpgroups own 64 keys each, or the same"
        if self.tile_m not in ((TILE, 2 * TILE) if self.own_dq else (TILE,)):
            return f"tile_m={self.tile_m}: {TILE} queries or, with own_dq, {2 * TILE}"
        if self.score_m not in ((self.tile_m,) if self.wide else (self.tile_m, self.tile_m // 2)):
            return f"score_m={self.score_m}: all of a block or, of 128 keys, half of it"
        if len(self.registers) != 2 + self.wide:
            return f"registers={self.registers}: one number for each role"
        *of_keys, of_dq = self.registers
        threads = WARPGROUP_THREADS * (self.warpgroups + 1)
        each = REGISTERS // threads // 8 * 8
        at_launch = each * threads
        if any(x % 8 or not 24 <= x <= 256 for x in self.registers):
            return f"registers={self.registers}: multiples of 8 from 24 to 256"
        if of_keys[0] < each or max(self.registers[1:]) > each:
            return f"registers={self.registers}: at least {each}, then at most {each} at launch"
        taken = sum(of_keys) * (1 if self.wide else self.warpgroups) + of_dq
        if WARPGROUP_THREADS * taken > at_launch:
            return f"registers={self.registers}: more than the {at_launch} of {threads} threads"
        if self.alternate and self.wide:
            return "alternate=True: two warpgroups that own 64 keys each"
        if self.dq_last and not self.own_dq:
            return "dq_last=True: the last of the products of own_dq"
        if self.rotated and not self.may_rotate:
            return "rotated=True: for adds in one order, all queries of one length seeing all keys"
        if self.late_zeros and not self.own_dq:
            return "late_zeros=True: for own_dq, which leaves a warp for them"
        if self.spread and (
            not self.own_dq or self.deterministic or self.interleaved or self.ragged
        ):
            return "spread=True: for own_dq, tiles that take equally long and adds in any order"
        if self.head_parts and self.spread:
            return "head_parts=True: for tiles that are not cut along their queries"
        if self.last_parts and (self.head_parts or self.own_dq or self.deterministic):
            return "last_parts=True: for CTAs that take one tile each, adds in any order"
        if self.last_parts and (self.causal or self.ragged):
            return "last_parts=True: for tiles that take equally long"
        if self.own_dq and (reason := self.why_not_own_dq()):
            return f"own_dq=True: {reason}"
        if self.num_stages < 2:
            return f"num_stages={self.num_stages}: at least 2"
        if self.dq_width % self.dq_columns or self.dq_columns % 32:
            return f"dq_columns={self.dq_columns}: a multiple of 32 that divides {self.dq_width}"
        if self.softcap and self.overlap and not self.wide:
            return "softcap: its derivative takes the registers that overlap=True needs"
        others = (SCALARS, SCALARS_OF_DK)[: len(of_keys)]
        for needed, there, scalars in zip(self.accumulators, of_keys, others, strict=True):
            if needed > there - scalars:
                return (
                    f"tile_n={self.tile_n}: {needed} registers of accumulators a thread, of {there}"
                )
        if arch is not None and self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return f"tile_n={self.tile_n}: {self.smem_bytes} bytes of smem, too many for a CTA"
        return None

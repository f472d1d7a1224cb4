"""The config of the Hopper forward: the tiling, and when it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cutex.compile import Workspace
from cutex.device.attention.block_info import ceil_div
from cutex.device.attention.merged_rows import numbers_of_warp
from cutex.device.kept_sums import LANES
from cutex.kernels.attention.forward.config import BARRIERS, ELEMENT, ForwardConfig
from cutex.kernels.attention.forward.sm90.parts import tail_of
from cutex.kernels.attention.spec import Shape
from cutex.kernels.attention.tail import Tail

if TYPE_CHECKING:
    from cutex.problem.attention import AttentionProblem

WARPGROUP_ROWS = 64  # of one wgmma
ATOM_ROWS = 8  # of a swizzle: pages of fewer rows would be loaded row by row


@dataclass(frozen=True)
class Sm90ForwardConfig(ForwardConfig):
    """The Hopper tiling: one CTA, or two that share K and V, computes tile_m rows of O, tile_n keys
    at a time, from rings of num_stages slots."""

    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 2  # slots of K, and of V
    q_stages: int = 2
    own_o: bool = True  # O is stored through smem of its own, not through Q's
    o_parts: int = 1  # parts of O's columns that are stored through it one after the other
    q_in_registers: int = 0  # columns of operand A of QK that come from registers, not from smem
    halves: bool = False  # of a last causal block, rows that end in its first half take only that
    share: bool = False  # two CTAs have half a tile's rows each, and each loads half of K and V
    both_ends: bool = False  # block 0 of keys comes early, where all rows see it (turns)
    spread: bool = False  # the tiles of the last round are cut along their keys (parts.py)
    split: bool = False  # each tile is cut along its keys into parts for a CTA each (split_row.py)
    alternate: bool = False  # every other wave of causal tiles takes its keys forwards (order.py)
    rescale_threshold: float = 8.0  # powers of two before sums and O are scaled down
    speculative: bool = True  # blocks without a mask are not searched for a larger score
    guards_all: bool = False  # those are guarded whatever the scores of the first ones are like
    dispatch: str = "dynamic"  # how tiles are handed out: "one" (a CTA each), "static", "dynamic"
    num_ctas: int = 132  # CTAs of a persistent grid
    l2_bytes: int = 50 * 2**20  # bytes that heads in work at one time should fit into

    in_waves: ClassVar[bool] = True  # heads come in groups with one tile for each CTA (order.py)

    @property
    def ctas(self) -> int:
        """The number of CTAs that work on a tile together."""
        return 2 if self.share else 1

    @property
    def rows(self) -> int:
        """The rows of a tile that one CTA computes."""
        return self.tile_m // self.ctas

    @property
    def speculates(self) -> bool:
        """Whether a tile may have to be computed again. Never with a user's functions, which might
        leave a row a single key."""
        return self.speculative and not self.modified

    @property
    def scales_later(self) -> bool:
        """Whether guarded blocks of fp16 scale O behind QK of the next block, which is long enough
        for it: not at head dim 256, nor worth it where O has fewer columns."""
        return self.speculates and self.head_dim_v == 128

    @property
    def asks_later(self) -> bool:
        """Whether tame blocks of fp16 ask in the next step whether references must follow their
        scores: at head dims where that is faster."""
        return self.speculates and self.head_dim in (96, 128)

    @property
    def begins(self) -> int:
        """The exponentials of a thread's part of a row that guarded blocks of bf16, which seldom
        raise references, begin with before they know whether they do: where that is faster."""
        return 8 if self.head_dim == 128 else 0

    @property
    def releases_early(self) -> bool:
        """Whether Q's slot is released right after the last QK, without a result of the tile."""
        return self.own_o and not self.speculates

    @property
    def work_slots(self) -> int:
        """Tiles that are announced at one time: where results may have to be computed again, one
        more than is being computed, even if its Q has to wait for a slot."""
        return 2 if self.speculates else self.q_stages

    @property
    def q_waits(self) -> bool:
        """Whether a tile is announced before Q's only slot is free."""
        return self.work_slots > self.q_stages

    @property
    def alternates(self) -> bool:
        return self.alternate and self.causal and not any(self.window)

    def turns(self, of_bf16: bool) -> bool:
        """Whether the first block of keys comes right behind the masked ones at the end: scores
        seldom exceed those of both ends of a row by much. Where all blocks are guarded references
        rise above block 0 in bf16, whose exponents, and LSE with them, would be rounded more."""
        band = self.window[0] or self.alternates
        return self.both_ends and self.speculates and not (band or (self.guards_all and of_bf16))

    @property
    def takes_halves(self) -> bool:
        """Whether rows of a warpgroup may end in the first half of their first block."""
        return self.halves and (self.causal or self.window[1]) and not self.alternates

    def tile_flops(self, problem: AttentionProblem) -> list[float]:
        """The MMA FLOPs of each tile: a warpgroup leaves out the blocks that its own rows do not
        see, and may take half of the last."""
        from cutex.kernels.attention.order import block_info, tiles_of

        m_blocks, lengths = tiles_of(problem, self), (problem.seqlen_q, problem.seqlen_k)
        own = block_info(problem, self)._replace(tile_m=WARPGROUP_ROWS)
        column = 2.0 * WARPGROUP_ROWS * self.tile_n
        qk, pv = column * self.head_dim, column * self.head_dim_v

        def flops(m_block: int) -> float:
            blocks = own.n_blocks(m_block, *lengths)
            count = blocks.end - blocks.first
            half = self.takes_halves and count and own.ends_in_first_half(m_block, *lengths)
            return count * (qk + pv) - half * qk / 2

        existing = own.num_m_blocks(problem.seqlen_q)
        of_tile = [0.0] * (max(m_blocks) + 1)
        for m_block in range(existing):
            of_tile[m_block * WARPGROUP_ROWS // self.tile_m] += flops(m_block)
        return [of_tile[m] for m in m_blocks]

    @property
    def is_cut(self) -> bool:
        return self.spread or self.split

    def uncut(self) -> Self:
        return replace(self, spread=False, split=False)

    def workspace(self, shape: Shape) -> Workspace:
        needs = super().workspace(shape)
        if self.split:  # NOTE: for as many CTAs as there may be, however many keys sequences have
            warps = self.num_ctas * self.warps
            return Workspace(2 * warps * numbers_of_warp(self.head_dim_v), warps)
        if not self.spread:
            return needs
        kept = self.tail(shape).shares * self.ctas * self.warps
        return Workspace(kept * LANES * self.part_numbers, needs.flags + kept)

    def tail(self, shape: Shape) -> Tail:
        """How the tiles of the last round of `shape` are cut."""
        return tail_of(self, self.tiles(shape), ceil_div(shape.longest_k, self.tile_n))

    def key_blocks(self, problem: AttentionProblem) -> list[int]:
        blocks = super().key_blocks(problem)
        if not self.spread:
            return blocks
        tail = tail_of(self, len(blocks), blocks[0])
        shares = [tail.cut(share + 1) - tail.cut(share) for share in range(tail.shares)]
        return blocks[: tail.whole] + shares

    @property
    def warps(self) -> int:
        """The warps of a CTA that compute rows."""
        return 4 * self.warpgroups

    @property
    def part_numbers(self) -> int:
        """The numbers that a thread keeps of its rows of a part of a tile."""
        return self.head_dim_v // 2 + 8

    @property
    def has_parts(self) -> bool:
        """Whether parts of a tile's keys can be computed apart: all tiles have as many, and scores
        do not depend on where a key is."""
        return not (self.banded or self.has_lengths or self.sink or self.modified)

    @property
    def has_lengths(self) -> bool:
        """Whether only the card knows how long sequences are."""
        return self.ragged_q or self.ragged_k

    @property
    def can_split(self) -> bool:
        """Whether each tile's keys can be computed in parts by CTAs of their own."""
        alone = self.dispatch == "one" and self.ctas == 1 and not self.spread
        taken = self.speculates and not (self.halves or self.alternate)
        return alone and taken and not (any(self.window) or self.sink)

    def tiles(self, shape: Shape) -> int:
        units = shape.heads_q // self.pack * shape.batch
        return ceil_div(shape.longest_q * self.pack, self.tile_m) * units

    @property
    def warpgroups(self) -> int:
        return self.rows // WARPGROUP_ROWS

    @property
    def q_bytes(self) -> int:
        return self.rows * self.head_dim * ELEMENT

    @property
    def k_bytes(self) -> int:
        return self.tile_n * self.head_dim * ELEMENT

    @property
    def v_bytes(self) -> int:
        return self.tile_n * self.head_dim_v * ELEMENT

    @property
    def o_bytes(self) -> int:
        return self.rows * self.head_dim_v * ELEMENT

    @property
    def smem_bytes(self) -> int:
        o = self.o_bytes // self.o_parts if self.own_o else 0
        return self.q_bytes * self.q_stages + (self.k_bytes + self.v_bytes) * self.num_stages + o

    @property
    def accumulators(self) -> int:
        """The registers of a consumer thread that hold S, P, O, and the columns of Q kept in
        registers."""
        return (3 * self.tile_n + 2 * self.head_dim_v + self.q_in_registers) // 4

    def why_not(self, problem: Any = None, arch: Any = None) -> str | None:
        """The reason why this config cannot run, as one sentence, or None."""
        if reason := self.why_not_computed():
            return reason
        if self.page_size and (self.share or not self.used_k or self.page_size % ATOM_ROWS):
            return (
                f"page_size={self.page_size}, used_k={self.used_k}, share={self.share}: pages have "
                f"a multiple of {ATOM_ROWS} keys, of which lengths count, and are of one CTA"
            )
        if self.tile_m % (WARPGROUP_ROWS * self.ctas) or not 64 <= self.rows <= 192:
            return f"tile_m={self.tile_m}: one to three warpgroups of a CTA take 64 rows each"
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}: a multiple of 16, up to 256"
        if self.halves and self.tile_n % 32:
            return f"tile_n={self.tile_n}: half of it must be a multiple of 16"
        if self.pack < 1 or 64 % self.pack:
            return f"pack={self.pack}: must divide the 64 rows of a warpgroup"
        if self.dispatch not in ("one", "static", "dynamic"):
            return f"dispatch={self.dispatch!r}: one, static or dynamic"
        if self.spread and not (self.has_parts and self.speculates and self.dispatch != "one"):
            return "spread=True: tiles that see all keys are cut, by CTAs that take several"
        if self.split and not self.can_split:
            return "split=True: parts of tiles with a CTA each, no sinks, windows, functions"
        if self.num_stages < 2 or self.q_stages not in (1, 2):
            return f"num_stages={self.num_stages}, q_stages={self.q_stages}: at least 2; 1 or 2"
        if self.head_dim_v % (32 * self.o_parts) or (self.o_parts > 1 and not self.own_o):
            return f"o_parts={self.o_parts}: parts of O have columns by 32, and smem of its own"
        if self.q_in_registers not in (*range(0, self.head_dim, 64), self.head_dim):
            return f"q_in_registers={self.q_in_registers}: columns of Q by 64, or all"
        limit = {1: 208, 2: 208, 3: 128}[self.warpgroups]
        if self.accumulators > limit:
            return (
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: {self.accumulators} registers of "
                f"accumulators a thread, {self.warpgroups} warpgroups have {limit}"
            )
        if arch is not None and self.smem_bytes + BARRIERS > arch.smem_per_cta:
            return f"tile_n={self.tile_n}: {self.smem_bytes} bytes of smem, too many for a CTA"
        return None

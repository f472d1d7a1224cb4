"""What the roles of a CTA of the MLA kernel share: its walk, smem and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.attention.block_info import BlockInfo
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.kernels.attention.decode.rows import Rows
from cutex.kernels.attention.decode.shared import WARP, Walk
from cutex.kernels.attention.decode.signature import Passed, Sizes
from cutex.kernels.attention.decode.splits import Piece, Splits, weight
from cutex.kernels.attention.mla.combine import rows_of
from cutex.kernels.attention.mla.config import CHUNK, ELEMENT, HEAD_DIM, HEAD_DIM_V, ROWS, MlaConfig
from cutex.kernels.attention.mla.signature import blocks_of_rows

SWIZZLE = 128  # bytes
WIDTH = CHUNK  # columns
CHUNKS = HEAD_DIM // WIDTH  # of a block of keys
# chunks that are free at the same time: when the warpgroups of the values have the first half of
# their columns, and when they have the other. The last chunk is no value: P takes its place
GROUPS = (0, 1, 4, 5), (2, 3, 6, 7, 8)
ORDER = sum(GROUPS, ())  # in which they are loaded, and needed by QK


@dataclass(frozen=True)
class ChunkRing:
    """The ring of blocks of keys, each in chunks of 64 columns, so that QK may begin with the first
    wave of them that has come, and the next load when the first are free.

    full[slot, wave]:    1 arrival of each LOAD warp, and the bytes by TMA
    empty[slot, group]:  1 arrival of each VALUES warp, of both CTAs that share their loads
    """

    num_slots: int
    waves: int  # of chunks, in ORDER
    wave_bytes: int  # of each warp that loads
    full: Barrier
    empty: Barrier
    sharers: int

    @staticmethod
    def allocate(smem: SmemAllocator, config: MlaConfig, readers: int) -> ChunkRing:
        c = config
        slots = c.num_stages
        full = Barrier.allocate(smem, "kv full", arrivals=c.load_warps, slots=slots * c.waves)
        empty = Barrier.allocate(
            smem, "kv empty", arrivals=readers * c.team, slots=slots * len(GROUPS)
        )
        wave_bytes = c.kv_bytes // c.waves // c.load_warps
        return ChunkRing(slots, c.waves, wave_bytes, full, empty, c.team)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def producer(self) -> PipelineState:
        """The initial state of the role that fills the slots."""
        return PipelineState(self.num_slots, Int32(0), Int32(1))

    def consumer(self) -> PipelineState:
        """The initial state of a role that empties the slots."""
        return PipelineState(self.num_slots, Int32(0), Int32(0))

    def wave_of(self, chunk: int) -> int:
        return ORDER.index(chunk) * self.waves // CHUNKS

    def acquire(self, state: PipelineState, group: int) -> None:
        """Wait until a group's chunks are empty, then arm the barriers of the waves that begin with
        it. A whole warp calls it."""
        self.empty.wait(state.phase, state.slot * len(GROUPS) + group)
        before = {self.wave_of(c) for c in sum(GROUPS[:group], ())}
        with cute.arch.elect_one():
            for wave in sorted({self.wave_of(c) for c in GROUPS[group]} - before):
                self.full.arrive_expecting(self.wave_bytes, state.slot * self.waves + wave)

    def filled(self, state: PipelineState, wave: int) -> cute.Pointer:
        """The barrier on which the bytes of a wave arrive."""
        return self.full[state.slot * self.waves + wave]

    def wait_full(self, state: PipelineState, wave: int) -> None:
        self.full.wait(state.phase, state.slot * self.waves + wave)

    def is_full(self, state: PipelineState, wave: int) -> Boolean:
        """Whether all lanes of this warp see the wave full. A whole warp calls it."""
        seen = cute.arch.mbarrier_test_wait(self.filled(state, wave), state.phase)
        return cute.arch.vote_all_sync(seen)

    @cute.jit
    def release(self, state: PipelineState, group: cutlass.Constexpr[int]) -> None:
        """Arrive once for this warp, at each CTA that loads: its reads of a group are complete."""
        at = state.slot * len(GROUPS) + group
        if cutlass.const_expr(self.sharers == 1):
            with cute.arch.elect_one():
                self.empty.arrive(at)
        else:
            lane = cute.arch.lane_idx()
            if lane < self.sharers:
                cute.arch.mbarrier_arrive(self.empty[at], lane)

    @cute.jit
    def drain(self, state: PipelineState) -> None:
        """Wait until every slot is empty, after the last load: the other CTA then has nothing left
        to write here or to signal."""
        for _ in cutlass.range(self.num_slots, unroll=1):
            for group in cutlass.range_constexpr(len(GROUPS)):
                self.empty.wait(state.phase, state.slot * len(GROUPS) + group)
            state.advance()


@dataclass(frozen=True)
class Words:
    """What the warpgroup of the scores tells those of the values beside P, each row or warp."""

    factors: cute.Tensor  # (bM, SLOT) fp32: what O so far is multiplied by before P is added
    rescale: cute.Tensor  # (warps, SLOT) Int32: whether a warp's rows have such factors
    normalisers: cute.Tensor  # (bM, SLOT) fp32: what O is multiplied by in the end

    @staticmethod
    def allocate(smem: SmemAllocator, slots: int) -> Words:
        rows, warps = (cute.make_layout((n, slots)) for n in (ROWS, 4))
        return Words(
            smem.allocate_tensor(Float32, rows, byte_alignment=16),
            smem.allocate_tensor(Int32, warps, byte_alignment=16),
            smem.allocate_tensor(Float32, rows, byte_alignment=16),
        )


@dataclass(frozen=True)
class MlaWalk(Walk):
    """A CTA's way over its parts of units."""

    def rows(self, piece: Piece) -> Rows:
        """The rows of a part's unit."""
        return rows_of(self.passed, self.sizes, piece.entry, piece.head)

    def kv_head(self, owner: Int32) -> Int32:
        """The head of keys that an owner of units reads."""
        return owner // blocks_of_rows(self.sizes)

    @cute.jit
    def shares(self, owners: Int32, teams: Int32) -> tuple[Int32, Int32]:
        """The length of the row of all units, and of each team's share: that of the longest unit,
        so that none is cut, if it is only a little longer than an equal share."""
        c, total, longest = self.config, Int32(0), Int32(0)
        for first in cutlass.range(0, self.sizes.entries, WARP, unroll=4):
            mine = weight(self.length(first + cute.arch.lane_idx()), c.start)
            total += mine
            longest = cutlass.max(longest, mine)
        total = cute.arch.warp_redux_sync(total, "add") * owners
        longest = cute.arch.warp_redux_sync(longest, "max")
        quota = Splits.quota_of(total, teams, c.least)
        near = (longest > quota) & (longest * 100 <= quota * (100 + c.uneven))
        return total, longest if near else quota


@dataclass(frozen=True)
class Shared(MlaWalk):
    config: MlaConfig
    sQ: cute.Tensor  # (bM, D, 1)
    sKV: cute.Tensor  # (bN, D, SLOT)
    words: Words
    q: Ring  # of one slot
    kv: ChunkRing
    p_full: Barrier  # for each slot of keys: its P, with its words

    @property
    def sP(self) -> cute.Tensor:
        """P of each slot, (bM, bN, SLOT), where its last chunk was: as many bytes."""
        c, dtype = self.config, self.sKV.element_type
        layout = slots_layout(dtype, ROWS, c.tile_n, 1, min(SWIZZLE, c.tile_n * ELEMENT))
        first = self.sKV.iterator + c.tile_n * HEAD_DIM_V
        one = cute.make_tensor(cute.recast_ptr(first, layout.inner, dtype), layout.outer)
        shape, stride = one.layout.shape, one.layout.stride
        slots = cute.make_layout(
            (*shape[:2], c.num_stages), stride=(*stride[:2], c.tile_n * HEAD_DIM)
        )
        return cute.make_tensor(one.iterator, slots)

    @classmethod
    def allocate(
        cls,
        smem: SmemAllocator,
        dtype: type,
        config: MlaConfig,
        warps: tuple[int, int],
        walk: tuple[BlockInfo, Passed, Sizes],
    ) -> Self:
        """Allocate smem; `warps` are those of the scores and those of the values."""
        c, (of_scores, of_values) = config, warps
        sQ = allocate_slots(smem, dtype, slots_layout(dtype, ROWS, HEAD_DIM, 1, SWIZZLE))
        kv = slots_layout(dtype, c.tile_n, c.head_dim, c.num_stages, SWIZZLE)
        sKV = allocate_slots(smem, dtype, kv)
        words = Words.allocate(smem, c.num_stages)
        q = Ring.allocate(smem, "q", 1, c.q_bytes, of_scores)
        kv = ChunkRing.allocate(smem, c, of_values)
        p_full = Barrier.allocate(smem, "p full", arrivals=of_scores, slots=c.num_stages)
        return cls(c, *walk, sQ, sKV, words, q, kv, p_full)

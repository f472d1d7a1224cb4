"""What the roles of a CTA of the MLA kernel share: its walk, smem and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.attention.block_info import BlockInfo
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.mla.config import CHUNKS, ELEMENT, HEAD_DIM, HEAD_DIM_V
from cutex.kernels.attention.mla.sm90.config import ROWS, SLOTS, Sm90MlaConfig
from cutex.kernels.attention.mla.walk import MlaWalk

SWIZZLE = 128  # bytes
SCORES_WARPS = 4  # of a slot
WAVES = 3  # in which a block of keys comes, in ORDER
# chunks that are free at the same time: when the warpgroups of the values have the first half of
# their columns, and when they have the other. The last chunk is no value: P takes its place
GROUPS = (0, 1, 4, 5), (2, 3, 6, 7, 8)
ORDER = sum(GROUPS, ())  # in which they are loaded, and needed by QK


@dataclass(frozen=True)
class ChunkRing:
    """The ring of blocks of keys, each in chunks of 64 columns, so that QK may begin with the first
    wave of them that has come, and the next load when the first are free.

    full[slot, wave]:    1 arrival of each warp that loads, and the bytes by TMA
    empty[slot, group]:  1 arrival of each VALUES warp
    """

    wave_bytes: int  # of each warp that loads
    full: Barrier
    empty: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, config: Sm90MlaConfig, readers: int) -> ChunkRing:
        c = config
        full = Barrier.allocate(smem, "kv full", arrivals=c.load_warps, slots=SLOTS * WAVES)
        empty = Barrier.allocate(smem, "kv empty", arrivals=readers, slots=SLOTS * len(GROUPS))
        wave_bytes = c.kv_bytes // WAVES // c.load_warps
        return ChunkRing(wave_bytes, full, empty)

    def init(self) -> None:
        self.full.init()
        self.empty.init()

    def consumer(self) -> PipelineState:
        """The initial state of a role that empties the slots."""
        return PipelineState(SLOTS, Int32(0), Int32(0))

    def wave_of(self, chunk: int) -> int:
        return ORDER.index(chunk) * WAVES // CHUNKS

    def acquire(self, state: PipelineState, group: int) -> None:
        """Wait until a group's chunks are empty, then arm the barriers of the waves that begin with
        it. A whole warp calls it."""
        self.empty.wait(state.phase, state.slot * len(GROUPS) + group)
        before = {self.wave_of(c) for c in sum(GROUPS[:group], ())}
        with cute.arch.elect_one():
            for wave in sorted({self.wave_of(c) for c in GROUPS[group]} - before):
                self.full.arrive_expecting(self.wave_bytes, state.slot * WAVES + wave)

    def filled(self, state: PipelineState, wave: int) -> cute.Pointer:
        """The barrier on which the bytes of a wave arrive."""
        return self.full[state.slot * WAVES + wave]

    def wait_full(self, state: PipelineState, wave: int) -> None:
        self.full.wait(state.phase, state.slot * WAVES + wave)

    @cute.jit
    def release(self, state: PipelineState, group: cutlass.Constexpr[int]) -> None:
        """Arrive once for this warp: its reads of a group are complete."""
        with cute.arch.elect_one():
            self.empty.arrive(state.slot * len(GROUPS) + group)


@dataclass(frozen=True)
class Words:
    """What the warpgroup of a slot's scores tells those of the values beside P, each row or warp;
    and the other one of the scores."""

    factors: cute.Tensor  # (bM, SLOT) fp32: what O so far is multiplied by before P is added
    rescale: cute.Tensor  # (warps, SLOT) Int32: whether a warp's rows have such factors
    normalisers: cute.Tensor  # (bM, SLOT) fp32: what O is multiplied by in the end
    references: cute.Tensor  # (bM, SLOT) fp32: of the softmax, with the slot's block
    sums: cute.Tensor  # (bM, SLOT) fp32: of the exponentials of this slot's blocks of a part

    @staticmethod
    def allocate(smem: SmemAllocator) -> Words:
        rows, warps = (cute.make_layout((n, SLOTS)) for n in (ROWS, SCORES_WARPS))
        rescale = smem.allocate_tensor(Int32, warps, byte_alignment=16)
        floats = [smem.allocate_tensor(Float32, rows, byte_alignment=16) for _ in range(4)]
        return Words(floats[0], rescale, *floats[1:])


@dataclass(frozen=True)
class Shared(MlaWalk):
    config: Sm90MlaConfig
    sQ: cute.Tensor  # (bM, D, 1)
    sKV: cute.Tensor  # (bN, D, SLOT)
    words: Words
    q: Ring  # of one slot
    kv: ChunkRing
    p_full: Barrier  # [slot]: its P, with its words
    turn: Barrier  # [slot, warp]: its references

    @property
    def sP(self) -> cute.Tensor:
        """P of each slot, (bM, bN, SLOT), where its last chunk was: as many bytes."""
        c, dtype = self.config, self.sKV.element_type
        layout = slots_layout(dtype, ROWS, c.tile_n, 1, min(SWIZZLE, c.tile_n * ELEMENT))
        first = self.sKV.iterator + c.tile_n * HEAD_DIM_V
        one = cute.make_tensor(cute.recast_ptr(first, layout.inner, dtype), layout.outer)
        shape, stride = one.layout.shape, one.layout.stride
        slots = cute.make_layout((*shape[:2], SLOTS), stride=(*stride[:2], c.tile_n * HEAD_DIM))
        return cute.make_tensor(one.iterator, slots)

    @classmethod
    def allocate(
        cls,
        smem: SmemAllocator,
        dtype: type,
        config: Sm90MlaConfig,
        warps: tuple[int, int],
        walk: tuple[BlockInfo, KernelArgs, Sizes],
    ) -> Self:
        """Allocate smem; `warps` are those of the scores and those of the values."""
        c, (of_scores, of_values) = config, warps
        sQ = allocate_slots(smem, dtype, slots_layout(dtype, ROWS, HEAD_DIM, 1, SWIZZLE))
        kv = slots_layout(dtype, c.tile_n, c.head_dim, SLOTS, SWIZZLE)
        sKV = allocate_slots(smem, dtype, kv)
        words = Words.allocate(smem)
        q = Ring.allocate(smem, "q", 1, c.q_bytes, of_scores)
        kv = ChunkRing.allocate(smem, c, of_values)
        p_full = Barrier.allocate(smem, "p full", arrivals=SCORES_WARPS, slots=SLOTS)
        turn = Barrier.allocate(smem, "turn", arrivals=1, slots=SLOTS * SCORES_WARPS)
        return cls(c, *walk, sQ, sKV, words, q, kv, p_full, turn)

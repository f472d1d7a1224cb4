"""What the roles of a CTA of the Blackwell MLA kernel share: its walk, smem and barriers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, contiguous_rows_layout, slots_layout
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import Barrier, PairRing, PipelineState
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.splits import Piece
from cutex.kernels.attention.mla.config import CHUNK, CHUNKS
from cutex.kernels.attention.mla.sm100.config import (
    BOX,
    CTA_ROWS,
    CTAS,
    DIMS,
    KEYS_OF_CTA,
    SLOTS,
    Sm100MlaConfig,
)
from cutex.kernels.attention.mla.walk import MlaWalk

SWIZZLE = 128  # bytes
BUFFERS = 2  # blocks of S
LOAD_WARPS = 3  # with four, threads would have too few registers
THREADS = 128  # of the softmax: those of lane l and l + 64 have the same row


@dataclass(frozen=True)
class Barriers:
    """barrier      arrives                                        waits
    s_full[buffer]  1 in both CTAs: the commit of QK               SOFTMAX
    p_full          1 a SOFTMAX warp of both CTAs, at the leader:  MMA, before PV
                    P is written, O scaled and, before a unit's
                    first, O of the unit before read
    o_full          1 in both CTAs: the commit of PV of each block SOFTMAX, before it writes P,
                                                                   scales or reads O
    """

    s_full: Barrier
    p_full: Barrier
    o_full: Barrier

    @staticmethod
    def allocate(smem: SmemAllocator, softmax_warps: int) -> Barriers:
        return Barriers(
            Barrier.allocate(smem, "s full", arrivals=1, slots=BUFFERS),
            Barrier.allocate(smem, "p full", arrivals=CTAS * softmax_warps),
            Barrier.allocate(smem, "o full", arrivals=1),
        )

    def __iter__(self) -> Iterator[Barrier]:
        return iter((self.s_full, self.p_full, self.o_full))

    @staticmethod
    def buffers() -> PipelineState:
        """The state of a role that waits for buffers of S in turn."""
        return PipelineState(BUFFERS, Int32(0), Int32(0))


@dataclass(frozen=True)
class Shared(MlaWalk):
    """The smem, barriers and arguments that all roles of a CTA use."""

    config: Sm100MlaConfig
    sQ: cute.Tensor  # (bM / 2, 64, CHUNK)
    sK: cute.Tensor  # (bN / 2, 64, SLOT)
    sVt: cute.Tensor  # (128, 32, SLOT): the same slots
    s32: cute.Tensor  # (32, 64, 2 * SLOT): their halves
    sP: cute.Tensor  # (bM / 2, bN, 1)
    halves: cute.Tensor  # (THREADS, BUFFERS + 1) fp32: what threads of the same row tell each other
    q: PairRing  # of one slot
    kv: PairRing  # of whose slots each warp that loads fills some
    barriers: Barriers

    @classmethod
    def allocate(
        cls,
        smem: SmemAllocator,
        dtype: type,
        config: Sm100MlaConfig,
        softmax_warps: int,
        walk: tuple[BlockInfo, KernelArgs, Sizes],
    ) -> Self:
        c = config
        sQ = allocate_slots(smem, dtype, slots_layout(dtype, CTA_ROWS, CHUNK, CHUNKS, SWIZZLE))
        slots = slots_layout(dtype, KEYS_OF_CTA, CHUNK, SLOTS, SWIZZLE)
        sK = allocate_slots(smem, dtype, slots)
        transposed = contiguous_rows_layout(dtype, DIMS // CTAS, BOX, SLOTS)
        sVt = cute.make_tensor(sK.iterator, transposed.outer)
        halved = slots_layout(dtype, BOX, CHUNK, 2 * SLOTS, SWIZZLE)
        s32 = cute.make_tensor(sK.iterator, halved.outer)
        sP = allocate_slots(smem, dtype, slots_layout(dtype, CTA_ROWS, c.tile_n, 1, SWIZZLE))
        halves = smem.allocate_tensor(
            Float32, cute.make_layout((THREADS, BUFFERS + 1)), byte_alignment=16
        )
        q = PairRing.allocate(smem, "q", 1, CTAS * c.q_bytes, consumers=1)
        kv = PairRing(
            SLOTS,
            CTAS * c.slot_bytes,
            Barrier.allocate(smem, "kv full", arrivals=1, slots=SLOTS),
            Barrier.allocate(smem, "kv empty", arrivals=1, slots=SLOTS),
        )
        barriers = Barriers.allocate(smem, softmax_warps)
        return cls(c, *walk, sQ, sK, sVt, s32, sP, halves, q, kv, barriers)

    def own_rows(self, piece: Piece) -> UnitRows:
        """The rows of a part's unit that this CTA has."""
        rows, rank = self.rows(piece), cute.arch.block_idx_in_cluster()
        number = rows.m_block * CTAS + rank
        return UnitRows(rows.batch, number, rows.head, rows.seq_q, rows.pack, CTA_ROWS)

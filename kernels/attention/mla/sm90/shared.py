"""What the roles of a CTA of the MLA kernel share: its walk, smem and barriers, and the loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import allocate_slots, slots_layout
from cutex.device.atoms.tma import tile_loads
from cutex.device.attention.block_info import BlockInfo
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.device.row_source import UNROLLED, Box, BoxLoads, cache_box_rows
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes
from cutex.kernels.attention.decode.splits import EntrySpan, Splits
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
    """The ring of key blocks, each in chunks of 64 columns, so that QK may start on the first wave
    of chunks loaded, and the next load when the first chunks are free.

    full[slot, wave]:    1 arrival of each warp that loads, and the bytes by TMA
    empty[slot, group]:  1 arrival of each VALUES warp
    """

    wave_bytes: int  # of each warp that loads
    full: Barrier
    empty: Barrier

    @classmethod
    def allocate(cls, smem: SmemAllocator, config: Sm90MlaConfig, readers: int) -> Self:
        c = config
        full = Barrier.allocate(smem, "kv full", arrivals=c.load_warps, slots=SLOTS * WAVES)
        empty = Barrier.allocate(smem, "kv empty", arrivals=readers, slots=SLOTS * len(GROUPS))
        wave_bytes = c.kv_bytes // WAVES // c.load_warps
        return cls(wave_bytes, full, empty)

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

    def wait_full(self, state: PipelineState, wave: cutlass.Constexpr[int]) -> None:
        self.full.wait(state.phase, state.slot * WAVES + wave)

    @cute.jit
    def release(self, state: PipelineState, group: cutlass.Constexpr[int]) -> None:
        """Arrive once for this warp: its reads of a group are complete."""
        with cute.arch.elect_one():
            self.empty.arrive(state.slot * len(GROUPS) + group)


@dataclass(frozen=True)
class Words:
    """What a slot's score warpgroup passes to the value warpgroups besides P, per row or per warp;
    and to the other score warpgroup."""

    factors: cute.Tensor  # (bM, SLOT) fp32: what O so far is multiplied by before P is added
    rescale: cute.Tensor  # (warps, SLOT) Int32: whether a warp's rows have such factors
    normalisers: cute.Tensor  # (bM, SLOT) fp32: what O is multiplied by in the end
    lse: cute.Tensor  # (bM, SLOT) fp32
    references: cute.Tensor  # (bM, SLOT) fp32: of the softmax, with the slot's block
    sums: cute.Tensor  # (bM, SLOT) fp32: of the exponentials of this slot's blocks of a part

    @staticmethod
    def allocate(smem: SmemAllocator) -> Words:
        rows, warps = (cute.make_layout((n, SLOTS)) for n in (ROWS, SCORES_WARPS))
        rescale = smem.allocate_tensor(Int32, warps, byte_alignment=16)
        floats = [smem.allocate_tensor(Float32, rows, byte_alignment=16) for _ in range(5)]
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
    products: Barrier  # [slot]: QK done

    ring_type: ClassVar[type[ChunkRing]] = ChunkRing

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
        kv = cls.ring_type.allocate(smem, c, of_values)
        p_full = Barrier.allocate(smem, "p full", arrivals=SCORES_WARPS, slots=SLOTS)
        turn = Barrier.allocate(smem, "turn", arrivals=1, slots=SLOTS * SCORES_WARPS)
        products = Barrier.allocate(smem, "qk done", arrivals=SCORES_WARPS, slots=SLOTS)
        return cls(c, *walk, sQ, sKV, words, q, kv, p_full, turn, products)


# ---- load
#
# What the warpgroups of the scores do between blocks: each loads the keys of its own slot. A
# warpgroup has nothing to do between handing over P of a block and QK of the next one in the same
# slot, which is loaded when PV of the block has freed it. So it starts that load itself, one block
# ahead of its products, over the borders of parts.


WARP = 32


class Cursor(NamedTuple):
    """The position of a slot's loads."""

    at: Int32  # the position behind the present part
    span: EntrySpan
    entry: Int32  # the present part: its entry,
    head: Int32  # the owner of its unit,
    first: Int32  # its first block,
    n_block: Int32  # and this slot's next block, which there is none of if below `first`
    slot: Int32  # of the block behind this part
    phase: Int32  # of this slot's next load


@dataclass(frozen=True)
class Load:
    q: cpasync.TmaInfo
    kv: Any  # cpasync.TmaInfo; chosen rows: the tensor of all rows
    pitch: Int32  # rows from one page, or one sequence, to the next
    slot: Int32  # whose keys this warp loads
    number: Int32  # of this warp among those that load
    shared: Shared

    def begin(self, splits: Splits, span: EntrySpan) -> Cursor:
        """The cursor before the first load."""
        zero = Int32(0)
        return Cursor(splits.begin, span, zero, zero, zero, Int32(-1), zero, Int32(1))

    @cute.jit
    def queries(self, rows: UnitRows, fill: PipelineState) -> None:
        """Load Q of a part, with zeros outside its rows; the first of the warps does it."""
        s = self.shared
        if (self.number == 0) & (self.slot == 0):
            operand = cpasync.TmaInfo(
                self.q.atom, self.q.tma_tensor[None, None, rows.batch], self.q.smem_layout
            )
            full = s.q.acquire(fill)
            tile_loads(operand, s.sQ, rows.m_block).load(0, 0, full)

    @cute.jit
    def next(self, splits: Splits, end: Int32, cursor: Cursor) -> Cursor:
        """Load the next block of this slot, if any, as soon as the slot is free."""
        s = self.shared
        if self.number < s.config.load_warps:
            cursor = self.found(splits, end, cursor)
            if cursor.n_block >= cursor.first:
                self.load(cursor, PipelineState(SLOTS, self.slot, cursor.phase))
                cursor = cursor._replace(n_block=cursor.n_block - SLOTS, phase=cursor.phase ^ 1)
        return cursor

    @cute.jit
    def found(self, splits: Splits, end: Int32, cursor: Cursor) -> Cursor:
        """The cursor at the next part that has a block for this slot."""
        s = self.shared
        at, span, entry, head, first, n_block, slot, phase = cursor
        while (n_block < first) & (at < end):
            span = s.span_at(splits, at, span)
            piece = splits.piece(at, span)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                entry, head, first = piece.entry, piece.head, blocks.first
                n_block = blocks.end - 1 - (slot ^ self.slot)
                slot = (slot + blocks.end - blocks.first) % SLOTS
        return Cursor(at, span, entry, head, first, n_block, slot, phase)

    @cute.jit
    def load(self, cursor: Cursor, fill: PipelineState) -> None:
        """Load the block of `cursor`."""
        s = self.shared
        batch, _ = s.entry(cursor.entry)
        keys = s.sizes.keys(s.args, batch)
        source = s.source(batch, keys, self.pitch)
        loads = BoxLoads(self.kv, source, s.sKV, s.kv_head(cursor.head))
        self.block(loads, self.boxes_of(loads, cursor.n_block), fill)

    @property
    def boxes(self) -> int:
        """The boxes of a block that this warp loads."""
        c = self.shared.config
        return c.tile_n // cache_box_rows(c.page_size, c.tile_n) // c.load_warps

    @cute.jit
    def boxes_of(self, loads: BoxLoads, n_block: Int32) -> Box:
        """The boxes of block `n_block` that this warp loads, one in each lane."""
        c, lane = self.shared.config, cute.arch.lane_idx()
        number, rows = self.number * self.boxes + lane % self.boxes, loads.box[0]
        return loads.source.box(n_block * c.tile_n + number * rows, rows)

    @cute.jit
    def block(self, loads: BoxLoads, found: Box, fill: PipelineState) -> None:
        """Load this warp's share of a block of keys, group by group of its chunks."""
        s, boxes = self.shared, self.boxes
        mine = self.number * boxes
        sX = cute.flat_divide(s.sKV, loads.box)  # (boxRows, boxD, BOX, CHUNK, SLOT)
        for group in cutlass.range_constexpr(len(GROUPS)):
            s.kv.acquire(fill, group)
            slot = sX[None, None, None, None, fill.slot]
            full = s.kv.filled(fill, 0)
            # NOTE: ptxas unrolls loops of single rows, too, and spills 1136 bytes
            for i in cutlass.range(boxes, unroll=boxes if boxes <= UNROLLED else 1):
                gX = loads.columns_of(Box(*(cute.arch.shuffle_sync(x, i) for x in found)))
                for n in cutlass.range_constexpr(len(GROUPS[group])):
                    self.chunk(gX, slot[None, None, mine + i, None], full, group, n)

    @cute.jit
    def chunk(
        self,
        gX: cute.Tensor,
        sX: cute.Tensor,
        full: cute.Pointer,
        group: cutlass.Constexpr[int],
        number: cutlass.Constexpr[int],
    ) -> None:
        """Start the load of a chunk of a box, from gX to sX (boxRows, boxD, CHUNK)."""
        chunk = GROUPS[group][number]
        tXsX, tXgX = cpasync.tma_partition(
            self.kv.atom, 0, cute.make_layout(1), cute.group_modes(sX[None, None, chunk], 0, 2),
            cute.group_modes(gX[None, None, chunk], 0, 2),
        )  # (TMA), (TMA)  # fmt: skip
        bar = full + self.shared.kv.wave_of(chunk)
        cute.copy(self.kv.atom, tXgX, tXsX, tma_bar_ptr=bar)

"""MLA decode of chosen keys on Hopper: each token has a list of the rows of the cache that it sees,
as DeepSeek-V3.2's tokens have.

An entry of the list that is no row of the cache, below 0 or behind its end, is no key. Its row in
smem is zeros, and the warps that load a block, which look the list up, tell those of the scores
which of its rows are keys. Rows come by cp.async, eight lanes 128 bytes: TMA takes a copy for each
row and 128 bytes, which a warp issues one after the other. All else is as for all keys of a cache
(mla/sm90).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.async_copy import copy_async
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.softmax import rows_of
from cutex.device.attention.unit_rows import UnitRows
from cutex.device.pipeline import PipelineState
from cutex.device.row_source import Box, clamp, row_list
from cutex.kernels.attention.mla.config import CHUNK, CHUNKS, ELEMENT
from cutex.kernels.attention.mla.sm90.config import KEYS, SLOTS
from cutex.kernels.attention.mla.sm90.mla import Mla
from cutex.kernels.attention.mla.sm90.scores import Block, Scores
from cutex.kernels.attention.mla.sm90.shared import (
    GROUPS,
    ORDER,
    SCORES_WARPS,
    WAVES,
    ChunkRing,
    Cursor,
    Load,
    Shared,
)
from cutex.schedulers.order import select

ROWS = KEYS // SCORES_WARPS  # of a block, that one warp loads
UNIT = 16 // ELEMENT  # elements of a copy
UNITS = CHUNK // UNIT  # of a row of a chunk, and lanes that copy one
TOGETHER = 32 // UNITS  # rows that a warp copies at a time


class ChosenRows(NamedTuple):
    """Single rows: row i is row index[i] of the `rows` of memory, or no row if there is none of
    that number."""

    index: Any  # (length) Int32
    length: Int32 | int
    rows: Int32 | int

    def box(self, row: Any, rows: int) -> Box:
        exists = clamp(self.length - row, rows)
        at = Int32(self.index[row * exists])
        is_row = (at >= 0) & (at < self.rows)
        return Box(select(is_row, at, 0), select(is_row, exists, 0))


class CopiedRing(ChunkRing):
    """The ring of blocks of keys that the warps of the scores themselves copy, each wave as a group
    of cp.async.

    full[slot, wave]:    1 arrival of each warp that copies, its copies being done
    """

    def acquire(self, state: PipelineState, group: int) -> None:
        self.empty.wait(state.phase, state.slot * len(GROUPS) + group)

    @cute.jit
    def wait_full(self, state: PipelineState, wave: cutlass.Constexpr[int]) -> None:
        """Wait for a wave, of which this warp has copied some."""
        cute.arch.cp_async_wait_group(WAVES - 1 - wave)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.full.arrive(state.slot * WAVES + wave)
        ChunkRing.wait_full(self, state, wave)


@dataclass(frozen=True)
class SparseShared(Shared):
    chosen: Any = None  # (warps, SLOT) Int32: which of the rows that a warp loads are keys

    ring_type: ClassVar[type[ChunkRing]] = CopiedRing

    @classmethod
    def allocate(cls, smem: SmemAllocator, *others: Any) -> Self:
        base = super().allocate(smem, *others)
        chosen = smem.allocate_tensor(Int32, cute.make_layout((SCORES_WARPS, SLOTS)), 16)
        return replace(base, chosen=chosen)


@dataclass(frozen=True)
class SparseLoad(Load):
    kv: cute.Tensor  # (Rows, 1, D)
    shared: SparseShared

    @cute.jit
    def load(self, cursor: Cursor, fill: PipelineState) -> None:
        s, chosen, lane = self.shared, self.shared.chosen, cute.arch.lane_idx()
        batch, _ = s.entry(cursor.entry)
        table, keys = s.args.page_table[batch, None], s.sizes.keys(s.args, batch)
        rows = ChosenRows(table, keys, cute.size(self.kv, mode=[0]))
        first = self.number * ROWS
        found = rows.box(cursor.n_block * KEYS + first + lane % ROWS, 1)  # a row in each lane
        is_key = cute.arch.vote_ballot_sync(found.count > 0)
        # NOTE: this warp's scores of the block before in this slot are behind a barrier of all
        if lane == 0:
            chosen[self.number, fill.slot] = Int32(is_key)
        sources, places, read = [], [], []
        unit = lane % UNITS
        for i in cutlass.range_constexpr(ROWS // TOGETHER):
            row = i * TOGETHER + lane // UNITS
            offset, count = (cute.arch.shuffle_sync(x, row) for x in found)
            sources.append(self.kv.iterator + (Int64(offset) * self.kv.stride[0] + unit * UNIT))
            places.append(self.place(first + row, unit, fill.slot))
            read.append(count * UNIT * ELEMENT)
        for n in cutlass.range_constexpr(CHUNKS):
            chunk = ORDER[n]
            for group in cutlass.range_constexpr(len(GROUPS)):
                if cutlass.const_expr(chunk == GROUPS[group][0]):
                    s.kv.acquire(fill, group)
            for i in cutlass.range_constexpr(ROWS // TOGETHER):
                to = places[i] + chunk * KEYS * CHUNK
                copy_async(to, sources[i] + chunk * CHUNK, UNIT * ELEMENT, read[i])
            if cutlass.const_expr((n + 1) * WAVES % CHUNKS == 0):
                cute.arch.cp_async_commit_group()

    def place(self, row: Int32, unit: Int32, slot: Int32) -> cute.Pointer:
        """Where a unit of a row's first chunk goes: in a row of 128 bytes the swizzle exchanges
        units (slots_layout)."""
        sKV = self.shared.sKV
        plain = cute.recast_ptr(sKV.iterator, cute.make_swizzle(0, 4, 3))
        swizzled = unit ^ (row % UNITS)
        return plain + (
            slot * cute.cosize(sKV[None, None, 0].layout) + row * CHUNK + swizzled * UNIT
        )


@dataclass(frozen=True)
class SparseBlock(Block):
    shared: SparseShared

    @cute.jit
    def scores(self, i: Int32, kv: PipelineState) -> cute.Tensor:
        """The scores of block `i`; -inf of rows that are no keys."""
        acc = Block.scores(self, i, kv)
        scores, first = rows_of(acc), 2 * (cute.arch.thread_idx()[0] % 4)
        for warp in cutlass.range_constexpr(SCORES_WARPS):
            keys = self.shared.chosen[warp, self.group] >> first
            for c in cutlass.range_constexpr(ROWS // 4):  # this thread's columns of these rows
                kept = (keys & (1 << (c // 2 * 8 + c % 2))) != 0
                for r in cutlass.range_constexpr(2):
                    at = warp * (ROWS // 4) + c
                    scores[r, at] = scores[r, at] if kept else -Float32.inf
        return acc


@dataclass(frozen=True)
class SparseScores(Scores):
    def block(self, rows: UnitRows, blocks: Blocks) -> Block:
        base = Scores.block(self, rows, blocks)
        return SparseBlock(*(getattr(base, f.name) for f in fields(Block)))


class SparseMla(Mla):
    name = "sm90_mla_sparse"
    shared_type: ClassVar[type[Shared]] = SparseShared
    load_type: ClassVar[type[Load]] = SparseLoad
    scores_type: ClassVar[type[Scores]] = SparseScores

    def keys(self, mKV: cute.Tensor) -> cute.Tensor:
        return row_list(mKV)  # (Rows, 1, D)

"""MLA decode of chosen keys on Hopper: each token has a list of the rows of the cache that it sees,
as DeepSeek-V3.2's tokens have.

An entry of the list below 0 is no key. Its row in smem is zeros, and the warps that load a block,
which look the list up, tell those of the scores which of its rows are keys. All else is as for all
keys of a cache (mla/sm90).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.attention.block_info import Blocks
from cutex.device.attention.softmax import rows_of
from cutex.device.pipeline import PipelineState
from cutex.device.row_source import Box, BoxLoads, RowSource, clamp
from cutex.kernels.attention.decode.shared import Rows
from cutex.kernels.attention.mla.sm90.config import KEYS, SLOTS
from cutex.kernels.attention.mla.sm90.mla import Mla
from cutex.kernels.attention.mla.sm90.scores import Block, Scores
from cutex.kernels.attention.mla.sm90.shared import SCORES_WARPS, Load, Shared

ROWS = KEYS // SCORES_WARPS  # of a block, that one warp loads


class ChosenRows(NamedTuple):
    """Single rows: row i is row index[i] of memory, or no row if that is below 0."""

    index: Any  # (rows) Int32
    length: Int32 | int

    def box_rows(self, tile_rows: int) -> int:
        return 1

    def box(self, row: Any, rows: int) -> Box:
        exists = clamp(self.length - row, rows)
        at = Int32(self.index[row * exists])
        return Box(cutlass.max(at, 0), exists * clamp(at + 1, 1))


@dataclass(frozen=True)
class SparseShared(Shared):
    chosen: cute.Tensor  # (warps, SLOT) Int32: which of the rows that a warp loads are keys

    @classmethod
    def allocate(cls, smem: SmemAllocator, *others: Any) -> Self:
        base = Shared.allocate(smem, *others)
        chosen = smem.allocate_tensor(Int32, cute.make_layout((SCORES_WARPS, SLOTS)), 16)
        return cls(**{f.name: getattr(base, f.name) for f in fields(Shared)}, chosen=chosen)

    def source(self, batch: Int32, keys: Int32, pitch: Int32) -> RowSource:
        return ChosenRows(self.args.page_table[batch, None], keys)


@dataclass(frozen=True)
class SparseLoad(Load):
    shared: SparseShared

    @cute.jit
    def block(self, loads: BoxLoads, found: Box, fill: PipelineState) -> None:
        keys, chosen = cute.arch.vote_ballot_sync(found.count > 0), self.shared.chosen
        # NOTE: this warp's scores of the block before in this slot are behind a barrier of all
        if cute.arch.lane_idx() == 0:
            chosen[self.number, fill.slot] = Int32(keys)
        cute.arch.sync_warp()
        Load.block(self, loads, found, fill)


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
    def block(self, rows: Rows, blocks: Blocks) -> Block:
        base = Scores.block(self, rows, blocks)
        return SparseBlock(*(getattr(base, f.name) for f in fields(Block)))


class SparseMla(Mla):
    name = "sm90_mla_sparse"
    shared_type: ClassVar[type[Shared]] = SparseShared
    load_type: ClassVar[type[Load]] = SparseLoad
    scores_type: ClassVar[type[Scores]] = SparseScores

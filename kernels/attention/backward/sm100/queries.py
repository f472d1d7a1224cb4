"""Add: the role of the four warps that add dQ to the sums in global memory, block by block; and
Convert, the launch that reads these.

A tile of the sums is stored as (WARP, D / 4, rows of a warp, 4): a thread, which has a row, writes
16 bytes beside its neighbours', and a warp adds contiguous bytes by bulk copies.

Deterministic, CTAs add to a tile one after another (device/turns.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from cutex.device.atoms.tmem import fence_after_sync, fence_before_sync
from cutex.device.attention.row_store import SummedTile
from cutex.device.attention.seqlen_info import SeqlenInfo
from cutex.device.attention.tmem_rows import columns_of, flat
from cutex.device.epilogue.sm100.tma_store import SubTiles
from cutex.device.turns import await_turn, pass_turn
from cutex.kernels.attention.backward import rows
from cutex.kernels.attention.backward.rows import THREADS, WIDE
from cutex.kernels.attention.backward.sm100.config import PART, Sm100BackwardConfig
from cutex.kernels.attention.backward.sm100.shared import Shared
from cutex.kernels.attention.backward.tiles import turn_of

BESIDE = 4  # neighbouring threads of convert that have neighbouring units of a row: 64 bytes of dQ


@dataclass(frozen=True)
class Add:
    """The role that adds dQ of each block, out of tensor memory, to the fp32 sums."""

    shared: Shared
    dq_sums: cute.Tensor  # (tiles, bM * D)

    @cute.jit
    def run(self) -> None:
        s = self.shared
        c = s.config
        blocks = s.m_blocks()
        tile, m_block = s.tiles.tile(c, s.first_head(), s.tile.batch, s.tile.seq_q), blocks.first
        earlier, earlier_turn = tile, Int32(-1)  # of the block before
        for i in cutlass.range(s.total(blocks), unroll=1):
            if cutlass.const_expr(c.deterministic):
                turn = turn_of(c, s.info, s.tile, m_block)
                pass_turn(s.args.turns, earlier, self.turn_part(), earlier_turn)
                earlier, earlier_turn = tile + m_block, turn
                await_turn(s.args.turns, tile + m_block, self.turn_part(), turn)
            for part in cutlass.range_constexpr(0, c.dq_parts, c.dq_parts_at_once):
                parts = range(part, min(part + c.dq_parts_at_once, c.dq_parts))
                if cutlass.const_expr(len(parts) > 1):
                    self.add_parts(i, tile + m_block, parts)
                else:
                    self.add(i, tile + m_block, part)
            m_block += 1
            if m_block == blocks.end:
                m_block = blocks.first
                tile += s.tiles.per_head
        if cutlass.const_expr(c.deterministic):
            pass_turn(s.args.turns, earlier, self.turn_part(), earlier_turn)
        else:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add(self, i: Int32, tile: Int32, part: cutlass.Constexpr[int]) -> None:
        """Add part `part` of dQ of block i to tile `tile`, once it is computed."""
        c, block = self.shared.config, self.shared.count(i)
        columns = self.await_part(i, part)
        # NOTE: several at once, for dQ's columns, or what is over them, are waited for
        at_once = c.dq_at_once // PART
        for first in cutlass.range_constexpr(0, columns.num_parts, at_once):
            loaded = [columns.start_load(first + j) for j in range(at_once)]
            columns.wait_loads()
            if cutlass.const_expr(first + at_once == columns.num_parts):
                self.release_part(part)
            for j in cutlass.range_constexpr(at_once):
                number = (block * c.dq_parts + part) * columns.num_parts + first + j
                self.add_columns(flat(loaded[j]), tile, part, first + j, number)

    @cute.jit
    def add_parts(self, i: Int32, tile: Int32, parts: cutlass.Constexpr[range]) -> None:
        """Read `parts` of dQ of block i as they are computed, then add them to tile `tile`."""
        loaded, block = [], self.shared.count(i)
        for part in cutlass.range_constexpr(parts.start, parts.stop):
            columns = self.await_part(i, part)
            loaded.append([columns.start_load(j) for j in range(columns.num_parts)])
            columns.wait_loads()
            self.release_part(part)
        for part in cutlass.range_constexpr(parts.start, parts.stop):
            of_part = loaded[part - parts.start]
            for j in cutlass.range_constexpr(len(of_part)):
                number = (block * self.shared.config.dq_parts + part) * len(of_part) + j
                self.add_columns(flat(of_part[j]), tile, part, j, number)

    @cute.jit
    def await_part(self, i: Int32, part: cutlass.Constexpr[int]) -> SubTiles:
        """The columns of part `part` of dQ of block i, once it is computed."""
        s = self.shared
        c = s.config
        place = part % len(c.dq_columns)
        s.barriers.dq_full.wait(c.dq_use(s.count(i), part) & 1, place)
        fence_after_sync()
        return columns_of(s.tmem, c.dq_columns[place], c.dq_width)

    @cute.jit
    def release_part(self, part: cutlass.Constexpr[int]) -> None:
        """Tell that part `part` is in registers."""
        fence_before_sync()
        with cute.arch.elect_one():
            self.shared.barriers.dq_empty.arrive(part % len(self.shared.config.dq_columns))

    @cute.jit
    def add_columns(
        self,
        values: cute.Tensor,
        tile: Int32,
        part: cutlass.Constexpr[int],
        j: cutlass.Constexpr[int],
        number: Int32,
    ) -> None:
        """Start adding PART columns, those from j * PART on of a part, the `number`-th of all."""
        c = self.shared.config
        column = self.shared.split * c.dk_width + part * c.dq_width + j * PART
        if cutlass.const_expr(c.dq_slots > 0):
            self.add_from_smem(values, tile, column, number % c.dq_slots)
        else:
            self.add_from_registers(values, tile, column)

    @cute.jit
    def add_from_smem(self, values: cute.Tensor, tile: Int32, column: Int32, slot: Int32) -> None:
        """Start adding this thread's `values`, columns from `column` on, through a slot."""
        c = self.shared.config
        warp, lane, rows = cute.arch.warp_idx() % 4, cute.arch.lane_idx(), c.dq_rows
        mine = self.shared.sdQ[None, warp, slot]  # (PART * rows)
        vectors = cute.logical_divide(mine, cute.make_layout(4))  # (4, NumV)
        fours = cute.logical_divide(values, cute.make_layout(4))  # (4, NumV)
        cute.arch.cp_async_bulk_wait_group(c.dq_slots - 1, read=True)
        cute.arch.sync_warp()
        # NOTE: of 64 queries each warp has 16, in the first lanes of its quarter
        if cutlass.const_expr(rows == 32) or lane < rows:
            for j in cutlass.range_constexpr(PART // 4):
                cute.autovec_copy(fours[None, j], vectors[None, j * rows + lane])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.sums(tile).add_slot(mine, (warp * c.head_dim + column) * rows, lane == 0)

    @cute.jit
    def add_from_registers(self, values: cute.Tensor, tile: Int32, column: Int32) -> None:
        """Add this thread's `values`, columns from `column` on, four at a time."""
        c = self.shared.config
        warp, lane, rows = cute.arch.warp_idx() % 4, cute.arch.lane_idx(), c.dq_rows
        fours = cute.logical_divide(values, cute.make_layout(4))  # (4, NumV)
        sums, first = self.sums(tile), (warp * c.head_dim + column) // 4 * rows + lane
        if cutlass.const_expr(rows == 32) or lane < rows:
            for j in cutlass.range_constexpr(PART // 4):
                sums.add(first + j * rows, fours[None, j])

    def sums(self, tile: Int32) -> SummedTile:
        return SummedTile(self.dq_sums[tile, None])

    def turn_part(self) -> Int32:
        """The part of a tile that this warp adds to."""
        return self.shared.split * 4 + cute.arch.warp_idx() % 4


class Convert(rows.Convert):
    """Convert, which reads the sums as Add stores them."""

    config: Sm100BackwardConfig

    @cute.jit
    def tile(
        self,
        thread: Int32,
        sums: cute.Tensor,
        gdQ: cute.Tensor,
        seqlen: SeqlenInfo,
        m_block: Int32,
        scale: Float32,
    ) -> None:
        c = self.config
        vectors = cute.logical_divide(sums, cute.make_layout(4))  # (4, NumV)
        at_once = THREADS // BESIDE  # rows
        rounds = c.tile_m // at_once
        for i in cutlass.range_constexpr(c.tile_m * c.head_dim // (WIDE * THREADS)):
            row = i % rounds * at_once + thread // BESIDE
            unit = i // rounds * BESIDE + thread % BESIDE
            numbers = cute.make_rmem_tensor(cute.make_layout((4, WIDE // 4)), Float32)
            first = row // c.dq_rows * (c.head_dim // 4) + unit * (WIDE // 4)
            for j in cutlass.range_constexpr(WIDE // 4):
                at = (first + j) * c.dq_rows + row % c.dq_rows
                cute.autovec_copy(vectors[None, at], numbers[None, j])
            rounded = cute.make_rmem_tensor(WIDE, gdQ.element_type)
            for column in cutlass.range_constexpr(WIDE):
                rounded[column] = (numbers[column] * scale).to(gdQ.element_type)
            self.store(rounded, gdQ, seqlen, m_block * c.tile_m + row, unit)

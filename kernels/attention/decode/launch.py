"""The launch of a decode kernel on any arch, its smem slots and what fills them: Load and CopyLoad,
the role of the warps that load K and V, and Append, the kernel before it that writes new keys and
values to the caches, after the existing ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import slots_layout
from cutex.device.attention.block_info import Blocks
from cutex.device.attention.new_rows import CacheRows, append_rows, units_of_row, vectors
from cutex.device.pipeline import Barrier, PipelineState, Ring
from cutex.device.row_copies import NO_ROW, WARP, CopiedRing, RowCopies
from cutex.device.row_source import (
    BoxLoads,
    box_operand,
    cache_box_rows,
    page_pitch,
    row_list,
    swizzle_bytes,
)
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.out import Combine
from cutex.kernels.attention.decode.shared import PART, Shared
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes, arguments
from cutex.schedulers.order import select

Config = TypeVar("Config", bound=DecodeConfig)


class DecodeKernel(Generic[Config]):
    """What compiles and launches a decode kernel of any arch needs to know."""

    name: str
    kernel: Any

    def __init__(self, config: Config) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype)

    @property
    def kernels(self) -> dict[str, Any]:
        append = {"append": Append.kernel} if self.config.appended_before else {}
        combine = {"combine": Combine.kernel} if self.config.combined else {}
        return {**append, "decode": type(self).kernel, **combine}

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mO: cute.Tensor, *rest
    ) -> None:
        launch(self, (mQ, mK, mV, mO), KernelArgs.of(self.config, rest[:-1]), rest[-1])


@cute.jit
def launch(
    kernel: cutlass.Constexpr[Any], tensors: tuple[cute.Tensor, ...], args: KernelArgs, stream
) -> None:
    """Append the new keys, if there are any, and launch `kernel` on (q, k, v, o)."""
    c = kernel.config
    mQ, mK, mV, mO = tensors
    sizes = Sizes.of(c, mQ, mK, args)
    box_rows = cache_box_rows(c.page_size, c.tile_n, c.leftpad)
    k = box_operand(mK, (c.tile_n, c.head_dim), box_rows)
    v = box_operand(mV, (c.tile_n, c.head_dim_v), box_rows)
    if cutlass.const_expr(c.parts != "shares"):
        even = cutlass.max(c.ctas // sizes.units, 1)
        args = args._replace(num_splits=Int32(1) if c.parts == "one" else even)
    most = sizes.units
    if cutlass.const_expr(c.by_room):
        most *= 1 if c.whole else args.num_splits
    else:
        most *= cute.ceil_div(sizes.rows_k, c.tile_n) + c.start
    if cutlass.const_expr(c.appends or c.copies_rows):
        args = args._replace(k_cache=mK, v_cache=mV)
    if cutlass.const_expr(c.appended_before):
        Append(c).launch(mK, mV, args, sizes, stream)
    pitches = page_pitch(mK), page_pitch(mV)
    ctas = most
    if cutlass.const_expr(not (c.whole and c.waves)):
        ctas = cutlass.min(most, c.ctas // sizes.team * sizes.team)
    kernel.kernel(mQ, k, v, mO, args, sizes, pitches).launch(
        grid=(ctas, 1, 1),
        block=(kernel.num_threads, 1, 1),
        min_blocks_per_mp=c.ctas_per_sm,
        preferred_smem_carveout=100,  # percent; else the DSL asks a GPU
        use_pdl=True,
        stream=stream,
    )
    if cutlass.const_expr(c.combined):
        Combine(c).launch(mO, args, sizes, stream)


def kv_slots(dtype: type[cutlass.Numeric], rows: int, columns: int, count: int):
    """The layout (rows, columns, SLOT) of slots of Q, K or V."""
    swizzle = swizzle_bytes(columns * dtype.width // 8)
    return slots_layout(dtype, rows, columns, count, swizzle)


def ring(
    smem: SmemAllocator, name: str, config: DecodeConfig, slot_bytes: int, consumers: int
) -> Ring:
    """The ring of K or V; all load warps fill an equal part of each slot."""
    warps, slots = config.load_warps, config.num_stages
    arrivals = warps * WARP if config.copies_rows else warps
    full = Barrier.allocate(smem, f"{name} full", arrivals=arrivals, slots=slots)
    empty = Barrier.allocate(smem, f"{name} empty", arrivals=consumers, slots=slots)
    kind = CopiedRing if config.copies_rows else Ring
    return kind(slots, slot_bytes // warps, full, empty)


# ---- loads


class Lag(NamedTuple):
    """The block whose values are loaded next: its keys were loaded last."""

    batch: Int32
    keys: Int32
    head: Int32  # of K and V
    at: Any  # the block; of single rows, the place of this lane's
    exists: Boolean


@dataclass(frozen=True)
class Load:
    """The role of a load warp: its share of each block of K and V, through their rings.

    NOTE: a part is found, and a block loaded, in one place of the code each: what has run once
    before is not fetched from memory again (docs/facts/decode.md#short-walk).
    """

    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    pitch_k: Int32  # rows from one page, or one sequence, to the next
    pitch_v: Int32
    number: Int32  # of this warp among those that load
    shared: Shared

    @cute.jit
    def run(self) -> None:
        """Load the keys of this CTA's parts, in the order in which the products need them: values
        of a block after the next one's keys."""
        s = self.shared
        self.prefetch()
        splits, place, end = s.begin()
        k_fill, v_fill, told = s.k.producer(), s.v.producer(), self.parts_told()
        zero = Int32(0)
        lag, at = Lag(zero, zero, zero, zero, Boolean(False)), splits.begin
        while at < end:
            place, span = s.found(splits, at, place)
            piece = s.piece(splits, at, span)
            at = piece.after
            if piece.end > piece.first:
                blocks = s.of_piece(piece)
                told = self.tell(told, (*piece, *blocks))
                batch, _ = s.entry(piece.entry)
                keys, head = s.sizes.keys(s.args, batch), s.kv_head(piece.head)
                self.append(batch, head, keys, blocks)
                for i in cutlass.range(blocks.end - blocks.first, unroll=1):
                    block = Lag(batch, keys, head, blocks.end - 1 - i, Boolean(True))
                    following = self.load_keys(block, k_fill)
                    k_fill.advance()
                    if lag.exists:
                        self.load_values(lag, v_fill)
                        v_fill.advance()
                    lag = following
        if lag.exists:
            self.load_values(lag, v_fill)
        self.tell(told, tuple(zero for _ in range(PART)))
        if cutlass.const_expr(s.config.overlaps):
            cute.arch.griddepcontrol_launch_dependents()

    def prefetch(self) -> None:
        """Fetch the tensor maps."""
        for operand in (self.k, self.v):
            cpasync.prefetch_descriptor(operand.atom)

    @cute.jit
    def append(self, batch: Int32, head: Int32, keys: Int32, blocks: Blocks) -> None:
        """Append the new rows that are in these blocks, if that is not done before."""
        s = self.shared
        if cutlass.const_expr(s.config.appends):
            before, size = Int32(s.args.seqused_k[batch]), s.config.tile_n
            to = cutlass.min(keys, blocks.end * size)
            rows = cutlass.max(before, blocks.first * size), to, before
            append_rows(*s.new_rows(), (batch, head), rows)

    def load_keys(self, of: Lag, fill: PipelineState) -> Lag:
        """Load the keys of a block; returns what its values are loaded by."""
        self.load_block(self.k, self.pitch_k, self.shared.sK, of, fill, self.shared.k)
        return of

    def load_values(self, of: Lag, fill: PipelineState) -> None:
        """Load the values of a block."""
        self.load_block(self.v, self.pitch_v, self.shared.sV, of, fill, self.shared.v)

    @cute.jit
    def load_block(
        self,
        operand: cpasync.TmaInfo,
        pitch: Int32,
        sX: cute.Tensor,
        of: Lag,
        fill: PipelineState,
        ring: Ring,
    ) -> None:
        s = self.shared
        source = s.source(of.batch, of.keys, pitch)
        loads = BoxLoads(operand, source, sX, of.head)
        share = 0, self.number, s.config.load_warps
        loads.load(of.at, fill.slot, ring.acquire(fill), *share)

    def parts_told(self) -> PipelineState:
        """The state in the ring of announced parts, for this warp, which fills it."""
        s = self.shared
        return s.k.producer() if s.parts is None else s.parts.ring.producer()

    @cute.jit
    def tell(self, told: PipelineState, words: tuple[Int32, ...]) -> PipelineState:
        """Announce a part, or the end, to the roles that do not walk."""
        s = self.shared
        if cutlass.const_expr(s.parts is not None):
            told = s.parts.tell(told, words, self.number == 0)
        return told


@dataclass(frozen=True)
class CopyLoad(Load):
    """A load warp's share of each block of K and V, whose rows may be anywhere in memory."""

    def prefetch(self) -> None:
        """There are no descriptors."""

    @cute.jit
    def load_keys(self, of: Lag, fill: PipelineState) -> Lag:
        """As Load's. A lane knows the places of one row of a block, before its slot is empty, and
        those of V from when K was loaded."""
        s = self.shared
        of_k, of_v = self.places(of.batch, of.keys, of.at)
        self.copies(s.args.k_cache, s.sK, of.head).load(of_k, fill.slot, s.k.acquire(fill))
        return of._replace(at=of_v)

    @cute.jit
    def load_values(self, of: Lag, fill: PipelineState) -> None:
        s = self.shared
        self.copies(s.args.v_cache, s.sV, of.head).load(of.at, fill.slot, s.v.acquire(fill))

    def copies(self, mX: cute.Tensor, sX: cute.Tensor, head: Int32) -> RowCopies:
        return RowCopies(row_list(mX), sX, head, self.number, self.shared.config.load_warps)

    @cute.jit
    def places(self, batch: Int32, keys: Int32, block: Int32) -> tuple[Int32, Int32]:
        """The places in K's and in V's list of rows of the row of a block that is this lane's;
        NO_ROW if there is none."""
        s, lane = self.shared, cute.arch.lane_idx()
        mine = s.config.tile_n // s.config.load_warps
        row = block * s.config.tile_n + self.number * mine + lane
        k, v = (s.source(batch, keys, x).box(row, 1) for x in (self.pitch_k, self.pitch_v))
        exists = (k.count > 0) & (lane < mine)
        return select(exists, k.offset, NO_ROW), select(exists, v.offset, NO_ROW)


# ---- new keys


THREADS = 128


class Append:
    """A CTA for each new row of each sequence, or of all packed ones. Rows that a cache has no room
    for are dropped."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config

    @cute.jit
    def launch(
        self, mK: cute.Tensor, mV: cute.Tensor, args: KernelArgs, sizes: Sizes, stream: Any
    ) -> None:
        sequences = Int32(1) if cutlass.const_expr(self.config.varlen_new) else sizes.batch
        self.kernel(mK, mV, args, sizes).launch(
            grid=(sizes.new_keys, sequences, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mK: cute.Tensor, mV: cute.Tensor, args: KernelArgs, sizes: Sizes) -> None:
        row, batch, _ = cute.arch.block_idx()
        number, belongs = row, Boolean(True)  # of the row in its sequence
        if cutlass.const_expr(self.config.varlen_new):
            ends = args.cu_seqlens_k_new
            while (batch + 1 < sizes.batch) & (Int32(ends[batch + 1]) <= row):
                batch += 1
            number, belongs = row - Int32(ends[batch]), row < Int32(ends[batch + 1])
        at = Int32(args.seqused_k[batch]) + number
        exists = belongs & (at >= 0) & (at < sizes.rows_k)
        self.copy(args.k_new, mK, (batch, row), at, exists, args)
        self.copy(args.v_new, mV, (batch, row), at, exists, args)

    @cute.jit
    def copy(
        self,
        new: cute.Tensor,
        cache: cute.Tensor,
        place: tuple[Int32, Int32],
        at: Int32,
        exists: Boolean,
        args: KernelArgs,
    ) -> None:
        """Copy the row of all heads at `place` of `new` to row `at` of its sequence."""
        c, (batch, row) = self.config, place
        thread, _, _ = cute.arch.thread_idx()
        heads, units = cute.size(cache, mode=[2]), units_of_row(cache)
        if exists:
            rows = CacheRows(c.page_size, args.page_table, args.batch_idx)
            entry, at = rows.place(batch, at)
            from_row, to_row = vectors(new, batch, row), vectors(cache, entry, at)
            for i in cutlass.range(thread, heads * units, THREADS, unroll=1):
                head, unit = i // units, i % units
                cute.autovec_copy(from_row[None, unit, head], to_row[None, unit, head])

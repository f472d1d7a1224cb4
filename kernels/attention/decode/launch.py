"""The launch of a decode kernel on any arch, the layout of its smem slots, and Append, the kernel
before it that writes new keys and values to the caches, after the existing ones.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms.mma import slots_layout
from cutex.device.attention.new_rows import CacheRows, units_of_row, vectors
from cutex.device.pipeline import Barrier, Ring
from cutex.device.row_copies import WARP, CopiedRing
from cutex.device.row_source import box_operand, cache_box_rows, page_pitch, swizzle_bytes
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.out import Combine
from cutex.kernels.attention.decode.signature import KernelArgs, Sizes, arguments

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
    kernel.kernel(mQ, k, v, mO, args, sizes, pitches).launch(
        grid=(cutlass.min(most, c.ctas // sizes.team * sizes.team), 1, 1),
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

"""The launch of a decode kernel, the same on every arch, and the layout of its slots in smem."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from cutex.device.atoms.mma import slots_layout
from cutex.device.pipeline import Barrier, Ring
from cutex.device.row_source import box_operand, cache_box_rows, page_pitch, swizzle_bytes
from cutex.kernels.attention.decode.append import Append
from cutex.kernels.attention.decode.combine import Combine
from cutex.kernels.attention.decode.config import DecodeConfig
from cutex.kernels.attention.decode.signature import Passed, Sizes


@cute.jit
def launch(
    kernel: cutlass.Constexpr[Any], tensors: tuple[cute.Tensor, ...], passed: Passed, stream
) -> None:
    """Append the new keys, if there are any, and launch `kernel` on (q, k, v, o)."""
    c = kernel.config
    mQ, mK, mV, mO = tensors
    sizes = Sizes.of(c, mQ, mK, passed)
    box_rows = cache_box_rows(c.page_size, c.tile_n, c.leftpad)
    k = box_operand(mK, (c.tile_n, c.head_dim), box_rows)
    v = box_operand(mV, (c.tile_n, c.head_dim_v), box_rows)
    if cutlass.const_expr(c.parts != "shares"):
        even = cutlass.max(c.ctas // sizes.units, 1)
        passed = passed._replace(num_splits=Int32(1) if c.parts == "one" else even)
    most = sizes.units * (cute.ceil_div(sizes.rows_k, c.tile_n) + c.start)
    if cutlass.const_expr(c.appended):
        Append(c).launch(mK, mV, passed, sizes, stream)
    pitches = page_pitch(mK), page_pitch(mV)
    kernel.kernel(mQ, k, v, mO, passed, sizes, pitches).launch(
        grid=(cutlass.min(most, c.ctas // sizes.team * sizes.team), 1, 1),
        block=(kernel.num_threads, 1, 1),
        min_blocks_per_mp=c.ctas_per_sm,
        preferred_smem_carveout=100,  # percent; else the DSL asks a GPU
        use_pdl=True,
        stream=stream,
    )
    if cutlass.const_expr(c.combined):
        Combine(c).launch(mO, passed, sizes, stream)


def kv_slots(dtype: type[cutlass.Numeric], rows: int, columns: int, count: int):
    """The layout (rows, columns, SLOT) of slots of Q, K or V."""
    swizzle = swizzle_bytes(columns * dtype.width // 8)
    return slots_layout(dtype, rows, columns, count, swizzle)


def ring(
    smem: SmemAllocator, name: str, config: DecodeConfig, slot_bytes: int, consumers: int
) -> Ring:
    """The ring of K or V, whose slots all warps that load fill together, equal parts each."""
    warps, slots = config.load_warps, config.num_stages
    full = Barrier.allocate(smem, f"{name} full", arrivals=warps, slots=slots)
    empty = Barrier.allocate(smem, f"{name} empty", arrivals=consumers, slots=slots)
    return Ring(slots, slot_bytes // warps, full, empty)

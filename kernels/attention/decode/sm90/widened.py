"""WidenedRing: a ring of tiles of 8-bit keys or values, which are widened to 16 bits when they are
needed, since wgmma takes no two operands of different widths, nor 8 bits of V as it lies in memory.

The warpgroup widens a tile into the one place that its next product reads. Products are of fp16, to
which one conversion leads, two more to bf16; queries in bf16 are scaled by a power of two, so that
the largest of a warp's rows is around 2^8.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float16, Float32, Int32, cute

from cutex.device.atoms.wgmma import WARPGROUP
from cutex.device.pipeline import PipelineState, Ring
from cutex.kernels.attention.decode.config import DecodeConfig

BARRIER = 2  # a named barrier of the warpgroup
MANTISSA, BIAS, INFINITE = 23, 127, 255  # of fp32: bits; exponents of 1 and of infinity
AIM = 8  # the exponent of the largest query
UNIT = 16  # elements: 16 bytes as loaded, 32 widened


def product_dtype(config: DecodeConfig, dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The element type of the products where queries are of `dtype`."""
    return Float16 if config.fp8 and not config.q_in_smem else dtype


@cute.jit
def to_fp16(held: cute.Tensor, out: cute.Tensor) -> Float32:
    """Round `held` to fp16, times a power of two for all threads of the warp, and return what the
    result has to be multiplied by."""
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(held)):
        x = Float32(held[i])
        largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
    word = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    bits = cute.recast_tensor(word, Int32)
    word[0] = cute.arch.warp_reduction_max(largest)
    exponent = cutlass.min(cutlass.max(bits[0] >> MANTISSA, AIM + 1), INFINITE - 1)
    bits[0], bits[1] = (2 * BIAS + AIM - exponent) << MANTISSA, (exponent - AIM) << MANTISSA
    for i in cutlass.range_constexpr(cute.size(held)):
        out[i] = Float16(Float32(held[i]) * word[0])
    return word[1]


def in_any_slot(sX: cute.Tensor, num_slots: int) -> cute.Tensor:
    """The tile sX (bN, bD, 1) as (bN, bD, SLOT), the same in every slot."""
    one = sX[None, None, 0]
    layout = cute.append(one.layout, cute.make_layout(num_slots, stride=0))
    return cute.make_tensor(one.iterator, layout)


@dataclass(frozen=True)
class WidenedRing:
    """A Ring as the loop over blocks uses it; `wait_full` also widens."""

    ring: Ring
    sX: cute.Tensor  # (bN, D, SLOT) 8 bits
    wide: cute.Tensor  # (bN, D, 1) 16 bits

    @cute.jit
    def wait_full(self, state: PipelineState) -> None:
        """Wait until the slot is full, and widen it. All threads of the warpgroup call it, with no
        product of a tile before under way."""
        self.ring.wait_full(state)
        # NOTE: the product of another warp may still read the tile before
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP)
        self.widen(self.sX[None, None, state.slot], self.wide[None, None, 0])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP)

    def release(self, state: PipelineState) -> None:
        self.ring.release(state)

    @cute.jit
    def widen(self, narrow: cute.Tensor, wide: cute.Tensor) -> None:
        """Copy `narrow` (bN, D) to `wide`. Every e4m3 is a bf16 and an fp16."""
        across = cute.size(narrow, mode=[1]) // UNIT
        thread, _, _ = cute.arch.thread_idx()
        held = cute.make_rmem_tensor(cute.make_layout(UNIT), narrow.element_type)
        out = cute.make_rmem_tensor(cute.make_layout(UNIT), wide.element_type)
        for i in cutlass.range_constexpr(cute.size(narrow) // UNIT // WARPGROUP):
            index = thread + i * WARPGROUP
            row, unit = index // across, index % across
            cute.autovec_copy(cute.local_tile(narrow[row, None], (UNIT,), (unit,)), held)
            kind = Float16 if wide.element_type is Float16 else Float32
            out.store(held.load().to(kind).to(wide.element_type))
            cute.autovec_copy(out, cute.local_tile(wide[row, None], (UNIT,), (unit,)))

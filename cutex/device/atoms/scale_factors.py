"""Scale factors of blocks along K: from global memory to the tensor memory that tcgen05.mma reads.

A chunk is 512 bytes: four factors (one 32-bit word) of each of 128 rows, word r at byte
16 (r % 32) + 4 (r // 32). Chunks are in this form everywhere, so nothing is ever rearranged:

    global memory   (128 words, chunks along K, chunks of rows, L)
    smem            the same for one step of K, in a slot of the ring; by TMA
    tensor memory   4 columns of 32 lanes, the same in each quarter of the lanes; by tcgen05.cp

An MMA of K takes 1, 2 or 4 factors of a row: those of one byte, of two, or a whole word. The
position of its bytes in the word is in the upper bits of an address in tensor memory; this is how
pointers to 8-bit elements are counted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from cutex.device.atoms.tma import TileLoads

ROWS = 128  # rows of a chunk
WORDS = 128  # of 32 bits, in a chunk
CHUNK_BYTES = 512
COLUMNS = 4  # of tensor memory, that a chunk takes


@dataclass(frozen=True)
class FactorTile:
    """The chunks of one operand's factors in a step of K: `rows` chunks below each other, in each
    of `steps` places along K."""

    rows: int
    steps: int

    # NOTE: the two methods that let the DSL carry a FactorTile, all of which is known when tracing
    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> FactorTile:
        return self

    @property
    def bytes(self) -> int:
        return self.rows * self.steps * CHUNK_BYTES

    @property
    def columns(self) -> int:
        """Columns of tensor memory."""
        return self.rows * self.steps * COLUMNS

    def slots(self, num_slots: int) -> cute.Layout:
        """The smem layout (WORDS, STEPS, ROWS, SLOT) of a ring."""
        stride = (1, WORDS, WORDS * self.steps, WORDS * self.steps * self.rows)
        return cute.make_layout((WORDS, self.steps, self.rows, num_slots), stride=stride)

    def allocate(self, smem: SmemAllocator, num_slots: int) -> cute.Tensor:
        """Allocate the slots (WORDS, STEPS, ROWS, SLOT) in smem."""
        return smem.allocate_tensor(Int32, self.slots(num_slots), byte_alignment=128)

    @cute.jit
    def load_operand(
        self, mF: cute.Tensor, num_slots: cutlass.Constexpr[int], pair: cutlass.Constexpr[bool]
    ) -> cpasync.TmaInfo:
        """The tensor map that loads these chunks of mF (L, RestRows, RestK, WORDS) into a slot.

        With `pair`, each CTA loads its own, and all bytes are counted on the leader's barrier.
        """
        mode = cute.select(mF.layout, mode=[3, 2, 1, 0])  # (WORDS, RestK, RestRows, L)
        group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(group),
            cute.make_tensor(mF.iterator, mode),
            self.slots(num_slots),
            (WORDS, self.steps, self.rows),
        )

    @cute.jit
    def loads(
        self, operand: cpasync.TmaInfo, sF: cute.Tensor, first: Int32, batch: Int32 | int
    ) -> TileLoads:
        """The loads from chunk `first` of rows on, of the batch entry; an operand with a single
        entry serves all."""
        mF = operand.tma_tensor
        entry = cutlass.min(batch, cute.size(mF, mode=[3]) - 1)
        mF = cute.domain_offset((0, 0, first), mF[None, None, None, entry])
        tile = (WORDS, self.steps, self.rows)
        gF = cute.local_tile(mF, tile, (0, None, 0))  # (WORDS, STEPS, ROWS, RestK)
        tFsF, tFgF = cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sF, 0, 3),
            cute.group_modes(gF, 0, 3),
        )  # (TMA, SLOT), (TMA, RestK)
        return TileLoads(operand.atom, tFgF, tFsF)


class Factors(NamedTuple):
    """The factors of one operand: slots of smem, and their place in tensor memory."""

    tile: FactorTile
    sF: cute.Tensor  # (WORDS, STEPS, ROWS, SLOT)
    tmem: cute.Pointer  # tile.columns columns: chunks of rows side by side, then steps of K

    @cute.jit
    def copy(self, slot: Int32, pair: cutlass.Constexpr[bool]) -> None:
        """Start the copy of a slot, for a pair in both CTAs. A whole warp calls it; MMAs that the
        same thread starts after it read what it writes."""
        source = factors_descriptor(self.sF[None, 0, 0, slot].iterator)
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(self.tile.steps):
                for row in cutlass.range_constexpr(self.tile.rows):
                    chunk = row * self.tile.steps + step  # in smem
                    column = (step * self.tile.rows + row) * COLUMNS
                    copy_chunk(self.tmem + column, source + chunk * CHUNK_BYTES // 16, pair)

    def of_inst(self, dtype: type[cutlass.Numeric], first: int) -> cute.Pointer:
        """The address of factor `first` of each row, counted along a step of K."""
        column = first // 4 * self.tile.rows * COLUMNS
        return cute.recast_ptr(self.tmem + column, dtype=dtype) + first % 4

    def shifted(self, columns: Int32) -> Factors:
        """The same factors from 32 x `columns` rows on."""
        return self._replace(tmem=self.tmem + columns)


@dsl_user_op
def factors_descriptor(smem: cute.Pointer, *, loc=None, ip=None) -> Int64:
    """The smem descriptor of a chunk, 32 rows of 16 bytes: core matrices of 8 rows that are 128
    bytes apart, no swizzle (PTX ISA, tcgen05 "Shared memory descriptor")."""
    step, version = 128 // 16, 1
    fields = step << 16 | step << 32 | version << 46
    address = smem.toint(loc=loc, ip=ip)
    return Int64((address & 0x3FFFF) >> 4) | Int64(fields)


@dsl_user_op
def copy_chunk(
    tmem: cute.Pointer, source: Int64, pair: cutlass.Constexpr[bool], *, loc=None, ip=None
) -> None:
    """tcgen05.cp of 32 rows of 128 bits to each quarter of the lanes. One thread calls it."""
    address = Int32(tmem.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    in_tmem = llvm.PointerType.get(cute.AddressSpace.tmem.value)
    nvvm.tcgen05_cp(
        nvvm.Tcgen05CpShape.SHAPE_32x128b,
        llvm.inttoptr(in_tmem, address, loc=loc, ip=ip),
        source.ir_value(loc=loc, ip=ip),
        group=nvvm.CTAGroupKind.CTA_2 if pair else nvvm.CTAGroupKind.CTA_1,
        multicast=nvvm.Tcgen05CpMulticast.WARPX4,
        loc=loc,
        ip=ip,
    )


class BlockFactors(NamedTuple):
    """The factors of both operands of an MMA."""

    a: Factors
    b: Factors

    def copy(self, slot: Int32, pair: bool) -> None:
        """Start the copies of a slot of the ring to tensor memory, for a pair in both CTAs. A whole
        warp calls it."""
        self.a.copy(slot, pair)
        self.b.copy(slot, pair)

    def of_columns(self, first: Int32) -> BlockFactors:
        """The factors where B's begin with row `first` of the first chunk, a multiple of 32."""
        return self._replace(b=self.b.shifted(first // 32))

"""A packed weight on its way from global memory to the registers of wgmma's operand A."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import MmaF16BF16Op
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from cutex.device.atoms import nibbles
from cutex.device.atoms.mma import SMEM_ALIGN
from cutex.device.atoms.wgmma import WARPGROUP
from cutex.problem.w4.layout import (
    BLOCK_K,
    CODE_WORDS,
    DEFAULT_ZERO,
    HALF_K,
    HALVES,
    PAIRS,
    W4Format,
)

WORDS = CODE_WORDS // HALVES // WARPGROUP  # of a thread in half a block: one for each wgmma
K_OF_MMA = 16

ROWS, COLUMNS, K = 16, 8, 16  # of an mma.sync


def warpgroup_mma(kind: type[cutlass.Numeric], columns: int = 2 * COLUMNS) -> cute.TiledMma:
    """mma.sync of a warpgroup: each warp 16 rows, by 8 or 16 columns."""
    op = MmaF16BF16Op(kind, Float32, (ROWS, COLUMNS, K))
    return cute.make_tiled_mma(op, (4, 1, 1), permutation_mnk=(64, columns, K))


def words_of(mW: cute.Tensor) -> cute.Tensor:
    """A packed weight's words (STRIP, RestK, WORDS) as the kernels compute with them."""
    return cute.recast_tensor(mW, Int32)


def allocate_weights(smem: SmemAllocator, of: W4Format, strips: int, num_slots: int) -> cute.Tensor:
    """The slots (WORDS, STRIP, SLOT) of blocks of so many strips."""
    shape = of.words, strips, num_slots
    return smem.allocate_tensor(Int32, cute.make_layout(shape), SMEM_ALIGN)


class WeightLoads(NamedTuple):
    """The loads of a tile's strips, a block of each for a K tile; those past the last strip are
    the last one's again, and never stored."""

    mW: cute.Tensor  # (STRIP, RestK, WORDS)
    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    first: Int32  # strip

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.mW, mode=[1])

    def block(self, strip: int, k_tile: Int32) -> cute.Tensor:
        """A block in global memory."""
        there = cutlass.min(self.first + strip, cute.size(self.mW, mode=[0]) - 1)
        words = cute.make_layout(cute.size(self.sW, mode=[0]))  # its size is known
        return cute.make_tensor(self.mW[there, k_tile, None].iterator, words)

    @cute.jit
    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Start the loads of K tile `k_tile` into `slot`. A whole warp calls it."""
        bits = cute.size(self.sW, mode=[0]) * 32
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32, num_bits_per_copy=bits)
        for strip in cutlass.range_constexpr(cute.size(self.sW, mode=[1])):
            block = self.block(strip, k_tile)
            with cute.arch.elect_one():
                cute.copy(atom, block, self.sW[None, strip, slot], mbar_ptr=full)

    @cute.jit
    def prefetch(self, k_tile: Int32) -> None:
        """Have L2 load K tile `k_tile`. A whole warp calls it."""
        for strip in cutlass.range_constexpr(cute.size(self.sW, mode=[1])):
            block = self.block(strip, k_tile)
            with cute.arch.elect_one():
                prefetch_bulk(block.iterator, 4 * cute.size(self.sW, mode=[0]))


@dsl_user_op
def prefetch_bulk(address: cute.Pointer, num_bytes: int, *, loc=None, ip=None) -> None:
    """Have L2 load so many bytes (PTX ISA, cp.async.bulk.prefetch)."""
    values = [address.toint().ir_value(loc=loc, ip=ip), Int32(num_bytes).ir_value(loc=loc, ip=ip)]
    ptx = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    llvm.inline_asm(None, values, ptx, "l,r", has_side_effects=True, loc=loc, ip=ip)


class Factors(NamedTuple):
    """The scales and zeros of a thread's two rows, 8 apart, in one block: a word for each group,
    the first row's in the low half."""

    scales: Any  # (GROUP) words, or None
    zeros: Any


@dataclass(frozen=True)
class Fragments:
    """What a thread reads of the slots, and makes operands A of."""

    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    format: W4Format
    kind: Any  # the element type of x
    scales_sums: bool = False  # whether scales are for `add_scaled`, not for `widen`

    @property
    def halves_of_group(self) -> int:
        """The halves of a block whose sums share scales: both, if weights are scaled before."""
        return min(self.format.group, BLOCK_K) // HALF_K if self.scales_sums else HALVES

    def group_of(self, half: int) -> int:
        """The group of a block that `half` is in, of groups of at least a half."""
        return half // self.halves_of_group

    def begins_group(self, half: int) -> bool:
        return half % self.halves_of_group == 0

    def ends_group(self, half: int) -> bool:
        return self.begins_group(half + 1)

    def add_scaled(self, sums: Any, factors: Factors, half: int, acc: Any) -> None:
        """acc += sums (MMA, 1, MMA_N) of the group that ends with `half`, times its scales: of a
        thread's first row, and of the row 8 below."""
        scales = self.both(factors.scales[self.group_of(half)])
        for i in range(cute.size(sums)):
            acc[i] = acc[i] + sums[i] * scales[i // 2 % 2]

    def both(self, word: Int32) -> list[Float32]:
        """The numbers in a word."""
        pair = cute.make_rmem_tensor(2, Int32)  # NOTE: a tensor of one has stride 0
        pair[0] = pair[1] = word
        halves = cute.recast_tensor(pair, self.kind)
        return [halves[i].to(Float32) for i in range(2)]

    @cute.jit
    def codes(self, strip: Int32 | int, half: cutlass.Constexpr[int], slot: Int32) -> cute.Tensor:
        """A thread's words of half a block (WORD)."""
        thread, _, _ = cute.arch.thread_idx()
        words, strips, slots = self.sW.shape
        shape = WORDS, WARPGROUP, HALVES, strips, slots
        strides = 1, WORDS, WORDS * WARPGROUP, words, words * strips
        codes = cute.make_tensor(self.sW.iterator, cute.make_layout(shape, stride=strides))
        held = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        cute.autovec_copy(codes[None, thread % WARPGROUP, half, strip, slot], held)
        return held

    def factors(self, strip: Int32 | int, slot: Int32) -> Factors:
        """A thread's scales and zeros of a block."""
        of = self.format
        scales = self._words(CODE_WORDS, strip, slot) if of.group else None
        zeros = self._words(CODE_WORDS + of.factor_words, strip, slot) if of.zeros else None
        return Factors(scales, zeros)

    @cute.jit
    def _words(self, first: cutlass.Constexpr[int], strip: Int32 | int, slot: Int32) -> cute.Tensor:
        thread, _, _ = cute.arch.thread_idx()
        pair = thread % WARPGROUP // 4
        groups = self.format.groups
        words, strips, slots = self.sW.shape
        layout = cute.make_layout(
            (groups, PAIRS, strips, slots), stride=(1, groups, words, words * strips)
        )
        there = cute.make_tensor(self.sW.iterator + first, layout)
        held = cute.make_rmem_tensor(cute.make_layout(groups), Int32)
        cute.autovec_copy(there[None, pair, strip, slot], held)
        return held

    def widen(self, codes: cute.Tensor, factors: Factors, half: int, tCrA: cute.Tensor) -> None:
        """Write the values of half a block, scaled unless `scales_sums`, to operand A (MMA, 1,
        MMA_K)."""
        words = cute.recast_tensor(tCrA, Int32)  # (REG, 1, MMA_K)
        out = cute.make_tensor(words.iterator, cute.make_layout((4, WORDS)))
        known: dict[int, tuple[Any, Any]] = {}
        for i in range(WORDS):
            group = (half * WORDS + i) * K_OF_MMA // self.format.group if self.format.group else 0
            if group not in known:
                known[group] = self.of_group(factors, group)
            scales, zeros = known[group]
            scales = None if self.scales_sums else scales
            for register, value in enumerate(self.pairs(codes[i], zeros)):
                if scales is not None:
                    value = nibbles.times(value, scales[register % 2], self.kind)
                out[register, i] = value

    def of_group(self, factors: Factors, group: int) -> tuple[Any, Any]:
        """The scales and the zeros of a group, each as pairs of a row's twice."""
        found = [None if x is None else nibbles.splat(x[group]) for x in factors]
        return found[0], found[1]

    def pairs(self, word: Int32, zeros: Any) -> list[Int32]:
        """The eight values of a word, not yet scaled."""
        if self.format.kind == "fp4":
            return nibbles.pairs_of_e2m1(word, self.kind)
        base = 0x6400 if self.kind is cutlass.Float16 else 0x4300
        one = Int32((base + DEFAULT_ZERO) * nibbles.PAIR)
        zeros = zeros or (one, one)
        raw = nibbles.pairs_of_int4(word, self.kind)
        return [nibbles.minus(x, zeros[i % 2], self.kind) for i, x in enumerate(raw)]

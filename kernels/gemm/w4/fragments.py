"""A packed weight on its way from global memory to the registers of operand A, and its products by
few rows of x."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from cutex.device.atoms import nibbles
from cutex.device.atoms.mma import SMEM_ALIGN
from cutex.device.atoms.multicast import SharedRing
from cutex.device.atoms.wgmma import WARPGROUP, WgmmaProduct
from cutex.device.pipeline import PipelineState
from cutex.problem.w4.layout import (
    BLOCK_K,
    CODE_WORDS,
    DEFAULT_ZERO,
    HALF_K,
    HALVES,
    PAIRS,
    W4Format,
)

if TYPE_CHECKING:
    from cutex.kernels.gemm.w4.sm90.config import W4Config

WORDS = CODE_WORDS // HALVES // WARPGROUP  # of a thread in half a block: one for each wgmma
K_OF_MMA = 16

ROWS, COLUMNS, K = 16, 8, 16  # of an mma.sync
# the least exponent beside which bf16 has room for scales of up to 2^8 (TOP_SCALE) in units of its
# least number
FUSED = 14
BASE_POWER = {BFloat16: 7, Float16: 10}  # of INTEGER_BASE


def warpgroup_mma(kind: type[cutlass.Numeric], columns: int = 2 * COLUMNS) -> cute.TiledMma:
    """mma.sync by a warpgroup: each warp 16 rows, by 8 or 16 columns."""
    op = MmaF16BF16Op(kind, Float32, (ROWS, COLUMNS, K))
    return cute.make_tiled_mma(op, (4, 1, 1), permutation_mnk=(64, columns, K))


def words_of(mW: cute.Tensor) -> cute.Tensor:
    """A packed weight's words (STRIP, RestK, WORDS) in the kernels' view."""
    return cute.recast_tensor(mW, Int32)


def allocate_weights(smem: SmemAllocator, of: W4Format, strips: int, num_slots: int) -> cute.Tensor:
    """Allocate the slots (WORDS, STRIP, SLOT) for blocks of this many strips."""
    shape = of.words, strips, num_slots
    return smem.allocate_tensor(Int32, cute.make_layout(shape), SMEM_ALIGN)


class WeightLoads(NamedTuple):
    """The loads of a tile's strips, one block each for a K tile; for strips past the last, the last
    one is loaded again and its results never stored."""

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
    """What a thread reads of the slots and turns into operands A."""

    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    format: W4Format
    kind: Any  # the element type of x
    scales_sums: bool = False  # whether scales are for `add_scaled`, not for `widen`
    tiny: bool = False  # whether integers may be widened as tiny numbers

    @property
    def halves_of_group(self) -> int:
        """The halves of a block whose sums share scales: both, if weights are scaled before the
        product."""
        return min(self.format.group, BLOCK_K) // HALF_K if self.scales_sums else HALVES

    def group_of(self, half: int) -> int:
        """The group of a block that `half` is in, for groups of at least half a block."""
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
        """The low and the high number of a word."""
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

    @property
    def are_tiny(self) -> bool:
        """Whether codes are widened as tiny numbers. Scales of fp16 are too large for them, and too
        small."""
        by_sums = self.scales_sums or not self.format.group
        return self.tiny and self.format.kind == "int4" and (self.kind is not Float16 or by_sums)

    @property
    def fuses(self) -> bool:
        """Whether one operation scales a tiny code and takes its zero off: of zeros whose product
        with a scale is exact."""
        return self.are_tiny and bool(self.format.group) and not self.scales_sums and (
            not self.format.zeros
        )  # fmt: skip

    @property
    def exponent(self) -> int:
        """The power of two that sums of products are to be multiplied with."""
        if not self.are_tiny:
            return 0
        if self.fuses:
            return FUSED
        return -nibbles.least_power(self.kind) - nibbles.top_power(self.kind)

    def unscale(self, acc: cute.Tensor) -> None:
        """Multiply all sums with 2^exponent."""
        if self.exponent:
            acc.store(acc.load() * Float32(2.0**self.exponent))

    def widen(self, codes: cute.Tensor, factors: Factors, half: int, tCrA: cute.Tensor) -> None:
        """Write the values of half a block, scaled unless `scales_sums`, by 2^-exponent, to operand
        A (MMA, 1, MMA_K)."""
        words = cute.recast_tensor(tCrA, Int32)  # (REG, 1, MMA_K)
        out = cute.make_tensor(words.iterator, cute.make_layout((4, WORDS)))
        known: dict[int, tuple[Any, Any]] = {}
        for i in range(WORDS):
            group = (half * WORDS + i) * K_OF_MMA // self.format.group if self.format.group else 0
            if group not in known:
                known[group] = self.of_group(factors, group)
            scales, zeros = known[group]
            if self.are_tiny:
                values = self.tiny_pairs(codes[i], scales, zeros)
            else:
                values = self.pairs(codes[i], zeros)
            scales = None if self.scales_sums or self.fuses else scales
            for register, value in enumerate(values):
                if scales is not None:
                    value = nibbles.times(value, scales[register % 2], self.kind)
                out[register, i] = value

    def tiny_pairs(self, word: Int32, scales: Any, zeros: Any) -> list[Int32]:
        """The eight values of a word by 2^-exponent, scaled where that is fused. A row's pairs are
        every second one."""
        pair_of, kind = partial(nibbles.pair_of, kind=self.kind), self.kind
        top = -nibbles.least_power(kind) - self.exponent
        units = [pair_of(top), pair_of(top - 4)]
        less = [pair_of(3 - self.exponent, sign=-1)] * 2  # DEFAULT_ZERO
        if self.fuses:
            # NOTE: the same in all words of a group: computed once
            units = [nibbles.times(scales[i], pair_of(top - 4 * i), kind) for i in range(2)]
            less = [nibbles.times(scale, less[0], kind) for scale in scales]
        elif zeros:
            # they are kept with the base of an or-ed integer
            base = BASE_POWER[kind] - self.exponent
            by = pair_of(-self.exponent, sign=-1), pair_of(base)
            less = [nibbles.fused(zero, *by, kind) for zero in zeros]
        raw = nibbles.tiny_pairs_of_int4(word)
        return [nibbles.fused(x, units[i % 2], less[i % 2], kind) for i, x in enumerate(raw)]

    def of_group(self, factors: Factors, group: int) -> tuple[Any, Any]:
        """The scales and the zeros of a group, each as pairs with a row's value twice."""
        found = [None if x is None else nibbles.splat(x[group]) for x in factors]
        return found[0], found[1]

    def pairs(self, word: Int32, zeros: Any) -> list[Int32]:
        """The eight values of a word, before scaling."""
        if self.format.kind == "fp4":
            return nibbles.pairs_of_e2m1(word, self.kind)
        base = 0x6400 if self.kind is cutlass.Float16 else 0x4300
        one = Int32((base + DEFAULT_ZERO) * nibbles.PAIR)
        zeros = zeros or (one, one)
        raw = nibbles.pairs_of_int4(word, self.kind)
        return [nibbles.minus(x, zeros[i % 2], self.kind) for i, x in enumerate(raw)]


# ---- products by few rows of x


def own_warpgroup(tiles: W4Config) -> Int32 | int:
    """Which of the warpgroups that divide a tile's rows this one is."""
    if tiles.row_warpgroups == 1:
        return 0
    own = cute.arch.warp_idx() // 4
    return cute.arch.make_warp_uniform(own % tiles.row_warpgroups if tiles.in_turn else own)


@dataclass(frozen=True)
class FewRows:
    """The products of blocks of a weight by few rows of x.

    An mma.sync takes some 33 cycles, and one that adds to its sums waits for it: so those of half a
    block have sums of their own, and those of the other half add to them. Scales of groups of 64
    and more multiply the sums of a group, which are fewer than its weights. Of up to 8 rows of x,
    the 8 columns behind are left out.
    """

    mma: WgmmaProduct
    sX: cute.Tensor  # (bN, bK, SLOT)
    ab: SharedRing
    tiles: W4Config
    weights: Fragments

    @cute.jit
    def add(self, take: PipelineState, num: cutlass.Constexpr[int]) -> PipelineState:
        """mma.acc += W @ x^T over `num` blocks of K; return the state after."""
        total, tiles, weights = self.mma.acc, self.tiles, self.weights
        waves, columns = cute.size(total, mode=[1]), tiles.columns_computed
        size = cute.size(total) // waves
        one = cute.make_layout(((2, 2), 1, columns // COLUMNS))  # (MMA, 1, MMA_N)
        thread, _, _ = cute.arch.thread_idx()
        wg = own_warpgroup(tiles)
        tiled_mma = warpgroup_mma(weights.kind, columns)
        thr_mma = tiled_mma.get_slice(thread % WARPGROUP)
        sB = cute.local_tile(self.sX, (columns, BLOCK_K), (0, 0, None))  # (N, bK, SLOT)
        partitioned = thr_mma.partition_B(sB[None, None, 0])  # (MMA, MMA_N, MMA_K)
        load = cute.make_copy_atom(LdMatrix8x8x16bOp(False, min(4, columns // 4)), weights.kind)
        s2r = cute.make_tiled_copy_B(load, tiled_mma).get_slice(thread % WARPGROUP)
        tXsX = s2r.partition_S(sB)  # (CPY, CPY_N, CPY_K, SLOT)
        states, loaded = [], []
        for _ in cutlass.range_constexpr(num):
            self.ab.wait_full(take)
            tCrB = tiled_mma.make_fragment_B(partitioned)  # (MMA, MMA_N, MMA_K)
            cute.copy(s2r, tXsX[None, None, None, take.slot], s2r.retile(tCrB))
            states.append(PipelineState(take.num_slots, take.slot, take.phase))
            loaded.append(tCrB)
            take.advance_by(tiles.turns)
        for wave in cutlass.range_constexpr(waves):
            strip = wave * tiles.row_warpgroups + wg
            acc = cute.make_tensor(total.iterator + wave * size, one)
            for i in cutlass.range_constexpr(num):
                self.add_strip(acc, strip, states[i].slot, tiled_mma, loaded[i])
        cute.arch.sync_warp()  # its lanes have read the slots
        for i in cutlass.range_constexpr(num):
            self.ab.release(states[i])
        return take

    def add_strip(
        self,
        acc: cute.Tensor,
        strip: Int32,
        slot: Int32,
        tiled_mma: cute.TiledMma,
        tCrB: cute.Tensor,
    ) -> None:
        """acc (MMA, 1, MMA_N) += the block of `strip` in `slot`, by x (MMA, MMA_N, MMA_K)."""
        weights = self.weights
        tCrA = self.mma.mma.a_registers(HALF_K)  # (MMA, 1, MMA_K)
        sums = [cute.make_rmem_tensor(acc.layout, Float32) for _ in range(WORDS)]
        factors = weights.factors(strip, slot)
        for half in range(HALVES):
            weights.widen(weights.codes(strip, half, slot), factors, half, tCrA)
            add_half(tiled_mma, tCrA, tCrB, half, sums, weights.begins_group(half))
            if weights.ends_group(half) and weights.scales_sums:
                weights.add_scaled(added(sums), factors, half, acc)
            elif weights.ends_group(half):
                acc.store(acc.load() + added(sums).load())


def add_half(
    mma: cute.TiledMma,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    half: int,
    sums: list[cute.Tensor],
    first: bool,
) -> None:
    """sums[i] (MMA, 1, MMA_N) += A @ B^T of the i-th 16 of K of half a block, A (MMA, 1, MMA_K) of
    that half, B (MMA, MMA_N, all K); with `first` they begin at zero."""
    for i, acc in enumerate(sums):
        if first:
            acc.fill(0.0)
        cute.gemm(mma, acc, tCrA[None, None, i], tCrB[None, None, half * WORDS + i], acc)


def added(sums: list[cute.Tensor]) -> cute.Tensor:
    """The sum of all of `sums`, in the first of them."""
    for step in (1, 2):
        for i in range(0, len(sums), 2 * step):
            sums[i].store(sums[i].load() + sums[i + step].load())
    return sums[0]

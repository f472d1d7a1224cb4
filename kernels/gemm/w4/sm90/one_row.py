"""The GEMM with a packed 4-bit weight by one row of x on Hopper: out = ops(x @ W^T).

Widening codes to 16 bits takes 11 instructions for eight of them, longer than memory takes to bring
them. An integer product takes three: the two codes of a byte become two signed bytes, times 16. It
needs x in integers, too: each 128 elements of x are written as 7-bit digits relative to the largest
of them, and since there is one row, the eight columns of an mma.sync are eight digits.

    x = 2^(exponent - 130) * sum of digit[p] * 2^(-7 p), p of 0 to 7

Sums of a block of K are exact; digits are summed separately, in fp32, and combined at the end. Of
an element, 2^-51 of the largest of its 128 may be lost. Elements that are not finite count as zero
here, and are added separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.memory import SmemAllocator

from cutex.compile import Argument
from cutex.device.atoms import nibbles
from cutex.device.atoms.mma import SMEM_ALIGN, allocate_slots
from cutex.device.atoms.multicast import Cluster, SharedRing
from cutex.device.atoms.tma import AbLoads
from cutex.device.atoms.wgmma import WARPGROUP, Wgmma, WgmmaProduct
from cutex.device.pipeline import Barrier, PipelineState
from cutex.device.work_tile import WorkTile
from cutex.kernels.gemm.signature import tile_counts, transposed
from cutex.kernels.gemm.sm90.general import Barriers
from cutex.kernels.gemm.sm90.mma import Cooperative, MmaRole
from cutex.kernels.gemm.w4.fragments import Fragments, WeightLoads, allocate_weights, words_of
from cutex.kernels.gemm.w4.signature import W4Signature
from cutex.kernels.gemm.w4.sm90.config import W4Config
from cutex.kernels.gemm.w4.sm90.kernel import W4Gemm, WidenSplitK, block_share
from cutex.problem.w4.layout import BLOCK_K, DEFAULT_ZERO, HALF_K, HALVES
from cutex.schedulers.order import select

DIGITS_BARRIER = 6  # a named barrier of all MMA warps of a CTA
LANES = 32
DIGIT = 7  # bits
PLANES = 8  # digits of an element
CHUNK = 16  # of K, of a word of codes
IN_WORD = (0, 8, 1, 9)  # elements of K of one row, from a thread's first on, in a word of codes
INFINITE = 255  # the exponent of what is not finite
HEADROOM = 24  # powers of two that a block's sums are kept below their value
LEAST = HEADROOM + 2  # exponent of a block, whose scale is then a normal number
# of sums: HEADROOM, less 3 for the position of the first digit and 4 for codes times 16
UNIT = 2.0 ** (HEADROOM - 3 - 4)


# ---- digits


@dataclass(frozen=True)
class Digits:
    """The digits of the x blocks that a CTA multiplies, in smem."""

    sD: cute.Tensor  # (4, LANE, HALF, BLOCK) words of four elements of one digit
    sE: cute.Tensor  # (BLOCK) 2^(exponent - HEADROOM), less than 0 if some are not finite
    mX: cute.Tensor  # (M, K), of which the first row
    first: Int32  # block of x that has the first of these

    @staticmethod
    def allocate(smem: SmemAllocator, blocks: int) -> tuple[cute.Tensor, cute.Tensor]:
        """sD and sE for up to this many blocks."""
        layout = cute.make_layout((4, LANES, HALVES, blocks))
        sD = smem.allocate_tensor(Int32, layout, SMEM_ALIGN)
        return sD, smem.allocate_tensor(Float32, cute.make_layout(blocks), 16)

    def begin(self, count: Int32, warps: int) -> cute.Tensor:
        """Write the digits of the first `warps` blocks, one block per warp; returns the loaded bits
        of each warp's next block (4). All MMA warps call it."""
        held = cute.make_rmem_tensor(len(IN_WORD), Int32)
        for i, bits in enumerate(self.bits(cute.arch.warp_idx())):
            held[i] = bits
        self.write_next(Int32(0), count, held, warps)
        return held

    @cute.jit
    def write_next(
        self, first: Int32, count: Int32, held: cute.Tensor, warps: cutlass.Constexpr[int]
    ) -> None:
        """Write the digits of this warp's block among those from `first` on, whose bits are `held`,
        and load those of its next block into it."""
        block = first + cute.arch.warp_idx()
        if block < count:
            self.write_block(block, [held[i] for i in range(len(IN_WORD))])
            for i, bits in enumerate(self.bits(block + warps)):
                held[i] = bits

    def bits(self, block: Int32) -> list[Int32]:
        """The bits of a lane's four elements of a block, as fp32."""
        lane = cute.arch.lane_idx()
        first = block * BLOCK_K + lane // 4 * CHUNK + 2 * (lane % 4)
        return [bits_of(self.element(first + at)) for at in IN_WORD]

    @cute.jit
    def write_block(self, block: Int32, bits: list[Int32]) -> None:
        """Write the digits of a block, of which each lane has four elements: the ones that share a
        word of codes in a row."""
        lane = cute.arch.lane_idx()
        exponents = [(x >> 23) & 255 for x in bits]
        most, special = Int32(LEAST), Int32(0)
        for e in exponents:
            most = cutlass.max(most, select(e == INFINITE, 0, e))
            special = select(e == INFINITE, 1, special)
        for distance in (1, 2, 4, 8, 16):
            most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, distance))
            special = special | cute.arch.shuffle_sync_bfly(special, distance)
        words = [self.digits(x, e, most) for x, e in zip(bits, exponents, strict=True)]
        half, place, pair = lane // 16, lane // 4 % 4, lane % 4
        for part in cutlass.range_constexpr(2):
            for i, word in enumerate(transposed_bytes([w[part] for w in words])):
                self.sD[place, (4 * part + i) * 4 + pair, half, block] = word
        if lane == 0:
            self.sE[block] = float_of(((most - HEADROOM) << 23) | (special << 31))

    @cute.jit
    def element(self, k: Int32) -> Float32:
        """Element k of these blocks; zero past the end of x."""
        at, value = self.first * BLOCK_K + k, Float32(0.0)
        if at < cute.size(self.mX, mode=[1]):
            value = self.mX[0, at].to(Float32)
        return value

    def digits(self, bits: Int32, exponent: Int32, most: Int32) -> tuple[Int32, Int32]:
        """The eight digits of an element, one byte each, in two's complement: the 8 bits of bf16,
        or 11 of fp16, occupy three neighbouring digits."""
        mantissa = (bits & 0x7FFFFF) | select(exponent == 0, Int32(0), Int32(0x800000))
        exponent = cutlass.max(exponent, 1)
        shift = most - exponent
        first = (shift * 37) >> 8  # shift / DIGIT, of up to 8 * DIGIT
        down = shift - DIGIT * first
        fixed = (mantissa >> 13) << (DIGIT - down)
        sign = bits >> 31  # 0 or -1
        three = Int32(0)
        for i in range(3):
            digit = (fixed >> (DIGIT * (2 - i))) & 127
            three = three | ((((digit ^ sign) - sign) & 255) << (8 * i))
        three = select(shift < DIGIT * PLANES, three, Int32(0))
        return placed(select(exponent == INFINITE, Int32(0), three), cutlass.max(first, 0))


def placed(three: Int32, first: Int32) -> tuple[Int32, Int32]:
    """Three bytes from byte `first` of eight on, as two words; bytes past the last are dropped."""
    by = 8 * (first & 3)
    low, high = three << by, shifted_out(three, by)
    zero = Int32(0)
    return select(first < 4, low, zero), select(first < 4, high, low)


def shifted_out(x: Int32, by: Int32) -> Int32:
    """The bits that x << by (at most 24) shifts out of the word."""
    return Int32((Uint32(x) >> Uint32(31 - by)) >> Uint32(1))


def transposed_bytes(words: list[Int32]) -> list[Int32]:
    """Byte i of each of four words, as word i."""
    prmt = cute.arch.prmt
    a, b = prmt(words[0], words[1], Int32(0x5140)), prmt(words[2], words[3], Int32(0x5140))
    c, d = prmt(words[0], words[1], Int32(0x7362)), prmt(words[2], words[3], Int32(0x7362))
    pairs = ((a, b, 0x5410), (a, b, 0x7632), (c, d, 0x5410), (c, d, 0x7632))
    return [Int32(prmt(x, y, Int32(how))) for x, y, how in pairs]


def bits_of(x: Float32) -> Int32:
    """The bits of an fp32."""
    return Int32(llvm.bitcast(T.i32(), x.ir_value()))


def finite(x: Float32) -> cutlass.Boolean:
    return ((bits_of(x) >> 23) & 255) != INFINITE


def abs_of(x: Float32) -> Float32:
    return cutlass.max(x, -x)


def float_of(bits: Int32) -> Float32:
    """The fp32 of these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value()))


def power_of_two(biased: Int32) -> Float32:
    """2^(biased - 127), of 1 to 254."""
    return float_of(biased << 23)


# ---- mainloop


@dsl_user_op
def integer_mma(
    a: tuple[Int32, ...], b: tuple[Int32, ...], c: tuple[Int32, ...], *, loc=None, ip=None
) -> tuple[Int32, ...]:
    """a (16x32) @ b (32x8) + c of bytes (PTX ISA, "Matrix Fragments for mma.m16n8k32")."""
    values = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b, *c)]
    ptx = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, "
        "{$8, $9}, {$10, $11, $12, $13};"
    )
    kind = llvm.StructType.get_literal([T.i32()] * 4)
    found = llvm.inline_asm(
        kind, values, ptx, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", has_side_effects=False, loc=loc, ip=ip
    )
    return tuple(Int32(llvm.extractvalue(T.i32(), found, [i], loc=loc, ip=ip)) for i in range(4))


@dataclass(frozen=True)
class OneRow:
    """The mainloop: weight blocks times the digits of x."""

    tiles: W4Config
    weights: Fragments
    digits: Digits

    @cute.jit
    def run(
        self, mma: WgmmaProduct, ab: SharedRing, take: PipelineState, count: Int32
    ) -> PipelineState:
        """mma.acc = W @ x^T over `count` blocks from slot `take` on, the first of those that have
        digits; return the state after. All slots are released."""
        total, tiles = mma.acc, self.tiles
        waves = cute.size(total, mode=[1])
        size = cute.size(total) // waves
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        total.fill(0.0)
        sums = cute.make_rmem_tensor(cute.make_layout((4, waves)), Float32)
        sums.fill(0.0)
        digits, warps = self.digits, 4 * tiles.mma_warpgroups
        held = digits.begin(count, warps)
        for block in cutlass.range(count, unroll=1):
            if block % warps == 0:
                cute.arch.barrier(barrier_id=DIGITS_BARRIER, number_of_threads=LANES * warps)
                digits.write_next(block + warps, count, held, warps)
            ab.wait_full(take)
            x = self.loaded(block)
            scale = self.digits.sE[block]
            for wave in cutlass.range_constexpr(waves):
                strip = wave * tiles.mma_warpgroups + wg
                self.add_strip(sums[None, wave], strip, take.slot, x, abs_of(scale))
            if scale < 0.0:
                self.add_special(sums, block, take.slot, wg)
            cute.arch.sync_warp()  # its lanes have read the slot
            ab.release(take)
            take.advance()
        for wave in cutlass.range_constexpr(waves):
            of_rows = put_together(sums[None, wave])
            if cute.arch.lane_idx() % 4 == 0:
                for i in cutlass.range_constexpr(2):
                    total[wave * size + 2 * i] = of_rows[i]
        return take

    def loaded(self, block: Int32) -> cute.Tensor:
        """A thread's digits of a block (4, HALF)."""
        held = cute.make_rmem_tensor(cute.make_layout((4, HALVES)), Int32)
        for half in range(HALVES):
            there = self.digits.sD[None, cute.arch.lane_idx(), half, block]
            cute.autovec_copy(there, held[None, half])
        return held

    def add_strip(
        self, sums: cute.Tensor, strip: Int32, slot: Int32, x: cute.Tensor, scale: Float32
    ) -> None:
        """sums (4) += the block of `strip` in `slot` times digits x (4, HALF), for a thread's two
        rows and two digits."""
        weights = self.weights
        found: tuple[Int32, ...] = (Int32(0),) * 4
        rows = self.scales(strip, slot)
        for half in range(HALVES):
            codes = weights.codes(strip, half, slot)
            for i in range(0, 4, 2):
                a = *signed(codes[i]), *signed(codes[i + 1])
                found = integer_mma(a, (x[i, half], x[i + 1, half]), found)
        for i in range(4):
            sums[i] = sums[i] + (found[i].to(Float32) * scale) * rows[i // 2]

    def scales(self, strip: Int32, slot: Int32) -> list[Float32]:
        """The scales of a thread's two rows."""
        weights = self.weights
        if not weights.format.group:
            return [Float32(1.0)] * 2
        return weights.both(weights.factors(strip, slot).scales[0])

    @cute.jit
    def add_special(self, sums: cute.Tensor, block: Int32, slot: Int32, wg: Int32) -> None:
        """sums (4, WAVE) += the block in `slot` times those elements of x that are not finite.

        NOTE: each is multiplied as it is, so that an infinity times a zero weight is a NaN.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() % 4
        for k in cutlass.range(BLOCK_K, unroll=1):
            value = self.digits.element(block * BLOCK_K + k)
            if not finite(value):
                half, i, at = k // HALF_K, k % HALF_K // CHUNK, k % CHUNK
                thread = LANES * warp + lane // 4 * 4 + at % 8 // 2
                shift = 8 * (at // 8) + 16 * (at % 2)
                for wave in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                    strip = wave * self.tiles.mma_warpgroups + wg
                    word = self.weights.sW[half * 4 * WARPGROUP + 4 * thread + i, strip, slot]
                    rows = self.scales(strip, slot)
                    for row in cutlass.range_constexpr(2):
                        code = ((word >> (shift + 4 * row)) & 15) - DEFAULT_ZERO
                        if lane % 4 == 0:
                            sums[2 * row, wave] += code.to(Float32) * rows[row] * value


def signed(word: Int32) -> tuple[Int32, Int32]:
    """The eight codes of a word minus 8, times 16, as bytes: those of a thread's first row, and of
    the row 8 below."""
    high, top = 0xF0F0F0F0 - (1 << 32), 0x80808080 - (1 << 32)
    return nibbles.turned(word << 4, high, top), nibbles.turned(word, high, top)


@cute.jit
def put_together(sums: cute.Tensor) -> cute.Tensor:
    """The sums of two rows (2), combined from those of a thread's two digits of each (4)."""
    first = cute.arch.lane_idx() % 4 * (2 * DIGIT)
    weight = power_of_two(127 - first) * UNIT
    found = cute.make_rmem_tensor(2, Float32)
    for i in cutlass.range_constexpr(2):
        value = (sums[2 * i] + sums[2 * i + 1] * 2.0**-DIGIT) * weight
        for distance in (1, 2):
            value = value + cute.arch.shuffle_sync_bfly(value, distance)
        found[i] = value
    return found


# ---- kernel


class NoLoads(NamedTuple):
    """The loads of an x that threads read: none."""

    def load(self, k_tile: Int32, slot: Int32, full: cute.Pointer) -> None:
        """Do nothing."""

    def prefetch(self, k_tile: Int32) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class WeightOperand:
    """The weight with its slots; x is read by threads."""

    mW: cute.Tensor  # (STRIP, RestK, WORDS)
    sW: cute.Tensor  # (WORDS, STRIP, SLOT)
    mX: cute.Tensor  # (M, K)
    b = None

    @property
    def num_k_tiles(self) -> Int32:
        return cute.size(self.mW, mode=[1])

    @cute.jit
    def loads(self, tile: WorkTile, cluster: cutlass.Constexpr[Cluster]) -> AbLoads:
        """The loads that this CTA starts for `tile`: its strips."""
        first = tile.m * cute.size(self.sW, mode=[1])
        return AbLoads(WeightLoads(self.mW, self.sW, first), NoLoads())


class W4OneRow:
    """W4Gemm for one row of x and one tile for each CTA. The MMA warps write x as digits, one block
    each, under the loads of as many blocks before.

    Barriers and roles are W4Gemm's, and named barrier 6: all MMA warps, having written digits of as
    many blocks as there are warps. In place of its sX:

    smem            bytes
    sD, sE          1028 * digits: of each block of x that this CTA multiplies
    """

    arch = W4Gemm.arch
    dtypes = W4Gemm.dtypes

    def __init__(self, config: W4Signature) -> None:
        self.config, self.any_rows = config, W4Gemm(config)
        self.tiles, self.general = self.any_rows.tiles, self.any_rows.general

    @property
    def name(self) -> str:
        return "sm90_gemm_w4_one_row"

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return self.any_rows.operands(dtype)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mOut: cute.Tensor, *rest) -> None:
        """Launch with x (1, K), the packed weight (STRIP, RestK, WORDS), out (1, N), the
        operations' arguments and a stream."""
        mW = words_of(mW)
        *passed, stream = rest
        g = self.general
        mOut = transposed(mOut)
        out, rows, given = g.stored(mOut, tuple(passed))
        g.start(self.kernel(mW, mX, out, rows, given), mOut, stream)

    @cute.kernel
    def kernel(
        self,
        mW: cute.Tensor,
        mX: cute.Tensor,
        out: Any,
        rows: cute.Tensor | None,
        passed: tuple[Any, ...],
    ) -> None:
        """Run the roles; `out`, `rows` and `passed` are the general kernel's."""
        c, g = self.tiles, self.general
        smem = SmemAllocator()
        sW = allocate_weights(smem, c.format, c.strips, c.num_stages)  # (WORDS, STRIP, SLOT)
        mOut, sC = out, None
        if cutlass.const_expr(self.config.out.tma):
            mOut = out.tma_tensor
            sC = allocate_slots(smem, out.atom.value_type, out.smem_layout)  # (64, epiN, SLOT)
        mProduct = g.config.product(mOut)
        sD, sE = Digits.allocate(smem, c.digits)
        barriers = Barriers.allocate(smem, g)
        own = self.any_rows.own_sums(smem)
        operands = WeightOperand(mW, sW, mX)
        walk = g.scheduler.walk(tile_counts(c, mProduct))
        prepare = partial(self.prepare_row, operands, (sD, sE), barriers.sums, own, walk.split)
        g.run(
            self.any_rows.load_role, operands, barriers, prepare, mProduct, (out, sC, rows, passed)
        )

    def prepare_row(
        self,
        operands: WeightOperand,
        smem: tuple[cute.Tensor, cute.Tensor],
        sums: Barrier | None,
        own: cute.Tensor | None,
        split: Int32 | int,
    ) -> tuple[MmaRole, WgmmaProduct]:
        """The MMA role, and this warpgroup's part of W @ x^T, once the digits have been written.
        The MMA warps call it."""
        g, c, blocks = self.general, self.tiles, operands.num_k_tiles
        cute.arch.griddepcontrol_wait()  # the kernel before may write x
        first, _ = block_share(c, split, blocks)
        digits = Digits(*smem, operands.mX, Int32(first))
        kind = operands.mX.element_type
        loop = OneRow(c, Fragments(operands.sW, c.format, kind, True), digits)
        mma = Wgmma(c.tile_n, kind, warpgroups=c.mma_warpgroups)
        product = WgmmaProduct(mma, None, None, mma.accumulator(c.tile_m, c.tile_n))
        what = g.config, c, g.scheduler
        if sums is not None:
            return WidenSplitK(*what, g.cluster, sums, own, blocks, own=loop), product
        return Cooperative(*what, own=loop), product

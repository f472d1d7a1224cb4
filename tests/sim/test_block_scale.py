"""Block-scaled tcgen05.mma against products in float64: small values and factors, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from multiplications import B_AT, SMEM, Mma, operand
from operands import FORMATS, Layout, packed, small_integers
from tensor_maps import swizzled

from cutex.sim import BadOperand, Hazards, UnknownInstruction

FOURS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FACTOR_CODES = {"ue8m0": 1, "ue4m3": 0}
FACTOR_TYPES = {"ue8m0": ml_dtypes.float8_e8m0fnu, "ue4m3": ml_dtypes.float8_e4m3fn}
FACTOR_VALUES = {"ue8m0": [0.25, 0.5, 1, 2, 4], "ue4m3": [0.5, 0.75, 1, 1.5, 2, 3]}


@dataclass
class Scaled(Mma):
    """A block-scaled MMA; 4-bit operands are given as layouts of bytes, two elements in each."""

    kind: str = "mxf8f6f4"
    vector: str = ".scale_vec::1X"
    factors: str = "ue8m0"
    count: int = 1  # factors per row
    a_byte: int = 0  # of the word that holds them
    b_byte: int = 0

    @property
    def four_bits(self) -> bool:
        return self.kind != "mxf8f6f4"

    @property
    def k(self) -> int:
        return 64 if self.four_bits else 32

    @property
    def a_factors_at(self) -> int:
        return -(-(self.column + self.n) // 4) * 4

    @property
    def b_factors_at(self) -> int:
        return self.a_factors_at + 4

    @property
    def width(self) -> int:
        return -(-(self.b_factors_at + 8) // 32) * 32

    @property
    def idesc(self) -> int:
        code = 1 if self.four_bits else {"e4m3": 0, "e5m2": 1}[self.b.kind]
        value = self.b_byte << 4 | code << 7 | code << 10 | self.negate << 13
        value |= self.b.mn_major << 16 | FACTOR_CODES[self.factors] << 23 | self.a_byte << 29
        if isinstance(self.a, Layout):
            value |= self.a.mn_major << 15
        return value | self.n >> 3 << 17 | self.m >> 7 << 27

    def codes(self, rows: int, seed: int) -> np.ndarray:
        """Random elements (rows, K): 4-bit codes, or small integers."""
        if self.four_bits:
            return np.random.default_rng(seed).integers(0, 16, (rows, 64))
        return small_integers(self.b.kind, (rows, 32), seed)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return np.where(codes & 8, -1, 1) * FOURS[codes & 7] if self.four_bits else codes

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The codes of A and B, and D before the MMA."""
        c = np.random.default_rng(self.seed + 2).integers(-64, 64, (self.m, self.n))
        return self.codes(self.m, self.seed), self.codes(self.n, self.seed + 1), c

    def drawn(self, rows: int, seed: int) -> np.ndarray:
        draw = np.random.default_rng(seed)
        return draw.choice(FACTOR_VALUES[self.factors], (rows, self.count))

    @property
    def scales(self) -> tuple[np.ndarray, np.ndarray]:
        return self.drawn(self.m, self.seed + 3), self.drawn(self.n, self.seed + 4)

    def shared(self) -> np.ndarray:
        if not self.four_bits:
            return super().shared()
        a, b, _ = self.values()
        images = np.zeros((self.group, SMEM), np.uint8)
        for cta, image in enumerate(images):
            for layout, codes in ((self.a, a), (self.b, b)):
                mine = codes.reshape(self.group, -1, 64)[cta]
                layout.put(image, mine[:, ::2] | mine[:, 1::2] << 4)
        return images

    def tensor_memory(self) -> np.ndarray:
        t = super().tensor_memory()
        junk = np.random.default_rng(9).integers(0, 1 << 32, (32, 12), np.uint32)
        t[:, :, self.a_factors_at : self.a_factors_at + 12] = np.tile(junk, (4, 1))
        a, b = self.scales
        rows = self.m // self.group
        for cta in range(self.group):
            self.put(t[cta], self.a_factors_at, self.a_byte, a[cta * rows :][:rows])
            self.put(t[cta], self.b_factors_at, self.b_byte, b, self.group == 2 and rows == 64)
        return t

    def put(
        self, t: np.ndarray, column: int, byte: int, factors: np.ndarray, halves: bool = False
    ) -> None:
        """Write factors to all four quarters of the lanes of ``t`` (128, columns); for a pair with
        M = 128 the first half of B to the first two quarters, the second half to the others.
        """
        raw = factors.astype(FACTOR_TYPES[self.factors]).view(np.uint8).astype(np.uint32)
        below = self.n // 2 if halves else len(factors)
        for row, mine in enumerate(raw):
            first = row // below * 2
            for quarter in range(first, first + 2 if halves else 4):
                at = row % below % 32 + 32 * quarter, column + row % below // 32
                for g, value in enumerate(mine.tolist()):
                    shift = 8 * (byte + g)
                    t[at] = int(t[at]) & ~(0xFF << shift) & 0xFFFFFFFF | value << shift

    def text(self) -> str:
        plain = f"kind::{'i8' if self.four_bits else 'f8f6f4'}"
        places = f"""
            add.u32 %r24, %r12, {self.a_factors_at | self.a_byte << 30};
            add.u32 %r25, %r12, {self.b_factors_at | self.b_byte << 30};
        """
        scaled = f"kind::{self.kind}.block_scale{self.vector}"
        text = super().text().replace(plain, scaled)
        return places + text.replace("%r23, %p4", "%r23, [%r24], [%r25], %p4")

    def want(self) -> np.ndarray:
        a, b, c = self.values()
        sa, sb = (np.repeat(s, self.k // self.count, 1) for s in self.scales)
        sign = -1 if self.negate in (1, 2) else 1
        product = (self.numbers(a) * sa) @ (self.numbers(b) * sb).T
        return sign * product + (c if self.accumulate else 0)


NEXT = 16384  # from an operand to the rows of 128 bytes in which its rows go on


@dataclass
class Long(Scaled):
    """A 4-bit MMA of K = 96: 48 bytes of a row from the ``first`` of its eight chunks on, which may
    go on in other rows of 128 bytes; 3 or 6 factors, which go on in the words behind.
    """

    first: int = 0
    arch: str = "sm_103a"

    @property
    def k(self) -> int:
        return 96

    @property
    def idesc(self) -> int:
        return super().idesc | 1 << 31

    @property
    def b_factors_at(self) -> int:
        return self.a_factors_at + 8

    @property
    def width(self) -> int:
        return -(-(self.b_factors_at + 2 * -(-self.n // 32)) // 32) * 32

    def codes(self, rows: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 16, (rows, 96))

    def shared(self) -> np.ndarray:
        a, b, _ = self.values()
        images = np.zeros((self.group, SMEM), np.uint8)
        for cta, image in enumerate(images):
            for layout, codes in ((self.a, a), (self.b, b)):
                mine = codes.reshape(self.group, -1, 96)[cta]
                row, byte = np.arange(len(mine))[:, None], 16 * self.first + np.arange(48)
                at = layout.start + row * 128 + byte + np.where(byte < 128, 0, NEXT - 128)
                image[swizzled(at, 128)] = mine[:, ::2] | mine[:, 1::2] << 4
        return images

    def put(
        self, t: np.ndarray, column: int, byte: int, factors: np.ndarray, halves: bool = False
    ) -> None:
        raw = factors.astype(FACTOR_TYPES[self.factors]).view(np.uint8)
        words = -(-len(raw) // 32)
        t[:, column : column + 2 * words] = 0x7F7F7F7F
        cells = t.view(np.uint8).reshape(*t.shape, 4)
        for row, mine in enumerate(raw):
            for place, value in enumerate(mine.tolist(), byte):
                at = column + row // 32 + words * (place // 4)
                cells[row % 32 :: 32, at, place % 4] = value

    def text(self) -> str:
        text = super().text()
        for register, layout in (("%d2", self.a), ("%d3", self.b)):
            given = f"or.b64 {register}, {register}, {layout.descriptor('sm_100a')};"
            assert given in text
            text = text.replace(
                given,
                f"""{given}
                add.u64 {register}, {register}, {self.first | 1 << 52};
                add.u32 %r26, %r0, {layout.start + NEXT};
                shl.b32 %r26, %r26, 12;
                cvt.u64.u32 %d4, %r26;
                or.b64 {register}, {register}, %d4;""",
            )
        return text


def eight(n: int, group: int = 1, kind: str = "e4m3", **how) -> Scaled:
    a = operand(kind, mn_major=how.pop("a_mn", False))
    b = packed(kind, 128, how.pop("b_mn", False), B_AT, n // group)
    return Scaled(a, b, how.pop("m", 128 * group), n, group, seed=n, **how)


def four(kind: str, count: int, n: int, group: int = 1, **how) -> Scaled:
    a, b = operand("u8"), packed("u8", 128, start=B_AT, rows=n // group)
    how = {"vector": f".scale_vec::{count}X", **how}
    m = how.pop("m", 128 * group)
    return Scaled(a, b, m, n, group, kind=kind, count=count, seed=n, **how)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("n", "group"), [(8, 1), (72, 1), (256, 1), (64, 2), (256, 2)])
def test_8_bit_operands_have_a_factor_per_row(kind, n, group):
    eight(n, group, kind).check()


@pytest.mark.parametrize("n", [64, 192, 256])
def test_a_pair_with_m_128_has_the_factors_of_each_half_of_b_in_half_of_the_lanes(n):
    eight(n, 2, m=128).check()
    four("mxf4nvf4", 4, n, 2, m=128, factors="ue4m3").check()
    four("mxf4", 2, n, 2, m=128, b_byte=2).check()


@pytest.mark.parametrize(("a_byte", "b_byte"), [(1, 0), (0, 2), (3, 3)])
def test_the_descriptor_names_the_byte_of_a_factor(a_byte, b_byte):
    eight(64, a_byte=a_byte, b_byte=b_byte).check()


@pytest.mark.parametrize(("a_mn", "b_mn"), [(True, False), (False, True)])
def test_8_bit_operands_may_be_mn_major(a_mn, b_mn):
    eight(64, a_mn=a_mn, b_mn=b_mn).check()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
@pytest.mark.parametrize(("n", "group"), [(8, 1), (136, 1), (256, 2)])
@pytest.mark.parametrize(("a_byte", "b_byte"), [(0, 0), (2, 0), (0, 2)])
def test_4_bit_operands_with_two_factors_per_row(kind, n, group, a_byte, b_byte):
    four(kind, 2, n, group, a_byte=a_byte, b_byte=b_byte).check()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("factors", FACTOR_CODES)
@pytest.mark.parametrize(("n", "group"), [(8, 1), (192, 1), (256, 1), (256, 2)])
def test_4_bit_operands_with_four_factors_per_row(factors, n, group):
    four("mxf4nvf4", 4, n, group, factors=factors).check()


@pytest.mark.parametrize(
    ("kind", "count", "vector"),
    [("mxf4", 2, ".block32"), ("mxf4", 2, ""), ("mxf4nvf4", 4, ".block16"),
     ("mxf4nvf4", 2, ".block32")],
)  # fmt: skip
def test_blocks_may_be_named_by_their_size(kind, count, vector):
    four(kind, count, 64, vector=vector).check()
    eight(64, vector=".block32").check()


@pytest.mark.parametrize("how", [{"accumulate": 0}, {"negate": 1}, {"negate": 3}])
def test_without_accumulation_and_with_negation(how):
    four("mxf4nvf4", 4, 64, **how).check()


def test_factors_that_are_not_in_both_quarters_of_their_half_are_found():
    case = four("mxf4nvf4", 4, 128, 2, m=128)
    t = case.tensor_memory()
    t[1, 102, case.b_factors_at + 1] ^= 0x100  # of the second half of B
    with pytest.raises(Hazards, match=r"of row 102, .* differ between the two quarters"):
        case.run(t)


def test_factors_that_are_not_in_every_quarter_of_the_lanes_are_found():
    case = four("mxf4nvf4", 4, 64)
    t = case.tensor_memory()
    t[0, 70, case.b_factors_at + 1] ^= 0x100
    with pytest.raises(Hazards, match=r"scale factors of row 38, .* differ between the four quart"):
        case.run(t)


def test_a_copy_of_factors_is_in_order_with_the_mma_that_takes_them():
    """tcgen05.cp.32x128b.warpx4 fills all four quarters: 128 rows of four factors."""
    case = four("mxf4nvf4", 4, 64, factors="ue4m3")
    before = case.tensor_memory()
    want = case.run(before)
    words = before[0, :32, case.a_factors_at : case.a_factors_at + 4]
    images = case.shared()
    Layout("u8", sbo=128, lbo=128, start=SMEM - 1024).put(images[0], words.copy().view(np.uint8))
    case.shared = lambda: images  # type: ignore[method-assign]
    text = case.text()
    copy = f"""
        add.u32 %r21, %r0, {SMEM - 1024}; bfe.u32 %r21, %r21, 4, 14; cvt.u64.u32 %d4, %r21;
        or.b64 %d4, %d4, {Layout("u8", sbo=128, lbo=128).descriptor("sm_100a")};
        @%p3 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %d4;
    """
    at = text.index("@%p3 tcgen05.mma")
    case.text = lambda: text[:at] + copy + text[at:]  # type: ignore[method-assign]
    before[:, :, case.a_factors_at : case.a_factors_at + 4] = 0
    np.testing.assert_array_equal(case.run(before), want)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("case", "error", "sentence"),
    [
        (eight(64, kind="e4m3", vector=".scale_vec::4X"), UnknownInstruction, "vector size"),
        (four("mxf4", 2, 64, b_byte=1), BadOperand, "2 scale factors per row from byte 1"),
        (four("mxf4nvf4", 2, 64, factors="ue4m3"), BadOperand, "of type ue4m3: takes 4"),
        (four("mxf4", 2, 64, factors="ue4m3"), BadOperand, "does not define for kind::mxf4"),
        (eight(64, vector=".scale_vec::2X"), UnknownInstruction, "scale vector size"),
        (four("mxf4nvf4", 2, 64, vector=""), UnknownInstruction, "scale vector size"),
        (eight(24, 2), BadOperand, r"M=256, N=24 .* takes M in \(128, 256\), N in steps of 16"),
        (eight(96, 2, m=128), BadOperand, r"M=128, N=96 .* N in steps of 64"),
    ],
)  # fmt: skip
def test_what_hardware_does_not_take(case, error, sentence):
    with pytest.raises(error, match=sentence):
        case.run()


def test_formats_hold_what_is_drawn():
    assert (FOURS.astype(ml_dtypes.float4_e2m1fn).astype(float) == FOURS).all()
    assert set(FORMATS) >= {"e4m3", "e5m2"}
    for name, values in FACTOR_VALUES.items():
        assert (np.array(values) == np.array(values).astype(FACTOR_TYPES[name]).astype(float)).all()


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("count", "factors", "a_byte", "b_byte"),
    [(6, "ue4m3", 0, 0), (6, "ue8m0", 2, 2), (3, "ue8m0", 0, 0), (3, "ue8m0", 2, 3)],
)
@pytest.mark.parametrize(("first", "n", "group"), [(0, 128, 1), (3, 64, 1), (6, 128, 2)])
def test_4_bit_operands_with_a_k_of_96(count, factors, a_byte, b_byte, first, n, group):
    """Chunk 6 of 8: a row goes on elsewhere."""
    a, b = packed("u8", 128), packed("u8", 128, start=B_AT, rows=n // group)
    kind, vector = ("mxf4nvf4", ".block16") if count == 6 else ("mxf4", ".block32")
    Long(
        a, b, 128 * group, n, group, kind=kind, vector=vector, count=count, factors=factors,
        a_byte=a_byte, b_byte=b_byte, first=first, seed=n,
    ).check()  # fmt: skip


def test_a_k_of_96_is_of_sm_103a_only():
    with pytest.raises(BadOperand, match="does not define for kind::mxf4"):
        Long(
            packed("u8", 128), packed("u8", 128, start=B_AT, rows=64), 128, 64, kind="mxf4",
            vector=".block32", count=3, arch="sm_100a",
        ).check()  # fmt: skip

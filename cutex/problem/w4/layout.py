"""The format of a weight of 4 bits, and its layout in memory.

A weight (N, K) is cut into strips of 64 rows, and these into blocks of 128 of K, padded. A strip's
blocks are contiguous, and a block is one TMA copy:

    codes    4096 bytes: for each half of K, for each of the 128 threads of a warpgroup, 16 bytes,
             its registers of operand A of four wgmmas of 64x16 (PTX ISA, "Register Fragments for
             wgmma.mma_async"), a word for each wgmma: nibble i is the low half of register i,
             nibble i + 4 the high half; of fp4 for bf16 the bits of a word lie in E2M1_PLACES
    scales   16 bits for each row and group of K: for each of 32 pairs of rows that a thread holds,
             8 apart, a word for each group, the first row's in the low half
    zeros    the same, if there are any

Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

STRIP, BLOCK_K = 64, 128  # rows and elements of K of a block
HALF_K, HALVES = 64, 2  # of K that a thread's 16 bytes of codes hold
CODE_WORDS = STRIP * BLOCK_K // 8  # of 32 bits
PAIRS = STRIP // 2
THREADS = 128
KINDS = ("int4", "fp4")
GROUPS = (0, 16, 32, 64, 128)  # elements of K that share a scale; 0: none in the block


@dataclass(frozen=True)
class W4Format:
    """What a block of a packed weight holds.

    int4: codes 0 to 15, of which `zero` counts as 0, or each group's own with `zeros`. fp4: e2m1.
    """

    kind: str = "int4"
    group: int = 128
    zeros: bool = False

    @property
    def groups(self) -> int:
        """The groups in a block."""
        return BLOCK_K // self.group if self.group else 0

    @property
    def factor_words(self) -> int:
        """The words of a block's scales."""
        return PAIRS * self.groups

    @property
    def words(self) -> int:
        """The words of 32 bits of a block."""
        return CODE_WORDS + self.factor_words * (2 if self.zeros else 1)

    def why_not(self) -> str | None:
        """The reason why there is no such format, or None."""
        if self.kind not in KINDS:
            return f"kind={self.kind!r} is not one of {', '.join(KINDS)}"
        if self.group not in GROUPS:
            return f"group={self.group} is not one of {', '.join(map(str, GROUPS))}"
        if self.zeros and (self.kind != "int4" or not self.group):
            return "zeros: int4 with groups has them"
        return None

    def bytes(self, n: int, k: int) -> int:
        """The bytes of a packed weight (n, k)."""
        return -(-n // STRIP) * -(-k // BLOCK_K) * self.words * 4


def word_dtype(of: W4Format, dtype: str) -> str:
    """The type of the words of a weight packed for activations of `dtype`.

    fp4 for bfloat16 had two layouts, whose words were int32 both: those of today's are of another
    type, so that words are never read in a layout that is not theirs, whatever stands beside them.
    """
    return "uint32" if _had_two_layouts(of, dtype) else "int32"


def _had_two_layouts(of: W4Format, dtype: str) -> bool:
    return of.kind == "fp4" and dtype == "bf16"


def why_not_version(version: int, of: W4Format, dtype: str) -> str | None:
    """The reason why a weight packed in that version of the layout, for activations of `dtype`, is
    not read; None if it is."""
    if (FP4_VERSION if _had_two_layouts(of, dtype) else 0) <= version <= LAYOUT_VERSION:
        return None
    again = "pack the weight again with cutex.pack_w4"
    if version:
        return f"it is packed in layout version {version}, not {LAYOUT_VERSION}: {again}"
    return f"it has no layout version, and of fp4 for bfloat16 there were two layouts: {again}"


# a code's value is its bits, put where a float of 16 bits has them, times this: e2m1 has the
# exponent 0 where the float has that of its least normal number
E2M1_UNIT = {"bf16": 126, "fp16": 14}  # 2 to its power
# where a word of fp4 for bf16 has the bits of its nibbles: a shift, or a rotation, brings a pair of
# codes to the sign, the exponent and the mantissa of two bf16, and a mask is all that is left
_OF_HALF = (0, 1, 2, 9, 4, 5, 6, 13, 10, 11, 12, 19, 14, 7, 8, 15)
E2M1_PLACES = tuple((place + half) % 32 for half in (0, 16) for place in _OF_HALF)
# of the places above and below, kept with what is packed: a change to them counts it up. Until it
# was kept (0) there were two layouts of fp4 for bf16, in E2M1_PLACES and as nibbles; 1 is the first
# of these, in words of int32, and 2 in words of a type of theirs (word_dtype). From 3 on integers'
# scales for bf16 are at most TOP_SCALE, with a factor for each row. All else is alike
LAYOUT_VERSION = 3
FP4_VERSION = 2  # the first with today's layout of fp4 for bf16
# an integer is or-ed into the mantissa of a float whose unit is 1
INTEGER_BASE = {"bf16": 128, "fp16": 1024}
DEFAULT_ZERO = 8
# the largest scale of integers for bf16 beside which kernels need no factor of a row
TOP_SCALE = 2.0**8

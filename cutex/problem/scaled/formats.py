"""The formats of a scaled operand: elements, and how many of them share a scale factor.

A row of an operand is a row of the MMA, along K. Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutex.dtypes import DTYPES, DType

# the largest value of each element type, and the exponent of its leading bit
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
SWIZZLE_ROWS, SWIZZLE_FACTORS = 128, 4  # of a tile of the swizzled layout of scale factors


@dataclass(frozen=True)
class Format:
    """Elements, and a scale factor for each `block` (rows, elements of K) of them."""

    name: str
    element: str  # a name in cutex.dtypes.DTYPES
    scale: str  # the type of a scale factor
    block: tuple[int, int]  # 0: all of that side
    tensor_scale: bool = False  # whether the scale factors have one of their own, in fp32
    least: float = 0.0  # what the largest value of a block counts as at least, with fp32 factors

    def __str__(self) -> str:
        return self.name

    @property
    def dtype(self) -> DType:
        return DTYPES[self.element]

    @property
    def largest(self) -> float:
        """The largest value of an element."""
        return LARGEST[self.element]

    @property
    def swizzled(self) -> bool:
        """Whether a tensor core reads the scale factors, in the 128x4 layout (layouts.py)."""
        return self.scale != "fp32"

    def factors(self, rows: int, k: int) -> tuple[int, int]:
        """The numbers of scale factors along the rows and along K; a last block may be shorter."""
        return _blocks(rows, self.block[0]), _blocks(k, self.block[1])

    def stored_factors(self, rows: int, k: int) -> int:
        """The number of scale factors in memory, with the padding of the swizzled layout."""
        down, along = self.factors(rows, k)
        if not self.swizzled:
            return down * along
        tiles = -(-down // SWIZZLE_ROWS) * -(-along // SWIZZLE_FACTORS)
        return tiles * SWIZZLE_ROWS * SWIZZLE_FACTORS

    def bytes(self, rows: int, k: int) -> int:
        """The bytes of an operand (rows, k) with its scale factors."""
        factors = DTYPES[self.scale].bytes(self.stored_factors(rows, k))
        return self.dtype.bytes(rows * k) + factors + (4 if self.tensor_scale else 0)


def _blocks(size: int, block: int) -> int:
    return -(-size // block) if block else 1


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("mxfp8", "e4m3", "e8m0", (1, 32)),
        Format("mxfp8_e5m2", "e5m2", "e8m0", (1, 32)),
        Format("mxfp4", "e2m1", "e8m0", (1, 32)),
        Format("nvfp4", "e2m1", "e4m3", (1, 16), tensor_scale=True),
        # `least` as in DeepGEMM's casts and, of whole rows and tensors, as in torchao's
        Format("fp8_1x128", "e4m3", "fp32", (1, 128), least=1e-4),
        Format("fp8_128x128", "e4m3", "fp32", (128, 128), least=1e-4),
        Format("fp8_row", "e4m3", "fp32", (1, 0), least=1e-12),
        Format("fp8_tensor", "e4m3", "fp32", (0, 0), least=1e-12),
    )
}


class Recipe(NamedTuple):
    """The formats of A and B in a scaled GEMM."""

    a: Format
    b: Format


def _recipe(a: str, b: str) -> Recipe:
    return Recipe(FORMATS[a], FORMATS[b])


# by the name that is a problem's dtype; the first ones are read by tensor cores with their scale
# factors (Blackwell), the others are scaled in fp32
BLOCK_SCALED: dict[str, Recipe] = {
    "mxfp8": _recipe("mxfp8", "mxfp8"),
    "mxfp8_e5m2": _recipe("mxfp8_e5m2", "mxfp8"),
    "mxfp4": _recipe("mxfp4", "mxfp4"),
    "nvfp4": _recipe("nvfp4", "nvfp4"),
    "mxfp8_mxfp4": _recipe("mxfp8", "mxfp4"),
    "mxfp4_mxfp8": _recipe("mxfp4", "mxfp8"),
}
FP32_SCALED: dict[str, Recipe] = {
    "fp8_block": _recipe("fp8_1x128", "fp8_128x128"),  # activations by weights, as DeepSeek-V3
    "fp8_1x128": _recipe("fp8_1x128", "fp8_1x128"),  # a weight's gradient
    "fp8_row": _recipe("fp8_row", "fp8_row"),
    "fp8_tensor": _recipe("fp8_tensor", "fp8_tensor"),
}
RECIPES: dict[str, Recipe] = BLOCK_SCALED | FP32_SCALED


def format_named(name: object) -> Format:
    """The format of that name; ValueError for one that cutex does not have."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]

"""Element types: one record each, with the names that torch, the DSL and PTX have for it.

Sizes are counted in elements and converted here, because two of fp4 share a byte and a scale factor
belongs to a block of elements. Importing this loads neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """An element type. `packed` elements share one element of the torch type."""

    name: str
    bits: int
    torch_name: str
    dsl_name: str
    ptx: str
    packed: int = 1

    def __str__(self) -> str:
        return self.name

    def bytes(self, elements: int) -> int:
        """Return the bytes of so many elements. Raises ValueError if they do not fill the last
        byte."""
        if elements * self.bits % 8:
            raise ValueError(f"{elements} elements of {self.name} are no whole number of bytes")
        return elements * self.bits // 8

    def elements(self, num_bytes: int) -> int:
        """The number of elements that fit into so many bytes."""
        return num_bytes * 8 // self.bits

    @property
    def torch(self) -> torch.dtype:
        """The torch type; loads torch. Raises AttributeError if this torch does not have it."""
        import torch

        return getattr(torch, self.torch_name)

    @property
    def dsl(self) -> Any:
        """The DSL's numeric type; loads the DSL."""
        import cutlass

        return getattr(cutlass, self.dsl_name)


DTYPES: dict[str, DType] = {
    t.name: t
    for t in (
        DType("fp32", 32, "float32", "Float32", "f32"),
        DType("bf16", 16, "bfloat16", "BFloat16", "bf16"),
        DType("fp16", 16, "float16", "Float16", "f16"),
        DType("e4m3", 8, "float8_e4m3fn", "Float8E4M3FN", "e4m3"),
        DType("e5m2", 8, "float8_e5m2", "Float8E5M2", "e5m2"),
        DType("e8m0", 8, "float8_e8m0fnu", "Float8E8M0FNU", "ue8m0"),  # scale factors
        DType("e2m1", 4, "float4_e2m1fn_x2", "Float4E2M1FN", "e2m1", packed=2),
        DType("uint8", 8, "uint8", "Uint8", "u8"),  # bytes of packed elements
        DType("int32", 32, "int32", "Int32", "s32"),
        DType("uint32", 32, "uint32", "Uint32", "u32"),  # words of packed elements
        DType("int64", 64, "int64", "Int64", "s64"),
        DType("uint8", 8, "uint8", "Uint8", "u8"),  # bytes of packed elements
    )
}


def of_torch(given: torch.dtype) -> DType | None:
    """The record of a torch type; None for one that is not in DTYPES."""
    return _BY_TORCH_NAME.get(str(given).removeprefix("torch."))


_BY_TORCH_NAME = {t.torch_name: t for t in DTYPES.values()}

"""An operand of a GEMM in memory: its argument, and that of its scale factors."""

from __future__ import annotations

import pytest

from cutex.compile import Operand
from cutex.kernels.gemm.layouts import FactorLayout, OperandLayout


def test_elements_of_4_bits_are_bytes_of_two_along_k() -> None:
    a, b = OperandLayout("e2m1", whole=True), OperandLayout("e2m1", "column", batched=True)
    assert a.argument("a", "m", "k", "la") == Operand("a", ("m", "half_k"), "uint8")
    passed = b.argument("b", "k", "n", "lb")
    assert passed == Operand("b", ("lb", "half_k", "n"), "uint8", contiguous=-2, whole=False)


@pytest.mark.parametrize(
    ("layout", "batched", "expected"),
    [
        (None, True, ()),
        (FactorLayout(), False, (("m", "kb"), "fp32", -2, True)),
        (FactorLayout(), True, (("l", "m", "kb"), "fp32", -2, True)),
        (FactorLayout(rows=128), True, (("l", "mb", "kb"), "fp32", None, False)),
        (FactorLayout(swizzled=True), False, (("l", "chunks_m", "chunks_k", "words"), "int32")),
    ],
)
def test_factors_are_rows_blocks_or_words(layout, batched, expected) -> None:
    found = OperandLayout("e4m3", batched=batched, scales=layout).factors("a", "m", "l")
    assert len(found) == bool(expected)
    for operand in found:
        fields = operand.sizes, operand.dtype, operand.contiguous, operand.aligned
        assert fields[: len(expected)] == expected

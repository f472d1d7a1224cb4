"""torchao's MXTensor and NVFP4Tensor in `cutex.matmul`, `scaled_mm` and `pack_w4`.

torchao is not installed: stand-ins have the attributes of its classes, of newer versions
(torchao/prototype/mx_formats, 2026) and of older ones, and no operation but a transposition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutex
from cutex import ops
from cutex.ops.torchao_tensors import is_torchao, quantized
from cutex.problem.scaled import layouts, quantization
from cutex.problem.scaled.formats import FORMATS


@dataclass
class Newer:
    """The attributes of an MXTensor or NVFP4Tensor, as newer versions name them."""

    qdata: Tensor
    scale: Tensor
    block_size: int
    is_swizzled_scales: bool
    per_tensor_scale: Tensor | None = None

    def t(self) -> Newer:
        """As torchao's: elements and, in two dimensions, scales are transposed views."""
        scale = self.scale.t() if self.scale.dim() == 2 else self.scale
        return replace(self, qdata=self.qdata.t(), scale=scale)


class OlderNvfp4:
    """The attributes of an NVFP4Tensor of older versions."""

    def __init__(self, of: Newer) -> None:
        self.qdata, self._scale_e4m3 = of.qdata, of.scale
        self._block_size, self._is_swizzled_scales = of.block_size, of.is_swizzled_scales
        self._per_tensor_scale = of.per_tensor_scale


def made(x: Tensor, format: str, swizzled: bool, older: bool = False) -> tuple[Any, Tensor]:
    """A stand-in for x quantized, and its values."""
    of = FORMATS[format]
    q = quantization.quantize(x, of)
    scale = layouts.swizzle(q.scale).flatten() if swizzled else q.scale
    data = q.data.view(torch.uint8) if of.element == "e2m1" else q.data
    found = Newer(data, scale, of.block[1], swizzled, q.tensor_scale)
    return (OlderNvfp4(found) if older else found), quantization.dequantize(q, torch.float64)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
def test_products_are_those_of_the_values(format: str, swizzled: bool) -> None:
    (a, va), (w, vw) = (made(torch.randn(n, 128), format, swizzled) for n in (40, 72))
    assert is_torchao(a) and not is_torchao(torch.zeros(2))
    with ops.simulated("sm_100a"):
        out = cutex.matmul(a, w.t(), activation="relu", out_dtype=torch.float32)
        again = cutex.scaled_mm(a, w.t(), activation="relu", output_dtype=torch.float32)
    want = torch.relu(va @ vw.mT)
    assert torch.equal(out, again)
    assert (out.double() - want).abs().max() <= 2.0**-16 * want.abs().max()


def test_names_of_older_versions_and_weights_packed_for_16_bits() -> None:
    older, values = made(torch.randn(72, 128), "nvfp4", swizzled=True, older=True)
    q = quantized("a", older)
    assert torch.equal(cutex.dequantize(q, torch.float64), values)
    packed = cutex.pack_w4(older, dtype=torch.bfloat16)
    error = (packed.dequantize(torch.float64) - values).abs().max()
    assert error <= 2.0**-22 * values.abs().max()
    alone = Newer(older.qdata, older._scale_e4m3, 16, True)  # without a tensor's own scale
    assert quantized("a", alone).tensor_scale is None
    assert cutex.pack_w4(alone).dequantize().isfinite().all()


@pytest.mark.slow
def test_under_torch_compile() -> None:
    (a, _), (w, _) = (made(torch.randn(n, 128), "mxfp8", True) for n in (40, 72))
    with ops.simulated("sm_100a"):
        compiled = torch.compile(lambda a, b: cutex.matmul(a, b), backend="aot_eager")
        assert torch.equal(compiled(a, w.t()), cutex.matmul(a, w.t()))


A, _ = made(torch.randn(32, 128), "mxfp8", False)
W, _ = made(torch.randn(64, 128), "mxfp8", False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (A, W, r"b has blocks along its other side: takes b \(K, N\), the weight's .t\(\)"),
        (
            torch.zeros(32, 128).bfloat16(),
            W.t(),
            "a is torch.bfloat16, and the other one is quantized",
        ),
        (A, torch.zeros(128, 64).bfloat16(), "b is torch.bfloat16, and the other one is quantized"),
        (replace(A, block_size=64), W.t(), "a has blocks of 64: mxfp8 has 32"),
        (replace(A, scale=A.scale[:3]), W.t(), r"a has 12 scales: \(32, 4\) were due"),
        (replace(A, scale=A.scale.float()), W.t(), "a has elements .* with scales torch.float32"),
    ],
)
def test_what_does_not_fit_is_answered_in_a_sentence(a: Any, b: Any, says: str) -> None:
    with ops.simulated("sm_100a"), pytest.raises((TypeError, ValueError), match=says):
        cutex.matmul(a, b)


def test_other_arguments_are_refused() -> None:
    with (
        ops.simulated("sm_100a"),
        pytest.raises(ValueError, match="alpha is given: with quantized"),
    ):
        cutex.matmul(A, W.t(), alpha=2.0)

"""NVIDIA's fused attention runs unmodified, from a clone of CUTLASS (test_foreign_kernels.py)."""

from __future__ import annotations

import math

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from test_foreign_kernels import ALL_EXAMPLES, CLONE, EXAMPLES, ORDERS, example

from cutex.sim import Hazards, simulate

pytestmark = pytest.mark.skipif(
    not CLONE, reason="needs a clone of CUTLASS's examples: set CUTEX_CUTLASS to it"
)
TOKENS, HEADS = 256, 2


@pytest.fixture(autouse=True)
def examples_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(ALL_EXAMPLES)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Attention of (heads, tokens, dims), in float64."""
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.softmax(scores, -1) @ v.double()


@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
def test_attention_of_hopper(order):
    module = example("cute/hopper/kernel/attention", "fmha")
    dims = 64

    def tensor(dims: int, dtype: torch.dtype, value: float | None = None) -> torch.Tensor:
        """(tokens, dims, 1, heads, batch)"""
        shape = (1, TOKENS, HEADS, 1, dims)
        data = torch.randn(shape) if value is None else torch.full(shape, value)
        return data.to(dtype).permute(1, 4, 3, 2, 0)

    q, k, v = (tensor(dims, torch.float16) for _ in range(3))
    out, lse = tensor(dims, torch.float16, math.nan), tensor(1, torch.float32, math.nan)
    mask = module.fmha_utils.MaskEnum.WINDOW_MASK
    kernel = module.HopperFusedMultiHeadAttentionForward(
        Float32, Float32, (64, 128, dims), False, mask
    )
    scale = dims**-0.5
    scales = scale * math.log2(math.e), scale, 1.0
    # NOTE: it returns while its last TMA stores may still read shared memory
    with pytest.raises(Hazards, match=r"^1 hazard found\n.*exit: .* TMA store .* reads: no thread"):
        simulate(
            kernel, q, k, v, out, lse, *scales, None, None, CUstream(0), arch="sm_90a", **order
        )
    heads = [x[:, :, 0, :, 0].permute(2, 0, 1) for x in (q, k, v, out)]
    assert (heads[3].double() - exact(*heads[:3])).abs().max() < 1e-3


@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_blackwell(causal, order):
    module = example("cute/blackwell/kernel/attention/fmha", "fmha")
    dims = 128
    q, k, v = (torch.randn(1, TOKENS, HEADS, 1, dims).half() for _ in range(3))
    out = torch.full_like(q, math.nan)
    masks = module.fmha_utils.MaskEnum
    kernel = module.BlackwellFusedMultiHeadAttentionForward(
        Float32, Float32, (128, 128), dims, False,
        masks.WINDOW_MASK if causal else masks.RESIDUAL_MASK, False, False,
    )  # fmt: skip
    scale = dims**-0.5

    @cute.jit
    def host(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, out: cute.Tensor, stream: CUstream):
        sizes = [1, TOKENS, TOKENS, TOKENS, HEADS, HEADS, dims, dims]
        scales = Float32(scale * math.log2(math.e)), Float32(scale), Float32(1.0)
        right = Int32(0) if causal else None  # tokens that a token may look ahead
        kernel(q, k, v, out, tuple(Int32(n) for n in sizes), None, None, None, None, *scales,
               None, None, right, None, None, stream, False)  # fmt: skip

    simulate(host, q, k, v, out, CUstream(0), **order)
    heads = [x[0, :, :, 0].transpose(0, 1) for x in (q, k, v, out)]
    assert (heads[3].double() - exact(*heads[:3], causal)).abs().max() < 2e-3

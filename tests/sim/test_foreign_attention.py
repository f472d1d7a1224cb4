"""FlashAttention-4's Blackwell forward runs unmodified, where it is installed (extra `peers`)."""

from __future__ import annotations

import inspect

import pytest
import torch

from cutex.sim import simulate

forward = pytest.importorskip(
    "flash_attn.cute.flash_fwd_sm100", reason="needs flash-attn-4: pip install -e '.[peers]'"
)

ORDERS = [{}, {"order": "random", "seed": 1}, {"order": "starved", "seed": 4}]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("tokens, heads", [(512, 4), (200, 1)])
def test_forward_is_that_of_torch(tokens, heads, order, monkeypatch):
    """The error is within twice that of rounding the exact output to bf16, plus that of P to
    bf16."""
    from cuda.bindings.driver import CUstream

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")  # else it takes the arch of the GPU that is here
    kernel = forward.FlashAttentionForwardSm100(128, is_static_persistent=False)
    q, k, v = (torch.randn(1, tokens, heads, 128).bfloat16() for _ in range(3))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((1, heads, tokens), float("nan"))
    parameters = list(inspect.signature(type(kernel).__call__).parameters.values())
    rest = [p.default for p in parameters[7:-1]]  # after softmax_scale, before the stream
    report = simulate(kernel, q, k, v, out, lse, 128**-0.5, *rest, CUstream(0), **order)
    assert not report.findings
    qd, kd, vd = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = qd @ kd.transpose(2, 3) * 128**-0.5
    exact = (torch.softmax(scores, -1) @ vd).transpose(1, 2)
    at_bf16 = (torch.softmax(scores, -1).bfloat16().double() @ vd).transpose(1, 2).bfloat16()
    assert (out.double() - exact).abs().max() <= 2 * (at_bf16.double() - exact).abs().max()
    assert torch.allclose(lse.double(), torch.logsumexp(scores, -1), atol=1e-4)

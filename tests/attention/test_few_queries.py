"""flash_attn_func of few queries on many keys, which take the kernels of caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_attn_calls import call

import cutex
from cutex.arch import local_arch
from cutex.ops.attention import few_queries, planned
from cutex.ops.attention.call import AttentionCall
from cutex.problem.attention.case import AttentionCase

CASE = AttentionCase(
    batch=2, seqlen_q=3, seqlen_k=1100, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=64
)
CASES = {
    "full": CASE,
    "causal": replace(CASE, causal=True),
    "a window": replace(CASE, window=(300, 1)),
    "a soft cap": replace(CASE, softcap=5.0),
    "a sink": replace(CASE, causal=True, sink=True),
    "packed queries": replace(CASE, lengths_q=(5, 2), tail=4, used_k=(1100, 300), causal=True),
    "used keys": replace(CASE, used_k=(7, 1100)),
    "head dim 40, 24 of v": replace(CASE, head_dim=40, head_dim_v=24, dtype="fp16"),
    "views": replace(CASE, views=("padded", "interleaved", "heads first")),
    "views that are copied": replace(CASE, views=("shifted", "contiguous", "contiguous")),
}
SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in CASES if x != "causal"]


@pytest.fixture(autouse=True)
def device():
    planned.forget()
    if local_arch(["sm_90a"]) is not None:
        yield "cuda"
    else:
        with cutex.ops.simulated("sm_90a"):
            yield "cpu"
    planned.forget()


@pytest.mark.parametrize("name", ["causal", *SLOW])
def test_few_queries_are_right_twice(device, name):
    """By a plan that is made, and by one that is kept."""
    case = CASES[name]
    inputs = case.inputs(device)
    for _ in range(2):
        found = case.check(inputs, *call(case, inputs), poisoned=False)
        assert found.ok, found.message
    assert all(isinstance(x, few_queries.FewQueries) for x in planned._plans.values())


@pytest.mark.slow
def test_o_is_written_with_the_strides_that_are_wanted(device):
    inputs = CASE.inputs(device)
    q, k, v = inputs[:3]
    want = cutex.flash_attn_func(q, k, v)
    out = torch.full((2, 4, 3, 64), torch.nan, dtype=q.dtype, device=device).transpose(1, 2)
    given = AttentionCall(q, k, v)
    found, lse = planned.attend(given, True, out)
    assert found is out and torch.equal(out, want)
    plan = planned.plan_of(given, True, out)
    again, of_rows = plan.short_with(out)(q, k, v)
    assert again.stride() == out.stride() and torch.equal(again, want)
    assert torch.equal(of_rows, lse)


@pytest.mark.parametrize(
    ("changes", "few"),
    [
        ({}, True),
        ({"seqlen_q": 33}, False),  # more than 64 packed rows
        ({"seqlen_k": 1000}, False),
        ({"window": (-1, 20)}, True),
        ({"window": (None, -3)}, False),  # off the diagonal
        ({"views": ("contiguous", "shifted", "contiguous")}, False),  # a copy is needed
        ({"lengths_q": (3, 2), "lengths_k": (1100, 1100)}, False),
        ({"used_q": (3, 2), "used_k": (1, 2)}, False),
    ],
)
def test_which_calls_have_few_queries(device, changes, few):
    case = replace(CASE, **changes)
    inputs = case.inputs(device)
    given = AttentionCall(
        *inputs[:5], seqused_q=inputs.seqused_q, seqused_k=inputs.seqused_k,
        window_size=case.window,
    )  # fmt: skip
    assert few_queries.are_few(given) is few


def test_gradients_of_few_queries(device):
    if device == "cpu":
        pytest.skip("the backward of so many keys takes the simulator too long")
    q, k, v = (x.requires_grad_() for x in CASE.inputs(device)[:3])
    out = cutex.flash_attn_func(q, k, v, causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), enable_gqa=True,
        attn_mask=torch.ones(3, 1100, dtype=torch.bool, device=device).tril(1097),
    ).transpose(1, 2)  # fmt: skip
    do = torch.randn_like(out)
    mine = torch.autograd.grad(out, (q, k, v), do)
    theirs = torch.autograd.grad(want, (q, k, v), do.double())
    for x, y in zip(mine, theirs, strict=True):
        assert (x.double() - y).norm() < 1e-2 * y.norm()

"""Gradients of flash_attn_func and flash_attn_varlen_func, against autograd in float64."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from attention_gradients import definition, upstream, wide
from attention_stand_in import StandIn, flash_on_cpu, own_backward_on_cpu
from flash_attn_calls import SMALL, call
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import cutex
from cutex.ops.attention import (
    backward,
    differentiable,
    known_gradients,
    planned,
    registered_backward,
)


@pytest.fixture
def stand_in(monkeypatch):
    yield StandIn(monkeypatch)
    planned.forget()


GRADIENTS = {
    "dense": {},
    "causal": {"causal": True},
    "more queries than keys": {"causal": True, "seqlen_q": 50},
    "window": {"window": (6, 3)},
    "192/128": {"head_dim": 192, "head_dim_v": 128},
    "sink": {"sink": True, "window": (4, None)},
    "a window of more than 32 bits": {"window": (2**40, 3)},
    "packed": {"lengths_q": (12, 9), "lengths_k": (7, 30), "causal": True},
    "packed with a sink": {"lengths_q": (12, 0), "lengths_k": (7, 30), "sink": True},
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("of_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_definition(stand_in, name, compiled, of_lse):
    problem = replace(SMALL, dtype="fp16", **GRADIENTS[name])
    inputs = problem.inputs()
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], inputs.sink) if x is not None]
    sink = leaves[3] if problem.sink else None
    mine = inputs._replace(q=leaves[0], k=leaves[1], v=leaves[2], sink=sink)
    function = torch.compile(call, backend="aot_eager") if compiled else call
    exact = wide(inputs)
    want = definition(problem, exact)[: 1 + of_lse]
    with flash_on_cpu():
        found = function(problem, mine)[: 1 + of_lse]
        g = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=g).to(x.dtype) for x in found]
        torch.autograd.backward(found, grads)
    torch._dynamo.reset()
    torch.autograd.backward(want, [x.double() for x in grads])
    names = ("q", "k", "v", "sink")
    for x, name in zip(leaves, names, strict=False):
        want_grad = getattr(exact, name).grad
        torch.testing.assert_close(x.grad.double(), want_grad, rtol=0.02, atol=0.01)


def test_a_gradient_of_lse_alone(stand_in):
    """As where parts of attention are merged, and only one part's LSE counts."""
    problem = replace(SMALL, dtype="fp16")
    inputs = problem.inputs()
    mine, exact = [inputs[i].clone().requires_grad_() for i in range(3)], wide(inputs)
    with flash_on_cpu():
        _, lse = cutex.flash_attn_func(*mine, return_lse=True)
        lse.sum().backward()
    definition(problem, exact)[1].sum().backward()
    for x, y in zip(mine, exact[:2], strict=False):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.02, atol=0.01)
    assert not mine[2].grad.any()  # LSE does not depend on v


@pytest.mark.parametrize(
    "views", [("transposed", "shifted", "padded"), ("shifted", "interleaved", "transposed")]
)
def test_gradients_of_views_that_torchs_backward_cannot_read(stand_in, views):
    problem = replace(SMALL, dtype="fp16", views=views)
    q, k, v = (x.requires_grad_() for x in problem.inputs()[:3])
    with flash_on_cpu():
        cutex.flash_attn_func(q, k, v).square().sum().backward()
    exact = wide(problem.inputs())
    definition(problem, exact)[0].square().sum().backward()
    for x, y in zip((q, k, v), exact[:3], strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0.02, atol=0.02)


def test_rows_of_no_sequence_leave_the_gradient_of_a_sink_alone(stand_in):
    problem = replace(SMALL, lengths_q=(5, 9), lengths_k=(7, 3), tail=3, sink=True)
    inputs = problem.inputs()
    q, k, v = (torch.nan_to_num(x) for x in inputs[:3])
    starts = [torch.stack((x, x), 1)[:, 0] for x in inputs[3:5]]  # lengths of any stride, too
    found = []
    for unwritten in (torch.nan, 1e4):
        sink = inputs.sink.clone().requires_grad_()
        with flash_on_cpu():
            out = cutex.flash_attn_varlen_func(q, k, v, *starts, learnable_sink=sink)
            out.data[14:] = unwritten
            out.backward(torch.ones_like(out))
        found.append(sink.grad)
    assert found[0].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize(
    ("ends", "longest"), [((0,), None), ((0, 0), 0)], ids=["no batch", "no row"]
)
def test_gradients_without_sequences_are_zero(stand_in, ends, longest):
    q, k, v = (torch.ones(3, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    sink = torch.zeros(2, requires_grad=True)
    cu = torch.tensor(ends, dtype=torch.int32)
    with flash_on_cpu():
        out = cutex.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, learnable_sink=sink)
        out.nan_to_num().sum().backward()
    assert not any(x.grad.any() for x in (q, k, v, sink))


NO_GRADIENT = {
    "softcap=3.0, which torch's flash backward does not know": {"softcap": 3.0},
    "seqused_k, which torch's flash backward does not know": {"used_k": (3, 4)},
    "cu_seqlens_q or cu_seqlens_k alone": {"lengths_q": (3, 4)},
}


@pytest.mark.parametrize("sentence", NO_GRADIENT)
def test_where_there_is_no_gradient_it_says_so_at_once(stand_in, sentence):
    problem = replace(SMALL, **NO_GRADIENT[sentence])
    inputs = problem.inputs()
    mine = inputs._replace(q=inputs.q.requires_grad_())
    with pytest.raises(ValueError, match=sentence):
        call(problem, mine)
    with torch.no_grad():
        assert problem.check(inputs, *call(problem, mine)).ok


@pytest.mark.parametrize("shape", [(2, 70, 3, 64), (130, 4, 96), (1, 0, 2, 64)])
def test_a_sinks_sums_keep_few_products_at_one_time(shape, monkeypatch):
    """Whole copies of O in float32 would be twice its size each."""
    grad_out, out = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    want = (grad_out.float() * out.float()).sum(-1)
    multiplied, mul = [], torch.mul
    monkeypatch.setattr(torch, "mul", lambda x, y: multiplied.append(x.numel()) or mul(x, y))
    monkeypatch.setattr(backward, "MOST_PRODUCTS", 5000)
    assert torch.equal(backward.row_products(grad_out, out), want)
    assert sum(multiplied) == out.numel() and max(multiplied) <= 5000


def test_there_is_no_gradient_through_a_users_function(stand_in):
    q, k, v = (x.requires_grad_() for x in SMALL.inputs()[:3])
    with pytest.raises(ValueError, match="score_mod cannot be given"):
        cutex.flash_attn_func(q, k, v, score_mod=lambda s, *_: s)


def test_there_is_no_second_derivative(stand_in):
    q, k, v = (x.requires_grad_() for x in SMALL.inputs()[:3])
    with flash_on_cpu():
        (dq,) = torch.autograd.grad(
            cutex.flash_attn_func(q, k, v).float().sum(), q, create_graph=True
        )
        with pytest.raises(ValueError, match="attention has no second derivative"):
            dq.float().sum().backward()


def test_a_plan_changes_nothing_about_gradients(stand_in):
    q, k, v = SMALL.inputs()[:3]
    sink = torch.zeros(4)
    for a, b, c, d in itertools.product((False, True), repeat=4):
        tensors = [x.detach().requires_grad_(r) for x, r in ((q, a), (k, b), (v, c), (sink, d))]
        out = cutex.flash_attn_func(*tensors[:3], learnable_sink=tensors[3])
        assert out.requires_grad == (a or b or c or d)
    with torch.inference_mode():
        assert not cutex.flash_attn_func(q, k, v).requires_grad
        mine = [x.clone() for x in (q, k, v)]
    assert F.mse_loss(cutex.flash_attn_func(*mine), cutex.flash_attn_func(q, k, v)) == 0


def test_later_calls_find_the_plan_of_the_first_with_gradients(stand_in, monkeypatch):
    """Also where calls with and without gradients, and of other options, take turns."""
    q, k, v = (x.half().requires_grad_() for x in SMALL.inputs()[:3])
    made, of = [], differentiable.Node.of

    def counted(call):
        made.append(of(call))
        return made[-1]

    monkeypatch.setattr(differentiable.Node, "of", staticmethod(counted))

    def results(**options):
        out = cutex.flash_attn_func(q, k, v, causal=True, **options)
        assert out.requires_grad
        with torch.no_grad():
            assert not cutex.flash_attn_func(q, k, v, causal=True, **options).requires_grad
        return out

    with flash_on_cpu():
        grads = [torch.autograd.grad(results().float().square().sum(), (q, k, v)) for _ in range(3)]
        assert len(made) == 1
        assert all(map(torch.equal, grads[0], grads[2]))
        asked = results(deterministic=True).grad_fn.node
        assert asked.options["deterministic"]
        assert not results().grad_fn.node.options["deterministic"]
        assert len(made) == 2
        out, lse = cutex.flash_attn_func(q, k, v, causal=True, return_lse=True)
        assert out.requires_grad and lse.requires_grad
        q.requires_grad_(False)
        (dk,) = torch.autograd.grad(results().float().square().sum(), k)
    assert torch.equal(dk, grads[0][1])


def test_what_is_saved_may_be_kept_elsewhere(stand_in):
    """As where activations wait on another device."""
    q, k, v = (x.half().requires_grad_() for x in SMALL.inputs()[:3])
    found = []
    for hooks in (nullcontext(), saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone())):
        for _ in range(2):
            with hooks, flash_on_cpu():
                out = cutex.flash_attn_func(q, k, v)
                found.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    for mine in found[1:]:
        assert all(map(torch.equal, found[0], mine))


def test_gradients_of_a_call_like_the_one_before(stand_in, monkeypatch):
    """They are found without that one's decisions; where something differs, they are made anew."""
    made, of_inputs = [], registered_backward.of_inputs
    monkeypatch.setattr(
        registered_backward, "of_inputs", lambda *of: made.append(of) or of_inputs(*of)
    )
    inputs = SMALL.inputs()[:3]
    grad = upstream(SMALL, 3, of_lse=False)[0]

    def gradients(of=None):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = cutex.flash_attn_func(*leaves)
        return torch.autograd.grad(out, leaves, grad if of is None else of)

    with own_backward_on_cpu(monkeypatch), cutex.ops.simulated("sm_90a"):
        first = gradients()
        gradients()  # the plan of the forward is known from its second call on
        seen = len(made)
        again = [gradients() for _ in range(2)]
        assert len(made) == seen and all(map(torch.equal, again[1], first))
        one = torch.ones((), dtype=inputs[0].dtype)
        expanded = gradients(one.expand(grad.shape))
        assert len(made) == seen + 1
        assert all(map(torch.equal, expanded, gradients(torch.ones(grad.shape, dtype=one.dtype))))
        with monkeypatch.context() as patch:  # what is made anew is not computed
            patch.setattr(registered_backward, "of_inputs", lambda *of: made.append(of) or zeros)
            patch.setattr(differentiable.KnownGradients, "of", lambda *of: None)
            patch.setattr(known_gradients, "_in_one_order", lambda: True)
            zeros = (*map(torch.zeros_like, first), None)
            assert not any(x.any() for x in gradients())
    with own_backward_on_cpu(monkeypatch), cutex.ops.simulated("sm_90a"):
        assert all(map(torch.equal, gradients(), first))

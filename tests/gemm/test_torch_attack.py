"""Randomized calls of cutex.matmul beside plain torch: no result differs silently under code that
wraps tensors, watches calls or transforms functions."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from matmul_stand_in import StandIn, agree, plain_torch, square
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import cutex
from cutex.ops.matmul import eager
from cutex.problem.matmul import FLOAT8, draw

bf16 = torch.bfloat16
inf, nan = torch.inf, torch.nan


class Subclass(Tensor):
    pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield StandIn(monkeypatch)
    eager.PLANS.forget()


def minus(x: Tensor) -> Tensor:
    return (-x.float()).to(x.dtype)


# ---- 1,000 randomized calls beside plain torch

Function = Callable[..., Tensor]
Pairs = Iterator[tuple[Tensor, Tensor]]  # the results of cutex and of torch


def plainly(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    for x in (a, minus(a), a):
        yield f(x, b), g(x, b)
    yield f(torch.nn.Parameter(a, requires_grad=False), b), g(a, b)


def as_subclass(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    for _ in range(2):
        got = f(a.as_subclass(Subclass), b)
        assert type(got) is Subclass
        yield got.as_subclass(Tensor), g(a, b)
    with torch.inference_mode():
        assert type(f(a.as_subclass(Subclass), b)) is Subclass


def as_wrapper(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    a, b = (x.clone(memory_format=torch.contiguous_format) for x in (a, b))
    got = f(TwoTensor(a, minus(a)), TwoTensor(b, b))
    yield got.a, g(a, b)
    yield got.b, g(minus(a), b)


def fake(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    f(a, b)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = f(mode.from_tensor(a), mode.from_tensor(b))
    want = g(a, b)
    assert type(got) is not Tensor and got.shape == want.shape and got.dtype == want.dtype
    yield want, want


def negated(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    if a.dtype in FLOAT8:  # torch cannot resolve these
        yield from plainly(f, g, a, b)
        return
    yield f(torch._neg_view(a), b), g(-a, b)
    yield f(a, torch._neg_view(b)), g(a, -b)
    if a.dtype is torch.float32:
        conjugate = torch.complex(a, a).conj()
        yield f(conjugate.imag, b), g(-a, b)


def zeros(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    f(a, b)
    yield f(torch._efficientzerotensor(a.shape, dtype=a.dtype), b), g(torch.zeros_like(a), b)


def functional(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    yield torch.func.functionalize(f)(a, b), g(a, b)
    leaked = torch._to_functional_tensor
    got = f(leaked(a), leaked(b))
    torch._sync(got)
    yield torch._from_functional_tensor(got), g(a, b)


def mapped(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    many = torch.stack((a, minus(a), a))
    yield torch.func.vmap(f, (0, None))(many, b), torch.stack([g(x, b) for x in many])
    last = torch.stack((b, minus(b)), -1)
    both = torch.stack((minus(b), b))
    yield torch.func.vmap(f)(many[:2], both), torch.stack((g(a, minus(b)), g(minus(a), b)))
    yield torch.func.vmap(f, (None, -1))(a, last), torch.stack((g(a, b), g(a, minus(b))))


def gradient(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    def loss(function: Function) -> Function:
        return lambda a, b: function(a, b).float().square().sum()

    got = torch.func.grad(loss(f), (0, 1))(a, b)
    yield from zip(got, torch.func.grad(loss(g), (0, 1))(a, b), strict=True)


def backward(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    f(a, b)
    for _ in range(2):
        leaves = [[x.clone().requires_grad_() for x in (a, b)] for _ in range(2)]
        for function, mine in zip((f, g), leaves, strict=True):
            result = function(*mine)
            assert result.requires_grad
            result.float().square().sum().backward()
        for ours, theirs in zip(*leaves, strict=True):
            yield ours.grad, theirs.grad


def tangents(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    a, b = a.contiguous(), b.contiguous()  # torch makes no duals of others
    yield from zip(
        torch.func.jvp(f, (a, b), (minus(a), b)),
        torch.func.jvp(g, (a, b), (minus(a), b)),
        strict=True,
    )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, -a)
        got, want = (forward_ad.unpack_dual(function(dual, b)).tangent for function in (f, g))
        assert got is not None
        yield got, want


def traced(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    f(a, b)
    for pre_dispatch in (False, True):
        graph = make_fx(f, pre_dispatch=pre_dispatch)(a, b)
        assert "cutex" in graph.code
        yield graph(minus(a), b), g(minus(a), b)
    yield torch.jit.trace(f, (a, b), check_trace=False)(minus(a), b), g(minus(a), b)


def counted(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    f(a, b)
    with FlopCounterMode(display=False) as ours:
        got = f(a, b)
    with FlopCounterMode(display=False) as theirs:
        want = g(a, b)
    assert ours.get_total_flops() == theirs.get_total_flops()
    yield got, want


def inferred(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    with torch.inference_mode():
        mine = a.clone()
        got = f(mine, b)
        yield got.clone(), g(mine, b)
    yield f(mine, b), g(a, b)


def autocasted(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    f(a, b)
    for dtype in (bf16, torch.float16):
        with torch.autocast("cpu", dtype):
            got = f(a, b)
        cast = [x if x.dtype in FLOAT8 else x.to(dtype) for x in (a, b)]
        yield got, g(*cast)


def without_gradients(f: Function, g: Function, a: Tensor, b: Tensor) -> Pairs:
    mine = a.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            got = f(mine, b)
            assert not got.requires_grad
            yield got, g(a, b)


WAYS = (
    plainly, as_subclass, as_wrapper, fake, negated, zeros, functional, mapped, gradient, backward,
    tangents, traced, counted, inferred, autocasted, without_gradients,
)  # fmt: skip
NEW_RESULTS = (as_subclass, as_wrapper, traced)  # which `out`, made within, would hide
DERIVATIVES = (gradient, backward, tangents)


def attack(seed: int) -> str:
    """Make one randomized call in one randomized way; return "same", or the sentence of a
    refusal."""
    r = random.Random(seed)
    way = r.choice(WAYS)
    problem = draw(r.randrange(10**6), largest=5, most_work=2**14)
    inputs = dict(zip(problem.names, problem.inputs(), strict=True))
    a, b = inputs.pop("a"), inputs.pop("b")
    if way in DERIVATIVES and a.dtype in FLOAT8:
        way = plainly
    activation = square if problem.activation == "leaky" else problem.activation
    if way is not plainly and activation is square and r.random() < 0.7:
        activation = None
    options = {"activation": activation, "alpha": problem.alpha}
    if problem.out is not None and r.random() < 0.5 and way not in NEW_RESULTS:
        options["beta"] = problem.beta
    else:
        options["out_dtype"] = problem.out_dtype

    def call(function: Function) -> Function:
        def run(a: Tensor, b: Tensor) -> Tensor:
            given = {k: v.clone() if k == "amax" else v for k, v in inputs.items()}
            if "beta" not in options:
                return function(a, b, **given, **options)
            out = problem.outputs()[0] if problem.beta else torch.zeros(problem.shape)
            return function(a, b, out=out.to(problem.out_dtype), **given, **options)

        return run

    ran = False
    try:
        for got, want in way(call(cutex.matmul), call(plain_torch), a, b):
            ran = True
            assert agree(got, want), f"seed {seed}: {way.__name__}, {options}: {problem}"
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        simple = "beta" not in options and not inputs.keys() & {"amax", "scale_a"}
        assert not (simple and activation is not square), (
            f"seed {seed}: {way.__name__}, {options}: {problem}: {error}"
        )
        return str(error)
    assert ran
    return "same"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.sweep(8)
@pytest.mark.parametrize("tenth", range(10))
def test_nothing_is_silently_different_from_plain_torch(stand_in: StandIn, tenth: int) -> None:
    found = [attack(seed) for seed in range(12 * tenth, 12 * tenth + 12)]
    assert found.count("same") >= 8


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_nothing_is_silently_different_in_a_thousand_calls(stand_in: StandIn, tenth: int) -> None:
    found = [attack(seed) for seed in range(1000 + 100 * tenth, 1100 + 100 * tenth)]
    assert found.count("same") >= 70

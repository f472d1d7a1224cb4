"""torch's contract for an operator, on cutex.flash_attn_func, beside its definition."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_stand_in import StandIn, flash_on_cpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import cutex
from cutex.ops.attention import planned

bf16 = torch.bfloat16


class Subclass(Tensor):
    pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield StandIn(monkeypatch)
    planned._plans.clear()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def operands(seed: int = 0, dtype: torch.dtype = bf16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (2, 6, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64)
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return q, k, v


Q, K, V = operands()
SINK = torch.linspace(-1, 1, 4)


def definition(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, sink=None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).float() for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    p = scores.softmax(-1)[..., :keys]
    return torch.einsum("bhqk,bkhd->bqhd", p, v).to(q.dtype)


def agree(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    got, want = got.double(), want.double()
    return bool((got - want).abs().max() <= 0.03 * (want.abs().max() + 0.1))


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same call by flash_attn_varlen_func."""
    cu_q, cu_k = (
        torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32) for x in (q, k)
    )
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = cutex.flash_attn_varlen_func(*flat, cu_q, cu_k, q.shape[1], k.shape[1], **options)
    return out.unflatten(0, (-1, q.shape[1]))


Function = Callable[[Tensor, Tensor, Tensor], Tensor]
Pairs = Iterator[tuple[Tensor, Tensor]]


def plainly(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    for x in (q, -q, q):
        yield f(x, k, v), g(x, k, v)


def as_subclass(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    for _ in range(2):
        got = f(q, k.as_subclass(Subclass), v)
        assert type(got) is Subclass
        yield got.as_subclass(Tensor), g(q, k, v)


def as_wrapper(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    got = f(*(TwoTensor(x, -x) for x in (q, k, v)))
    yield got.a, g(q, k, v)
    yield got.b, g(-q, -k, -v)


def fake(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    f(q, k, v)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = f(*(mode.from_tensor(x) for x in (q, k, v)))
    assert type(got) is not Tensor and got.shape == q.shape
    got = f(*(x.to("meta") for x in (q, k, v))) if f is cutex.flash_attn_func else got
    yield q, q


def negated(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    yield f(torch._neg_view(q), k, v), g(-q, k, v)
    yield f(q, k, torch._neg_view(v)), g(q, k, -v)


def zeros(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    yield f(torch._efficientzerotensor(q.shape, dtype=q.dtype), k, v), g(0 * q, k, v)


def functional(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    yield torch.func.functionalize(f)(q, k, v), g(q, k, v)
    got = f(*map(torch._to_functional_tensor, (q, k, v)))
    torch._sync(got)
    yield torch._from_functional_tensor(got), g(q, k, v)


def mapped(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    yield (
        torch.func.vmap(f)(*(torch.stack((x, -x)) for x in (q, k, v))),
        torch.stack((g(q, k, v), g(-q, -k, -v))),
    )
    many = torch.stack((q, -q), 2)
    want = torch.stack((g(q, k, v), g(-q, k, v)))
    yield torch.func.vmap(f, (2, None, None))(many, k, v), want


def gradient(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    def loss(function: Function) -> Callable[..., Tensor]:
        return lambda *x: function(*x).float().square().sum()

    q, k, v = q.half(), k.half(), v.half()
    with flash_on_cpu():
        got = torch.func.grad(loss(f), (0, 1, 2))(q, k, v)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        f(q, k, v)
        loss(f)(*leaves).backward()
    want = torch.func.grad(loss(g), (0, 1, 2))(q, k, v)
    yield from zip(got, want, strict=True)
    yield from zip((x.grad for x in leaves), want, strict=True)


def traced(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    f(q, k, v)
    for pre_dispatch in (False, True):
        graph = make_fx(f, pre_dispatch=pre_dispatch)(q, k, v)
        assert "cutex.flash_attn" in graph.code
        yield graph(-q, k, v), g(-q, k, v)


def counted(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    f(q, k, v)
    with FlopCounterMode(display=False) as flops:
        got = f(q, k, v)
    yield got, g(q, k, v)
    assert flops.get_total_flops() == 4 * 2 * 4 * 6 * 9 * 64


def autocasted(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    f(q, k, v)
    for dtype in (bf16, torch.float16):
        with torch.autocast("cpu", dtype):
            yield f(q, k, v), g(q.to(dtype), k.to(dtype), v.to(dtype))
            yield f(q.float(), k, v.half()), g(q.to(dtype), k.to(dtype), v.half().to(dtype))


def inferred(f: Function, g: Function, q: Tensor, k: Tensor, v: Tensor) -> Pairs:
    with torch.inference_mode():
        mine = q.clone()
        yield f(mine, k, v).clone(), g(mine, k, v)
    yield f(mine, k, v), g(q, k, v)


WAYS = (
    plainly, as_subclass, as_wrapper, fake, negated, zeros, functional, mapped, gradient, traced,
    counted, autocasted, inferred,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_silently_different_from_its_definition(
    stand_in: StandIn, way: Callable[..., Pairs], seed: int
) -> None:
    r = random.Random(f"{way.__name__} {seed}")
    options: dict[str, Any] = {"causal": r.random() < 0.5}
    sink = SINK if r.random() < 0.5 else None
    function = packed if r.random() < 0.5 and way not in (as_wrapper, fake, traced) else None
    function = function or cutex.flash_attn_func

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, learnable_sink=sink, **options)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return definition(q, k, v, sink=sink, **options)

    for got, want in way(ours, theirs, *operands(seed)):
        assert agree(got, want)


def test_a_sink_is_looked_at_as_q_is(stand_in: StandIn) -> None:
    for _ in range(2):
        got = cutex.flash_attn_func(Q, K, V, learnable_sink=torch._neg_view(SINK))
        assert agree(got, definition(Q, K, V, sink=-SINK))
        assert agree(
            cutex.flash_attn_func(Q, K, V, learnable_sink=SINK), definition(Q, K, V, sink=SINK)
        )
        mine = SINK.as_subclass(Subclass)
        assert type(cutex.flash_attn_func(Q, K, V, learnable_sink=mine)) is Subclass


def test_tangents_are_refused_in_one_sentence(stand_in: StandIn) -> None:
    cutex.flash_attn_func(Q, K, V)
    sentence = "cutex::flash_attn has no forward differentiation"
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.jvp(lambda q: cutex.flash_attn_func(q, K, V), (Q,), (Q,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q, Q)
        for function in (cutex.flash_attn_func, torch.ops.cutex.flash_attn):
            with pytest.raises(NotImplementedError, match=sentence):
                function(dual, K, V)
            with pytest.raises(NotImplementedError, match=sentence):
                function(Q, K, V, learnable_sink=forward_ad.make_dual(SINK, SINK))


def test_a_nested_tensor_is_refused_in_one_sentence(stand_in: StandIn) -> None:
    nested = torch.nested.nested_tensor([Q[0], Q[1]])
    with pytest.raises(ValueError, match="q must be a strided tensor, got a nested tensor"):
        cutex.flash_attn_func(nested, K, V)


@pytest.mark.slow
def test_a_plan_of_another_threads_simulator_is_not_run() -> None:
    made, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with cutex.ops.simulated():
            cutex.flash_attn_func(Q, K, V)
            made.set()
            done.wait(60)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    made.wait(120)
    try:
        assert planned._plans
        with pytest.raises(ValueError, match="runs on a Hopper or Blackwell GPU"):
            cutex.flash_attn_func(Q, K, V)
    finally:
        done.set()
        thread.join()


def test_the_operator_is_what_torch_expects(stand_in: StandIn) -> None:
    leaves = [x.clone().half().requires_grad_() for x in (Q, K, V)]
    with flash_on_cpu():
        torch.library.opcheck(torch.ops.cutex.flash_attn, tuple(leaves), {"causal": True})

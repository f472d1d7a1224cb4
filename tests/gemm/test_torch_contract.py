"""torch's contract for an operator, on cutex.matmul: writes, numbers, derivatives of any order,
maps, autocast, infinities."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from matmul_stand_in import StandIn, agree, plain_torch
from torch import Tensor

import cutex
from cutex.kernels.gemm.scaled.fp8.config import Fp8Config
from cutex.ops.matmul import eager

bf16 = torch.bfloat16
inf, nan = torch.inf, torch.nan


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield StandIn(monkeypatch)
    eager.PLANS.forget()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = bf16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B = normal(16, 24), normal(24, 8, seed=1)


Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- outputs


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_out_and_amax_count_each_write(stand_in: StandIn, mode) -> None:
    out, amax = torch.zeros(16, 8, dtype=bf16), torch.zeros(1)
    with mode():
        for n in range(1, 4):  # without a plan, and with one
            cutex.matmul(A, B, out=out)
            cutex.matmul(A, B, amax=amax)
            assert (out._version, amax._version) == (n, n)
        torch.ops.cutex.matmul_out(out, A, B)
        assert out._version == 4


@pytest.mark.parametrize("remembered", [False, True], ids=["first call", "with a plan"])
def test_a_saved_tensor_that_is_overwritten_raises_as_in_torch(
    stand_in: StandIn, remembered: bool
) -> None:
    out = torch.zeros(16, 8, dtype=bf16)
    if remembered:
        cutex.matmul(A, B, out=out)
    loss = (out * torch.ones(16, 8, requires_grad=True)).sum()
    cutex.matmul(A, B, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_inference_tensor_is_written_to_in_inference_mode_only(stand_in: StandIn) -> None:
    with torch.inference_mode():
        out = torch.zeros(16, 8, dtype=bf16)
        for _ in range(2):
            cutex.matmul(A, B, out=out)
        assert agree(out, A @ B) and cutex.matmul(A, B).is_inference()
    for call in (cutex.matmul, lambda a, b, out: torch.ops.cutex.matmul_out(out, a, b)):
        with pytest.raises((ValueError, RuntimeError), match="inference"):
            call(A, B, out=out)
    with torch.inference_mode():
        mine = A.clone()
    assert not cutex.matmul(mine, B).is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        cutex.matmul(mine, B.clone().requires_grad_())


def test_out_may_not_share_memory_with_what_is_read(stand_in: StandIn) -> None:
    memory = torch.zeros(48, 16, dtype=bf16)
    square = normal(16, 16)
    for _ in range(2):
        cutex.matmul(memory[:16], square, out=memory[16:32])
        cutex.matmul(square, square, residual=memory[:16], out=memory[16:32])
        for out in (memory[:16], memory[8:24]):
            with pytest.raises(ValueError, match="out shares memory with a, which is read"):
                cutex.matmul(memory[:16], square, out=out)
        with pytest.raises(ValueError, match="out shares memory with b"):
            cutex.matmul(square, memory[:16], out=memory[:16])
        with pytest.raises(ValueError, match="out shares memory with residual"):
            cutex.matmul(square, square, residual=memory[:16], out=memory[8:24])
    over_itself = square.clone()
    for _ in range(2):
        want = square @ square + over_itself
        cutex.matmul(square, square, residual=over_itself, out=over_itself)
        assert agree(over_itself, want)
    columns = normal(16, 32)  # side by side in one memory is apart
    want = columns[:, :16] @ square
    cutex.matmul(columns[:, :16], square, out=columns[:, 16:])
    assert agree(columns[:, 16:], want)


def test_amax_may_not_share_memory_with_what_is_read(stand_in: StandIn) -> None:
    """As where a history of scales and of maxima is one tensor."""
    history = torch.ones(4)
    for _ in range(2):
        cutex.matmul(A, B, scale_a=history[:1], scale_b=history[1:2], amax=history[2:3])
        for i in range(2):
            with pytest.raises(ValueError, match="amax shares memory with scale_" + "ab"[i]):
                cutex.matmul(
                    A, B, scale_a=history[:1], scale_b=history[1:2], amax=history[i : i + 1]
                )
    with pytest.raises(ValueError, match="amax shares memory with bias"):
        cutex.matmul(A, B, bias=(row := torch.ones(8)), amax=row[3:4])


def test_a_lazily_negated_out_is_written_as_torch_writes_it(stand_in: StandIn) -> None:
    for beta in (0.0, 0.5):
        out = torch._neg_view(torch.ones(16, 8, dtype=bf16))
        assert cutex.matmul(A, B, out=out, beta=beta) is out
        assert agree(out, A @ B - beta)
    amax = torch._neg_view(torch.zeros(1))
    assert agree(cutex.matmul(A, B, amax=amax), A @ B)
    assert agree(amax[0], (A.float() @ B.float()).abs().max())


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 4)])
def test_scales_are_one_row_or_column(stand_in: StandIn, shape: tuple[int, ...]) -> None:
    """One for each matrix of as many as there are rows is no scale of the rows."""
    a, b = normal(8, 8, 24).to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^scale_a has shape .* its 8 elements must be in one of"):
        cutex.matmul(a, b, scale_a=torch.ones(shape))
    for ones in (torch.ones(8), torch.ones(8, 1), torch.ones(1, 1, 1)):
        assert cutex.matmul(a, b, scale_a=ones).shape == (8, 8, 8)


# ---- numbers and gradients


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [torch.tensor(2.0), "2", 2j, None])
def test_alpha_and_beta_are_numbers_of_the_host(stand_in: StandIn, name: str, value) -> None:
    out = torch.zeros(16, 8, dtype=bf16)
    for _ in range(2):
        cutex.matmul(A, B, out=out, **{name: 2.0})
        with pytest.raises(TypeError, match=f"{name} must be a number, got {type(value).__name__}"):
            cutex.matmul(A, B, out=out, **{name: value})


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_number_that_no_float_holds_is_refused(stand_in: StandIn, name: str) -> None:
    out = normal(16, 8)
    with pytest.raises(ValueError, match=f"^{name} is too large for a float$"):
        cutex.matmul(A, B, out=out, **{name: 10**400})


@dataclass
class Times:
    """A function that has no hash."""

    factor: float

    def __call__(self, x):
        return x * self.factor


def test_a_function_needs_no_hash(stand_in: StandIn) -> None:
    for factor in (1.0, 2.0):
        out = torch.zeros(16, 8)
        assert cutex.matmul(A, B, activation=Times(factor), out=out) is out
        assert agree(out, plain_torch(A, B, alpha=factor, out_dtype=torch.float32))


def test_a_users_activation_breaks_the_graph_and_is_not_traced_by_dynamo(stand_in) -> None:
    traced: list[str] = []

    def backend(module, _):
        traced.append(module.code)
        return module.forward

    function = torch.compile(lambda a: cutex.matmul(a, B, activation=Times(2.0)), backend=backend)
    for _ in range(2):
        assert agree(function(A), plain_torch(A, B, alpha=2.0))
    assert len(traced) <= 1, traced
    torch._dynamo.reset()


def test_alpha_and_beta_are_read_at_each_call(stand_in: StandIn) -> None:
    for alpha in (2, 3.0, np.float32(0.5), np.int64(4), True, 2):
        assert agree(cutex.matmul(A, B, alpha=alpha), float(alpha) * (A @ B))


NO_GRADIENT: dict[str, Callable[[bool], Tensor]] = {
    "scale_a": lambda wanted: torch.ones(1, requires_grad=wanted),
    "out": lambda wanted: torch.zeros(16, 8, dtype=bf16, requires_grad=wanted),
    "amax": lambda wanted: torch.zeros(1, requires_grad=wanted),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_refused_whether_or_not_there_is_a_plan(
    stand_in: StandIn, name: str, compiled: bool
) -> None:
    def call(a: Tensor, b: Tensor, given: dict[str, Tensor]) -> Tensor:
        return cutex.matmul(a, b, **given)

    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    make = NO_GRADIENT[name]
    sentence = rf"{name}.* cannot be given where a gradient is wanted"
    for _ in range(2):
        with pytest.raises(Exception, match=sentence):
            function(A, B, {name: make(True)})
        with pytest.raises(Exception, match=sentence):
            function(A.clone().requires_grad_(), B, {name: make(False)})
        for wanted in (False, True):
            with torch.no_grad():
                assert agree(function(A, B, {name: make(wanted)}), A @ B)
        assert agree(function(A, B, {name: make(False)}), A @ B)
    torch._dynamo.reset()


ACTIVATED = ("relu", "gelu", "gelu_tanh", "silu", "gated_silu", "gated_gelu", None)


def differentiable(matmul: Function, activation: str | None, x: Tensor) -> Tensor:
    """A scalar function of one matrix, with a bias and a residual computed from it."""
    b = torch.linspace(-1, 1, 48).view(6, 8)
    n = 4 if (activation or "").startswith("gated") else 8
    residual = x.sum(-1, keepdim=True).expand(*x.shape[:-1], n)
    y = matmul(x, b, bias=x[0, :1].expand(8), activation=activation, residual=residual)
    return (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sin().sum()


TRANSFORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda y: torch.func.grad(f)(y).sin().sum())(x),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),))[1],
    "grad of jvp": lambda f, x: torch.func.grad(lambda y: torch.func.jvp(f, (y,), (x.cos(),))[1])(
        x
    ),
    "jvp of jvp": lambda f, x: torch.func.jvp(
        lambda y: torch.func.jvp(f, (y,), (x.cos(),))[1], (x,), (x.sin(),)
    )[1],
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "gradients of each sample": lambda f, x: torch.func.vmap(torch.func.grad(f))(
        torch.stack((x, -x, x.sin()))
    ),
    "double backward": lambda f, x: torch.autograd.functional.hessian(f, x),
}


@pytest.mark.parametrize("activation", ACTIVATED, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_derivatives_of_any_order_are_those_of_torch(
    stand_in: StandIn, transform: Callable[[Function, Tensor], Tensor], activation: str | None
) -> None:
    x = normal(5, 6, dtype=torch.float32)
    want = transform(lambda x: differentiable(plain_torch, activation, x), x)
    got = transform(lambda x: differentiable(cutex.matmul, activation, x), x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# ---- plans and operators


def test_gradients_of_fp8_are_rounded_to_it_only_at_the_end(stand_in: StandIn) -> None:
    a, b = (torch.ones(2, 2).to(torch.float8_e4m3fn).requires_grad_() for _ in "ab")
    beyond = torch.tensor([[1000.0, -996.0], [-996.0, 1000.0]], dtype=bf16)  # fp8 ends at 448
    cutex.matmul(a, b).backward(beyond)
    assert a.grad is not None and b.grad is not None
    assert (a.grad.float() == 4.0).all() and (b.grad.float() == 4.0).all()


def test_fp8_is_promoted_where_fast_accumulation_is_not_wanted(stand_in: StandIn) -> None:
    """Eagerly and by the operator, the first time and by a plan, of either type of fp8, with every
    form of the call, and where an activation's gradient computes its input again."""
    a, b = normal(16, 160).to(torch.float8_e4m3fn), normal(160, 8).to(torch.float8_e5m2)
    calls: dict[str, Callable[..., Any]] = {
        "eager": lambda **fast: cutex.matmul(a, b, **fast),
        "out": lambda **fast: cutex.matmul(a, b, out=torch.empty(16, 8), **fast),
        "the operator": lambda **fast: torch.ops.cutex.matmul(a, b, **fast),
        "amax": lambda **fast: cutex.matmul(a, b, amax=torch.zeros(1), **fast),
        "vmap": lambda **fast: torch.vmap(partial(cutex.matmul, **fast))(a[None], b[None]),
        "gradient": lambda **fast: cutex.matmul(
            a.clone().requires_grad_(), b, activation="gelu", **fast
        ).sum().backward(),
    }  # fmt: skip
    for name, call in calls.items():
        for fast in (False, True) * 2:
            stand_in.launches.clear()
            call(**({} if fast else {"use_fast_accum": False}))
            fp8 = [config.tiles for config, (x, *_) in stand_in.launches if x.element_size() == 1]
            assert len(fp8) == (2 if name == "gradient" else 1)
            assert {isinstance(tiles, Fp8Config) for tiles in fp8} == {not fast}, (name, fast)
    with pytest.raises(TypeError, match="use_fast_accum must be True or False, got 'no'"):
        cutex.matmul(a, b, use_fast_accum="no")


def test_operators_take_plans_too(stand_in: StandIn, monkeypatch) -> None:
    """Within torch.compile, under autocast, in training, with one tensor as both operands."""
    arranged = []
    arrange = eager.arrange
    monkeypatch.setattr(eager, "arrange", lambda *args: arranged.append(args) or arrange(*args))
    square = normal(16, 16)
    leaf = square.clone().requires_grad_()
    compiled = torch.compile(cutex.matmul, backend="aot_eager", fullgraph=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "the operator": lambda: torch.ops.cutex.matmul(A, B),
        "compiled": lambda: compiled(A, B),
        "a gradient wanted": lambda: cutex.matmul(leaf, B[:16]),
        "autocast": lambda: autocasted_to_bf16(A.float(), B),
        "both operands": lambda: cutex.matmul(square, square),
        "a default device": lambda: on_default_device(square, B[:16]),
    }
    for call in calls.values():
        call()
        before = len(arranged)
        for _ in range(3):
            call()
        assert len(arranged) == before
    torch._dynamo.reset()


def test_vectors_of_any_form_find_their_plan(stand_in: StandIn, monkeypatch) -> None:
    arranged = []
    arrange = eager.arrange
    monkeypatch.setattr(eager, "arrange", lambda *args: arranged.append(args) or arrange(*args))
    a, b = (normal(n, 32, seed=n).to(torch.float8_e4m3fn) for n in (16, 8))
    rows, columns = torch.rand(16, 2) + 0.5, torch.rand(8) + 0.5
    product = a.float() @ b.mT.float()
    for scale_a, scale_b, bias in (
        (rows[:, :1], columns[None], columns[None]),
        (rows[0, 0], columns[1], rows[:, 1:].contiguous()),
        (rows[:, 1], columns, columns[None]),
    ):
        for _ in range(2):
            amax = torch.zeros(())
            fused = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias, "amax": amax}
            out = cutex.matmul(a, b.mT, **fused)
            want = product * scale_a.reshape(-1, 1) * scale_b + bias
            assert torch.allclose(out.float(), want, rtol=2**-7, atol=2**-7)
            assert torch.allclose(amax, want.abs().max())
            rows *= 2
    assert len(arranged) == 3


def autocasted_to_bf16(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", bf16):
        return cutex.matmul(a, b)


def on_default_device(a: Tensor, b: Tensor) -> Tensor:
    with torch.device("cpu"):
        return cutex.matmul(a, b)


@pytest.mark.parametrize("name", ["matmul", "matmul_out", "matmul_amax"])
def test_operators_are_what_torch_expects(stand_in: StandIn, name: str) -> None:
    leaves = [x.clone().requires_grad_() for x in (A, B)]
    out, amax = torch.zeros(16, 8, dtype=bf16), torch.zeros(1)
    arguments = {"matmul": leaves, "matmul_out": (out, A, B), "matmul_amax": (amax, out, A, B)}
    operator = getattr(torch.ops.cutex, name).default
    torch.library.opcheck(operator, tuple(arguments[name]))
    options = {"activation": "gelu", "alpha": 0.5, "bias": torch.ones(8, dtype=bf16)}
    torch.library.opcheck(operator, tuple(arguments[name]), options)


def test_meta_tensors_give_meta_tensors(stand_in: StandIn) -> None:
    a, b = A.to("meta"), B.to("meta")
    c = cutex.matmul(a, b, out_dtype=torch.float32)
    assert c.is_meta and c.shape == (16, 8) and c.dtype == torch.float32
    assert cutex.matmul(a, b, out=c) is c and not stand_in.launches


def test_what_has_no_memory_is_refused_in_one_sentence(stand_in: StandIn) -> None:
    memory = normal(48, 24)
    for emptied in (memory[:16], memory[16:32]):
        memory.untyped_storage().resize_(0)
        for function in (cutex.matmul, torch.ops.cutex.matmul):
            with pytest.raises(ValueError, match="a has no memory"):
                function(emptied, B)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([A, A], layout=layout)
        with pytest.raises(ValueError, match="a must be a strided tensor, got a nested tensor"):
            cutex.matmul(nested, B)


# ---- maps


@pytest.mark.parametrize("mapped", ["a", "b", "residual", "bias", "scale_a", "a b residual", "all"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_vmap_is_one_launch_unless_a_vector_is_mapped(
    stand_in: StandIn, mapped: str, batch: tuple[int, ...]
) -> None:
    shapes = {"a": (*batch, 4, 6), "b": (6, 8), "residual": (8,), "bias": (8,), "scale_a": (4,)}
    names = list(shapes) if mapped == "all" else mapped.split()
    given = {n: normal(2, *s, dtype=torch.float32) for n, s in shapes.items() if n in names}
    given |= {n: normal(*s, dtype=torch.float32) for n, s in shapes.items() if n not in names}
    dims = tuple(0 if n in names else None for n in shapes)

    def call(matmul: Function) -> Function:
        return lambda a, b, residual, bias, scale_a: matmul(
            a, b, residual=residual.expand(*batch, 4, 8), bias=bias, scale_a=scale_a,
            scale_b=torch.ones(1),
        )  # fmt: skip

    values = [given[n] for n in shapes]
    got = torch.func.vmap(call(cutex.matmul), dims)(*values)
    assert len(stand_in.launches) == (1 if set(names) <= {"a", "b", "residual"} else 2)
    assert agree(got, torch.func.vmap(call(plain_torch), dims)(*values))


# ---- autocast


def test_autocast_casts_what_torch_casts_but_not_where_out_is_given(stand_in: StandIn) -> None:
    a, b = A.float().requires_grad_(), B.float()
    for dtype in (bf16, torch.float16):
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                assert cutex.matmul(a.detach(), B).dtype == torch.matmul(a, B).dtype == dtype
                with torch.no_grad():
                    assert cutex.matmul(a, b, amax=torch.zeros(1)).dtype == dtype
                result = cutex.matmul(a, b)
                out = torch.zeros(16, 8)
                assert cutex.matmul(a.detach(), b, out=out) is out
            assert {x.dtype for x in stand_in.launches[-1][1][:3]} == {torch.float32}
            (grad,) = torch.autograd.grad(result.float().sum(), a)
            assert result.dtype == dtype and grad.dtype == torch.float32
            compiled = torch.compile(cutex.matmul, backend="aot_eager", fullgraph=True)
            with torch.autocast("cpu", dtype):
                assert compiled(a, b).dtype == dtype
    torch._dynamo.reset()


# ---- precision, infinities and NaN


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_first_float32_that_torch_would_read_in_full_is_warned_of(
    stand_in: StandIn, precision
) -> None:
    def warned(a: Tensor, b: Tensor) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            cutex.matmul(a, b)
        return [str(w.message) for w in found]

    eager._warn_of_tf32.cache_clear()
    torch.set_float32_matmul_precision("high")
    assert not warned(A.float(), B.float())
    torch.set_float32_matmul_precision("highest")
    assert not warned(A, B)
    (sentence,) = warned(A[1:].float(), B.float())
    assert "reads float32 as tf32" in sentence and "set_float32_matmul_precision" in sentence
    assert not warned(A[2:].float(), B.float())


def bias_alone(bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A row of the result for zero operands, and amax."""
    a, b = torch.zeros(8, 16, dtype=bf16), torch.zeros(16, 8, dtype=bf16)
    amax = options.pop("amax", torch.ones(1))
    return cutex.matmul(a, b, bias=bias, out_dtype=torch.float32, amax=amax, **options)[0], amax


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("name", "of_minus_inf"), [("relu", 0.0), ("gelu", 0.0), ("gelu_tanh", nan), ("silu", nan)]
)
def test_infinities_and_nan_are_those_of_torch_but_for_gelu(name: str, of_minus_inf: float) -> None:
    """torch's formulas on a GPU, x / (1 + exp(-x)) and so on; those of its CPU differ."""
    bias = torch.tensor([inf, -inf, nan, -1e30, 1e30, 0.0, -50.0, 50.0])
    with cutex.ops.simulated():
        got, amax = bias_alone(bias, activation=name)
    want = torch.tensor([inf, of_minus_inf, nan, 0.0, 1e30, 0.0, 0.0, 50.0])
    torch.testing.assert_close(got, want, equal_nan=True)
    assert amax.isnan()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_amax_of_nan_is_nan_as_torchs(arch: str) -> None:
    with cutex.ops.simulated(arch):
        for x, y, largest in [(3, -7, 7), (3, -inf, inf), (-inf, nan, nan), (0, 0, 1)]:
            _, amax = bias_alone(torch.tensor([float(x), y]).repeat(4))
            torch.testing.assert_close(amax, torch.tensor([float(largest)]), equal_nan=True)
        _, amax = bias_alone(torch.ones(8), amax=torch.tensor([nan]))
        assert amax.isnan()

"""The plan cache that all operators share, on an operator that nobody has."""

from __future__ import annotations

import pytest
import torch

from cutex.ops import plans, simulated
from cutex.ops.matmul import eager
from cutex.ops.plans import PlanCache


class Function:
    """A user's function in a plan."""

    def __init__(self) -> None:
        self.current = True

    def is_current(self) -> bool:
        return self.current


def doubled(x):
    return 2 * x


def find(cache, key, *tensors):
    for known in cache.known.get(key, ()):
        if known.takes(*tensors) and (known.always or known.still()):
            return known
    return None


def test_a_plan_takes_tensors_that_are_alike_under_the_same_options():
    cache, x = PlanCache(), torch.ones(4, 6)
    assert not cache
    cache.remember(("mode", 1.0), (x,), doubled)
    assert cache and find(cache, ("mode", 1.0), torch.zeros(4, 6)).launch(x).sum() == 48
    for other in (x.double(), x.mT, torch.ones(4, 7), torch.ones(4, 6, requires_grad=True)):
        assert find(cache, ("mode", 1.0), other) is None
    assert find(cache, ("mode", 2.0), x) is None


def test_a_plan_with_gradients_or_a_function_is_asked_each_time():
    cache, function = PlanCache(), Function()
    x = torch.ones(3, requires_grad=True)
    cache.remember("grad", (x,), doubled)
    assert find(cache, "grad", x) is None
    with torch.no_grad():
        assert find(cache, "grad", x) is not None
    plain = torch.ones(3)
    cache.remember("function", (plain,), doubled, [function])
    assert find(cache, "function", plain) is not None
    function.current = False
    assert find(cache, "function", plain) is None


def test_a_plan_with_one_tensor_twice_is_of_calls_that_give_one_twice():
    cache = PlanCache()
    x, y, z = (torch.ones(4, 6) for _ in range(3))
    options = ("mode",)
    cache.remember(cache.key_of(options, x, y, x), (x, y, x), doubled)
    for given in ((x, y, x), (z, x, z)):
        assert cache.find(options, *given) is not None
    for given in ((x, y, z), (x, x, x), (x, x, y), (x, y, y), (x, y), (x, y.mT, x)):
        assert cache.find(options, *given) is None, "another pattern, or a tensor that is not alike"
    cache.remember(cache.key_of(options, x, y, z), (x, y, z), doubled)
    for given in ((x, y, x), (x, y, z), (z, x, z), (y, x, z)):
        assert cache.find(options, *given) is not None
    assert cache.launched(options, x, y) is None


def test_the_newest_of_plans_alike_are_kept():
    cache = PlanCache(most=2, most_alike=2)
    sizes = [torch.ones(n) for n in (1, 2, 3)]
    for x in sizes:
        cache.remember("key", (x,), doubled)
    assert [find(cache, "key", x) is not None for x in sizes] == [False, True, True]
    cache.remember("second", (sizes[0],), doubled)
    cache.remember("third", (sizes[0],), doubled)
    assert list(cache.known) == ["third"], "all are dropped once there are too many"
    cache.remember(["no hash"], (sizes[0],), doubled)
    assert len(cache.known) <= 1


def test_plans_are_forgotten_where_a_simulation_begins_and_ends():
    cache = PlanCache()
    cache.remember("key", (torch.ones(1),), doubled)
    with simulated():
        assert not cache
        cache.remember("key", (torch.ones(1),), doubled)
    assert not cache
    assert plans.PlanCache is type(eager.PLANS)


@pytest.fixture
def launches(monkeypatch):
    """The arguments of each launch, without a kernel."""
    found = []
    monkeypatch.setattr(eager, "kernel_for", lambda *_: None)
    monkeypatch.setattr(eager, "launcher", lambda *_: lambda *given: found.append(given))
    monkeypatch.setattr(eager, "arch_of", lambda _, archs: "sm_90a")
    eager.PLANS.forget()
    yield found
    eager.PLANS.forget()


def bf16(*shape):
    return torch.ones(shape, dtype=torch.bfloat16)


CALLS = {
    "two": lambda a, b, m: eager.matmul(a, b),
    "bias": lambda a, b, m: eager.matmul(a, b, bias=m[0]),
    "out": lambda a, b, m: eager.matmul(a, b, out=bf16(64, 64)),
    "tall": lambda a, b, m: eager.matmul(a.view(2, 32, 64), b),
    "tall with bias": lambda a, b, m: eager.matmul(a.view(2, 32, 64), b, bias=m[0]),
    "tall with all": lambda a, b, m: eager.matmul(
        a.view(2, 32, 64), b, bias=m[0], residual=m.view(2, 32, 64), alpha=0.5),
    "square": lambda a, b, m: eager.matmul(a, a),
    "one tensor throughout": lambda a, b, m: eager.matmul(a, a, residual=a),
    "a residual that is b": lambda a, b, m: eager.matmul(a, b, residual=b),
    "square with bias": lambda a, b, m: eager.matmul(a, a, bias=m[0]),
    "accumulated": lambda a, b, m: eager.matmul(a, b, out=bf16(64, 64), beta=0.5),
    "accumulated tall": lambda a, b, m: eager.matmul(
        a.view(2, 32, 64), b, out=bf16(2, 32, 64), residual=m.view(2, 32, 64), beta=0.5),
    "amax": lambda a, b, m: eager.matmul(a, b, amax=torch.zeros(1), activation="relu"),
}  # fmt: skip


def described(x):
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


@pytest.mark.sweep(3)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_plan_passes_what_the_first_call_passed(call, launches, monkeypatch):
    a, b, more = bf16(64, 64), bf16(64, 64), bf16(64, 64)
    first = call(a, b, more)
    monkeypatch.setattr(eager, "arrange", lambda *_: pytest.fail("there is a plan"))
    again = call(a, b, more)
    one, two = launches
    assert list(map(described, one)) == list(map(described, two))
    assert described(first) == described(again)
    inputs = {x.data_ptr() for x in (a, b, more)}
    same = [isinstance(x, torch.Tensor) and x.data_ptr() in inputs for x in one]
    assert [x.data_ptr() for x, s in zip(one, same, strict=True) if s] == [
        x.data_ptr() for x, s in zip(two, same, strict=True) if s
    ]
    assert again.data_ptr() in {x.data_ptr() for x in two if isinstance(x, torch.Tensor)}


def test_an_output_that_shares_memory_has_no_plan(launches):
    memory = bf16(192, 64)
    a, b = memory[:64], bf16(64, 64)
    eager.matmul(a, b, out=memory[128:])
    for out in (memory[32:96], memory[:64]):
        with pytest.raises(ValueError, match="out"):
            eager.matmul(a, b, out=out)
    assert len(launches) == 1

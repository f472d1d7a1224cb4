"""cutex.ops.plain: the tensors on which a kernel may be launched directly, and those for torch
first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from cutex.ops import device
from cutex.ops.plain import check_held, guard, is_plain, is_watched_unseen, nobody_watches


def matrix() -> Tensor:
    return torch.ones(8, 8)


class Subclass(Tensor):
    pass


def left_over(transform: Callable[..., Callable[..., Tensor]]) -> Tensor:
    """A tensor that has left the transform that wrapped it."""
    kept: list[Tensor] = []
    transform(lambda x: (kept.append(x), x.sum())[1])(matrix())
    return kept[0]


def inferred() -> Tensor:
    with torch.inference_mode():
        return matrix()


FOREIGN: dict[str, Callable[[], Tensor]] = {
    "fake": lambda: FakeTensorMode().from_tensor(matrix()),
    "a subclass": lambda: matrix().as_subclass(Subclass),
    "a wrapper": lambda: TwoTensor(matrix(), matrix()),
    "functional": lambda: torch._to_functional_tensor(matrix()),
    "negated": lambda: torch._neg_view(matrix()),
    "imaginary part of a conjugate": lambda: torch.zeros(8, 8, dtype=torch.cfloat).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor((8, 8)),
    "meta": lambda: matrix().to("meta"),
    "left vmap": lambda: left_over(torch.func.vmap),
    "left grad": lambda: left_over(torch.func.grad),
}
PLAIN: dict[str, Callable[[], Tensor]] = {
    "a matrix": matrix,
    "a parameter": lambda: torch.nn.Parameter(matrix()),
    "a buffer": lambda: torch.nn.Buffer(matrix()),
    "a view": lambda: matrix().mT[2:],
    "expanded": lambda: torch.ones(1, 8).expand(8, 8),
    "an inference tensor": inferred,
    "a result of autograd": lambda: matrix().requires_grad_() * 2,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_more_than_memory_is_not_plain(make: Callable[[], Tensor]) -> None:
    x = make()
    takes = guard((matrix(), matrix()))
    assert not is_plain(x) and not takes(matrix(), x) and not takes(x, matrix())
    assert takes(matrix(), matrix())


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN.keys())
def test_memory_is_plain(make: Callable[[], Tensor]) -> None:
    x = make()
    assert is_plain(x) and guard((x, matrix()))(x, matrix())
    with torch.inference_mode():
        assert is_plain(x) and guard((x, matrix()))(x, matrix())


OTHERS: dict[str, Callable[[], Tensor]] = {
    "sizes": lambda: torch.ones(8, 9),
    "strides": lambda: matrix().mT,
    "a dtype": lambda: matrix().half(),
    "a gradient": lambda: matrix().requires_grad_(),
    "a class": lambda: torch.nn.Parameter(matrix(), requires_grad=False),
    "inference": inferred,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_a_guard_takes_what_it_was_made_for_alone(make: Callable[[], Tensor]) -> None:
    takes = guard((matrix(), make()))
    assert takes(matrix(), make()) and not takes(matrix(), matrix()) and not takes(make(), make())
    same = matrix()
    assert not guard((matrix(), matrix()))(same, same)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.half)])
def test_a_guard_knows_the_modes_that_change_dispatch(mode) -> None:
    outside = guard((matrix(),))
    with mode():
        inside = guard((matrix(),))
        x = matrix()
        assert inside(x) and not outside(x)
    x = matrix()
    assert outside(x) and not inside(x)


def seen_within(
    run: Callable[[Callable[[Tensor], Tensor]], object], look: Callable[[], bool]
) -> bool:
    """The result of `look` within a transform."""
    found: list[bool] = []

    def function(x: Tensor) -> Tensor:
        found.append(look())
        return x.sum()

    run(function)
    return found[0]


@contextmanager
def watched_on_a_default_device() -> Iterator[None]:
    with torch.device("cpu"), TorchFunctionMode():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a dispatch mode": TorchDispatchMode,
    "a function mode": TorchFunctionMode,
    "a function mode and a default device": watched_on_a_default_device,
    "fake tensors": FakeTensorMode,
    "functional tensors": FunctionalTensorMode,
    "forward differentiation": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_modes_watch(mode: Callable[[], AbstractContextManager[object]]) -> None:
    x = matrix()
    takes = guard((x,))
    with mode():
        assert not nobody_watches()
        assert is_watched_unseen() or not takes(x)
    assert nobody_watches() and takes(x) and not is_watched_unseen()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "vmap": lambda f: torch.func.vmap(f)(matrix()),
    "grad": lambda f: torch.func.grad(f)(matrix()),
    "jvp": lambda f: torch.func.jvp(f, (matrix(),), (matrix(),)),
    "functionalize": lambda f: torch.func.functionalize(f)(matrix()),
    "make_fx": lambda f: make_fx(f)(matrix()),
    "make_fx before dispatch": lambda f: make_fx(f, pre_dispatch=True)(matrix()),
    "jit.trace": lambda f: torch.jit.trace(f, (matrix(),)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_watch(transform: Callable[[Callable[[Tensor], Tensor]], object]) -> None:
    x = matrix()
    takes = guard((x,))
    assert not seen_within(transform, nobody_watches)
    assert seen_within(transform, lambda: is_watched_unseen() or not takes(x))
    assert nobody_watches() and takes(x) and not is_watched_unseen()


@pytest.mark.parametrize(
    "mode",
    [nullcontext, torch.no_grad, torch.inference_mode, lambda: DeviceContext("cpu")],
    ids=["none", "no_grad", "inference mode", "default device"],
)
def test_modes_that_change_nothing_for_a_kernel_do_not_watch(mode) -> None:
    with mode():
        assert nobody_watches()


def test_a_launch_asks_for_its_gpu_only_where_another_is_current(monkeypatch):
    current, asked, ran = [1], [], []
    monkeypatch.setattr(device, "SEVERAL_GPUS", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(device, "current", lambda x: asked.append(x) or nullcontext())
    there = torch.device("cuda", 1)
    launch = device.on_device(there, ran.append)
    launch("here")
    current[0] = 0
    launch("from elsewhere")
    assert ran == ["here", "from elsewhere"] and asked == [there]


@pytest.mark.parametrize("keep", [0, 0.5])
@pytest.mark.parametrize("view", ["itself", "columns", "transposed", "expanded", "rows behind"])
def test_elements_beyond_the_storage_are_refused(view: str, keep: float) -> None:
    x = torch.zeros(8, 16)
    views = {
        "itself": x, "columns": x[:, 8:], "transposed": x.T, "expanded": x.expand(3, 8, 16),
        "rows behind": x[6:],
    }  # fmt: skip
    found = views[view]
    check_held("x", found)
    x.untyped_storage().resize_(int(x.untyped_storage().nbytes() * keep))
    said = "was cut to 256" if keep else "has no memory"
    with pytest.raises(ValueError, match=f"^x .*{said}"):
        check_held("x", found)
    check_held("x", found[:0])


def test_every_first_launch_looks_at_the_storage_of_its_operands() -> None:
    compiled: Any = SimpleNamespace(
        argument_names=("mX", "mY"), function=lambda *x: lambda *y: None
    )
    x, y = torch.zeros(4), torch.zeros(4)
    device.launcher(compiled, [x, y])(x, y)
    y.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=r"^mY reaches to byte 16 of its storage"):
        device.launcher(compiled, [x, y])

"""The devices that torch operators run on: CUDA, or the simulator for tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from cutex.arch import ARCHS
from cutex.compile import Compiled

SEVERAL_GPUS = torch.cuda.is_available() and torch.cuda.device_count() > 1

_simulator: dict[str, Any] = {}  # while tensors of the CPU run in the simulator: arch, order, seed
_caches: list[dict[Any, Any]] = []

Cache = TypeVar("Cache", bound=dict[Any, Any])


def per_device(cache: Cache) -> Cache:
    """`cache`, to be emptied whenever tensors of the CPU get or lose the simulator."""
    _caches.append(cache)
    return cache


@contextmanager
def simulated(arch: str = "sm_90a", **orders: Any) -> Iterator[None]:
    """Within, tensors on the CPU run in the simulator (see cutex.sim.simulate for `orders`)."""
    if arch not in ARCHS:
        known = " and ".join(ARCHS)
        raise ValueError(f"arch {arch!r}: cutex.matmul has kernels for {known} only")
    forget_plans()
    _simulator.update(arch=arch, **orders)
    try:
        yield
    finally:
        _simulator.clear()
        forget_plans()


def forget_plans() -> None:
    """Have every call look up its kernel anew."""
    for cache in _caches:
        cache.clear()


def simulated_arch() -> str | None:
    """The arch that tensors of the CPU are simulated on, if they are."""
    return _simulator.get("arch")


def arch_of(device: torch.device) -> str:
    """The arch of what runs on `device`; ValueError, in one sentence, if nothing does."""
    if device.type == "cpu" and _simulator:
        return _simulator["arch"]
    if device.type != "cuda":
        raise ValueError(
            f"a is on {device}: cutex.matmul runs on a Hopper or Blackwell GPU; move its tensors "
            "there, or run them in the simulator with `with cutex.ops.simulated():`"
        )
    capability = torch.cuda.get_device_capability(device)
    arch = next((x for x in ARCHS.values() if x.capability == capability), None)
    if arch is None:
        raise ValueError(
            f"a is on {device}, a GPU of compute capability {capability[0]}.{capability[1]}: "
            "cutex.matmul has kernels for 9.0 (Hopper) and 10.0 (Blackwell); use torch.matmul there"
        )
    return arch.name


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within, a CUDA `device` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launcher(compiled: Compiled, arguments: list[Any]) -> Callable[..., None]:
    """A function that launches `compiled`, once it is known to take `arguments`."""
    if not _simulator:
        return compiled.function(*arguments)
    from cutex.sim import simulate

    orders = {k: v for k, v in _simulator.items() if k != "arch"}

    def launch(*tensors: Any) -> None:
        simulate(compiled, *tensors, **orders)

    return launch

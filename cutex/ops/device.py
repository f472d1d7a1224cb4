"""The devices of torch operators: CUDA, or the simulator for tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from cutex.arch import ARCHS, KNOWN, Arch, board_named, local_arch
from cutex.compile import Compiled, Workspace
from cutex.ops.plain import check_held, empty_of, untraced
from cutex.ops.workspace import buffers, buffers_of, forget_flags
from cutex.simulation import SimulatedDevice, simulating
from cutex.simulation import current as simulation_here

ORDERS = ("order", "seed", "memory")  # options of `simulated` that are passed to cutex.simulate
SEVERAL_GPUS = torch.cuda.is_available() and torch.cuda.device_count() > 1

_caches: list[dict[Any, Any]] = []

Cache = TypeVar("Cache", bound=dict[Any, Any])


def per_device(cache: Cache) -> Cache:
    """`cache`, registered to be cleared whenever CPU tensors start or stop being simulated."""
    _caches.append(cache)
    return cache


@contextmanager
def simulated(arch: str = "sm_90a", **orders: Any) -> Iterator[None]:
    """A context in which this thread's CPU tensors run in the simulator.

    orders: order, seed and memory, see cutex.simulate. The innermost of nested contexts counts.
    Raises ValueError for an unknown arch, TypeError for another option.
    """
    if arch not in KNOWN:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(KNOWN)}")
    for name in orders:
        if name not in ORDERS:
            known = ", ".join(ORDERS)
            raise TypeError(f"simulated() has no option {name!r}, it takes arch, {known}")

    def launch(compiled: Compiled, tensors: tuple[Any, ...]) -> None:
        from cutex.sim import simulate

        simulate(compiled, *tensors, **orders)

    with simulating(SimulatedDevice(arch, launch)):
        forget_plans()
        try:
            yield
        finally:
            forget_plans()
            forget_flags(torch.device("cpu"))


def forget_plans() -> None:
    """Make every call look up its kernel again."""
    for cache in _caches:
        cache.clear()


@torch.compiler.assume_constant_result  # dynamo traces no context variables
def simulated_arch() -> str | None:
    """The arch that this thread's CPU tensors are simulated on, or None."""
    simulation = simulation_here()
    return None if simulation is None else simulation.arch


def arch_of(
    device: torch.device,
    function: str = "cutex.matmul",
    name: str = "a",
    instead: str = "torch.matmul",
    archs: Mapping[str, Arch] = ARCHS,
) -> str:
    """The arch of the GPU `device`, or the one simulated for the CPU; ValueError, in one sentence,
    if it is none of `archs`: `function` cannot take its argument `name` there, `instead` can."""
    if device.type == "cpu" and (simulated := simulated_arch()) is not None:
        if simulated not in archs:
            *most, last = archs
            known = f"{', '.join(most)} and {last}"
            raise ValueError(f"arch {simulated!r}: {function} has kernels for {known} only")
        return simulated
    if device.type != "cuda":
        raise ValueError(
            f"{name} is on {device}: {function} runs on {_kinds(archs)} GPU; move its "
            "tensors there, or run them in the simulator with `with cutex.ops.simulated():`"
        )
    capability = torch.cuda.get_device_capability(device)
    arch = next((x for x in archs.values() if x.capability == capability), None)
    if arch is None:
        *most, last = (f"{x.capability[0]}.{x.capability[1]} ({x.title})" for x in archs.values())
        raise ValueError(
            f"{name} is on {device}, a GPU of compute capability {capability[0]}.{capability[1]}: "
            f"{function} has kernels for {', '.join(most)} and {last}; use {instead} there"
        )
    return arch.name


def _kinds(archs: Mapping[str, Arch]) -> str:
    return "a Hopper or Blackwell" if archs is ARCHS else "an Ampere or newer"


def other_sms(arch_name: str) -> int:
    """The number of SMs of this process's GPU, if it is of the arch but has not as many as the
    arch's facts say (an H100 PCIe, an H20, a MIG slice); otherwise 0."""
    if simulated_arch() is not None or (here := local_arch()) is None or here.name != arch_name:
        return 0
    found = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return 0 if found == here.num_sms else int(found)


def other_board(arch_name: str) -> str:
    """The name in BOARDS of this process's GPU, if it is of the arch but on another board than the
    arch's facts; otherwise ""."""
    if simulated_arch() is not None or (here := local_arch()) is None or here.name != arch_name:
        return ""
    return board_named(torch.cuda.get_device_name())


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a CUDA `device` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device(device: torch.device, launch: Callable[..., None]) -> Callable[..., None]:
    """`launch` with `device` current, which several GPUs need."""
    if not SEVERAL_GPUS or device.type != "cuda":
        return launch
    here, index = torch._C._cuda_getDevice, device.index

    def launch_there(*arguments: Any) -> None:
        if here() == index:  # NOTE: as nearly always; the context takes as long as the launch
            launch(*arguments)
        else:
            with current(device):
                launch(*arguments)

    return launch_there


def allocating(function: Callable[..., None], out: torch.Tensor, place: int) -> Callable[..., Any]:
    """`function`, which takes a tensor like `out` as argument number `place` and writes it, as a
    function of the other arguments that returns it."""
    function, empty = on_device(out.device, function), empty_of(out.device, SEVERAL_GPUS)
    shape, strides, dtype = tuple(out.shape), out.stride(), out.dtype

    @untraced
    def run(*given: torch.Tensor) -> torch.Tensor:
        made = empty(shape, strides, dtype)
        function(*given[:place], made, *given[place:])
        return made

    return run


def launcher(
    compiled: Compiled, arguments: list[Any], needs: Workspace | None = None
) -> Callable[..., None]:
    """A function that launches `compiled`, after a check that it takes `arguments` and that these
    are in memory; if it `needs` a workspace, the function appends one.

    A launcher for the simulator raises ValueError outside the `simulated` context that it was made
    in.
    """
    if needs is not None:
        device = arguments[0].device
        of_stream = buffers_of(needs, device)
        launch_with = launcher(compiled, [*arguments, *buffers(needs, device)])
        return lambda *tensors: launch_with(*tensors, *of_stream())
    for name, x in zip(compiled.argument_names, arguments, strict=True):
        check_held(name, x)
    simulation = simulation_here()
    if simulation is None or not arguments[0].is_cpu:
        return compiled.function(*arguments)

    def launch(*tensors: Any) -> None:
        if simulation_here() is not simulation:
            raise ValueError("this plan was made for another simulator")
        simulation.launch(compiled, tensors)

    return launch

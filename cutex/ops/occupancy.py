"""How many clusters of a kernel a GPU runs at one time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cutex.compile import Compiled

PORTABLE = 8  # CTAs of a cluster that every GPU with clusters takes


def clusters_at_once(
    compiled: Compiled, threads: int, ctas: int, device: torch.device
) -> int | None:
    """The number of clusters of `ctas` CTAs with `threads` threads that a GPU runs at once, for the
    first function that a compiled kernel launches; None in the simulator.

    NOTE: it cannot be computed from the number of SMs: GPCs have 14 to 18 SMs, differently on each
    card, and one cluster more than fits waits until all others have ended.
    """
    if device.type != "cuda":
        return None
    from cuda.bindings import driver

    with torch.cuda.device(device), context_of(device):
        library = done(driver.cuLibraryLoadData(compiled.cubin, None, None, 0, None, None, 0))
        try:
            name, smem = next(iter(compiled.dynamic_smem.items()))
            kernel = done(driver.cuLibraryGetKernel(library, name.encode()))
            function = done(driver.cuKernelGetFunction(kernel))
            kinds = driver.CUfunction_attribute
            most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            done(driver.cuFuncSetAttribute(function, most, smem))
            share = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            done(driver.cuFuncSetAttribute(function, share, 100))
            if ctas > PORTABLE:
                larger = kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                done(driver.cuFuncSetAttribute(function, larger, 1))
            config = launch_config(threads, ctas, smem)
            return done(driver.cuOccupancyMaxActiveClusters(function, config))
        finally:
            done(driver.cuLibraryUnload(library))


@contextmanager
def context_of(device: torch.device) -> Iterator[None]:
    """A context in which the driver's functions work on `device`.

    NOTE: a thread that torch started, as autograd's, has none before it first calls the runtime.
    """
    from cuda.bindings import driver

    done(driver.cuInit(0))
    index = torch.cuda.current_device() if device.index is None else device.index
    of = done(driver.cuDeviceGet(index))
    done(driver.cuCtxPushCurrent(done(driver.cuDevicePrimaryCtxRetain(of))))
    try:
        yield
    finally:
        done(driver.cuCtxPopCurrent())
        done(driver.cuDevicePrimaryCtxRelease(of))


def launch_config(threads: int, ctas: int, smem: int) -> Any:
    """The launch of a cluster."""
    from cuda.bindings import driver

    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = ctas, 1, 1
    cluster.value = value
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem
    config.attrs, config.numAttrs = [cluster], 1
    return config


def done(answer: tuple[Any, ...]) -> Any:
    """What a function of the driver returned; RuntimeError if it failed."""
    error, *values = answer
    if error.value:
        raise RuntimeError(f"the driver says {error.name}")
    return values[0] if values else None

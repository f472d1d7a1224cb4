"""Stand-ins for the CUDA driver and runtime functions that scripts call besides launches:
properties of the GPU, memory, and synchronization. Memory is host memory that the script's kernels
may access, like torch's; a launch is complete when it returns, so waits do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime
import torch

from cutex.arch import Arch
from cutex.sim.host.streams import STREAMS
from cutex.sim.host.torch_stand_in import DeviceMemory


class CudaDevice:
    """The properties of a script's one GPU, as the driver and the runtime return them."""

    def __init__(self, arch: Arch) -> None:
        kind = driver.CUdevice_attribute
        major, minor = arch.capability
        known = {
            "COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor,
            "MULTIPROCESSOR_COUNT": arch.num_sms, "L2_CACHE_SIZE": arch.l2_bytes,
            "WARP_SIZE": 32, "MAX_THREADS_PER_BLOCK": 1024,
            "MAX_THREADS_PER_MULTIPROCESSOR": arch.sm_threads, "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
            "MAX_REGISTERS_PER_BLOCK": 65536, "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
            "MAX_SHARED_MEMORY_PER_BLOCK": 48 << 10,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": arch.smem_per_cta,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": arch.smem_per_cta + 1024,
            "RESERVED_SHARED_MEMORY_PER_BLOCK": 1 << 10,
            "COOPERATIVE_LAUNCH": 1, "CLUSTER_LAUNCH": 1, "UNIFIED_ADDRESSING": 1,
        }  # fmt: skip
        self.attributes = {
            int(getattr(kind, f"CU_DEVICE_ATTRIBUTE_{name}")): value
            for name, value in known.items()
        }
        self.name = f"NVIDIA {arch.board}".encode()

    def attribute(self, which: Any, *_: Any) -> int:
        """The attribute of a number, which the driver and the runtime share."""
        found = self.attributes.get(int(which))
        if found is None:
            raise NotImplementedError(
                f"the GPU that the simulator stands in for has no {getattr(which, 'name', which)}"
            )
        return found

    def runtime_functions(self) -> dict[str, Callable[..., Any]]:
        functions = {
            "cudaGetDevice": lambda *_: 0, "cudaGetDeviceCount": lambda *_: 1,
            "cudaDeviceGetAttribute": self.attribute,
        }  # fmt: skip
        return _answering(runtime.cudaError_t.cudaSuccess, functions, ("cudaSetDevice",))

    def driver_functions(self) -> dict[str, Callable[..., Any]]:
        device, context = driver.CUdevice(0), driver.CUcontext(1)
        functions: dict[str, Callable[..., Any]] = {
            "cuDeviceGet": lambda *_: device, "cuDeviceGetCount": lambda *_: 1,
            "cuDriverGetVersion": lambda *_: 13000, "cuCtxGetDevice": lambda *_: device,
            "cuCtxGetCurrent": lambda *_: context,
            "cuDevicePrimaryCtxRetain": lambda *_: context,
            "cuDeviceGetName": lambda *_: self.name, "cuDeviceGetAttribute": self.attribute,
        }  # fmt: skip
        return _answering(driver.CUresult.CUDA_SUCCESS, functions, ("cuInit", "cuCtxSetCurrent"))


class CudaMemory:
    """The memory that a script has allocated by the CUDA API."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.held: dict[int, torch.Tensor] = {}  # by address

    def allocate(self, size: int, *_: Any) -> int:
        tensor = self.memory.blank(self.memory.add(torch.empty(int(size), dtype=torch.uint8)))
        self.held[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def free(self, address: Any, *_: Any) -> None:
        self.held.pop(int(address), None)

    @staticmethod
    def fill(address: Any, value: int, size: int, *_: Any) -> None:
        ctypes.memset(int(address), value, size)

    @staticmethod
    def fill_words(address: Any, value: int, count: int, *_: Any) -> None:
        (ctypes.c_uint32 * count).from_address(int(address))[:] = [value] * count

    @staticmethod
    def copy(to: Any, frm: Any, size: int, *_: Any) -> None:
        STREAMS.all_wait()  # NOTE: more than one that is asynchronous does
        ctypes.memmove(_address(to), _address(frm), size)

    def runtime_functions(self) -> dict[str, Callable[..., Any]]:
        """The stand-ins for functions of `cuda.bindings.runtime`."""
        ok = runtime.cudaError_t.cudaSuccess
        functions = {
            "cudaMalloc": self.allocate, "cudaMallocAsync": self.allocate, "cudaFree": self.free,
            "cudaFreeAsync": self.free, "cudaMemset": self.fill, "cudaMemsetAsync": self.fill,
            "cudaMemcpy": self.copy, "cudaMemcpyAsync": self.copy,
        }  # fmt: skip
        functions |= dict.fromkeys(
            ("cudaDeviceSynchronize", "cudaStreamSynchronize"), STREAMS.all_wait
        )
        return _answering(ok, functions, ("cudaGetLastError",))

    def driver_functions(self) -> dict[str, Callable[..., Any]]:
        """The stand-ins for functions of `cuda.bindings.driver`."""
        functions: dict[str, Callable[..., Any]] = {
            "cuMemAlloc": self.allocate, "cuMemAllocAsync": self.allocate, "cuMemFree": self.free,
            "cuMemFreeAsync": self.free, "cuMemsetD8": self.fill, "cuMemsetD8Async": self.fill,
            "cuMemsetD32": self.fill_words, "cuMemsetD32Async": self.fill_words,
        }  # fmt: skip
        for name in ("cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD"):
            functions |= {name: self.copy, f"{name}Async": self.copy}
        functions |= dict.fromkeys(("cuStreamSynchronize", "cuCtxSynchronize"), STREAMS.all_wait)
        return _answering(driver.CUresult.CUDA_SUCCESS, functions, ())


def _answering(
    ok: Any, functions: dict[str, Callable[..., Any]], waits: tuple[str, ...]
) -> dict[str, Callable[..., Any]]:
    """The functions with the return convention of the bindings: a tuple of the error code and the
    result.
    """

    def answering(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            found = function(*arguments)
            return (ok,) if found is None else (ok, found)

        return call

    nothing = {name: lambda *_: (ok,) for name in waits}
    return {name: answering(function) for name, function in functions.items()} | nothing


def _address(memory: Any) -> int:
    """The address of a pointer, or of an object that holds bytes."""
    if hasattr(memory, "__array_interface__"):
        return int(memory.__array_interface__["data"][0])
    if isinstance(memory, bytearray | memoryview):
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return int(memory)

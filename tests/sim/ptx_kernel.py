"""Snippets of PTX as kernels: a body of instructions becomes an entry over arrays.

The same text runs in the simulator and, where the machine has a Hopper GPU, on it.

The body finds declared: predicates %p0.., 16-bit %h0.., 32-bit %r0.., 64-bit %d0..; and set: %i,
the thread's number in a one-dimensional grid; %lane; and for each array ``x``: %x, its address, and
%x_i, the address of ``x[i]`` (a row where ``x`` has more than one dimension).

With dynamic shared memory, ``smem`` is its symbol.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cutex.sim.errors import Hazards
from cutex.sim.host.capture import HostTensor, Launch
from cutex.sim.ptx.parse import parse
from cutex.sim.simulation import SimReport, Simulation

VERSION = "8.6"


@dataclass(frozen=True)
class Shape:
    """The launch of a snippet; smem in bytes."""

    grid: int | tuple[int, int, int] = 1
    block: int | tuple[int, int, int] = 32
    cluster: int = 1
    smem: int = 0
    ctas_per_sm: int = 1  # that registers must do for

    @staticmethod
    def _three(n: int | tuple[int, int, int]) -> tuple[int, int, int]:
        return (n, 1, 1) if isinstance(n, int) else n

    def launch(self, kernel: str, params: object) -> Launch:
        return Launch(
            kernel,
            self._three(self.grid),
            self._three(self.block),
            (self.cluster, 1, 1),
            self.smem,
            params,
        )


def module(body: str, arrays: Mapping[str, np.ndarray], shape: Shape, arch: str, head: str) -> str:
    """The PTX of a module with one entry ``snippet``; ``head`` holds module-scope declarations."""
    params = ", ".join(f".param .u64 p_{name}" for name in arrays)
    lines = [f".version {VERSION if arch == 'sm_90a' else '8.8'}", f".target {arch}"]
    lines += [".address_size 64", head]
    if shape.smem:
        lines.append(".extern .shared .align 1024 .b8 smem[];")
    lines += [f".visible .entry snippet({params})"]
    if shape.ctas_per_sm > 1:
        lines += [f".maxntid {shape.block}", f".minnctapersm {shape.ctas_per_sm}"]
    lines += ["{"]
    lines += [".reg .pred %p<16>;", ".reg .b16 %h<64>;", ".reg .b32 %r<512>;", ".reg .b64 %d<128>;"]
    lines += [".reg .b32 %i, %lane, %cta, %threads;", "mov.u32 %lane, %laneid;"]
    lines += ["mov.u32 %i, %tid.x;", "mov.u32 %cta, %ctaid.x;", "mov.u32 %threads, %ntid.x;"]
    lines += ["mad.lo.u32 %i, %cta, %threads, %i;"]
    for name, array in arrays.items():
        step = array.strides[0] if array.ndim else 0
        lines += [f".reg .b64 %{name}, %{name}_i;", f"ld.param.u64 %{name}, [p_{name}];"]
        lines += [f"cvta.to.global.u64 %{name}, %{name};"]
        lines += [f"mad.wide.u32 %{name}_i, %i, {step}, %{name};"]
    return "\n".join([*lines, body, "ret;", "}", ""])


def simulate_ptx(
    body: str,
    arrays: Mapping[str, np.ndarray],
    shape: Shape | None = None,
    *,
    head: str = "",
    arch: str = "sm_90a",
    order: str = "fifo",
    seed: int = 0,
    assembles: bool = True,
    **how: Any,
) -> SimReport:
    """Run the snippet in the simulator; ``arrays`` are written in place. Raises Hazards too.

    ``assembles``: whether NVIDIA's assembler takes it. ``how``: further options of `Simulation`.
    """
    shape = shape or Shape()
    text = module(body, arrays, shape, arch, head)
    if assembles:
        _assemble(text, arch)
    tensors = [HostTensor.of(array, name) for name, array in arrays.items()]
    values = [ctypes.c_uint64(t.address) for t in tensors]
    params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
    run = Simulation(parse(text), tensors, order=order, seed=seed, **how)
    run.launch(shape.launch("snippet", params))
    if run.report.findings:
        raise Hazards(run.report.findings)
    return run.report


def run_on_gpu(
    body: str, arrays: Mapping[str, np.ndarray], shape: Shape | None = None, *, head: str = ""
) -> None:
    """Run the snippet on the GPU of this machine; ``arrays`` are written in place."""
    import torch
    from cuda.bindings import driver

    def checked(result):
        code, *values = result
        assert code == driver.CUresult.CUDA_SUCCESS, code
        return values[0] if values else None

    shape = shape or Shape()
    text = module(body, arrays, shape, "sm_90a", head)
    on_gpu = {n: torch.from_numpy(_bytes(a).copy()).cuda() for n, a in arrays.items()}
    library = checked(driver.cuModuleLoadData(text.encode() + b"\0"))
    try:
        function = checked(driver.cuModuleGetFunction(library, b"snippet"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, limit, shape.smem))
        launch = shape.launch("snippet", None)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.smem
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = cluster.value.clusterDim
        dimension.x, dimension.y, dimension.z = launch.cluster
        config.attrs, config.numAttrs = [cluster], 1
        pointers = tuple(t.data_ptr() for t in on_gpu.values())
        arguments = (pointers, (ctypes.c_void_p,) * len(pointers))
        checked(driver.cuLaunchKernelEx(config, function, arguments, 0))
        checked(driver.cuCtxSynchronize())
    finally:
        driver.cuModuleUnload(library)
    for name, array in arrays.items():
        _bytes(array)[...] = on_gpu[name].cpu().numpy()


def _bytes(array: np.ndarray) -> np.ndarray:
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


@cache
def _assemble(text: str, arch: str) -> None:
    """Assemble the snippet with $CUTEX_PTXAS, if set: finds a test's own bad PTX without a GPU."""
    ptxas = os.environ.get("CUTEX_PTXAS")
    if ptxas:
        command = [ptxas, f"-arch={arch}", "-O0", "-o", os.devnull, "/dev/stdin"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert not done.returncode, f"{done.stderr}\n{text}"

"""The CuTe DSL as a script uses it on a machine with a GPU, on a machine without one.

A script's kernels are compiled for the arch of the GPU that is simulated; its launches run in the
simulator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import cuda.bindings.driver as driver
import cuda.bindings.runtime as cuda_runtime
import cutlass.cute.testing
import cutlass.testing
import torch
from cutlass._mlir import ir
from cutlass._mlir.passmanager import PassManager
from cutlass.base_dsl import compiler
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.base_dsl.export import ExternalBinaryModule
from cutlass.cute.runtime import _Tensor

from cutex.arch import Arch
from cutex.cache import plain_folder
from cutex.debug_info import recording
from cutex.sim.errors import SimError
from cutex.sim.host.arguments import holds_tensors, stand_for, takes_stream
from cutex.sim.host.calls import Calls
from cutex.sim.host.capture import describe_on_gpu
from cutex.sim.host.cuda_stand_in import CudaDevice, CudaMemory
from cutex.sim.host.loaded import is_stream
from cutex.sim.host.simulated import PlainSimulated, Simulated
from cutex.sim.host.stopwatch import STOPWATCH
from cutex.sim.host.torch_stand_in import patched
from cutex.tracing import tracing


class Compiler:
    """A replacement for the DSL's own function that compiles and runs a jitted function."""

    def __init__(self, arch: Arch, calls: Calls) -> None:
        self.arch, self.calls = arch, calls
        self.original = BaseDSL._func
        self.folder = plain_folder()

    def __call__(self, dsl: Any, body: Any, *arguments: Any, **named: Any) -> Any:
        if ir.Context.current is not None and ir.InsertionPoint.current is not None:
            return self.original(dsl, body, *arguments, **named)  # called while compiling
        only = named.pop("compile_only", False)
        named.pop("no_cache", None)
        function = self._compile(dsl, body, only, arguments, named)
        if only:
            return function
        if isinstance(function, PlainSimulated):
            return function(*function.runtime_arguments(arguments, named))
        bound = inspect.signature(body).bind(*arguments, **named)
        bound.apply_defaults()
        wanted = {*function.host.argument_names, *function.streams}
        return function(*[v for n, v in bound.arguments.items() if n in wanted])

    def _compile(
        self, dsl: Any, body: Any, only: bool, arguments: Any, named: dict[str, Any]
    ) -> Simulated | PlainSimulated:
        options = dsl.compile_options if only else compiler.CompileOptions()
        asked = options.options.get(compiler.EnableTVMFFI)
        with_ffi = asked is not None and bool(asked.value)
        plain = lambda: self._trace(dsl, body, options, False, arguments, named)
        own_stream = not takes_stream([*arguments, *named.values()])
        fakes = [stand_for(a, own_stream) for a in arguments]
        fake_named = {name: stand_for(a, own_stream) for name, a in named.items()}
        parameters = dict(inspect.signature(body).parameters)
        parameters.pop("self", None)
        compiled = None
        # NOTE: TVM-FFI takes tuples of tensors as arrays of its own tensors only
        if with_ffi or not any(map(holds_tensors, [*arguments, *named.values()])):
            try:
                compiled = self._trace(dsl, body, options, True, fakes, fake_named)
            except Exception:
                if with_ffi:
                    raise
        try:
            if compiled is None:  # NOTE: fails both ways, and so as the script would see it
                return PlainSimulated(plain(), self.calls)
            streams = _streams_of(body, arguments, named) if own_stream else set()
            return Simulated(compiled, parameters, streams, self.calls, None if with_ffi else plain)
        except SimError as error:  # NOTE: PTX that the simulator does not define
            self.calls.errors.append((error, getattr(compiled, "_cutex_ptx", "")))
            raise

    def _trace(
        self,
        dsl: Any,
        body: Any,
        options: Any,
        with_ffi: bool,
        arguments: Sequence[Any],
        named: dict[str, Any],
    ) -> Any:
        ours = (
            compiler.EnableTVMFFI(with_ffi),
            compiler.KeepPTX(True),
            compiler.KeepCUBIN(True),
            compiler.GenerateLineInfo(True),
            compiler.GPUArch(self.arch.name),
            compiler.DumpDir(self.folder.name),
        )
        dsl.compile_options = copy(options)  # NOTE: the script may use its own again
        dsl.compile_options.options = {**options.options, **{type(o): o for o in ours}}
        with ExitStack() as stack:
            stack.enter_context(tracing())
            recorder = stack.enter_context(recording())
            if not with_ffi:
                hook = compiler.PostCompileHookContext(dsl.compiler_provider, _strip_debug_info)
                stack.enter_context(hook)
            compiled = self.original(
                dsl, body, *arguments, compile_only=True, no_cache=True, **named
            )
        if compiled.__ptx__ and "\n" in compiled.__ptx__:  # else it is a file's name, of no kernel
            compiled._cutex_ptx = recorder.annotate(compiled.__ptx__)
        return compiled


def _streams_of(body: Any, arguments: Sequence[Any], named: dict[str, Any]) -> set[str]:
    """The parameters for which a call names a stream: not those of the environment's own."""
    known = inspect.signature(body)
    own = {
        name: value for name, value in named.items() if name in known.parameters
    }  # not the DSL's
    bound = known.bind_partial(*arguments, **own).arguments
    return {
        name
        for name, value in bound.items()
        if is_stream(value) and not getattr(value, "use_tvm_ffi_env_stream", False)
    }


def _strip_debug_info(module: ir.Module) -> None:
    """Remove debug info from the host code, after the PTX was made: the calls of its C interface
    have none, and LLVM refuses the mixture.
    """
    passes = PassManager.parse("builtin.module(strip-debuginfo)", context=module.context)
    passes.run(module.operation)


def _benchmark(callable: Any, **how: Any) -> float:
    """A replacement for cute.testing.benchmark: makes one call, and returns its microseconds."""
    arguments = how.get("kernel_arguments")
    generate = how.get("workspace_generator")
    if arguments is None and generate is not None:
        arguments = generate()
    if arguments is None:
        return 1e3 * STOPWATCH.of(callable)
    return 1e3 * STOPWATCH.of(lambda: callable(*arguments.args, **arguments.kwargs))


def _benchmark_for_autotune(callable: Any, *arguments: Any, **named: Any) -> float:
    """Makes one call of a configuration and returns 0: all are equally fast, so the DSL's tuner
    keeps the first.
    """
    how = ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose", "current_stream")
    callable(*arguments, **{n: v for n, v in named.items() if n not in how})
    return 0.0


def _on_gpu(make: Callable[..., None]) -> Callable[..., None]:
    """``_Tensor.__init__`` of from_dlpack, for which the script's GPU tensors are global memory."""

    def init(self: Any, tensor: Any, *arguments: Any, **named: Any) -> None:
        make(self, tensor, *arguments, **named)
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            describe_on_gpu(self._dlpack_data)

    return init


def _no_object_files(module: Any, file_path: str, *_: Any, **__: Any) -> None:
    """ExternalBinaryModule.__init__"""
    raise NotImplementedError(
        f"{file_path} holds a kernel's machine code and not its PTX, which is what the simulator "
        "runs: let the script compile the kernel, for instance by moving its cache away"
    )


@contextmanager
def dsl_on_cpu(arch: Arch, calls: Calls) -> Iterator[None]:
    from cutlass.utils import HardwareInfo

    compile, cuda, device = Compiler(arch, calls), CudaMemory(calls.memory), CudaDevice(arch)
    with ExitStack() as stack:
        for target, values in (
            (BaseDSL, {"_func": lambda dsl, body, *a, **k: compile(dsl, body, *a, **k)}),
            (cutlass.testing, {
                "benchmark": _benchmark, "_benchmark_for_autotune": _benchmark_for_autotune,
            }),
            (cutlass.cute.testing, {"benchmark": _benchmark}),
            (HardwareInfo, {
                "__init__": lambda self, *_: None,
                "get_max_active_clusters": lambda self, cluster_size, *_, **__: (
                    arch.num_sms // cluster_size
                ),
                "get_device_multiprocessor_count": lambda self: arch.num_sms,
                "get_l2_cache_size_in_bytes": lambda self: arch.l2_bytes,
            }),
            (driver, {
                **device.driver_functions(), **cuda.driver_functions(),
            }),
            (cuda_runtime, {**device.runtime_functions(), **cuda.runtime_functions()}),
            (_Tensor, {"__init__": _on_gpu(_Tensor.__init__)}),
            (ExternalBinaryModule, {"__init__": _no_object_files}),
            (cutlass.cuda, {"initialize_cuda_context": lambda *_, **__: None}),
        ):  # fmt: skip
            stack.enter_context(patched(target, **values))
        yield

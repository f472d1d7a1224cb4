"""The CuTe DSL as a script uses it on a machine with a GPU, where there is none.

What a script compiles is compiled for the GPU that is stood in for; what it launches runs in the
simulator. Tensors may be torch's, the DSL's own (``from_dlpack``), or addresses (``make_ptr``).
"""

from __future__ import annotations

import ctypes
import inspect
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda.bindings.driver as driver
import cuda.bindings.runtime as cuda_runtime
import cutlass.cute.testing
import cutlass.testing
import torch
from cutlass import cute
from cutlass._mlir import ir
from cutlass._mlir.passmanager import PassManager
from cutlass.base_dsl import compiler
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.base_dsl.runtime.cuda import create_cuda_runtime_error
from cutlass.cute import runtime

from cutex.arch import Arch
from cutex.cache import plain_folder
from cutex.debug_info import recording
from cutex.sim.errors import CooperativeTooLarge, Finding, SimError
from cutex.sim.host.capture import HostTensor, Launch
from cutex.sim.host.cuda_stand_in import CudaMemory
from cutex.sim.host.torch_stand_in import DeviceMemory, patched
from cutex.sim.reports import around, folded
from cutex.sim.run import SimReport, Simulation, is_stream, load, load_plain
from cutex.tracing import tracing


@dataclass
class Clock:
    """What --time asks for: on which GPU, and where a picture of the last launch goes."""

    gpu: str
    trace: str | None
    told: set[str] = field(default_factory=set)

    def run(
        self,
        function: Simulated | PlainSimulated,
        arguments: list[Any],
        regions: list[HostTensor],
    ) -> None:
        """Prints the time of the call's launches, each kernel once for each grid."""
        from cutex.sim.timing.call import time_call

        try:
            reports = time_call(
                function.host, function.programs, arguments, regions, self.gpu,
                log=self.trace is not None,
            )  # fmt: skip
        except ValueError as error:
            print(f"cutex: no time: {error}", file=sys.stderr)
            return
        for report in reports:
            if str(report) not in self.told:
                self.told.add(str(report))
                print(f"cutex: {report}", file=sys.stderr)
            if self.trace:
                report.write_trace(Path(self.trace))


@dataclass
class Calls:
    """What the script launched, by kernel, and what was found, whatever the script makes of it."""

    order: str
    seed: int
    memory: DeviceMemory
    limit: int | None = None
    clock: Clock | None = None
    resources: bool = False  # tell what each kernel takes
    jobs: int = 1  # processes that simulate a grid together
    checks: bool = True  # look for races
    clusters: int | None = None  # of a grid, that are simulated
    launches: dict[str, int] = field(default_factory=dict)
    report: SimReport = field(default_factory=SimReport)
    errors: list[tuple[SimError, str]] = field(default_factory=list)  # with the PTX they are about

    def run(
        self,
        function: Simulated | PlainSimulated,
        arguments: list[Any],
        tensors: Sequence[HostTensor] = (),
    ) -> None:
        """``tensors``: those that ``arguments`` hold no longer, but addresses."""
        started = time.perf_counter()
        named = [*tensors, *(a for a in arguments if isinstance(a, HostTensor))]
        regions = self.memory.regions(named)
        if self.clock is not None:
            try:
                self.clock.run(function, arguments, regions)
            except SimError as error:
                self.errors.append((error, function.ptx))
                raise
        sim = Simulation(
            function.programs, regions, order=self.order, seed=self.seed, limit=self.limit,
            cubin=(function.host.cubin or b"") if self.resources else None, jobs=self.jobs,
            checks=self.checks, clusters=self.clusters,
        )  # fmt: skip

        def launch(what: Launch) -> None:
            self.launches[what.kernel] = self.launches.get(what.kernel, 0) + 1
            try:
                sim.launch(what)
            except CooperativeTooLarge as error:
                raise create_cuda_runtime_error(
                    cuda_runtime.cudaError_t.cudaErrorCooperativeLaunchTooLarge.value,
                    cuda_runtime.cudaError_t,
                    error,
                ) from None
            except SimError as error:  # NOTE: counted, also where the script catches it
                self.errors.append((error, function.ptx))
                raise

        try:
            function.host(arguments, launch)
        finally:
            sim.report.seconds = time.perf_counter() - started
            self._add(sim.report, function.ptx)

    @property
    def failed(self) -> bool:
        return bool(self.errors or self.report.findings)

    def __str__(self) -> str:
        done, kernels, launches = self.report, len(self.launches), sum(self.launches.values())
        found, advised = len(self.report.findings), len(self.report.advisories)
        more = f", {advised} advisor{'y' if advised == 1 else 'ies'}" if advised else ""
        names = ", ".join(dict.fromkeys(type(e).__name__ for e, _ in self.errors))
        ended = f", ended by {names}" if names else ""
        return (
            f"{launches} launch{'es' * (launches != 1)} of {kernels} "
            f"kernel{'s' * (kernels != 1)} in order {self.order}, {done.instructions} "
            f"warp-instructions, {done.seconds:.1f} s, {found or 'no'} "
            f"finding{'s' * (found != 1)}{more}{ended}{'' if self.checks else ', races unchecked'}"
            + "".join(f"; {text}" for text in dict.fromkeys(map(str, done.sampled)))
        )

    def as_dict(self) -> dict[str, Any]:
        """What `str` says, and all findings, for programs."""
        return {
            "order": self.order,
            "seed": self.seed,
            "launches": self.launches,
            "warp_instructions": self.report.instructions,
            "seconds": self.report.seconds,
            "sampled": [str(s) for s in self.report.sampled],
            "errors": [{"type": type(e).__name__, "report": str(e)} for e, _ in self.errors],
            "kernels": [k.as_dict() for k in self.report.kernels.values()],
            "findings": [r.as_dict() for r in folded(self.report.findings)],
            "advisories": [r.as_dict() for r in folded(self.report.advisories)],
        }

    def tell(self, with_ptx: bool) -> None:
        """Everything that was found, to stderr; with the PTX around it if asked for."""
        for kernel in self.report.kernels.values():
            print(f"cutex: {kernel}", file=sys.stderr)
        for report in (*folded(self.report.findings), *folded(self.report.advisories)):
            print(f"cutex: {report}", file=sys.stderr)
            if with_ptx:
                print(around(self._ptx[report.root], str(report.root)), file=sys.stderr)
        for error, ptx in self.errors:
            print(f"cutex: {error}", file=sys.stderr)
            if with_ptx:
                print(around(ptx, str(error)), file=sys.stderr)

    def _add(self, new: SimReport, ptx: str) -> None:
        total = self.report
        total.launches += new.launches
        total.ctas += new.ctas
        total.instructions += new.instructions
        total.seconds += new.seconds
        total.kernels.update(new.kernels)
        total.sampled += new.sampled
        for mine, theirs in ((total.findings, new.findings), (total.advisories, new.advisories)):
            known = {(f.rule, f.where) for f in mine}
            for finding in theirs:
                if (finding.rule, finding.where) not in known:
                    mine.append(finding)
                    self._ptx[finding] = ptx

    def __post_init__(self) -> None:
        self._ptx: dict[Finding, str] = {}


class Simulated:
    """What cute.compile returned, which runs in the simulator when it is called."""

    def __init__(
        self,
        compiled: Any,
        parameters: dict[str, inspect.Parameter],
        calls: Calls,
        plain: Callable[[], Any] | None,
    ) -> None:
        """``plain``: compiles the same without TVM-FFI, as the script has asked; None where it has
        asked for TVM-FFI.
        """
        self.compiled, self.calls, self.plain = compiled, calls, plain
        self.parameters = list(parameters)
        self.defaults = {
            n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty
        }
        self.host, self.programs = load(compiled, (), "")
        self.ptx: str = getattr(compiled, "_cutex_ptx", "") or getattr(compiled, "__ptx__", "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def export_to_c(self, *arguments: Any, **named: Any) -> None:
        compiled = self.compiled if self.plain is None else self.plain()
        compiled.export_to_c(*arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Constants were compiled in; the host code has its own stream unless it names one."""
        given = list(arguments)
        given += [named[n] for n in self.parameters[len(given) :] if n in named]
        wanted = self.host.argument_names
        given = [g for g in given if not (is_stream(g) and not _takes_stream(given))]
        given += [self.defaults[n] for n in wanted[len(given) :] if n in self.defaults]
        names = [*wanted, *(f"argument {i}" for i in range(len(given)))]
        with torch._C.DisableTorchFunction():  # which tensors are where, as it is
            values = [_value(g, n) for g, n in zip(given, names, strict=False)]
        self.calls.run(self, values)


class _Type:
    """Stands for a type among the arguments of a call, which the host code takes no pointer to."""

    def __c_pointers__(self) -> list[int]:
        return []


class PlainSimulated:
    """The same of a function that only compiles without TVM-FFI: with objects of the script's own
    among its arguments, or tensors in tuples. The DSL itself turns these into pointers.
    """

    def __init__(self, compiled: Any, calls: Calls) -> None:
        self.compiled, self.calls = compiled, calls
        self.host, self.programs = load_plain(compiled)
        self.ptx: str = getattr(compiled, "_cutex_ptx", "") or ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        values = [_Type() if isinstance(a, type) else a for a in arguments]
        pointers, adapted = self.compiled.execution_args.generate_execution_args(
            tuple(values), named
        )
        self.calls.run(self, pointers, list(self._tensors(arguments, named)))
        del adapted  # which the pointers are to

    def runtime_arguments(self, arguments: Any, named: dict[str, Any]) -> tuple[Any, ...]:
        """Of those of a call of the jitted function, the ones that were not compiled in."""
        return self.compiled.execution_args.get_rectified_args_from_original_args(arguments, named)

    def _tensors(self, arguments: Any, named: dict[str, Any]) -> Iterator[HostTensor]:
        """Those among the arguments, with names for reports."""
        names = [n for n in self.compiled.execution_args.signature.parameters if n != "self"]
        names += [f"argument {i}" for i in range(len(names), len(arguments))]
        for name, value in [*zip(names, arguments, strict=False), *named.items()]:
            items = value if isinstance(value, tuple | list) else (value,)
            for i, item in enumerate(items):
                if _is_tensor(item):
                    yield _value(item, name if items is not value else f"{name}[{i}]")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "_dltensor_wrapper")


def _holds_tensors(value: Any) -> bool:
    """A tuple or list of tensors, in however many layers."""
    return isinstance(value, tuple | list) and any(
        _is_tensor(v) or _holds_tensors(v) for v in value
    )


def _takes_stream(arguments: Any) -> bool:
    """Host code without a tensor cannot ask its environment for the stream."""
    return not any(_is_tensor(a) or hasattr(a, "dynamic_shapes_mask") for a in arguments)


def _value(given: Any, name: str) -> Any:
    """An argument as the captured host code takes it."""
    if isinstance(given, torch.Tensor):
        return HostTensor.of(given, name)
    if hasattr(given, "_dltensor_wrapper"):
        return _of_dsl(given, name)
    if hasattr(given, "_pointer"):
        return ctypes.c_void_p(int(given._pointer))
    if is_stream(given):
        return ctypes.c_void_p()  # the default stream
    if isinstance(given, cutlass.Numeric):
        return given.value
    if isinstance(given, tuple | list):
        return tuple(_value(g, name) for g in given)
    return given


_FOUR_BITS = "float4_e2m1fn_x2"


def _of_dsl(tensor: Any, name: str) -> HostTensor:
    """A tensor made by ``from_dlpack``; its element type may be another than its bytes' own."""
    from cutlass.cute._tvm_ffi_args_spec_converter import NumericToTVMFFIDtype

    tensor.load_dltensor()
    kind, shape, strides = tensor.element_type, tuple(tensor.shape), tuple(tensor.stride)
    if kind is cutlass.Float4E2M1FN:  # two a byte, along what is contiguous
        shape = tuple(n // 2 if s == 1 else n for n, s in zip(shape, strides, strict=True))
        strides = tuple(s if s == 1 else s // 2 for s in strides)
        return HostTensor(tensor.data_ptr, shape, strides, _FOUR_BITS, 1, tensor, name)
    size = max(1, kind.width // 8)
    dtype = NumericToTVMFFIDtype[kind]
    return HostTensor(tensor.data_ptr, shape, strides, dtype, size, tensor, name)


class Compiler:
    """Takes the place of the DSL's own way to compile and run a jitted function."""

    def __init__(self, arch: Arch, calls: Calls) -> None:
        self.arch, self.calls = arch, calls
        self.original = BaseDSL._func
        self.folder = plain_folder()

    def __call__(self, dsl: Any, body: Any, *arguments: Any, **named: Any) -> Any:
        if ir.Context.current is not None and ir.InsertionPoint.current is not None:
            return self.original(dsl, body, *arguments, **named)  # called by what is compiled
        only = named.pop("compile_only", False)
        named.pop("no_cache", None)
        function = self._compile(dsl, body, only, arguments, named)
        if only:
            return function
        if isinstance(function, PlainSimulated):
            return function(*function.runtime_arguments(arguments, named))
        bound = inspect.signature(body).bind(*arguments, **named)
        bound.apply_defaults()
        wanted = function.host.argument_names
        return function(*[v for n, v in bound.arguments.items() if n in wanted])

    def _compile(
        self, dsl: Any, body: Any, only: bool, arguments: Any, named: dict[str, Any]
    ) -> Simulated | PlainSimulated:
        options = dsl.compile_options if only else compiler.CompileOptions()
        asked = options.options.get(compiler.EnableTVMFFI)
        with_ffi = asked is not None and bool(asked.value)
        plain = lambda: self._trace(dsl, body, options, False, arguments, named)
        own_stream = not _takes_stream([*arguments, *named.values()])
        fakes = [_fake(a, own_stream) for a in arguments]
        fake_named = {name: _fake(a, own_stream) for name, a in named.items()}
        parameters = dict(inspect.signature(body).parameters)
        parameters.pop("self", None)
        compiled = None
        # NOTE: TVM-FFI takes tuples of tensors as arrays of its own tensors only
        if with_ffi or not any(map(_holds_tensors, [*arguments, *named.values()])):
            try:
                compiled = self._trace(dsl, body, options, True, fakes, fake_named)
            except Exception:
                if with_ffi:
                    raise
        try:
            if compiled is None:  # NOTE: what fails in either way, fails as the script would see it
                return PlainSimulated(plain(), self.calls)
            return Simulated(compiled, parameters, self.calls, None if with_ffi else plain)
        except SimError as error:  # NOTE: of PTX that the simulator does not read
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


def _strip_debug_info(module: ir.Module) -> None:
    """Of the host code, the PTX having been made: LLVM refuses the calls of its C interface else,
    which have none.
    """
    passes = PassManager.parse("builtin.module(strip-debuginfo)", context=module.context)
    passes.run(module.operation)


def _fake(value: Any, own_stream: bool) -> Any:
    """What stands for an argument when a function is compiled: its type and layout."""
    if is_stream(value):
        return runtime.make_fake_stream(use_tvm_ffi_env_stream=own_stream)
    if isinstance(value, torch.Tensor):  # as the DSL's own TensorAdapter takes it
        value = runtime.from_dlpack(value).mark_layout_dynamic()
    if hasattr(value, "_dltensor_wrapper"):
        return _fake_of_dsl(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_fake(v, own_stream) for v in value])
    if isinstance(value, tuple | list):
        return type(value)(_fake(v, own_stream) for v in value)
    return value


def _fake_of_dsl(tensor: Any) -> Any:
    """Dynamic where the tensor is, and divisible as it says; elements of 4 bits come in pairs."""
    tensor.load_dltensor()
    kind = tensor.element_type
    pairs = 2 if kind.width == 4 else 1
    layout = str(tensor)[:-1].partition(" o ")[2]  # "(?,?{div=8}):(?{i64 div=8},1)"
    by_n, by_stride = (_divisibilities(part) for part in layout.split(":"))
    shape, strides = [], []
    for i, (n, stride) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
        among = max(by_n[i], pairs if stride == 1 else 1)
        shape.append(cute.sym_int(divisibility=among) if tensor.dynamic_shapes_mask[i] else n)
        among = max(by_stride[i], pairs)
        dynamic = tensor.dynamic_strides_mask[i]
        strides.append(cute.sym_int64(divisibility=among) if dynamic else stride)
    align = tensor._assumed_align or max(1, kind.width // 8)
    return runtime.make_fake_tensor(kind, tuple(shape), tuple(strides), assumed_align=align)


def _divisibilities(modes: str) -> list[int]:
    """What each mode of a flat layout, as the DSL writes it, is known to be a multiple of."""
    found = (re.search(r"div=(\d+)", mode) for mode in modes.strip("()").split(","))
    return [int(m[1]) if m else 1 for m in found]


def _benchmark(callable: Any, **how: Any) -> float:
    """cute.testing.benchmark: one call, and no time."""
    arguments = how.get("kernel_arguments")
    generate = how.get("workspace_generator")
    if arguments is None and generate is not None:
        arguments = generate()
    if arguments is None:
        callable()
    else:
        callable(*arguments.args, **arguments.kwargs)
    return math.nan


def _benchmark_for_autotune(callable: Any, *arguments: Any, **named: Any) -> float:
    """One call of a configuration: all are as fast, so that the DSL's tuner keeps the first."""
    how = ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose", "current_stream")
    callable(*arguments, **{n: v for n, v in named.items() if n not in how})
    return 0.0


@contextmanager
def dsl_on_cpu(arch: Arch, calls: Calls) -> Iterator[None]:
    from cutlass.utils import HardwareInfo

    compile, cuda = Compiler(arch, calls), CudaMemory(calls.memory)
    ok = (driver.CUresult.CUDA_SUCCESS,)
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
                "cuInit": lambda *_: ok,
                "cuDeviceGetCount": lambda *_: (*ok, 1),
                "cuDriverGetVersion": lambda *_: (*ok, 13000),
                **cuda.driver_functions(),
            }),
            (cuda_runtime, cuda.runtime_functions()),
            (cutlass.cuda, {"initialize_cuda_context": lambda *_, **__: None}),
        ):  # fmt: skip
            stack.enter_context(patched(target, **values))
        yield

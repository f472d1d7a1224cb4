"""Compiled functions in the simulator's form: the host half linked, the PTX parsed, and the
arguments of a call converted for the host half.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cutex import cache
from cutex.debug_info import recording
from cutex.sim.host.capture import PACKED, HostFunction, HostTensor, PlainHostFunction
from cutex.sim.ptx.parse import parse
from cutex.sim.ptx.program import Program
from cutex.tracing import tracing, uncollected


def captured(
    compiled: Any, tensors: Sequence[Any], arch: str = "sm_100a"
) -> tuple[HostFunction, dict[str, Program], list[Any], list[HostTensor]]:
    """The host half and the programs of a function given to `simulate`, its arguments converted for
    the host half, and the tensors among these.
    """
    host, programs = load(compiled, tensors, arch)
    arguments = _arguments(compiled, host, tensors)
    return host, programs, arguments, [a for a in arguments if isinstance(a, HostTensor)]


def _arguments(compiled: Any, host: HostFunction, values: Sequence[Any]) -> list[Any]:
    """The arguments that the host code takes: it has its own stream, and constants were compiled
    in.
    """
    if hasattr(compiled, "check_bounds"):  # as where cutex's own kernels are launched on a GPU
        compiled.check_bounds(values)
    if not hasattr(compiled, "export_to_c") and not hasattr(compiled, "object_path"):
        named = zip(_parameter_names(compiled), values, strict=False)
        values = [v for name, v in named if name in host.argument_names]
    values = [v for v in values if not is_stream(v)]
    names = [*host.argument_names, *(f"argument {i}" for i in range(len(values)))][: len(values)]
    return [HostTensor.of(v, n) or v for v, n in zip(values, names, strict=True)]


def is_stream(argument: Any) -> bool:
    return type(argument).__name__ in ("CUstream", "_FakeStream")


def load(
    compiled: Any, tensors: Sequence[Any], arch: str
) -> tuple[HostFunction, dict[str, Program]]:
    """The linked host half and the parsed PTX of a compiled or jitted function."""
    cached = getattr(compiled, "_cutex_sim", None)
    if cached is not None:
        return cached
    with uncollected():  # NOTE: a program's objects stay; looking for cycles took half of the time
        return _loaded(compiled, tensors, arch)


def _loaded(
    compiled: Any, tensors: Sequence[Any], arch: str
) -> tuple[HostFunction, dict[str, Program]]:
    if hasattr(compiled, "object_path") and hasattr(compiled, "symbol"):
        cubin = getattr(compiled, "cubin", None)
        programs = parse(compiled.ptx, cubin)
        loaded = HostFunction(Path(compiled.object_path), compiled.symbol), programs
        loaded[0].cubin = cubin
    else:
        if not hasattr(compiled, "export_to_c"):
            compiled = compile_for(compiled, tensors, arch)
        ptx = getattr(compiled, "_cutex_ptx", None) or getattr(compiled, "__ptx__", None)
        if not ptx:
            raise TypeError(
                "the compiled function carries no PTX: compile it with cute.KeepPTX(True), or "
                "pass the @cute.jit function"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.o"
            compiled.export_to_c(str(path), "kernel")
            cubin = getattr(compiled, "__cubin__", None)
            loaded = HostFunction(path, "kernel"), _programs(ptx, cubin)
            loaded[0].cubin = cubin
    with suppress(AttributeError, TypeError):
        compiled._cutex_sim = loaded
    return loaded


def load_plain(compiled: Any) -> tuple[HostFunction, dict[str, Program]]:
    """The linked host half and the parsed PTX of a function compiled without TVM-FFI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(compiled.dump_to_object("kernel"))
        host = PlainHostFunction(path, "kernel")
    host.cubin = getattr(compiled, "__cubin__", None)
    ptx = getattr(compiled, "_cutex_ptx", None) or getattr(compiled, "__ptx__", None)
    return host, _programs(ptx or "", host.cubin)


def _programs(ptx: str, cubin: bytes | None) -> dict[str, Program]:
    """The programs in ``ptx``; none for a function without a kernel, whose PTX the DSL gives as a
    file name.
    """
    return parse(ptx, cubin) if "\n" in ptx else {}


def compile_for(function: Any, tensors: Sequence[Any], arch: str) -> Any:
    """Compile a jitted function for ``arch`` with the layouts of ``tensors``, which may lie
    anywhere; needs no GPU.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    if not callable(function):
        raise TypeError(
            "simulate takes a compiled kernel or a @cute.jit function, got "
            f"{type(function).__name__}"
        )
    arguments = []
    for i, t in enumerate(tensors):
        host = HostTensor.described(t, f"argument {i}")
        if host is not None:
            align = next(a for a in (32, 16, 8, 4, 2, 1) if host.address % a == 0)
            shape, strides = _layout(host)
            arguments.append(
                make_fake_tensor(
                    _element_type(host), shape, strides, assumed_align=max(align, host.itemsize)
                )
            )
        elif is_stream(t):
            arguments.append(make_fake_stream(use_tvm_ffi_env_stream=True))
        else:
            arguments.append(t)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{name} cannot be called with {len(tensors)} arguments: {error}") from None
    with cache.plain_folder() as folder, tracing(), recording() as recorder:
        options = (
            cute.GPUArch(arch),
            cute.EnableTVMFFI(True),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GenerateLineInfo(True),
            DumpDir(folder),
        )
        compiled = cute.compile[options](function, *arguments, no_jit_engine=True)
    compiled._cutex_ptx = recorder.annotate(compiled.__ptx__)
    return compiled


def _layout(tensor: HostTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides as the kernel sees them, in single elements also for packed types."""
    if tensor.dtype not in PACKED:
        return tensor.shape, tensor.strides
    if 1 not in tensor.strides:
        raise ValueError(f"{tensor.name}: {tensor.dtype} needs a dimension that is contiguous")
    at = tensor.strides.index(1)
    shape = tuple(n * 2 if i == at else n for i, n in enumerate(tensor.shape))
    return shape, tuple(s if i == at else s * 2 for i, s in enumerate(tensor.strides))


def _element_type(tensor: HostTensor) -> Any:
    """The DSL's type of a tensor's elements."""
    import cutlass

    name = {
        "float8_e4m3fn": "Float8E4M3FN",
        "float8_e5m2": "Float8E5M2",
        "float8_e8m0fnu": "Float8E8M0FNU",
        "float4_e2m1fn_x2": "Float4E2M1FN",
    }.get(tensor.dtype) or tensor.dtype.replace("bfloat", "BFloat").replace(
        "uint", "Uint"
    ).capitalize()
    name = {"Bfloat16": "BFloat16", "Bool": "Boolean"}.get(name, name)
    found = getattr(cutlass, name, None)
    if found is None:
        raise TypeError(f"{tensor.name} has dtype {tensor.dtype}, for which the DSL has no type")
    return found


def _parameter_names(function: Any) -> list[str]:
    """The names of a jitted function's parameters, without self."""
    target = function if inspect.isroutine(function) else type(function).__call__
    names = list(inspect.signature(target).parameters)
    return [n for n in names if n != "self"]

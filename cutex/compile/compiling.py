"""Compilation of a kernel for any arch on any machine, without a GPU or the CUDA toolkit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from cutex import debug_info
from cutex.arch import kernels_of
from cutex.cache import plain_folder
from cutex.compile import cache as store
from cutex.compile.arguments import Argument, fake_arguments
from cutex.compile.cache import FILES, canonical, digest
from cutex.compile.compiled import Compiled
from cutex.compile.identity import class_values, text_of
from cutex.compile.sources import modules_of, places_of, sources_digest
from cutex.tracing import tracing

OPT_LEVEL = 3
DSL_DEFAULT = "sm_100a"  # the arch that the DSL takes to be this machine's if there is no GPU


class Kernel(Protocol):
    """An object that can be compiled. It also has a jit `__call__`, which takes its operands and a
    stream, and launches device functions.

    These are `kernels`, a mapping of roles, such as "preprocess" and "main", to functions decorated
    with @cute.kernel; one that launches a single function has it as `kernel` instead. A kernel is
    compiled for one of `archs`; one that is written for a single arch has that as `arch` instead.
    It may name the input dtypes that it takes in `dtypes`; the default is bf16 and fp16.
    """

    config: Any  # a frozen dataclass, whole in the compile key

    @property
    def name(self) -> str: ...
    def operands(self, dtype: str) -> tuple[Argument, ...]: ...


_in_process: dict[str, Compiled] = {}


def compile(kernel: Kernel, dtype: str, arch: str, *, cache: bool = True) -> Compiled:
    """Compile `kernel` for inputs of `dtype` ("bf16", "fp16", ...) and `arch` ("sm_90a", ...).

    With `cache` the result is kept in this process and on disk (see cutex/cache.py), and taken from
    there if it exists; two processes that need the same kernel compile it once.
    """
    if dtype not in (known := getattr(kernel, "dtypes", ("bf16", "fp16"))):
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    if not {arch, kernels_of(arch)} & {*(archs := archs_of(kernel))}:
        raise ValueError(f"{kernel.name} is a kernel for {', '.join(archs)}, not for {arch}")
    ingredients = _ingredients(kernel, dtype, arch)
    key = digest(canonical(ingredients))[:32]
    symbol = f"{_device_name(kernel, dtype, arch)}_{key[:8]}"
    operands = kernel.operands(dtype)

    def places() -> dict[str, str]:
        return places_of(modules_of(kernel, kernel.config))

    def build(folder: Path) -> None:
        entry = {**ingredients, "key": key, "symbol": symbol, "places": places()}
        _build(kernel, dtype, arch, folder, entry)

    if not cache:
        folder = tempfile.TemporaryDirectory(prefix="cutex-")
        build(Path(folder.name))
        compiled = store.read(Path(folder.name), key, operands, places)
        assert compiled is not None, "an entry just written must read back"
        compiled._folder, compiled.from_cache = folder, False
        return compiled
    if key not in _in_process:
        _in_process[key] = store.find_or_build(key, operands, build, places)
    return _in_process[key]


def _build(
    kernel: Kernel, dtype: str, arch: str, folder: Path, ingredients: dict[str, Any]
) -> None:
    """Trace, compile and write one entry into `folder`."""
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir, GenerateLineInfo, OptLevel
    from cutlass.cute.runtime import make_fake_stream

    start = time.perf_counter()
    options = (
        cute.GPUArch(arch),
        cute.EnableTVMFFI(True),
        cute.KeepPTX(True),
        cute.KeepCUBIN(True),
        OptLevel(OPT_LEVEL),
        GenerateLineInfo(True),  # changes no instruction; the simulator's reports need the lines
    )
    arguments = fake_arguments(kernel.operands(dtype))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with (
        plain_folder() as dumped,
        tracing(),
        debug_info.recording() as recorder,
        no_gpu_looked_for(),
    ):
        name_kernels(kernel, _device_name(kernel, dtype, arch))
        # NOTE: PTX and cubin would otherwise land in the working directory; and the host code is
        # compiled once, by the export, not for an engine in this process too
        compiler = cute.compile[(*options, DumpDir(dumped))]
        function = compiler(kernel, *arguments, stream, no_jit_engine=True)
        function.export_to_c(str(folder / FILES["object"]), ingredients["symbol"])
    (folder / FILES["ptx"]).write_text(recorder.annotate(function.__ptx__), encoding="utf-8")
    (folder / FILES["cubin"]).write_bytes(function.__cubin__)
    smem = launched_smem(str(function.ir_module))
    for name in smem:
        if "cutlass" in name:
            raise ValueError(
                f"{kernel.name} launches {name}, which is not among its kernels: "
                f"{', '.join(filter(None, kernels_of_call(kernel))) or 'kernel'}"
            )
    meta = {
        **ingredients,
        "dynamic_smem": smem,
        "compile_seconds": round(time.perf_counter() - start, 3),
        "checksums": {kind: digest((folder / n).read_bytes()) for kind, n in FILES.items()},
    }
    meta["checksum"] = digest(canonical(meta))
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def archs_of(kernel: Kernel) -> tuple[str, ...]:
    """The archs that `kernel` can be compiled for, beside those that run another's kernels."""
    of_one = (kernel.arch,) if hasattr(kernel, "arch") else ()
    return tuple(getattr(kernel, "archs", of_one))


def kernels_of_call(kernel: Kernel) -> Mapping[str, Any]:
    """The device functions that a call of `kernel` launches, by role; the role of an only one is
    ""."""
    found: Mapping[str, Any] = getattr(kernel, "kernels", None) or {"": type(kernel).kernel}  # type: ignore[attr-defined]
    return found


def name_kernels(kernel: Kernel, name: str) -> None:
    """Name the device functions of `kernel`: `name`, and each one's role.

    NOTE: "cutlass" in a kernel's name makes ptxas choose registers by other rules (NVIDIA/cutlass
    issue 3389), so the name is ours, whole.
    """
    for role, function in kernels_of_call(kernel).items():
        function.set_name_prefix(
            f"{name}_{role}" if role else name,
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )


@contextmanager
def no_gpu_looked_for() -> Iterator[None]:
    """A context in which the DSL does not look for this machine's GPU if there is none to see.

    NOTE: the DSL asks the driver what arch its GPU has, and asks again to word the error that there
    is none: some 280 starts of the driver before a process's first kernel, most of a minute where
    CUDA_VISIBLE_DEVICES hides the GPU from 16 processes.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    environment = CuTeDSL._get_dsl().envar
    if environment._arch is not None or _sees_gpu():
        yield
        return
    environment.arch = DSL_DEFAULT
    try:
        yield
    finally:
        environment._arch = None


def _sees_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # as in a process that only compiles
        return False
    import torch

    return torch.cuda.is_available()


_LAUNCH_CONFIG = r"!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
_SMEM = re.compile(r"(%\w+) = llvm.getelementptr %\w+\[0, 2\] : .*" + re.escape(_LAUNCH_CONFIG))
_LAUNCH = re.compile(r"addressof @kernels_(\w+) :.*\n.*llvm.load.*\n.*call @_cudaLaunchKernelEx\(")


def launched_smem(host_ir: str) -> dict[str, int]:
    """The dynamic smem, in bytes, of each kernel in the order of their launches: member 2 of a
    launch's cudaLaunchConfig_t, a constant. RuntimeError where it is none.

    The DSL computes it while it compiles and stores it nowhere else.
    """
    members = list(_SMEM.finditer(host_ir))
    found: dict[str, int] = {}
    for launch in _LAUNCH.finditer(host_ir):
        before = [m for m in members if m.start() < launch.start()]
        smem = _stored(host_ir, before[-1]) if before else None
        if smem is None:
            raise RuntimeError(f"the launch of {launch[1]} has no constant amount of smem")
        found[launch[1]] = max(smem, found.get(launch[1], 0))
    if not found:
        raise RuntimeError("no launch in the host code of the DSL")
    return found


def _stored(host_ir: str, member: re.Match[str]) -> int | None:
    """The constant that is stored to a member of a struct; None if it is no constant."""
    before, after = host_ir[: member.start()], host_ir[member.end() :]
    stored = re.search(rf"llvm.store (%\w+), {member[1]} : i64", after)
    values = stored and re.findall(rf"{stored[1]} = llvm.mlir.constant\((\d+) : i64\)", before)
    return int(values[-1]) if values else None  # the nearest above: names repeat by function


def _device_name(kernel: Kernel, dtype: str, arch: str) -> str:
    """The name of a kernel's code: sm90_gemm_stage3 is sm90_gemm_bf16_stage3; a name without an
    arch, of a kernel for several, takes that of the arch it is compiled for."""
    name = kernel.name
    if not re.match(r"sm\d+_", name):
        name = f"{arch.rstrip('af').replace('_', '')}_{name}"
    sm, op, *rest = name.split("_", 2)
    return "_".join([sm, op, dtype, *rest])


def _ingredients(kernel: Kernel, dtype: str, arch: str) -> dict[str, Any]:
    """Everything that a compiled kernel depends on."""
    cls = type(kernel)
    return {
        "kernel": f"{cls.__module__}.{cls.__qualname__}",
        "name": kernel.name,
        "class": class_values(cls),
        "config": text_of(kernel.config),
        "dtype": dtype,
        "arch": arch,
        "opt_level": OPT_LEVEL,
        "debug_info": debug_info.FORMAT,
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "dsl_environment": {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_")},
        "host": platform.machine(),
        "sources": sources_digest(modules_of(kernel, kernel.config)),
    }

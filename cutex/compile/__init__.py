"""Compile a kernel for any arch on any machine, keep it on disk, launch it on torch's stream.

A kernel is an object with `arch`, `name`, `config`, `operands(dtype)` and a jit `__call__` that
takes its operands and a stream. Sizes and strides are symbolic, so one compiled kernel serves all
shapes. No GPU and no CUDA toolkit is needed until a compiled kernel is called.

On disk an entry is one folder, named by the hash of everything that it was made from:

    <cache>/kernels/<key>/{kernel.o, kernel.ptx, kernel.cubin, meta.json}

written under another name and renamed, so it is there whole or not at all; meta.json holds each
file's checksum, and an entry that does not match is built anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

OPT_LEVEL = 3
FILES = {"object": "kernel.o", "ptx": "kernel.ptx", "cubin": "kernel.cubin"}
TORCH_NAMES = {  # of everything that an operand may be
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "int32": "int32",
}
ALIGN = 16  # bytes: TMA takes base addresses and row strides that are multiples of 16


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor argument: names of its sizes, e.g. ("m", "k"), and what its strides promise."""

    name: str
    sizes: tuple[str, ...]
    dtype: str
    contiguous: int | None = -1  # the mode of stride 1; None: no stride is known
    aligned: bool = True  # base and other strides are multiples of 16 bytes, as TMA takes them
    whole: bool = True  # so is the contiguous size


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A host number, passed as fp32 or, with dtype "int32", as a 32-bit integer."""

    name: str
    dtype: str = "fp32"


Argument = Operand | Scalar


class Kernel(Protocol):
    arch: str
    config: Any  # a frozen dataclass

    @property
    def name(self) -> str: ...
    def operands(self, dtype: str) -> tuple[Argument, ...]: ...


@dataclasses.dataclass
class Compiled:
    """A kernel compiled for one arch and dtype; call it with CUDA tensors to launch it."""

    symbol: str  # the object exports `__tvm_ffi_{symbol}`
    arch: str
    operands: tuple[Argument, ...]
    ptx: str
    cubin: bytes
    object_path: Path
    dynamic_smem: int  # bytes that the launch asks for, beside what the cubin declares
    key: str
    compile_seconds: float  # of the compilation, whoever did it
    from_cache: bool
    _function: Callable[..., None] | None = dataclasses.field(default=None, repr=False)
    _folder: tempfile.TemporaryDirectory[str] | None = dataclasses.field(default=None, repr=False)

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    def __call__(self, *tensors: torch.Tensor | float) -> None:
        """Launch on torch's current stream. TypeError or ValueError, in one sentence, if not."""
        try:
            self.function(*tensors)(*tensors)
        except Exception:
            # NOTE: the launcher itself checks every argument before it launches; this check is
            # slower, and here to say in one sentence what the launcher refused.
            self.check(*tensors)
            raise

    def function(self, *tensors: torch.Tensor | float) -> Callable[..., None]:
        """The launcher itself, once `tensors` are known to be what it takes."""
        if self._function is None:
            self._function = self._load(*tensors)
        return self._function

    def check(self, *tensors: torch.Tensor | float) -> None:
        """TypeError or ValueError, in one sentence, if `tensors` are not what this kernel takes."""
        names = ", ".join(self.argument_names)
        if len(tensors) != len(self.operands):
            raise TypeError(f"{self.symbol} takes {names}, got {len(tensors)} arguments")
        sizes: dict[str, tuple[int, str]] = {}
        for operand, x in zip(self.operands, tensors, strict=True):
            if isinstance(operand, Operand):
                _check_operand(operand, x, sizes)
            elif not isinstance(x, float if operand.dtype == "fp32" else int):
                kind = "a float" if operand.dtype == "fp32" else "an int"
                raise TypeError(f"{operand.name} must be {kind}, got {type(x).__name__}")
        self._check_device(tensors[0])

    def _check_device(self, x: Any) -> None:
        import torch

        capability = torch.cuda.get_device_capability(x.device)
        name = "sm_{}{}".format(*capability)
        if name != self.arch.rstrip("af"):
            raise ValueError(f"{self.symbol} is compiled for {self.arch}, this GPU is {name}")

    def _load(self, *tensors: torch.Tensor | float) -> Callable[..., None]:
        self.check(*tensors)
        from cutlass.cute.runtime import load_module

        return load_module(str(self.object_path), enable_tvm_ffi=True)[self.symbol]


def _check_operand(operand: Operand, x: Any, sizes: dict[str, tuple[int, str]]) -> None:
    import torch

    name = operand.name
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    dtype = getattr(torch, TORCH_NAMES[operand.dtype])
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if not x.is_cuda:
        raise ValueError(f"{name} must be on a CUDA device, got {x.device}")
    rank = len(operand.sizes)
    if x.dim() != rank:
        shape = "a matrix" if rank == 2 else f"a tensor of {rank} dimensions"
        raise ValueError(f"{name} must be {shape}, got {x.dim()} dimensions")
    for letter, size in zip(operand.sizes, x.shape, strict=True):
        if size < 1:
            raise ValueError(f"{name} has {letter.upper()}={size}, every size must be at least 1")
        known, owner = sizes.setdefault(letter, (size, name))
        if known != size:
            raise ValueError(f"{name} has {letter.upper()}={size}, but {owner} has {known}")
    _check_strides(operand, x)


def _check_strides(operand: Operand, x: torch.Tensor) -> None:
    name, itemsize = operand.name, x.element_size()
    if operand.contiguous is None:
        return
    last = operand.contiguous % x.dim()
    if x.stride(last) != 1:
        what = "rows" if last == x.dim() - 1 else "columns"
        raise ValueError(f"{name} must have contiguous {what}, got strides {tuple(x.stride())}")
    unit = ALIGN // itemsize
    if operand.whole and x.shape[last] % unit:
        letter = operand.sizes[last].upper()
        raise ValueError(f"{name} has {letter}={x.shape[last]}, which must be a multiple of {unit}")
    steps = [x.stride(d) * itemsize for d in range(x.dim()) if d != last and x.shape[d] > 1]
    if operand.aligned and (any(s % ALIGN for s in steps) or x.data_ptr() % ALIGN):
        step = steps[-1] if steps else 0
        raise ValueError(
            f"{name} must start at, and step its rows by, a multiple of {ALIGN} bytes, "
            f"got address {x.data_ptr():#x} and {step} bytes"
        )


_in_process: dict[str, Compiled] = {}
_tracing = threading.Lock()  # the DSL traces one kernel at a time


def compile(kernel: Kernel, dtype: str, arch: str, *, cache: bool = True) -> Compiled:
    """Compile `kernel` for inputs of `dtype` ("bf16", "fp16", ...) and `arch` ("sm_90a", ...).

    With `cache` the result is kept in this process and on disk (see `cache_dir`), and taken from
    there where it is; two processes that want the same kernel compile it once.
    """
    if dtype not in (known := getattr(kernel, "dtypes", ("bf16", "fp16"))):
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(known)}")
    if kernel.arch != arch:
        raise ValueError(f"{kernel.name} is a kernel for {kernel.arch}, not for {arch}")
    ingredients = _ingredients(kernel, dtype, arch)
    key = _digest(_canonical(ingredients))[:32]
    symbol = f"{_device_name(kernel, dtype)}_{key[:8]}"
    operands = kernel.operands(dtype)

    def build(folder: Path) -> None:
        _build(kernel, dtype, arch, folder, {**ingredients, "key": key, "symbol": symbol})

    if not cache:
        folder = tempfile.TemporaryDirectory(prefix="cutex-")
        build(Path(folder.name))
        compiled = _read(Path(folder.name), key, operands)
        assert compiled is not None, "an entry just written must read back"
        compiled._folder, compiled.from_cache = folder, False
        return compiled
    if key not in _in_process:
        _in_process[key] = _from_disk(cache_dir() / "kernels" / key, key, operands, build)
    return _in_process[key]


def cache_dir() -> Path:
    """$CUTEX_CACHE, or cutex in the platform's cache folder."""
    if "CUTEX_CACHE" in os.environ:
        return Path(os.environ["CUTEX_CACHE"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cutex"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutex"


def _from_disk(
    entry: Path, key: str, operands: tuple[Argument, ...], build: Callable[[Path], None]
) -> Compiled:
    from filelock import FileLock

    if found := _read(entry, key, operands):
        return found
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.with_suffix(".lock").touch()
    except OSError as error:
        raise ValueError(
            f"the cache {entry.parent} cannot be written ({error.strerror}): "
            "set CUTEX_CACHE to a folder that can"
        ) from None
    with FileLock(entry.with_suffix(".lock")):
        if found := _read(entry, key, operands):  # another process built it while this one waited
            return found
        shutil.rmtree(entry, ignore_errors=True)  # corrupt, or not there
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=entry.parent))
        try:
            build(scratch)
            scratch.rename(entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        compiled = _read(entry, key, operands)
        assert compiled is not None, f"{entry} does not read back right after it was written"
        compiled.from_cache = False
        return compiled


def _read(entry: Path, key: str, operands: tuple[Argument, ...]) -> Compiled | None:
    """The entry, if it is all there and every checksum holds."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        data = {kind: (entry / name).read_bytes() for kind, name in FILES.items()}
        whole = (
            meta["key"] == key
            and meta.pop("checksum") == _digest(_canonical(meta))
            and meta["checksums"] == {kind: _digest(content) for kind, content in data.items()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not whole:
        return None
    return Compiled(
        symbol=meta["symbol"],
        arch=meta["arch"],
        operands=operands,
        ptx=data["ptx"].decode(),
        cubin=data["cubin"],
        object_path=entry / FILES["object"],
        dynamic_smem=meta["dynamic_smem"],
        key=key,
        compile_seconds=meta["compile_seconds"],
        from_cache=True,
    )


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
        GenerateLineInfo(True),  # changes no instruction; the simulator's reports name Python lines
        DumpDir(str(folder)),  # NOTE: PTX and cubin would otherwise land in the working directory
    )
    arguments = _fake_arguments(kernel.operands(dtype))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with _tracing:
        # NOTE: "cutlass" in a kernel's name makes ptxas choose registers by other rules
        # (NVIDIA/cutlass issue 3389), so the name is ours, whole.
        type(kernel).kernel.set_name_prefix(  # type: ignore[attr-defined]
            _device_name(kernel, dtype), remove_cutlass_symbol=True, keep_mangled_name=False
        )
        function = cute.compile[options](kernel, *arguments, stream)
        function.export_to_c(str(folder / FILES["object"]), ingredients["symbol"])
    for dump in (*folder.glob("*.ptx"), *folder.glob("*.cubin")):
        dump.unlink()
    (folder / FILES["ptx"]).write_text(function.__ptx__.rstrip("\0"))
    (folder / FILES["cubin"]).write_bytes(function.__cubin__)
    meta = {
        **ingredients,
        "dynamic_smem": launched_smem(str(function.ir_module)),
        "compile_seconds": round(time.perf_counter() - start, 3),
        "checksums": {kind: _digest((folder / n).read_bytes()) for kind, n in FILES.items()},
    }
    meta["checksum"] = _digest(_canonical(meta))
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


_LAUNCH_CONFIG = r"!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def launched_smem(host_ir: str) -> int:
    """The dynamic smem of the first launch: member 2 of its cudaLaunchConfig_t, a constant.

    The DSL works it out while it compiles and keeps it nowhere else.
    """
    for member in re.finditer(
        r"(%\w+) = llvm.getelementptr %\w+\[0, 2\] : .*" + re.escape(_LAUNCH_CONFIG), host_ir
    ):
        before, after = host_ir[: member.start()], host_ir[member.end() :]
        stored = re.search(rf"llvm.store (%\w+), {member[1]} : i64", after)
        values = stored and re.findall(rf"{stored[1]} = llvm.mlir.constant\((\d+) : i64\)", before)
        if values:
            return int(values[-1])  # the nearest above: names repeat from function to function
    raise RuntimeError("no launch with a constant amount of smem in the host code of the DSL")


def dsl_type(dtype: str) -> Any:
    import cutlass

    return {
        "bf16": cutlass.BFloat16,
        "fp16": cutlass.Float16,
        "fp32": cutlass.Float32,
        "e4m3": cutlass.Float8E4M3FN,
        "e5m2": cutlass.Float8E5M2,
        "int32": cutlass.Int32,
    }[dtype]


def _fake_arguments(arguments: tuple[Argument, ...]) -> list[Any]:
    """Stand-ins of symbolic size: 32-bit sizes, 64-bit strides; scalars."""
    import cutlass
    from cutlass import cute

    operands = [o for o in arguments if isinstance(o, Operand)]
    # a size that is somewhere the contiguous one is a multiple of the unit everywhere
    unit = {o.sizes[-1]: _unit(o) for o in operands if o.whole}
    size: dict[str, Any] = {}
    for letter in (letter for o in operands for letter in o.sizes):
        if letter not in size:
            size[letter] = cute.sym_int(divisibility=unit.get(letter, 1), symbol=letter)
    return [
        _fake_tensor(o, [size[letter] for letter in o.sizes])
        if isinstance(o, Operand)
        else dsl_type(o.dtype)(1)
        for o in arguments
    ]


def _unit(o: Operand) -> int:
    return ALIGN * 8 // dsl_type(o.dtype).width if o.aligned else 1


def _fake_tensor(o: Operand, sizes: list[Any]) -> Any:
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    last = None if o.contiguous is None else o.contiguous % len(sizes)
    strides = tuple(
        1 if mode == last else cute.sym_int64(divisibility=_unit(o), symbol=f"ld{mode}_{o.name}")
        for mode in range(len(sizes))
    )
    align = {"assumed_align": ALIGN} if o.aligned else {}
    return make_fake_tensor(dsl_type(o.dtype), tuple(sizes), strides, **align)


def _device_name(kernel: Kernel, dtype: str) -> str:
    arch, op, rest = kernel.name.split("_", 2)
    return f"{arch}_{op}_{dtype}_{rest}"  # sm90_gemm_stage3 -> sm90_gemm_bf16_stage3


def _ingredients(kernel: Kernel, dtype: str, arch: str) -> dict[str, Any]:
    """Everything that a compiled kernel depends on."""
    cls = type(kernel)
    return {
        "kernel": f"{cls.__module__}.{cls.__qualname__}",
        "name": kernel.name,
        "config": repr(kernel.config),
        "dtype": dtype,
        "arch": arch,
        "opt_level": OPT_LEVEL,
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
        "dsl_environment": {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_")},
        "host": platform.machine(),
        "sources": sources_digest(),
    }


@once
def sources_digest() -> str:
    """Of every file that a kernel may be built from."""
    here = Path(__file__).resolve().parent.parent
    files = [here / "arch.py"]
    for folder in ("compile", "device", "kernels", "schedulers"):
        files += sorted((here / folder).resolve().rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parent.name}/{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

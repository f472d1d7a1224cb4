"""The launches of a compiled kernel: the real host code runs, and each launch calls back.

The kernel's exported object (a TVM-FFI function) is linked with ``shim.c`` in place of the DSL's
runtime, loaded, and called with CPU tensors that are described as GPU tensors. The host code
computes grids, tensor maps and parameters exactly as on a machine with a GPU; `Launch` holds the
launch that it requested.
"""

from __future__ import annotations

import ctypes as C
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutex.sim.errors import LaunchError, SimError
from cutex.sim.host.encode_map import encode_tiled
from cutex.sim.host.linked import link

_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_LAUNCH = 2, 4, 6  # cudaLaunchAttributeID
_ATTRIBUTE_BYTES = 72


@dataclass
class Launch:
    """One kernel launch: dimensions as (x, y, z), dynamic shared memory in bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    params: Any  # pointer to pointers, valid only inside the callback
    programmatic: bool = False  # may start before the launch before it has ended
    cooperative: bool = False  # all of its CTAs run at one time

    @property
    def num_ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def cluster_size(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def num_threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def warps_per_cta(self) -> int:
        return -(-self.num_threads // 32)

    def param_bytes(self, sizes: Sequence[int]) -> list[bytes]:
        return [C.string_at(self.params[i], size) for i, size in enumerate(sizes)]


class _Config(C.Structure):
    _fields_ = [
        ("grid", C.c_uint32 * 3), ("block", C.c_uint32 * 3), ("smem", C.c_uint64),
        ("stream", C.c_void_p), ("attributes", C.c_void_p), ("num_attributes", C.c_uint32),
    ]  # fmt: skip


class _Device(C.Structure):
    _fields_ = [("type", C.c_int32), ("id", C.c_int32)]


class _DataType(C.Structure):
    _fields_ = [("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16)]


class _DLTensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p), ("device", _Device), ("ndim", C.c_int32), ("dtype", _DataType),
        ("shape", C.POINTER(C.c_int64)), ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    ]  # fmt: skip


class _ManagedTensor(C.Structure):  # DLManagedTensor
    _fields_ = [("tensor", _DLTensor), ("context", C.c_void_p), ("deleter", C.c_void_p)]


class _Value(C.Union):
    _fields_ = [("i", C.c_int64), ("f", C.c_double), ("p", C.c_void_p)]


class _Any(C.Structure):  # TVMFFIAny
    _fields_ = [("type", C.c_int32), ("pad", C.c_int32), ("value", _Value)]


_LAUNCH_HOOK = C.CFUNCTYPE(C.c_int, C.c_char_p, C.POINTER(_Config), C.POINTER(C.c_void_p))
_ERROR_HOOK = C.CFUNCTYPE(None, C.c_char_p, C.c_char_p)
_ENCODE_HOOK = C.CFUNCTYPE(
    C.c_int, C.c_void_p, C.c_int, C.c_uint32, C.c_void_p, *[C.POINTER(C.c_uint64)] * 2,
    *[C.POINTER(C.c_uint32)] * 2, *[C.c_int] * 4,
)  # fmt: skip
_NONE, _INT, _FLOAT, _POINTER, _TENSOR, _ARRAY = 0, 1, 3, 4, 7, 71  # TVMFFITypeIndex
_CUDA = 2  # DLDeviceType

_DLPACK_TYPE = {  # name -> (code, bits), DLPack 1.1; two lanes where PACKED
    "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8),
    "uint16": (1, 16), "uint32": (1, 32), "uint64": (1, 64), "float16": (2, 16), "float32": (2, 32),
    "float64": (2, 64), "bfloat16": (4, 16), "bool": (6, 8), "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8), "float8_e5m2": (12, 8), "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8), "float4_e2m1fn_x2": (17, 4), "float6_e2m3fn": (15, 6),
    "float6_e3m2fn": (16, 6), "int4": (0, 4),
}  # fmt: skip
FOUR_BITS = "float4_e2m1fn_x2"
PACKED = (FOUR_BITS,)  # two elements per byte


@dataclass
class HostTensor:
    """A CPU tensor as the launcher sees it; strides in elements, ``dtype`` by name. One element of
    a PACKED type holds two values.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    owner: object
    name: str = ""
    views: tuple[HostTensor, ...] = ()  # if it is memory: the tensors of the launch in it
    blank: bool = False  # holds BLANK32 where nothing has been written
    read_only: bool = False

    @staticmethod
    def of(tensor: Any, name: str) -> HostTensor | None:
        """The HostTensor of a torch tensor, of a numpy array, of what the DSL's from_dlpack has
        given, or of what lends its memory by DLPack; None if ``tensor`` is none of these.
        """
        described = HostTensor.described(tensor, name)
        where = getattr(getattr(tensor, "device", None), "type", "cpu")
        if described is not None and where != "cpu":
            raise TypeError(f"{name} lies on {tensor.device}: the simulator takes CPU tensors")
        return described

    @staticmethod
    def described(tensor: Any, name: str) -> HostTensor | None:
        """`of`, for tensors on any device."""
        if hasattr(tensor, "_dltensor_wrapper"):
            return of_dsl(tensor, name)
        if hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):  # torch
            if str(tensor.layout) != "torch.strided" or tensor.is_nested:
                layout = "a nested tensor" if tensor.is_nested else tensor.layout
                raise TypeError(f"{name} must be a strided tensor, got {layout}")
            if tensor.is_neg() or tensor.is_conj():
                raise ValueError(
                    f"{name} is negated or conjugated lazily, and its memory holds other values: "
                    "pass resolve_neg() or resolve_conj() of it"
                )
            _check_memory(tensor, name)
            return HostTensor(
                tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()),
                str(tensor.dtype).removeprefix("torch."), tensor.element_size(), tensor, name,
            )  # fmt: skip
        if hasattr(tensor, "__array_interface__") and hasattr(tensor, "dtype"):
            size = tensor.dtype.itemsize
            if any(step % size for step in tensor.strides):
                raise ValueError(
                    f"{name} has strides of {tensor.strides} bytes, no multiples of its elements' "
                    f"{size}: pass a copy"
                )
            return HostTensor(
                tensor.__array_interface__["data"][0], tensor.shape,
                tuple(s // size for s in tensor.strides), str(tensor.dtype), size, tensor, name,
                read_only=tensor.__array_interface__["data"][1],
            )  # fmt: skip
        if hasattr(tensor, "__dlpack_device__") and not isinstance(tensor, type | HostTensor):
            import torch

            return HostTensor.of(torch.from_dlpack(tensor), name)
        return None


def _check_memory(tensor: Any, name: str) -> None:
    """Raise ValueError for a torch tensor whose elements no memory holds: of a storage that was
    freed or is too small, of a fake tensor, of zeros that are none in memory.
    """
    if not tensor.numel():
        return
    size, first = tensor.element_size(), tensor.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if (last + 1) * size > held or tensor.data_ptr() == first * size:
        raise ValueError(
            f"{name} is a tensor whose elements are not in memory ({type(tensor).__name__}, "
            f"storage of {held} bytes): pass one that holds its values"
        )


def of_dsl(tensor: Any, name: str) -> HostTensor:
    """A tensor made by the DSL's from_dlpack; its element type may differ from its bytes'."""
    from cutlass.cute._tvm_ffi_args_spec_converter import NumericToTVMFFIDtype

    tensor.load_dltensor()
    kind, shape, strides = tensor.element_type, tuple(tensor.shape), tuple(tensor.stride)
    dtype, size = NumericToTVMFFIDtype[kind], max(1, kind.width // 8)
    if kind.__name__ == "Float4E2M1FN":  # two a byte, along the contiguous mode
        shape = tuple(n // 2 if s == 1 else n for n, s in zip(shape, strides, strict=True))
        dtype, strides = FOUR_BITS, tuple(s if s == 1 else s // 2 for s in strides)
    return HostTensor(tensor.data_ptr, shape, strides, dtype, size, tensor, name)


class HostFunction:
    """The linked host half of one compiled kernel."""

    def __init__(self, object_file: Path, symbol: str) -> None:
        self.library = _loaded(object_file)
        self.function = getattr(self.library, f"__tvm_ffi_{symbol}")
        self.function.restype = C.c_int
        self.function.argtypes = [C.c_void_p, C.POINTER(_Any), C.c_int32, C.POINTER(_Any)]
        self.argument_names = _argument_names(object_file)
        self.cubin: bytes | None = None  # the kernel's, if the caller has it

    def __call__(self, arguments: Sequence[Any], on_launch: Callable[[Launch], None]) -> None:
        """Run the host code; ``on_launch`` is called for each launch, in order.

        ``arguments``: `HostTensor`, int, float, None, pointer, or tuples of these. Raises
        TypeError, ValueError or LaunchError with the host code's own message when it refuses
        them, and any exception of ``on_launch``.
        """
        keep: list[Any] = []
        packed = (_Any * max(1, len(arguments)))(*[_pack(a, keep) for a in arguments])
        self._run(lambda: self.function(None, packed, len(arguments), C.byref(_Any())), on_launch)

    def _run(self, function: Callable[[], int], on_launch: Callable[[Launch], None]) -> None:
        """Call the host code's ``function``, which returns 0, and catch its launches and errors."""
        raised: list[BaseException] = []
        refused: list[tuple[str, str]] = []

        def encode(*arguments: Any) -> int:
            try:
                encode_tiled(*arguments)
            except BaseException as error:
                raised.append(error)
                return 1
            return 0

        def launch(kernel: bytes, config: Any, params: Any) -> int:
            if raised:
                return 1
            c = config.contents
            try:
                on_launch(
                    Launch(
                        kernel.decode(),
                        tuple(c.grid),
                        tuple(c.block),
                        _cluster(c),
                        int(c.smem),
                        params,
                        bool(_attribute(c, _PROGRAMMATIC_LAUNCH)[0]),
                        bool(_attribute(c, _COOPERATIVE)[0]),
                    )
                )
            except BaseException as error:
                raised.append(error)
                return 1
            return 0

        hooks = (
            _LAUNCH_HOOK(launch),
            _ERROR_HOOK(lambda kind, message: refused.append((kind.decode(), message.decode()))),
            _ENCODE_HOOK(encode),
        )
        self.library.cutex_sim_hooks(*hooks)
        code = function()
        self.library.cutex_sim_hooks(None, None, None)
        if raised:
            raise raised[0]
        if refused:
            kind, message = refused[0]
            error = {"TypeError": TypeError, "ValueError": ValueError}.get(kind, LaunchError)
            raise error(message)
        if code:
            raise LaunchError(f"the host code returned {code}")


class PlainHostFunction(HostFunction):
    """The host code of a kernel compiled without TVM-FFI: it takes a pointer to each argument, and
    then one to its result (the C interface that the DSL exports).
    """

    def __init__(self, object_file: Path, prefix: str) -> None:
        self.library = _loaded(object_file)
        code = object_file.read_bytes()
        entry = re.search(rf"_mlir_{prefix}__mlir_ciface_\w+".encode(), code)
        if entry is None:
            raise SimError(f"{object_file.name} has no function that the simulator could call")
        self.function = getattr(self.library, entry.group().decode())
        self.function.restype = None
        self.argument_names, self.cubin = [], None
        for name in ("cuda_init", "cuda_load_to_device"):
            if f"_mlir_{prefix}_{name}".encode() in code:
                self._load(getattr(self.library, f"_mlir_{prefix}_{name}"))

    @staticmethod
    def _load(function: Any) -> None:
        """Call the load function with a library, a device and room for an error, as the DSL's own
        header does.
        """
        library, device, error = C.c_void_p(1), C.c_int32(0), C.c_int32(0)
        at = C.pointer(library)
        places = [C.addressof(at), C.addressof(device), C.addressof(error)]
        if function.__name__.endswith("cuda_init"):
            del places[1]
        function((C.c_void_p * len(places))(*places))

    def __call__(self, arguments: Sequence[Any], on_launch: Callable[[Launch], None]) -> None:
        """Run the host code; ``arguments`` are addresses, as ints or c_void_p."""
        result = C.c_int32(0)
        packed = (C.c_void_p * (len(arguments) + 1))(*arguments, C.addressof(result))

        def call() -> int:
            self.function(packed, C.c_int32(len(packed)))
            return result.value

        self._run(call, on_launch)


def _loaded(object_file: Path) -> C.CDLL:
    mode = getattr(os, "RTLD_LOCAL", 0) | os.RTLD_NOW
    return C.CDLL(str(link(object_file)), mode=mode)


def _argument_names(object_file: Path) -> list[str]:
    """The names of the host function's parameters, from the signature in its own error messages."""
    m = re.search(rb"when calling: `\w+\((.*?)\)`", object_file.read_bytes())
    return re.findall(r"(\w+): ", re.sub(r"\([^()]*\)", "", m.group(1).decode())) if m else []


def _cluster(config: _Config) -> tuple[int, int, int]:
    x, y, z = _attribute(config, _CLUSTER_DIMENSION, 3)
    return max(x, 1), max(y, 1), max(z, 1)


def _attribute(config: _Config, kind: int, count: int = 1) -> list[int]:
    """The first ``count`` words of an attribute of a launch; zeros if the launch lacks it."""
    for i in range(config.num_attributes):
        at = config.attributes + i * _ATTRIBUTE_BYTES
        if C.c_uint32.from_address(at).value == kind:
            return [C.c_uint32.from_address(at + 8 + 4 * j).value for j in range(count)]
    return [0] * count


def _pack(argument: Any, keep: list[Any]) -> _Any:
    if argument is None:
        return _Any(_NONE)
    if isinstance(argument, HostTensor):
        _check_dtype(argument)
        tensor = _dl_tensor(argument, keep)
        return _Any(_TENSOR, 0, _Value(p=C.addressof(tensor)))
    if isinstance(argument, bool | int):
        return _Any(_INT, 0, _Value(i=int(argument)))
    if isinstance(argument, float):
        return _Any(_FLOAT, 0, _Value(f=argument))
    if isinstance(argument, C.c_void_p):
        return _Any(_POINTER, 0, _Value(p=argument.value))
    if isinstance(argument, tuple | list):
        import tvm_ffi

        array = tvm_ffi.convert(_item(argument, keep))
        keep.append(array)
        return _Any(_ARRAY, 0, _Value(p=array.__chandle__()))
    raise TypeError(_cannot_pass(argument))


def _dl_tensor(tensor: HostTensor, keep: list[Any]) -> _DLTensor:
    """The DLTensor of `tensor`, described as on a GPU; `keep` gets the objects to which it
    points."""
    code, bits = _DLPACK_TYPE[tensor.dtype]
    n, lanes = len(tensor.shape), 1 + (tensor.dtype in PACKED)
    shape, strides = (C.c_int64 * n)(*tensor.shape), (C.c_int64 * n)(*tensor.strides)
    made = _DLTensor(
        tensor.address, _Device(_CUDA, 0), n, _DataType(code, bits, lanes), shape, strides, 0
    )
    keep += [shape, strides, made, tensor.owner]
    return made


class _Capsule:
    """A tensor as DLPack's capsule, from which TVM-FFI makes an object."""

    def __init__(self, tensor: HostTensor, keep: list[Any]) -> None:
        self.managed = _ManagedTensor(_dl_tensor(tensor, keep), None, None)
        keep.append(self)

    def __dlpack__(self, **_: Any) -> Any:
        new = C.pythonapi.PyCapsule_New
        new.restype, new.argtypes = C.py_object, [C.c_void_p, C.c_char_p, C.c_void_p]
        return new(C.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def describe_on_gpu(capsule: Any) -> None:
    """Make a tensor in host memory, given as DLPack's capsule, one on a GPU by its description."""
    pointer = C.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = C.c_void_p, [C.py_object, C.c_char_p]
    managed = _ManagedTensor.from_address(pointer(capsule, b"dltensor"))
    managed.tensor.device = _Device(_CUDA, 0)


def _item(value: Any, keep: list[Any]) -> Any:
    """An item of a tuple, nested to any depth, in the form that TVM-FFI takes."""
    import tvm_ffi

    if isinstance(value, tuple | list):
        return tuple(_item(v, keep) for v in value)
    if isinstance(value, HostTensor):
        _check_dtype(value)
        return tvm_ffi.from_dlpack(_Capsule(value, keep))
    if value is None or isinstance(value, int | float | C.c_void_p):
        return value
    raise TypeError(_cannot_pass(value))


def _check_dtype(tensor: HostTensor) -> None:
    if tensor.dtype not in _DLPACK_TYPE:
        raise TypeError(
            f"{tensor.name} has dtype {tensor.dtype}, which the simulator cannot pass on"
        )


def _cannot_pass(value: Any) -> str:
    return (
        f"the simulator cannot pass {type(value).__name__} to a kernel: tensors, pointers, int, "
        "float, None, and tuples of these only"
    )

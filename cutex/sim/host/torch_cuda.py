"""Stand-ins for torch.cuda on a machine without a GPU."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from cutex.arch import Arch
from cutex.sim.host.cuda_graphs import CUDAGraph, graph
from cutex.sim.host.stopwatch import STOPWATCH
from cutex.sim.host.streams import DEFAULT, STREAMS, Clock

GPU = torch.device("cuda", 0)


class _Stream:
    """torch.cuda.Stream; as a context, the current stream."""

    device, device_index, device_type = GPU, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = STREAMS.make()

    @classmethod
    def of(cls, handle: int) -> _Stream:
        """The stream with a handle."""
        stream = object.__new__(cls)
        stream.cuda_stream = STREAMS.known(int(handle))
        return stream

    @property
    def stream_id(self) -> int:
        return self.cuda_stream

    def synchronize(self) -> None:
        STREAMS.host_waits(STREAMS.recorded(self.cuda_stream))

    def wait_stream(self, other: Any) -> None:
        STREAMS.wait(self.cuda_stream, STREAMS.recorded(other.cuda_stream))

    def wait_event(self, event: Any) -> None:
        STREAMS.wait(self.cuda_stream, event.after)

    def query(self) -> bool:
        self.synchronize()
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event

    def __enter__(self) -> _Stream:
        self.before = [*getattr(self, "before", ()), STREAMS.current]
        STREAMS.current = self.cuda_stream
        return self

    def __exit__(self, *_: Any) -> None:
        STREAMS.current = self.before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class _ExternalStream(_Stream):
    def __init__(self, handle: int, *_: Any, **__: Any) -> None:
        self.cuda_stream = STREAMS.known(int(handle))


class _Entered:
    """torch.cuda.stream: a context in which a stream is the current one; None: as before."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def _set_stream(stream: Any) -> None:
    if stream is not None:
        STREAMS.current = stream.cuda_stream


class _Event:
    cuda_event = 0  # made by its first record, as torch does
    at: float | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: Clock = {}  # what it comes after

    def record(self, stream: Any = None) -> None:
        self.cuda_event, self.at = id(self), STOPWATCH.now()
        handle = STREAMS.current if stream is None else stream.cuda_stream
        self.after = STREAMS.recorded(handle)

    def wait(self, stream: Any = None) -> None:
        STREAMS.wait(STREAMS.current if stream is None else stream.cuda_stream, self.after)

    def synchronize(self) -> None:
        STREAMS.host_waits(self.after)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: _Event) -> float:
        if self.at is None or end.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return STOPWATCH.between(self.at, end.at)


class _Properties:
    def __init__(self, arch: Arch) -> None:
        self.name = f"NVIDIA {arch.board}"
        self.major, self.minor = arch.capability
        self.multi_processor_count = arch.num_sms
        self.L2_cache_size = arch.l2_bytes
        self.total_memory = 128 << 30
        self.warp_size = 32
        self.max_threads_per_block = 1024
        self.max_threads_per_multi_processor = arch.sm_threads
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = arch.smem_per_cta
        self.shared_memory_per_multiprocessor = arch.smem_per_cta + 1024
        self.is_integrated = self.is_multi_gpu_board = 0
        self.uuid = "GPU-00000000-0000-0000-0000-000000000000"


class _Nothing:
    """torch.cuda.device, which makes a GPU the current one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


class _Runtime:
    """torch.cuda.cudart(): each function returns success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_, **__: 0


class Generator(torch.Generator):
    """torch.Generator, also for a GPU."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


def cuda_functions(arch: Arch) -> dict[str, Any]:
    """The stand-ins for functions of torch.cuda; each is a separate function, as torch's compiler
    requires.
    """
    nothing = lambda: lambda *_, **__: None
    total = _Properties(arch).total_memory
    return {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda *_: arch.capability,
        "get_device_name": lambda *_: f"NVIDIA {arch.board}",
        "get_device_properties": lambda *_: _Properties(arch),
        "get_arch_list": lambda: [arch.name], "mem_get_info": lambda *_: (total, total),
        "can_device_access_peer": lambda *_: False,
        "is_bf16_supported": lambda *_, **__: True, "cudart": lambda: _Runtime(),
        "device": type("device", (_Nothing,), {}), "device_of": type("device_of", (_Nothing,), {}),
        "current_stream": lambda *_, **__: _Stream.of(STREAMS.current),
        "default_stream": lambda *_, **__: _Stream.of(DEFAULT), "stream": _Entered,
        "get_stream_from_external": lambda handle, *_, **__: _Stream.of(handle),
        "Stream": _Stream, "ExternalStream": _ExternalStream, "set_stream": _set_stream,
        "synchronize": STREAMS.all_wait,
        "Event": _Event, "_lazy_init": nothing(),
        "CUDAGraph": CUDAGraph, "graph": graph, "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: CUDAGraph.capturing is not None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        **{name: nothing() for name in (
            "set_device", "init", "empty_cache", "manual_seed", "manual_seed_all",
            "seed", "seed_all", "ipc_collect", "_sleep",
            "reset_peak_memory_stats", "reset_max_memory_allocated")},
    }  # fmt: skip


def marks() -> dict[str, Any]:
    """The stand-ins for torch.cuda.nvtx."""
    return {
        "range_push": lambda *_: 0, "range_pop": lambda: 0, "mark": lambda *_: None,
        "range_start": lambda *_: 0, "range_end": lambda *_: None,
    }  # fmt: skip


def uncompiled(function: Any = None, **_: Any) -> Any:
    """torch.compile: the function unchanged, which gives the same values."""
    return function if function is not None else lambda f: f


def _benchmark(function: Callable[[], Any], *_: Any, **how: Any) -> Any:
    """Triton's do_bench: the milliseconds of one call."""
    found, wanted = STOPWATCH.of(function), how.get("quantiles")
    if wanted is not None:
        return [found] * len(wanted) if len(wanted) > 1 else found
    return [found] if how.get("return_mode") == "all" else found


class _TritonDriver:
    """triton.runtime.driver.active, as benchmarks read it."""

    def clear_cache(self, _: Any) -> None: ...
    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return GPU

    def get_current_device(self) -> int:
        return 0


def _without_gpu(module: ModuleType) -> None:
    """Change a module of Triton's so that it needs no GPU."""
    if module.__name__ == "triton.testing":
        module.do_bench = module.do_bench_cudagraph = _benchmark  # type: ignore[attr-defined]
    else:
        module.driver.set_active(_TritonDriver())


class TritonTesting:
    """Finds the modules of Triton that a script imports to take times, and changes them to need no
    GPU.
    """

    NAMES = ("triton.testing", "triton.runtime.driver")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.NAMES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _without_gpu(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def __enter__(self) -> None:
        for name in self.NAMES:
            if name in sys.modules:
                _without_gpu(sys.modules[name])
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: Any) -> None:
        sys.meta_path.remove(self)

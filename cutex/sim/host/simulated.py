"""Functions compiled by the CuTe DSL that run in the simulator when a script calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cutex.sim.host.arguments import captured, is_tensor, takes_stream
from cutex.sim.host.calls import Calls
from cutex.sim.host.capture import HostTensor
from cutex.sim.host.cuda_graphs import deferred
from cutex.sim.host.loaded import is_stream, load, load_plain


class Simulated:
    """A function returned by cute.compile that runs in the simulator when it is called."""

    def __init__(
        self,
        compiled: Any,
        parameters: dict[str, inspect.Parameter],
        streams: set[str],
        calls: Calls,
        plain: Callable[[], Any] | None,
    ) -> None:
        """``streams``: parameters that a call names, and the host code does not have: it asks its
        environment. ``plain``: a function that compiles it without TVM-FFI, if the script did not
        ask for TVM-FFI; else None.
        """
        self.compiled, self.streams, self.calls, self.plain = compiled, streams, calls, plain
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
        """Run a call. Constants were compiled in; the host code has its own stream unless it names
        one.
        """
        if deferred(lambda: self(*arguments, **named)):
            return
        given = list(arguments)
        given += [named[n] for n in self.parameters[len(given) :] if n in named]
        wanted = self.host.argument_names
        takes = [n for n in self.parameters if n in wanted or n in self.streams]
        named_streams = [g for g in given if is_stream(g)]
        if len(given) == len(takes):  # a stream may be its address, a number
            named_streams += [g for g, n in zip(given, takes, strict=True) if n in self.streams]
            given = [g for g, n in zip(given, takes, strict=True) if n not in self.streams]
        given = [g for g in given if not (is_stream(g) and not takes_stream(given))]
        given += [self.defaults[n] for n in wanted[len(given) :] if n in self.defaults]
        names = [*wanted, *(f"argument {i}" for i in range(len(given)))]
        with torch._C.DisableTorchFunction():  # to see the tensors' real devices
            values = [captured(g, n) for g, n in zip(given, names, strict=False)]
        self.calls.run(self, values, stream=_handle(named_streams))


def _handle(streams: list[Any]) -> int | None:
    """The handle of the first of the streams that a call names."""
    return (
        int(streams[0]) if streams and not hasattr(streams[0], "use_tvm_ffi_env_stream") else None
    )


class _Type:
    """A stand-in for a type among the arguments of a call, for which the host code takes no
    pointer.
    """

    def __c_pointers__(self) -> list[int]:
        return []


class PlainSimulated:
    """A function that only compiles without TVM-FFI: with objects of the script's own among its
    arguments, or tensors in tuples. The DSL itself turns these into pointers.
    """

    def __init__(self, compiled: Any, calls: Calls) -> None:
        self.compiled, self.calls = compiled, calls
        self.host, self.programs = load_plain(compiled)
        self.ptx: str = getattr(compiled, "_cutex_ptx", "") or ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        if deferred(lambda: self(*arguments, **named)):
            return
        values = [_Type() if isinstance(a, type) else a for a in arguments]
        pointers, adapted = self.compiled.execution_args.generate_execution_args(
            tuple(values), named
        )
        stream = _handle([a for a in (*arguments, *named.values()) if is_stream(a)])
        self.calls.run(self, pointers, list(self._tensors(arguments, named)), stream)
        del adapted  # kept until here because the pointers are to it

    def runtime_arguments(self, arguments: Any, named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call of the jitted function that were not compiled in."""
        return self.compiled.execution_args.get_rectified_args_from_original_args(arguments, named)

    def _tensors(self, arguments: Any, named: dict[str, Any]) -> Iterator[HostTensor]:
        """The tensors among the arguments, with names for reports."""
        names = [n for n in self.compiled.execution_args.signature.parameters if n != "self"]
        names += [f"argument {i}" for i in range(len(names), len(arguments))]
        for name, value in [*zip(names, arguments, strict=False), *named.items()]:
            items = value if isinstance(value, tuple | list) else (value,)
            for i, item in enumerate(items):
                if is_tensor(item):
                    yield captured(item, name if items is not value else f"{name}[{i}]")

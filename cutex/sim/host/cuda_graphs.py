"""CUDA graphs of a script, where there is no GPU: captured work is recorded, and each replay runs
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from cutex.sim.host.streams import STREAMS

_ALLOCATE = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class Capture(TorchDispatchMode):
    """Records torch's operators without a write to their outputs, whose values are undefined until
    the replay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], Any]] = []
        self.inside = False  # of an operator of the script's own, which is recorded as a whole

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        copies = [t.clone() for t in written]

        def swapped(values: Any, old: list[Any], new: list[Any]) -> Any:
            by_id = {id(o): n for o, n in zip(old, new, strict=True)}
            return tree_map_only(torch.Tensor, lambda t: by_id.get(id(t), t), values)

        self.inside = True
        try:
            out = func(*swapped(args, written, copies), **swapped(kwargs, written, copies))
        finally:
            self.inside = False
        out = swapped(out, copies, written)
        if func.overloadpacket.__name__ not in _ALLOCATE:
            self.steps.append(lambda: _again(func, args, kwargs, out))
        return out


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator writes."""
    out = []
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(a.name)
            out += [t for t in tree_flatten(given)[0] if isinstance(t, torch.Tensor)]
    return out


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Run an operator into the tensors that it returned when it was captured."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        new = func(*args, **kwargs)
        for old, made in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
            if isinstance(old, torch.Tensor) and not _same_memory(old, made):
                old.copy_(made)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class CUDAGraph:
    """torch.cuda.CUDAGraph"""

    capturing: ClassVar[Capture | None] = None  # the one that is under way

    def __init__(self, *_: Any, **__: Any) -> None:
        self.capture: Capture | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if CUDAGraph.capturing is not None:
            raise RuntimeError("a CUDA graph is being captured already")
        self.capture = CUDAGraph.capturing = Capture()
        self.capture.__enter__()

    def capture_end(self) -> None:
        if self.capture is None or CUDAGraph.capturing is not self.capture:
            raise RuntimeError("this CUDA graph is not being captured")
        CUDAGraph.capturing = None
        self.capture.__exit__(None, None, None)

    def replay(self) -> None:
        if self.capture is None:
            raise RuntimeError("this CUDA graph has captured nothing")
        with STREAMS.replay():
            for step in self.capture.steps:
                step()

    def reset(self) -> None:
        self.capture = None

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def instantiate(self) -> None: ...
    def enable_debug_mode(self) -> None: ...
    def debug_dump(self, _: str) -> None: ...


class graph:
    """torch.cuda.graph"""

    def __init__(self, cuda_graph: CUDAGraph, *_: Any, **__: Any) -> None:
        self.cuda_graph = cuda_graph

    def __enter__(self) -> None:
        self.cuda_graph.capture_begin()

    def __exit__(self, *_: Any) -> None:
        self.cuda_graph.capture_end()


def deferred(launch: Callable[[], None]) -> bool:
    """Whether a launch is part of a graph that is being captured, and so runs only in replays."""
    capture = CUDAGraph.capturing
    if capture is None or capture.inside:
        return False
    capture.steps.append(launch)
    return True

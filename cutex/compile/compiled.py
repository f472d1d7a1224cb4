"""A compiled kernel: its code and properties, and its launch on torch's stream."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutex.compile.arguments import Argument, Operand, check_arguments, check_bounds

if TYPE_CHECKING:
    import torch


@dataclass
class Compiled:
    """A kernel compiled for one arch and dtype; call it with CUDA tensors to launch it."""

    symbol: str  # the object exports `__tvm_ffi_{symbol}`
    arch: str
    operands: tuple[Argument, ...]
    ptx: str
    cubin: bytes
    object_path: Path
    # bytes that launches request, beside the static smem in the cubin, by kernel in their order
    dynamic_smem: dict[str, int]
    key: str
    compile_seconds: float  # time of the compilation, in this process or an earlier one
    from_cache: bool
    _function: Callable[..., None] | None = field(default=None, repr=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    def __call__(self, *tensors: torch.Tensor | float) -> None:
        """Launch on torch's current stream. Raises TypeError or ValueError, in one sentence, if it
        cannot."""
        try:
            self.check_bounds(tensors)
            self.function(*tensors)(*tensors)
        except Exception:
            # NOTE: the launcher itself checks every argument before it launches; this check is
            # slower, and names in one sentence the argument that the launcher refused.
            self.check(*tensors)
            raise

    def function(self, *tensors: torch.Tensor | float) -> Callable[..., None]:
        """The launcher itself, loaded after a check that it takes `tensors`."""
        if self._function is None:
            self._function = self._load(*tensors)
        return self._function

    def check(self, *tensors: torch.Tensor | float) -> None:
        """Raise TypeError or ValueError, in one sentence, if this kernel does not take
        `tensors`."""
        names = ", ".join(self.argument_names)
        if len(tensors) != len(self.operands):
            raise TypeError(f"{self.symbol} takes {names}, got {len(tensors)} arguments")
        check_arguments(self.operands, tensors)
        self._check_device(tensors[0])

    def check_bounds(self, values: Sequence[Any]) -> None:
        """Raise ValueError, in one sentence, if one of `values` has a size for which this kernel
        has no memory."""
        if self._is_bounded:
            check_bounds(self.operands, values)

    @cached_property
    def _is_bounded(self) -> bool:
        operands = [x for x in self.operands if isinstance(x, Operand)]
        return any(x.bounds or x.bounds_by for x in operands)

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

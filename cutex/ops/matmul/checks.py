"""One call of `cutex.matmul`: its arguments, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cutex import dtypes
from cutex.arch import PORTABLE
from cutex.compile.user_function import arguments_taken
from cutex.ops.number import check_flag, number
from cutex.ops.overlap import overlaps_itself, share_memory
from cutex.ops.plain import check_held
from cutex.ops.written import check_writable

IN_DTYPES = tuple(dtypes.DTYPES[name] for name in ("bf16", "fp16", "e4m3", "e5m2", "fp32"))
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "gated_silu", "gated_gelu")


@dataclass
class Call:
    """The arguments of one cutex.matmul call."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    out: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    amax: Tensor | None = None
    activation: str | Callable[..., Any] | None = None
    out_dtype: torch.dtype | None = None
    alpha: float = 1.0
    beta: float = 0.0
    use_fast_accum: bool = True

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)[:8]}
        return {name: x for name, x in values.items() if x is not None}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """All arguments, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        if self.out is not None:
            return self.out.dtype
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if self.a.dtype in FLOAT8 else self.a.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        batch = torch.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        columns = self.b.shape[-1] // 2 if self.gate else self.b.shape[-1]
        return (*batch, self.a.shape[-2], columns)

    @property
    def gate(self) -> str | None:
        """The activation of the even columns, which the odd ones are multiplied with; None without
        a gate."""
        name = self.activation if isinstance(self.activation, str) else ""
        return name.removeprefix("gated_") if name.startswith("gated_") else None


def by_row(bias: Tensor, call: Call) -> bool:
    """Whether bias has one number per row of the result, rather than one per column."""
    n = call.b.shape[-1]
    return bias.shape not in ((n,), (1, n))


def check(call: Call) -> None:
    """Raise TypeError or ValueError, in one sentence that names the argument, if `call` is not
    supported."""
    for name in ("a", "b"):
        x = getattr(call, name)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    for name, x in call.tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
        if x.device != call.a.device:
            raise ValueError(f"{name} is on {x.device}, but a is on {call.a.device}")
        if x.layout is not torch.strided or x.is_nested:
            layout = "a nested tensor" if x.is_nested else x.layout
            raise ValueError(f"{name} must be a strided tensor, got {layout}")
    number("alpha", call.alpha)
    number("beta", call.beta)
    check_flag("use_fast_accum", call.use_fast_accum)
    _check_inputs(call)
    _check_result(call)
    _check_fused(call)


def check_memory(call: Call) -> None:
    """Check the addresses of the tensors, of a call that is about to run."""
    for name, x in call.tensors.items():
        check_held(name, x)
    for name in ("out", "amax"):
        x = getattr(call, name)
        if x is not None:
            check_writable(name, x)
    _check_apart("out", call)
    _check_apart("amax", call)


def check_arch(call: Call, arch: str) -> None:
    """Check that the kernels for `arch` take the dtype of the inputs."""
    if arch in PORTABLE and call.a.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"a has dtype {call.a.dtype}: on {arch} cutex.matmul takes bfloat16 and float16; use "
            "torch.matmul there"
        )


def _check_apart(written: str, call: Call) -> None:
    """Check that the tensor of the name `written` shares memory with no other."""
    y = getattr(call, written)
    if y is None or not y.numel():
        return
    for name, x in call.tensors.items():
        if name == written or not share_memory(x, y):
            continue
        if (written, name) == ("out", "residual") and (
            x.data_ptr(), x.shape, x.stride(), x.dtype,
        ) == (y.data_ptr(), y.shape, y.stride(), y.dtype):  # fmt: skip
            continue  # each element is read by the thread that then writes it
        raise ValueError(
            f"{written} shares memory with {name}, which is read while {written} is written"
        )


def _check_inputs(call: Call) -> None:
    a, b = call.a, call.b
    for name, x in (("a", a), ("b", b)):
        if dtypes.of_torch(x.dtype) not in IN_DTYPES:
            known = ", ".join(t.torch_name for t in IN_DTYPES)
            raise TypeError(f"{name} has dtype {x.dtype}, which is not one of {known}")
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got {x.dim()}")
    if a.dtype != b.dtype and not (a.dtype in FLOAT8 and b.dtype in FLOAT8):
        raise TypeError(f"b has dtype {b.dtype}, but a has {a.dtype}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"b has K={b.shape[-2]} (its last size but one), but a has K={a.shape[-1]} (its last)"
        )
    try:
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"b has batch sizes {tuple(b.shape[:-2])}, which do not broadcast with those of a, "
            f"{tuple(a.shape[:-2])}"
        ) from None


def _check_result(call: Call) -> None:
    dtype, shape = call.dtype, call.shape
    if dtype not in OUT_DTYPES:
        name = "out" if call.out is not None else "out_dtype"
        kinds = "bfloat16, float16 or float32"
        raise TypeError(f"{name} has dtype {dtype!r:.60}, which is not {kinds}")
    if call.out_dtype not in (None, dtype):
        raise TypeError(f"out_dtype is {call.out_dtype!r:.60}, but out has dtype {dtype}")
    if call.out is not None:
        if tuple(call.out.shape) != shape:
            raise ValueError(f"out has shape {tuple(call.out.shape)}, the result has {shape}")
        if overlaps_itself(call.out):
            shape, strides = tuple(call.out.shape), call.out.stride()
            raise ValueError(f"out of shape {shape} has strides {strides}: its elements overlap")
    if call.beta and call.out is None:
        raise ValueError(f"beta={call.beta} scales what out held before: out must be given")


def _check_fused(call: Call) -> None:
    m, n = call.a.shape[-2], call.b.shape[-1]
    if call.gate and (n % 2 or (call.bias is not None and by_row(call.bias, call))):
        raise ValueError(
            f"activation {call.activation!r} takes an even N, got {n}, and no row bias"
        )
    if call.gate and call.beta:
        raise ValueError(f"beta={call.beta} cannot be given with activation {call.activation!r}")
    if isinstance(call.activation, str):
        if call.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation {call.activation!r} is not one of {known}")
    elif call.activation is not None and not callable(call.activation):
        kind = type(call.activation).__name__
        raise TypeError(f"activation must be a name, a function or None, got {kind}")
    elif call.activation is not None and arguments_taken(call.activation, (1, 3)) is None:
        raise TypeError(
            f"activation {call.activation!r}: must be a Python function of one DSL Float32, or of "
            "it, its row and its column"
        )
    for name in ("bias", "residual"):
        x = getattr(call, name)
        if x is not None and x.dtype not in OUT_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not bfloat16, float16, float32")
    if call.bias is not None and call.bias.shape not in ((n,), (1, n), (m, 1)):
        raise ValueError(
            f"bias has shape {tuple(call.bias.shape)}, which is none of ({n},), (1, {n}), ({m}, 1)"
        )
    if call.residual is not None:
        try:
            call.residual.expand(call.shape)
        except RuntimeError:
            shape = tuple(call.residual.shape)
            raise ValueError(
                f"residual has shape {shape}, which does not broadcast to {call.shape}"
            ) from None
    for name, size in (("scale_a", m), ("scale_b", n), ("amax", 1)):
        x = getattr(call, name)
        if x is None:
            continue
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {x.dtype}")
        if x.numel() not in (1, size):
            takes = "1 element" if size == 1 else f"1 or {size} elements"
            raise ValueError(f"{name} must have {takes}, got {x.numel()}")
        if x.numel() > 1 and x.numel() != max(x.shape[-2:]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: its {size} elements must be in one of its "
                "last two dimensions"
            )

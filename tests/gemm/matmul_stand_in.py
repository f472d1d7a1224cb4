"""A stand-in for the matmul kernel: its arguments by its own names, its result by definition.

It replaces compiling and launching only, so that a test of what torch sees takes milliseconds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutex.device.epilogue.epilogue_ops import (
    Activation,
    Add,
    Alpha,
    Amax,
    Bias,
    Elementwise,
    Gate,
    Scale,
    Scales,
)
from cutex.ops.matmul import eager
from cutex.ops.plain import is_plain
from cutex.problem.matmul import ACTIVATIONS, FLOAT8


class StandIn:
    """The requested launches, each its config and its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        monkeypatch.setattr(
            eager, "kernel_for", lambda config, arch: SimpleNamespace(config=config)
        )
        monkeypatch.setattr(eager, "launcher", self.launcher)
        monkeypatch.setattr(eager, "arch_of", lambda device, archs: "sm_90a")
        eager.PLANS.forget()

    def launcher(self, compiled: Any, *_: Any) -> Any:
        def launch(*arguments: Any) -> None:
            for x in arguments:
                if isinstance(x, Tensor):  # a GPU would get an address
                    assert is_plain(x) and x.data_ptr()
            self.launches.append((compiled.config, arguments))
            with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
                by_definition(compiled.config, *arguments)

        return launch


def by_definition(config: Any, a: Tensor, b: Tensor, out: Tensor, *rest: Any) -> None:
    """Write the result of one launch."""
    x = a.float() @ b.float()
    passed = list(rest)
    for op in config.ops:
        values = [passed.pop(0) for _ in op.arguments()]
        match op:
            case Alpha():
                x = x * values[0]
            case Scale() | Bias():
                values = values[0].float()
                values = values[:, None] if op.by == "row" else values
                x = x * values if isinstance(op, Scale) else x + values
            case Scales():
                of_rows = values[0][:, None] if op.a == "row" else values[0]
                x = x * (of_rows * values[1])
            case Add():
                x = x + values[0].float() * (values[1] if op.beta else 1.0)
            case Activation():
                x = ACTIVATIONS[op.kind](x)
            case Gate():
                x = ACTIVATIONS[f"gated_{op.kind}"](x)
            case Elementwise():
                x = op.function.function(x)
            case Amax():
                values[0].data.copy_(torch.maximum(values[0], x.abs().max()))
    out.data.copy_(x)  # a kernel counts no version


# ---- plain torch, to compare with


def square(x: Any) -> Any:
    return x * x


def plain_torch(
    a: Tensor, b: Tensor, *, bias=None, activation=None, residual=None, out=None, out_dtype=None,
    alpha=1.0, beta=0.0, scale_a=None, scale_b=None, amax=None, use_fast_accum=True,
) -> Tensor:  # fmt: skip
    """cutex.matmul in torch's own operations, in fp32."""
    x = torch.matmul(a.float(), b.float()) * alpha
    if scale_a is not None:
        x = x * scale_a.view(-1, 1) * scale_b
    if beta:
        x = x + beta * out.float()
    if bias is not None:
        x = x + bias.float()
    x = square(x) if activation is square else ACTIVATIONS[activation](x)
    if residual is not None:
        x = x + residual.float()
    if amax is not None and x.numel():
        amax.copy_(torch.maximum(amax, x.abs().max()))
    dtype = out_dtype or (torch.bfloat16 if a.dtype in FLOAT8 else a.dtype)
    return out.copy_(x) if out is not None else x.to(dtype)


def agree(got: Tensor, want: Tensor) -> bool:
    """Whether two results differ by no more than intermediate roundings to bf16 can."""
    if got.shape != want.shape or got.dtype != want.dtype or got.numel() == 0:
        return got.shape == want.shape and got.dtype == want.dtype
    got, want = got.double(), want.double()
    return bool((got - want).abs().max() <= 0.05 * (want.abs().max() + 0.1))

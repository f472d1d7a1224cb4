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
)
from cutex.ops import eager
from cutex.ops.plain import is_plain
from cutex.problem.matmul import ACTIVATIONS


class StandIn:
    """Launches that were asked for: each a config and its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []
        monkeypatch.setattr(
            eager, "kernel_for", lambda config, arch: SimpleNamespace(config=config)
        )
        monkeypatch.setattr(eager, "launcher", self.launcher)
        monkeypatch.setattr(eager, "arch_of", lambda device: "sm_90a")
        eager._plans.clear()

    def launcher(self, compiled: Any, _: Any) -> Any:
        def launch(*arguments: Any) -> None:
            for x in arguments:
                if isinstance(x, Tensor):  # what a GPU would be given is an address
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

"""The FlashAttention backward on Hopper, in three launches: preprocess, main and convert."""

from __future__ import annotations

from typing import Any

from cutlass import cute

from cutex.compile import Argument
from cutex.kernels.attention.backward.config import BackwardConfig
from cutex.kernels.attention.backward.convert import Convert
from cutex.kernels.attention.backward.preprocess import Preprocess
from cutex.kernels.attention.backward.signature import KernelArgs, Tensors, arguments
from cutex.kernels.attention.backward.sm90.main import Main


class Backward:
    arch = "sm_90a"

    def __init__(self, config: BackwardConfig) -> None:
        if reason := config.why_not():
            raise ValueError(reason)
        self.config = config

    @property
    def name(self) -> str:
        return "sm90_attention_backward"

    @property
    def kernels(self) -> dict[str, Any]:
        return {"preprocess": Preprocess.kernel, "main": Main.kernel, "convert": Convert.kernel}

    def operands(self, dtype: str) -> tuple[Argument, ...]:
        return arguments(self.config, dtype)

    @cute.jit
    def __call__(self, mQ, *rest) -> None:
        count = len(Tensors._fields)
        tensors, stream = Tensors(mQ, *rest[: count - 1]), rest[-1]
        args = KernelArgs.of(self.config, rest[count - 1 : -1])
        Preprocess(self.config).launch(tensors, args, stream)
        Main(self.config).launch(tensors, args, stream)
        Convert(self.config).launch(tensors, args, stream)

"""FlashAttention-4's own Blackwell forward, compiled for comparison with ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

ARCH = "sm_100a"
HEAD_DIMS = (64, 96, 128)


@dataclass(frozen=True)
class Compiled:
    ptx: str
    cubin: bytes
    dynamic_smem: dict[str, int]


def compiled(kernel: Any, head_dim: int) -> Compiled:
    """Compile its kernel object for dense heads in bf16."""
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_tensor

    from cutex.compile import launched_smem

    rows, heads = 4096, 16
    shape, strides = (1, rows, heads, head_dim), (rows * heads * head_dim, heads * head_dim)
    operands = [
        make_fake_tensor(cutlass.BFloat16, shape, (*strides, head_dim, 1), assumed_align=16)
        for _ in range(4)
    ]
    lse = make_fake_tensor(Float32, (1, heads, rows), (heads * rows, rows, 1), assumed_align=16)
    parameters = list(inspect.signature(type(kernel).__call__).parameters.values())
    rest = [p.default for p in parameters[7:-1]]  # after softmax_scale, before the stream
    options = (cute.GPUArch(ARCH), cute.KeepPTX(True), cute.KeepCUBIN(True))
    function = cute.compile[options](kernel, *operands, lse, Float32(0.1), *rest, CUstream(0))
    smem = launched_smem(str(function.ir_module))
    return Compiled(function.__ptx__.rstrip("\0"), function.__cubin__, smem)


def kernels() -> Iterator[tuple[int, str, Compiled]]:
    """For each head dim: its kernel with one CTA per tile, compiled, and the registers of its
    roles; none if it is not installed."""
    if find_spec("flash_attn") is None:
        return
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    for d in HEAD_DIMS:
        kernel = FlashAttentionForwardSm100(d, is_static_persistent=False)
        registers = ", ".join(
            str(getattr(kernel, f"num_regs_{role}", "?"))
            for role in ("correction", "softmax", "other")
        )
        yield d, registers, compiled(kernel, d)

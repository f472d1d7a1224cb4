"""FlashAttention-4's own Blackwell forward, compiled for comparison with ours."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutex.kernels.attention.forward.sm100.bounds import Row

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


def rows() -> list[Row]:
    """The rows of FlashAttention-4's kernel, one for each head dim, with one CTA per tile; none if
    it is not installed."""
    if find_spec("flash_attn") is None:
        return []
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    from cutex.kernels.attention.forward.sm100.bounds import read_code

    found = []
    for d in HEAD_DIMS:
        kernel = FlashAttentionForwardSm100(d, is_static_persistent=False)
        code = compiled(kernel, d)
        registers = ", ".join(
            str(getattr(kernel, f"num_regs_{role}", "?"))
            for role in ("correction", "softmax", "other")
        )
        found.append(
            read_code(
                code,
                tile_n=128,
                kernel=f"flash-attn-4 {metadata.version('flash-attn-4')}",
                head_dim=d,
                head_dim_v=d,
                causal=False,
                ctas=1,
                q_tiles=2,
                registers=registers,
            )
        )
    return found

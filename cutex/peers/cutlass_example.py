"""CUTLASS's persistent GEMM of CTA pairs, compiled from a clone, for comparison with our stages."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from cutex.arch import arch

EXAMPLE = "examples/python/CuTeDSL/cute/blackwell/kernel/dense_gemm/dense_gemm_persistent.py"
ARCH = "sm_100a"
MNK = (8192, 8192, 4096)


@dataclass(frozen=True)
class Example:
    """The compiled example, and its tiling."""

    ptx: str
    cubin: bytes
    dynamic_smem: dict[str, int]
    tile: tuple[int, int]
    num_stages: int


def compiled(clone: Path) -> Example:
    """Compile the example for MNK in bf16, with 256x256 tiles and clusters of 2x1.

    ValueError if the clone does not contain it.
    """
    path = clone / EXAMPLE
    if not path.exists():
        raise ValueError(f"{path} is not there: --cutlass takes a clone of CUTLASS")
    spec = importlib.util.spec_from_file_location("dense_gemm_persistent", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dense_gemm_persistent"] = module  # the DSL looks the source up by module
    spec.loader.exec_module(module)

    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    from cutex.compile import launched_smem

    m, n, k = MNK
    tensors = [
        make_fake_tensor(cutlass.BFloat16, (*s, 1), (s[1], 1, s[0] * s[1]), assumed_align=16)
        for s in ((m, k), (n, k), (m, n))
    ]
    tile = (256, 256)
    gemm = module.PersistentDenseGemmKernel(cutlass.Float32, True, tile, (2, 1), True)
    options = (cute.GPUArch(ARCH), cute.KeepPTX(True), cute.KeepCUBIN(True))
    at_once = arch(ARCH).num_sms // 2
    function = cute.compile[options](gemm, *tensors, at_once, CUstream(0))
    return Example(
        ptx=function.__ptx__.rstrip("\0"),
        cubin=function.__cubin__,
        dynamic_smem=launched_smem(str(function.ir_module)),
        tile=tile,
        num_stages=gemm.num_ab_stage,
    )

"""CUTLASS's CuTe DSL examples unmodified, each with its own command line and its own check.

    CUTEX_CUTLASS=path/to/cutlass pytest -n 8 tests/sim/test_foreign_examples.py

Nothing of them is in this repository: without a clone these tests are skipped (docs/simulator.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = os.environ.get("CUTEX_CUTLASS", "")
EXAMPLES = Path(CLONE) / "examples/python/CuTeDSL"
pytestmark = pytest.mark.skipif(
    not CLONE, reason="needs a clone of CUTLASS's examples: set CUTEX_CUTLASS to it"
)

FINDINGS = {  # the faults of these examples
    "experimental/primitives/reduction/cluster_tmem_reduce.py": (
        "by the tcgen05.cp issued by", "reads tensor memory", "while it is still being written"),
    "experimental/primitives/mapa.py": (
        "returns without having waited for a load of CTA",),
    "experimental/primitives/tcgen05/mcast_clusterMxN_1cta_mma.py": (
        "exit: the commit of", "which has exited"),
    "experimental/primitives/tcgen05/mcast_clusterMxN_2cta_mma.py": (
        "exit: the commit of", "which has exited"),
    "experimental/primitives/tma/tma_pipeline_single_warp.py": (
        "the TMA load of src", "overwrites shared memory", "no barrier orders the two"),
    "experimental/primitives/tcgen05/2cta_mma_blockscale_m128.py": (
        "the tcgen05.cp of", "while it is still being written by the TMA load",
        "on which this warp never waited"),
    "experimental/primitives/tutorial/06_softmax.py": (
        "overwrites shared memory", "no barrier orders the two"),
    "experimental/primitives/tutorial/gemm_M128_N128_Kany_TN_warpspec_multistage.py": (
        "reads shared memory", "no barrier orders the two"),
    "experimental/primitives/tutorial/10_minimal_tensor_mma_fp8.py": (
        "setmaxnreg: CTA (0,0,0) warp 4", "all four warps have to execute it"),
    "experimental/primitives/tutorial/05_minimal_tensor_mma.py": (
        "setmaxnreg: CTA (0,0,0) warp 0", "all four warps have to execute it"),
    "experimental/primitives/tcgen05/2cta_mma_basic.py": (
        "race: tcgen05.dealloc of CTA (0,0,0)", "may come before the tcgen05.alloc of CTA (1,0,0)"),
    "experimental/primitives/tcgen05/2cta_mma_tma_store.py": (
        "race: tcgen05.dealloc of CTA (0,0,0)", "may come before the tcgen05.alloc of CTA (1,0,0)"),
    "experimental/primitives/tcgen05/clusterMxN_2cta_mma.py": (
        "race: tcgen05.dealloc of CTA (0,0,0)", "may come before the tcgen05.alloc of CTA (1,0,0)"),
    "cute/blackwell/kernel/mixed_input_gemm/mixed_input_gemm.py": (
        "setmaxnreg: CTA (0,0,0) warp 7", "all four warps take the same count"),
    "cute/blackwell/kernel/mixed_input_gemm/grouped_mixed_input_gemm.py": (
        "setmaxnreg: CTA (0,0,0) warp 5", "all four warps take the same count"),
    "cute/blackwell/kernel/mixed_input_gemm/grouped_mixed_input_gemm_acc_scale.py": (
        "setmaxnreg: CTA (0,0,0) warp 5", "all four warps take the same count"),
    "experimental/task_scheduling/blackwell/tutorial/02_gemm_simple_ts/01_fp16_bf16_gemm_3.py": (
        "uses mbarrier", "no barrier orders the two"),
    "experimental/task_scheduling/blackwell/tutorial/06_gemm_split_k_fp16_ts/"
    "01_gemm_split_k_fp16.py": ("exit: CTA", "the bulk copy of", "no thread of the CTA has waited"),
    "cute/blackwell/kernel/blockwise_gemm/masked_grouped_gemm.py": (
        "bad address", "0 bytes past the end of"),
    "cute/blackwell/kernel/attention/mixed_input_fmha/mixed_input_fmha_decode.py": (
        "exit: CTA", "that warp has not waited with tcgen05.wait::st"),
    "cute/blackwell/kernel/attention/mixed_input_fmha/mixed_input_fmha_prefill_d256.py": (
        "race: tcgen05.dealloc of", "overwrites tensor memory", "loaded at"),
    "cute/blackwell/tutorial/tutorial_tma/tma_v0.py": ("exit: CTA", "the TMA store of"),
    "cute/blackwell/tutorial/tutorial_tma/tma_v1.py": ("exit: CTA", "the TMA store of"),
    "cute/blackwell/kernel/attention/fmha/fmha_bwd.py": (
        "uses tensor memory columns", "but none is allocated"),
}  # fmt: skip
SMALLER = {
    "cute/blackwell/kernel/attention/fmha/fmha_bwd.py": "--s_q 256 --s_k 256 --h_q 2 --h_k 2",
}
LEFT_OUT = {
    "tutorial/03_gemm_tiled_smem.py": "a million threads: takes minutes",
}
KERNELS = {  # with the arguments that they need
    "cute/blackwell/kernel": {
        "attention/fmha/fmha": "--q_shape 1,256,4,64 --k_shape 1,256,4,64",
        "attention/mla/mla_decode_fp16": "",
        "attention/mla/mla_decode_fp8": "",
        "blockscaled_gemm/dense_blockscaled_gemm_persistent": (
            "--a_dtype Float8E4M3FN --b_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU "
            "--sf_vec_size 32"),
        "blockscaled_gemm/dense_blockscaled_gemm_persistent_amax": "",
        "blockscaled_gemm/dense_blockscaled_gemm_persistent_prefetch": "",
        "blockscaled_grouped_gemm/grouped_blockscaled_gemm": "",
        "blockwise_gemm/blockwise_gemm": "",
        "blockwise_gemm/contiguous_grouped_gemm": "",
        "dense_gemm/dense_gemm": "",
        "dense_gemm/dense_gemm_alpha_beta_persistent": "--alpha 2 --beta 0.5",
        "dense_gemm/dense_gemm_persistent": "",
        "dense_gemm/dense_gemm_persistent_prefetch": "",
        "dense_gemm/dense_gemm_software_pipeline": "",
        "grouped_gemm/grouped_gemm": "",
        "reduce/reduce": "",
    },
    "cute/blackwell/tutorial/tutorial_tma": {"tma_v2": ""},
    "cute/hopper/kernel": {
        "dense_gemm/dense_gemm_fp8_2xacc": "--mnkl 256,256,256,1", "cta_norm/cta_norm": "",
    },
    "cute/ampere/kernel": {
        "attention/flash_attention_v2":
            "--batch_size 1 --seqlen_q 256 --seqlen_k 256 --num_head 2",
        "dense_gemm/tensorop_gemm": "--mnkl 256,256,64,1",
        "dense_gemm/sgemm": "--mnk 256,256,64",
        "elementwise/elementwise_add": "",
    },
    "cute_ext/blackwell": {
        "dense_block_scaled_gemm": "", "dense_gemm": "", "dense_gemm_2sm": "",
        "dense_gemm_cute_pipeline": "",
    },
}  # fmt: skip


def simulated(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    arch = "sm_90a" if "hopper" in script else "sm_100a"
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cutex.sim", "--arch", arch, script, *arguments],
        cwd=EXAMPLES, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def primitives() -> list[str]:
    """Scripts of experimental/primitives, of which each is about one instruction or two."""
    found = sorted((EXAMPLES / "experimental/primitives").rglob("*.py"))
    names = [str(p.relative_to(EXAMPLES)) for p in found]
    return [n for n in names if n not in FINDINGS and not n.endswith(tuple(LEFT_OUT))]


CASES = [(name, "") for name in (primitives() if CLONE else ["none"])]
CASES += [(f"{folder}/{name}.py", how) for folder, names in KERNELS.items()
          for name, how in names.items()]  # fmt: skip


@pytest.mark.parametrize(("script", "arguments"), CASES)
def test_an_example_is_right_and_has_no_finding(script, arguments):
    ran = simulated(script, *arguments.split())
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert "no findings" in ran.stderr


@pytest.mark.parametrize("script", FINDINGS)
def test_an_example_that_is_wrong_is_found(script):
    ran = simulated(script, *SMALLER.get(script, "").split())
    assert ran.returncode == 1
    for sentence in FINDINGS[script]:
        assert sentence in ran.stderr

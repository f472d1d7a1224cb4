"""Kernels that we did not write run unmodified: CUTLASS's CuTe DSL examples, from a clone of it.

    CUTEX_CUTLASS=path/to/cutlass pytest tests/sim/test_foreign_kernels.py

Nothing of them is in this repository: without a clone these tests are skipped (docs/simulator.md).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import cutlass
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute

from cutex.sim import BadAddress, simulate

CLONE = os.environ.get("CUTEX_CUTLASS", "")
ALL_EXAMPLES = Path(CLONE) / "examples/python/CuTeDSL"
EXAMPLES = ALL_EXAMPLES / "cute"
pytestmark = pytest.mark.skipif(
    not CLONE, reason="needs a clone of CUTLASS's examples: set CUTEX_CUTLASS to it"
)
ORDERS = [
    {},
    {"order": "random", "seed": 1},
    {"order": "starved", "seed": 4},
    {"order": "peer-late"},
]
CLUSTERS = 4  # that the persistent examples believe to be active at once
TUTORIALS = [f"fp16_gemm_{i}" for i in range(6)]


def example(folder: str, name: str):
    """The example as a module, loaded from its file in the clone."""
    path = ALL_EXAMPLES / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the DSL looks the source up by module
    spec.loader.exec_module(module)
    return module


def operands(m: int, n: int, k: int, dtype: torch.dtype, batch: bool = False):
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    c = torch.full((m, n), float("nan")).to(dtype)
    reference = a.double() @ b.double().T
    if batch:
        a, b, c = a[:, :, None], b[:, :, None], c[:, :, None]
    return a, b, c, reference


def assert_close(c: torch.Tensor, reference: torch.Tensor) -> None:
    """Assert an error within twice that of rounding the exact product to the output's type."""
    rounding = (reference.to(c.dtype).double() - reference).abs().max()
    assert (c.reshape(reference.shape).double() - reference).abs().max() <= 2 * rounding


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_gemms_of_blackwell(name, order):
    """One CTA; a pair with multicast; warp roles; persistent; CLC, two cluster sizes; prefetch."""
    module = example("cute/blackwell/tutorial/tutorial_gemm", name)
    a, b, c, reference = operands(1024, 512, 256, torch.float16)
    constants = {"fp16_gemm_3": 1, "fp16_gemm_4": 2, "fp16_gemm_5": 1}.get(name, 0)
    report = simulate(module.host_function, a, b, c, *[CLUSTERS] * constants, **order)
    assert not report.findings
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("pair, tile", [(False, (128, 128)), (True, (256, 256))])
def test_persistent_gemm_of_blackwell_with_tma_store(pair, tile, order):
    module = example("cute/blackwell/kernel/dense_gemm", "dense_gemm_persistent")
    cluster = (2, 1) if pair else (1, 1)
    gemm = module.PersistentDenseGemmKernel(cutlass.Float32, pair, tile, cluster, True)
    a, b, c, reference = operands(512, 384, 320, torch.bfloat16, batch=True)
    simulate(gemm, a, b, c, CLUSTERS, CUstream(0), **order)
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_gemm_of_hopper_with_stmatrix_and_tma_store(order):
    module = example("cute/hopper/kernel/dense_gemm", "dense_gemm")
    gemm = module.HopperWgmmaGemmKernel(cutlass.Float32, (128, 128), (1, 1))
    a, b, c, reference = operands(384, 264, 200, torch.float16, batch=True)
    simulate(gemm, a, b, c, CUstream(0), arch="sm_90a", **order)
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("name", ["dense_gemm", "dense_gemm_software_pipeline"])
@pytest.mark.parametrize(
    "pair, tile, tma_store",
    [(False, (128, 128), True), (True, (256, 128), False), (True, (128, 128), True)],
)
def test_gemms_of_blackwell(name, pair, tile, tma_store, order):
    module = example("cute/blackwell/kernel/dense_gemm", name)
    cluster = (2, 1) if pair else (1, 1)
    gemm = module.DenseGemmKernel(cutlass.Float32, pair, tile, cluster, tma_store)
    a, b, c, reference = operands(512, 384, 200, torch.bfloat16, batch=True)
    simulate(gemm, a, b, c, CUstream(0), **order)
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("majors", ["mk", "kn", "mn"])
def test_gemms_of_blackwell_in_tf32_of_every_major(majors, pair, order):
    """Every major of A and B; an operand contiguous along M or N has 32-byte atoms of a 128-byte
    swizzle.
    """
    module = example("cute/blackwell/kernel/dense_gemm", "dense_gemm")
    tile, cluster = ((256, 128), (2, 1)) if pair else ((128, 128), (1, 1))
    gemm = module.DenseGemmKernel(cutlass.Float32, pair, tile, cluster, True)
    a, b = (torch.randint(-8, 9, (rows, 200)).float() for rows in (512, 384))
    c = torch.full((512, 384, 1), float("nan"))
    given = [
        (x if major == "k" else x.T.contiguous().T)[:, :, None]
        for x, major in zip((a, b), majors, strict=True)
    ]
    simulate(gemm, *given, c, CUstream(0), **order)
    assert torch.equal(c[:, :, 0], a @ b.T)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_gemm_of_blackwell_with_cluster_launch_control(order):
    module = example("cute/blackwell/kernel/dense_gemm", "dense_gemm_persistent_dynamic")
    gemm = module.PersistentDenseGemmKernel(cutlass.Float32, True, (256, 128), (2, 1), True)
    a, b, c, reference = operands(512, 384, 256, torch.bfloat16, batch=True)
    simulate(gemm, a, b, c, CUstream(0), **order)
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("tile, cluster", [((128, 256), (2, 1)), ((64, 128), (1, 2))])
def test_persistent_gemm_of_hopper(tile, cluster, order):
    module = example("cute/hopper/kernel/dense_gemm", "dense_gemm_persistent")
    gemm = module.HopperWgmmaGemmPersistentKernel(cutlass.Float32, tile, cluster, 1, True)
    a, b, c, reference = operands(384, 512, 200, torch.float16, batch=True)
    simulate(gemm, a, b, c, CLUSTERS, CUstream(0), arch="sm_90a", **order)
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize("pair", [False, True])
def test_blockwise_gemm_of_blackwell_with_scales_by_cp_async(pair, order):
    """Scale factors of 1x128 of A and 128x128 of B, applied to the accumulator."""
    module = example("cute/blackwell/kernel/blockwise_gemm", "blockwise_gemm")
    m, n, k = 256, 256, 512
    a, b = (torch.randint(-3, 4, (rows, k)).double() for rows in (m, n))
    sa, sb = torch.randint(1, 4, (k // 128, m)).T, torch.randint(1, 4, (n // 128, k // 128))
    reference = (a * sa.repeat_interleave(128, 1)) @ (
        b * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).T
    c = torch.full((m, n, 1), float("nan")).bfloat16()
    tile, cluster = ((256, 128), (2, 1)) if pair else ((128, 128), (1, 1))
    gemm = module.BlockwiseGemmKernel(cutlass.Float32, pair, tile, cluster)
    eights = [x.float().to(torch.float8_e4m3fn)[:, :, None] for x in (a, b)]
    factors = [x.float()[:, :, None] for x in (sa, sb)]
    simulate(gemm, *eights, c, *factors, CLUSTERS, CUstream(0), **order)
    assert_close(c, reference)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("columns", [1024, 32768])
def test_rms_norm_of_blackwell_with_groups_of_cp_async(columns, order, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # it imports another example
    norm = example("cute/blackwell/kernel/rmsnorm", "rmsnorm").RMSNormKernel(
        cutlass.Float16, columns
    )

    @cute.jit
    def host(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, stream: CUstream):
        norm(x.iterator, w.iterator, out.iterator, Int32(x.shape[0]), Float32(1e-5), stream)

    x, w = torch.randn(6, columns).half(), torch.randn(columns).half()
    out = torch.full_like(x, float("nan"))
    report = simulate(host, x, w, out, CUstream(0), **order)
    assert any(op.startswith("cp.async.ca") for op in report.counts)
    mean = (x.double() ** 2).mean(1, keepdim=True)
    assert_close(out, x.double() * torch.rsqrt(mean + 1e-5) * w.double())


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_cp_async_that_arrives_on_an_mbarrier_in_a_cluster(order):
    module = example("experimental/primitives", "cp_async_mbarrier_arrive_cluster")
    source, out = torch.arange(256.0), torch.full((8,), -1.0)
    simulate(module.host, source, out, **order)
    assert out.tolist() == [0, 1, 2, 3, 128, 129, 130, 131]


def test_the_tutorials_write_past_the_end_when_m_is_no_multiple_of_the_tile():
    """They require whole tiles; the simulator reports the accesses of other sizes."""
    module = example("cute/blackwell/tutorial/tutorial_gemm", "fp16_gemm_1")
    a, b, c, _ = operands(640, 512, 192, torch.float16)
    with pytest.raises(BadAddress, match=r"bytes past the end of c \(640x512 float16\)"):
        simulate(module.host_function, a, b, c)

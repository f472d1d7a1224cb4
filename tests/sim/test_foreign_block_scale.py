"""NVIDIA's block-scaled GEMMs run unmodified, from a clone of CUTLASS (test_foreign_kernels.py).

They fix the layout of scale factors in tensor memory, of which the PTX ISA has figures only.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import ml_dtypes
import numpy as np
import pytest
import torch
from cuda.bindings.driver import CUstream
from test_foreign_kernels import ALL_EXAMPLES, CLONE, CLUSTERS, EXAMPLES, ORDERS, example

from cutex.sim import simulate

pytestmark = pytest.mark.skipif(
    not CLONE, reason="needs a clone of CUTLASS's examples: set CUTEX_CUTLASS to it"
)
K = 512
ELEMENTS = {
    "e2m1": (cutlass.Float4E2M1FN, ml_dtypes.float4_e2m1fn),
    "e4m3": (cutlass.Float8E4M3FN, ml_dtypes.float8_e4m3fn),
    "e5m2": (cutlass.Float8E5M2, ml_dtypes.float8_e5m2),
}
FACTORS = {
    "ue4m3": (cutlass.Float8E4M3FN, ml_dtypes.float8_e4m3fn, [0.5, 0.75, 1, 1.5]),
    "ue8m0": (cutlass.Float8E8M0FNU, ml_dtypes.float8_e8m0fnu, [0.5, 1, 2]),
}


@dataclass
class Operand:
    """A matrix (rows, K) of small numbers with a factor for each ``block`` of a row."""

    rows: int
    element: str
    factor: str
    block: int
    seed: int

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self.numbers = draw.integers(-4, 5, (self.rows, K)).astype(ELEMENTS[self.element][1])
        values = FACTORS[self.factor][2]
        self.factors = draw.choice(values, (self.rows, K // self.block))

    @property
    def exact(self) -> np.ndarray:
        return self.numbers.astype(float) * np.repeat(self.factors, self.block, 1)

    @property
    def data(self) -> torch.Tensor:
        """The matrix as bytes; two 4-bit elements in each, the first in the lower half."""
        raw = self.numbers.view(np.uint8)
        if self.element == "e2m1":
            raw = raw[:, ::2] & 15 | raw[:, 1::2] << 4
        return torch.from_numpy(raw.copy())

    @property
    def blocked_factors(self) -> torch.Tensor:
        """The factors in blocks of 128 rows by 4 factors: 32 x 16 bytes, rows 32 apart side by
        side.
        """
        rows, count = self.factors.shape
        out = np.zeros((rows // 128, count // 4, 32, 4, 4), FACTORS[self.factor][1])
        r, g = np.arange(rows)[:, None], np.arange(count)[None, :]
        out[r // 128, g // 4, r % 32, r // 32 % 4, g % 4] = self.factors
        return torch.from_numpy(out.view(np.uint8).reshape(-1).copy())


def check(gemm, a: Operand, b: Operand, more: tuple, order: dict) -> None:
    """Compare with the rounded product, exactly; ``more`` are constants after the pointers."""
    element, factor = ELEMENTS[a.element][0], FACTORS[a.factor][0]

    @cute.jit
    def host(
        a: cute.Tensor, b: cute.Tensor, a_factors: cute.Tensor, b_factors: cute.Tensor,
        c: cute.Tensor, stream: CUstream,
    ):  # fmt: skip
        gemm(
            cute.recast_ptr(a.iterator, dtype=element),
            cute.recast_ptr(b.iterator, dtype=element),
            cute.recast_ptr(a_factors.iterator, dtype=factor),
            cute.recast_ptr(b_factors.iterator, dtype=factor),
            c.iterator,
            *more,
            stream,
        )

    c = torch.full((a.rows, b.rows), float("nan"), dtype=torch.float16)
    simulate(host, a.data, b.data, a.blocked_factors, b.blocked_factors, c, CUstream(0), **order)
    np.testing.assert_array_equal(c.numpy(), (a.exact @ b.exact.T).astype(np.float16))


@pytest.fixture(autouse=True)
def examples_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(ALL_EXAMPLES)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", ["nvfp4_gemm_0", "nvfp4_gemm_1"])
def test_tutorial_gemms_of_nvfp4(name, order):
    module = example("cute/blackwell/tutorial/tutorial_gemm", name)
    a, b = Operand(256, "e2m1", "ue4m3", 16, 1), Operand(512, "e2m1", "ue4m3", 16, 2)
    check(module.Sm100BlockScaledDenseGemmKernel(), a, b, ((256, 512, K, 1),), order)


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
@pytest.mark.parametrize(
    ("element", "factor", "block", "tile", "cluster"),
    [
        ("e2m1", "ue4m3", 16, (128, 128), (1, 1)),
        ("e2m1", "ue4m3", 16, (128, 64), (1, 1)),
        ("e2m1", "ue4m3", 16, (256, 64), (2, 2)),
        ("e2m1", "ue8m0", 16, (256, 256), (2, 1)),
        ("e2m1", "ue8m0", 32, (128, 256), (1, 1)),
        ("e4m3", "ue8m0", 32, (128, 128), (1, 1)),
        ("e4m3", "ue8m0", 32, (128, 192), (1, 2)),
        ("e4m3", "ue8m0", 32, (256, 192), (2, 1)),
        ("e5m2", "ue8m0", 32, (256, 128), (2, 1)),
    ],
)
def test_persistent_block_scaled_gemm_of_blackwell(element, factor, block, tile, cluster, order):
    module = example("cute/blackwell/kernel/blockscaled_gemm", "dense_blockscaled_gemm_persistent")
    a, b = (Operand(384, element, factor, block, seed) for seed in (1, 2))
    gemm = module.Sm100BlockScaledPersistentDenseGemmKernel(block, tile, cluster)
    k_major = module.OperandMajorMode.K
    layouts = (k_major, k_major, module.utils.LayoutEnum.ROW_MAJOR)
    check(gemm, a, b, (layouts, (384, 384, K, 1), CLUSTERS), order)
